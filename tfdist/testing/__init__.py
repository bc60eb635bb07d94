"""Runs functions and scripts on real tasks inside a test, and compares them with one process.

Synopsis, in a file of tests:

    def train(strategy):  # at the top level of the file: the tasks import it
        with strategy.scope():
            model = build()
            model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        return {**history.history, "weights": model.get_weights()}

    def test_two_workers_give_what_one_process_gives():
        tfdist.testing.assert_parity(train)

    def test_both_workers_log_the_same():
        with tfdist.testing.local_cluster(workers=2, strategy=True) as cluster:
            first, second = cluster.run(train)
        assert first["loss"] == second["loss"]

    def test_a_model_trains_on_workers_as_in_one_process():
        report = tfdist.testing.verify(build, (x, y), workers=[2, 3])  # build() returns a compiled model
        assert report, report

    def test_it_learns_through_parameter_servers():
        with tfdist.testing.local_cluster(workers=2, ps=2, strategy=True) as cluster:
            (logs,) = cluster.run(train)  # the chief's
        assert logs["loss"][-1] < logs["loss"][0]

pytest finds the fixture `tfdist_cluster` by itself (`tfdist.testing.plugin`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# name -> the module it lives in
_HOME = {
    "Comparison": "tfdist.testing.comparison",
    "Difference": "tfdist.testing.comparison",
    "LocalCluster": "tfdist.testing.cluster",
    "ScriptResult": "tfdist.testing.cluster",
    "assert_parity": "tfdist.testing.parity",
    "compare": "tfdist.testing.comparison",
    "Report": "tfdist.testing.verifying",
    "local_cluster": "tfdist.testing.cluster",
    "verify": "tfdist.testing.verifying",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from tfdist.testing.cluster import LocalCluster as LocalCluster
    from tfdist.testing.cluster import ScriptResult as ScriptResult
    from tfdist.testing.cluster import local_cluster as local_cluster
    from tfdist.testing.comparison import Comparison as Comparison
    from tfdist.testing.comparison import Difference as Difference
    from tfdist.testing.comparison import compare as compare
    from tfdist.testing.parity import assert_parity as assert_parity
    from tfdist.testing.verifying import Report as Report
    from tfdist.testing.verifying import verify as verify


def __getattr__(name: str) -> object:
    # pytest loads the plugin beside us in every project: nothing is imported before it is asked for.
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'tfdist.testing' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
