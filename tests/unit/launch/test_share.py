"""One entry per host -> one task per GPU, the same cluster on every host."""

from __future__ import annotations

import json

import pytest

from tfdist import tf_config
from tfdist.cluster import Task
from tfdist.errors import LaunchError
from tfdist.launch.share import default_tasks_per_host, split


def config(cluster, job="worker", index=0, **extra):
    return tf_config.parse(json.dumps({"cluster": cluster, "task": {"type": job, "index": index}, **extra}))


TWO = {"worker": ["a:2222", "b:3333"]}
CHIEF = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
SERVERS = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]}


@pytest.mark.parametrize(
    ("cluster", "count", "jobs"),
    [
        (TWO, 1, TWO),
        (TWO, 2, {"worker": ["a:2222", "a:2223", "b:3333", "b:3334"]}),
        ({"worker": ["[::1]:2222"]}, 3, {"worker": ["[::1]:2222", "[::1]:2223", "[::1]:2224"]}),
        # A chief that trains stays task 0; the rest of its host comes first among the workers.
        (CHIEF, 1, CHIEF),
        (CHIEF, 2, {"chief": ["a:2222"], "worker": ["a:2223", "b:2222", "b:2223", "c:2222", "c:2223"]}),
        ({"chief": ["a:2222"]}, 2, {"chief": ["a:2222"], "worker": ["a:2223"]}),
        # Beside parameter servers the chief coordinates.
        (SERVERS, 2, {"chief": ["a:2222"], "worker": ["b:2222", "b:2223", "c:2222", "c:2223"], "ps": ["d:2222"]}),
    ],
)
def test_every_host_comes_to_the_same_cluster(cluster, count, jobs):
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            shared = split(config(cluster, job, index), count).cluster
            assert {job: list(addresses) for job, addresses in shared.jobs.items()} == jobs


@pytest.mark.parametrize(
    ("cluster", "count"), [(TWO, 1), (TWO, 3), (CHIEF, 1), (CHIEF, 3), (SERVERS, 2), ({"chief": ["a:1"]}, 4)]
)
def test_every_task_runs_on_one_host(cluster, count):
    entries = [(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    shares = [split(config(cluster, *entry), count) for entry in entries]
    started = [task for share in shares for task in share.tasks]
    assert sorted(started) == sorted(shares[0].cluster.tasks)
    for share, (job, index) in zip(shares, entries, strict=True):
        host = cluster[job][index].partition(":")[0]
        assert {share.cluster.address(task).partition(":")[0] for task in share.tasks} == {host}


@pytest.mark.parametrize(
    ("cluster", "job", "index", "tasks"),
    [
        (TWO, "worker", 1, ["worker 2", "worker 3"]),
        (CHIEF, "chief", 0, ["chief 0", "worker 0"]),
        (CHIEF, "worker", 0, ["worker 1", "worker 2"]),
        (SERVERS, "chief", 0, ["chief 0"]),
        (SERVERS, "worker", 1, ["worker 2", "worker 3"]),
        (SERVERS, "ps", 0, ["ps 0"]),
        (TWO, "evaluator", 0, ["evaluator 0"]),
    ],
)
def test_a_host_runs_the_tasks_of_its_entry(cluster, job, index, tasks):
    assert [str(task) for task in split(config(cluster, job, index), 2).tasks] == tasks


def test_the_ports_of_this_host_are_those_of_its_tasks():
    assert split(config(TWO, index=1), 2).ports == (3333, 3334)
    assert split(config(TWO, "evaluator"), 2).ports == ()


def test_what_else_tf_config_says_stays():
    share = split(config(TWO, environment="cloud"), 2)
    assert share.extra == {"environment": "cloud"}


def test_a_share_is_whole_where_there_is_no_other_host():
    assert split(config({"worker": ["a:1"]}), 2).is_whole
    assert not split(config(TWO), 2).is_whole


@pytest.mark.parametrize(
    ("cluster", "count", "words"),
    [
        (
            {"worker": ["a:2222", "a:2223"]},
            2,
            "worker 0 at a:2222 is split into 2 tasks at ports 2222 to 2223, and worker 1 is at a:2223: set the ports",
        ),
        ({"worker": ["a:2223", "A.:2222"]}, 2, "worker 1 at A.:2222 .*, and worker 0 is at a:2223"),
        ({"worker": ["localhost:2222", "127.0.0.1:2224"]}, 3, "and worker 1 is at 127.0.0.1:2224"),
        ({"chief": ["a:2221"], "worker": ["a:2220"], "ps": ["b:1"]}, 2, "and chief 0 is at a:2221"),
        ({"worker": ["a:65535", "b:1"]}, 2, "ports 65535 to 65536, and ports end at 65535"),
        (TWO, 0, "--tasks-per-host must be at least 1, not 0"),
    ],
)
def test_ports_that_are_not_free_for_the_tasks_are_refused(cluster, count, words):
    with pytest.raises(LaunchError, match=words):
        split(config(cluster), count)


def test_ports_of_one_host_that_are_far_enough_apart_are_fine():
    assert split(config({"worker": ["a:2222", "a:2224"]}), 2).cluster.num_training_tasks == 4


@pytest.mark.parametrize(
    ("cluster", "gpus", "count"),
    [
        (TWO, 0, 1),
        (TWO, 4, 4),
        # An entry for each task, as one writes who starts tasks by hand.
        ({"worker": ["a:2222", "a:2223"]}, 2, 1),
        ({"chief": ["a:2222"], "worker": ["a:2223"]}, 2, 1),
        # Parameter servers and their coordinator may stand where workers do.
        ({"chief": ["a:2222"], "worker": ["a:2223", "b:2223"], "ps": ["a:2220"]}, 2, 2),
    ],
)
def test_by_default_a_host_runs_a_task_for_each_gpu(cluster, gpus, count):
    assert default_tasks_per_host(config(cluster), gpus) == count


@pytest.mark.parametrize(("index", "first"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_entries_of_one_host_take_one_gpu_after_the_other(index, first):
    cluster = {"worker": ["a:1", "b:1", "a:2", "a:3"]}
    share = split(config(cluster, index=index), 1)
    assert share.first_gpu == first
    assert share.tasks == (Task("worker", index),)
