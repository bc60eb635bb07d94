"""What pytest gets from tfdist: the fixture `tfdist_cluster`, and two marks. pytest finds it by itself.

    @pytest.mark.tfdist_cluster(workers=2, strategy=True)
    @pytest.mark.tfdist_deadline(60)
    def test_two_workers_learn_the_same(tfdist_cluster):
        first, second = tfdist_cluster.run(train)
        assert first == second

    @pytest.mark.tfdist_cluster(workers=2, ps=2, strategy=True)
    def test_it_learns_through_parameter_servers(tfdist_cluster):
        (logs,) = tfdist_cluster.run(train)

    @pytest.mark.parametrize("tfdist_cluster", [1, 2, {"workers": 2, "chief": True}], indirect=True)
    def test_every_cluster_learns(tfdist_cluster): ...

Tests that ask for the same cluster one after the other share its processes, where it has a strategy. `-p no:tfdist`
does without all this.

pytest loads this file in every project of the environment, so it imports nothing of weight before a test asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tfdist.testing.cluster import LocalCluster

MARK = "tfdist_cluster"
DEADLINE = "tfdist_deadline"


def pytest_configure(config: pytest.Config) -> None:
    """Tells pytest of our marks."""
    config.addinivalue_line(
        "markers", f"{MARK}(workers=2, **arguments): what the fixture tfdist_cluster is; tfdist.testing.local_cluster's"
    )
    config.addinivalue_line("markers", f"{DEADLINE}(seconds): how long each run of tfdist_cluster may take")


class _Kept:
    """The one cluster that is kept from test to test: two would take twice the memory."""

    def __init__(self) -> None:
        self._arguments: dict[str, Any] | None = None
        self._cluster: LocalCluster | None = None

    def get(self, arguments: dict[str, Any]) -> LocalCluster:
        from tfdist.testing.cluster import local_cluster

        if self._cluster is None or arguments != self._arguments:
            self.close()
            self._cluster, self._arguments = local_cluster(**arguments), arguments
        return self._cluster

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


@pytest.fixture(scope="session")
def _tfdist_kept() -> Iterator[_Kept]:
    kept = _Kept()
    yield kept
    kept.close()


@pytest.fixture
def tfdist_cluster(request: pytest.FixtureRequest, _tfdist_kept: _Kept) -> LocalCluster:
    """A local cluster of two workers, or what the mark `tfdist_cluster(...)` or an indirect parameter asks for."""
    arguments = {**_asked_by_mark(request), **_asked_by_parameter(request)}
    deadline = request.node.get_closest_marker(DEADLINE)
    if deadline is not None:
        if len(deadline.args) != 1 or deadline.kwargs:
            raise pytest.UsageError(f"write @pytest.mark.{DEADLINE}(seconds), with one number of seconds")
        arguments.setdefault("timeout_s", deadline.args[0])
    timeout_s = arguments.pop("timeout_s", None)
    cluster = _tfdist_kept.get(arguments)
    from tfdist.testing.cluster import TIMEOUT_S

    cluster.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    return cluster


def _asked_by_mark(request: pytest.FixtureRequest) -> dict[str, Any]:
    mark = request.node.get_closest_marker(MARK)
    if mark is None:
        return {}
    if len(mark.args) > 1:
        raise pytest.UsageError(f"write @pytest.mark.{MARK}(workers, chief=..., strategy=...), the rest by name")
    return {**({"workers": mark.args[0]} if mark.args else {}), **mark.kwargs}


def _asked_by_parameter(request: pytest.FixtureRequest) -> dict[str, Any]:
    parameter = getattr(request, "param", None)
    if parameter is None:
        return {}
    return {"workers": parameter} if isinstance(parameter, int) else dict(parameter)
