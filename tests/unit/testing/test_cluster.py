"""What a local cluster refuses before it starts anything."""

from __future__ import annotations

import pytest

import tfdist
from tfdist.errors import LaunchError, TravelError, UnsupportedError
from tfdist.testing import assert_parity, local_cluster


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workers": 0}, LaunchError, "workers must be at least 1, not 0"),
        ({"timeout_s": 0}, LaunchError, "timeout_s must be a number of seconds above 0, not 0"),
        (
            {"ps": 1, "strategy": "synchronous"},
            UnsupportedError,
            "kind 'synchronous' has no parameter servers.* ps=1",
        ),
        (
            {"ps": 1, "strategy": {"deterministic": True}},
            UnsupportedError,
            r"{'deterministic': ...} with ps=1: .*tfdist.create_strategy\(...\)",
        ),
    ],
)
def test_a_cluster_that_can_not_be_is_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        local_cluster(**arguments)


@pytest.mark.parametrize(
    ("arguments", "tasks"),
    [
        ({}, ["worker 0", "worker 1"]),
        ({"workers": 1, "chief": True}, ["chief 0", "worker 0"]),
        ({"workers": 2, "ps": 1}, ["chief 0", "worker 0", "worker 1", "ps 0"]),
    ],
)
def test_its_tasks_stand_in_the_order_of_results(arguments, tasks):
    with local_cluster(**arguments) as cluster:
        assert [str(task) for task in cluster.tasks] == tasks


def test_a_script_that_is_not_there_is_refused():
    with local_cluster() as cluster, pytest.raises(LaunchError, match=r"the script 'no\.py' is not in"):
        cluster.run_script("no.py")


def test_a_lambda_is_refused_before_anything_starts():
    with local_cluster() as cluster, pytest.raises(TravelError, match="the lambda at"):
        cluster.run(lambda: 1)


def of_a_strategy(strategy):
    return {}


def a_model():
    return None


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (of_a_strategy, {"ps": 1}, "workers=2 with ps=1: several workers .* Pass workers=1"),
        (of_a_strategy, {"ps": 1, "workers": [1, 2]}, r"workers=\[1, 2\] with ps=1"),
        (a_model, {"ps": 1, "workers": 1}, r"ps=1: a_model\(\) returns a model, .* a function of a strategy"),
    ],
)
def test_parity_through_parameter_servers_is_refused_where_there_can_be_none(function, arguments, message):
    with pytest.raises(UnsupportedError, match=message):
        assert_parity(function, **arguments)


def test_what_has_an_example_names_itself():
    for name in ("local_cluster", "assert_parity", "compare"):
        assert f"tfdist.testing.{name}(" in getattr(tfdist.testing, name).__doc__.partition("Example:")[2]
