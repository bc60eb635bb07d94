"""N tasks give what one plain Keras process gives, for every case of `parity`.

One cluster runs all cases of one N; a plain Keras process, which never imports tfdist, is the reference. How far arrays
may be apart is what `tfdist.testing` tells users, too.
"""

from __future__ import annotations

import numpy as np
import pytest
from parity import CASES
from parity.matrix import RUNS, Results, compared, other_bits, run_plain, run_tasks

from tfdist.testing import compare

_finished: dict[str, tuple[Results, str]] = {}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_plain(tmp_path_factory.mktemp("plain"))


def _run(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """Runs a cluster once, when the first test asks for it."""
    if name not in _finished:
        _finished[name] = run_tasks(name, tmp_path_factory.mktemp("tasks"))
    return _finished[name]


@pytest.mark.parametrize(
    ("clusters", "case"),
    [(name, case) for name, run in RUNS.items() for case in run.cases if not CASES[case].differs],
)
def test_tasks_give_what_one_plain_keras_process_gives(clusters, case, plain, tmp_path_factory):
    results, log = _run(clusters, tmp_path_factory)
    reference = plain[case][0]
    assert "error" not in reference, f"plain Keras itself fails: {reference['error']}"
    for index, got in enumerate(results[case]):
        assert got, f"task {index} left nothing; the tasks wrote:\n{log}"
        assert "error" not in got, f"task {index}: {got.get('error')}\n{log}"
        comparison = compared(case, got, reference)
        assert comparison, f"task {index}:\n{comparison}"


@pytest.mark.parametrize(
    ("clusters", "case"), [(name, case) for name, run in RUNS.items() if run.size > 1 for case in run.cases]
)
def test_tasks_hold_the_same_bits(clusters, case, tmp_path_factory):
    results, log = _run(clusters, tmp_path_factory)
    assert results[case][0], log
    for index in range(1, len(results[case])):
        different = other_bits(results[case], index)
        assert not different, f"task {index} differs from task 0 in {different}"


@pytest.mark.parametrize("clusters", [name for name, run in RUNS.items() if run.size > 1 and not run.core])
def test_dropout_draws_other_numbers_than_one_process(clusters, plain, tmp_path_factory):
    got, reference = _run(clusters, tmp_path_factory)[0]["dropout"][0], plain["dropout"][0]
    assert not compare(got["weight 0"], reference["weight 0"])
    assert np.all(np.isfinite(got["weight 0"]))
