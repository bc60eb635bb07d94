"""Tests of tfdist.cluster: what makes a cluster, and the rules on who is who in it."""

import dataclasses

import pytest

from tfdist.cluster import Cluster, Task, TFConfig, split_address
from tfdist.errors import ClusterError, TfdistError

WORKERS = Cluster({"worker": ("a:1", "b:1")})
WITH_CHIEF = Cluster({"worker": ("a:1", "b:1"), "chief": ("c:1",)})
WITH_PS = Cluster({"ps": ("p:1", "q:1"), "worker": ("a:1", "b:1"), "chief": ("c:1",)})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host:2222", ("host", 2222)),
        ("job-worker-0.ns.svc.cluster.local:2222", ("job-worker-0.ns.svc.cluster.local", 2222)),
        ("fully.qualified.:1", ("fully.qualified.", 1)),
        ("compose_worker_1:65535", ("compose_worker_1", 65535)),
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("[::1]:2222", ("::1", 2222)),
        ("[fe80::1%eth0]:2222", ("fe80::1%eth0", 2222)),
        ("xn--bcher-kva:80", ("xn--bcher-kva", 80)),
    ],
)
def test_an_address_splits_into_host_and_port(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("host", "has no port: write 'host:port', such as 'host:2222'"),
        ("[::1]", r"has no port: write 'host:port', such as '\[::1\]:2222'"),
        ("", "has no port"),
        ("host:", "no number after its last colon"),
        ("host:http", "no number after its last colon"),
        ("host:2222 ", "no number after its last colon"),
        ("host:+22", "no number after its last colon"),
        ("host:-1", "no number after its last colon"),
        ("host:٣", "no number after its last colon"),  # a digit, though not one of gRPC's
        ("host:0", "has port '0': write a port from 1 to 65535"),
        ("localhost:0000", "has port '0000': write a port from 1 to 65535"),
        ("host:65536", "write a port from 1 to 65535"),
        ("host:" + "9" * 5000, "write a port from 1 to 65535"),
        ("host:02222", "without leading zeros, 2222"),
        (":2222", "has no host"),
        ("::1:2222", r"has several colons: write an IPv6 address as '\[::1\]:2222'"),
        ("[::g]:2222", "no IPv6 address between its brackets"),
        ("[host]:2222", "no IPv6 address between its brackets"),
        ("10.0.0.256:2222", "no IPv4 address"),
        ("10.0.0:2222", "no IPv4 address"),
        ("0.0.0.0:2222", "means every interface"),
        ("[::]:2222", "means every interface"),
        ("grpc://host:2222", "has a scheme: write 'host:port' alone"),
        ("my host:2222", "no host name before its port"),
        ("-host:2222", "no host name before its port"),
        ("bücher:2222", "'xn--' form"),
        ("\ud800:2222", "'xn--' form"),
        ("h" * 254 + ":2222", "no host name before its port"),
        (2222, "is not text: write 'host:port'"),
        (None, "is not text: write 'host:port'"),
    ],
)
def test_an_address_that_nobody_can_connect_to_is_refused(address, complaint):
    with pytest.raises(ClusterError, match=complaint):
        split_address(address)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ClusterError) as caught:
        split_address("h" * 100_000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("jobs", "complaint"),
    [
        ({}, "nobody trains in the cluster"),
        ({"ps": ["p:1"]}, "nobody trains in the cluster"),
        ({"worker": []}, "job worker has no addresses: leave it out"),
        ({"worker": ["a:1"], "ps": []}, "job ps has no addresses: leave it out"),
        ({"worker": "a:1"}, r"addresses of job worker are 'a:1': give a list, \['host:port'\]"),
        ({"worker": {0: "a:1"}}, "give a list"),
        ({"worker": ["a:1", "b"]}, "worker 1: the address 'b' has no port"),
        ({"worker": ["a:1", 2]}, "worker 1: the address 2 is not text"),
        ({"worker": ["a:1", "b:1", "a:1"]}, "worker 0 and worker 2 have the same address, 'a:1'"),
        ({"worker": ["a:1"], "ps": ["a:1"], "chief": ["c:1"]}, "worker 0 and ps 0 have the same address"),
        ({"worker": ["Host:1", "host.:1"]}, "same address"),
        ({"worker": ["localhost:1", "127.0.0.1:1"]}, "same address"),
        ({"worker": ["[::1]:1", "[0:0::1]:1"]}, "same address"),
        ({"chief": ["a:1", "b:1"]}, "has 2 chiefs: keep one"),
        ({"worker": ["a:1"], "evaluator": ["e:1"]}, r"evaluator is listed.*Task\('evaluator', 0\)"),
        ({"Worker": ["a:1"]}, "job 'Worker' is unknown: jobs are chief, worker, ps and evaluator; write 'worker'"),
        ({"master": ["a:1"]}, "TensorFlow 2 calls a master 'chief'"),
        ({"workerpool1": ["a:1"]}, "Vertex AI's CLUSTER_SPEC, its workerpool1 is the job 'worker'"),
        ({"localhost": ["a:1"]}, "looks like a host"),
        ({"n08.example.org": ["a:1"]}, "looks like a host"),
        ({"trainer": ["a:1"]}, "job 'trainer' is unknown"),
        ({3: ["a:1"]}, "job 3 is unknown"),
        (["a:1"], "give a mapping of jobs"),
        (None, "give a mapping of jobs"),
    ],
)
def test_a_cluster_that_can_not_be_is_refused(jobs, complaint):
    with pytest.raises(ClusterError, match=complaint):
        Cluster(jobs)


@pytest.mark.parametrize(
    ("job", "index", "complaint"),
    [
        ("worker", -1, "worker has index -1: indexes count from 0"),
        ("worker", 1.0, "worker has index 1.0: give a whole number"),
        ("worker", "1", "worker has index '1': give a whole number"),
        ("worker", True, "worker has index True: give a whole number"),
        ("worker", None, "worker has index None: give a whole number"),
        ("chief", 1, "at most one chief"),
        ("evaluator", 1, "at most one evaluator"),
        ("master", 0, "'chief'"),
        (None, 0, "job None is unknown"),
    ],
)
def test_a_task_that_can_not_be_is_refused(job, index, complaint):
    with pytest.raises(ClusterError, match=complaint):
        Task(job, index)


def test_one_port_on_many_hosts_is_no_duplicate():
    assert Cluster({"worker": ("a:2222", "b:2222", "127.0.0.1:2222", "[::1]:2222")}).num_training_tasks == 4


@pytest.mark.parametrize(
    ("cluster", "chief", "training", "everyone"),
    [
        (WORKERS, "worker 0", "worker 0, worker 1", "worker 0, worker 1"),
        (WITH_CHIEF, "chief 0", "chief 0, worker 0, worker 1", "chief 0, worker 0, worker 1"),
        (WITH_PS, "chief 0", "worker 0, worker 1", "chief 0, worker 0, worker 1, ps 0, ps 1"),
        (Cluster({"chief": ("c:1",)}), "chief 0", "chief 0", "chief 0"),
    ],
)
def test_the_jobs_decide_who_is_chief_and_who_trains(cluster, chief, training, everyone):
    assert str(cluster.chief) == chief
    assert ", ".join(map(str, cluster.training_tasks)) == training
    assert cluster.num_training_tasks == len(cluster.training_tasks)
    assert ", ".join(map(str, cluster.tasks)) == everyone


@pytest.mark.parametrize("cluster", [WORKERS, WITH_CHIEF, WITH_PS])
def test_each_training_task_knows_its_place_among_them(cluster):
    configs = [TFConfig(cluster, task) for task in cluster.training_tasks]
    assert [config.training_index for config in configs] == list(range(len(configs)))
    assert all(config.trains for config in configs)


@pytest.mark.parametrize(
    ("cluster", "task"),
    [
        (WITH_PS, Task("chief", 0)),
        (WITH_PS, Task("ps", 0)),
        (WITH_PS, Task("evaluator", 0)),
        (WORKERS, Task("evaluator", 0)),
    ],
)
def test_a_task_that_does_not_train_has_no_place_among_those_who_do(cluster, task):
    config = TFConfig(cluster, task)
    assert not config.trains
    with pytest.raises(ClusterError, match=f"{task} does not train"):
        _ = config.training_index


@pytest.mark.parametrize(
    ("cluster", "task", "expected"),
    [
        (WORKERS, Task("worker", 0), True),
        (WORKERS, Task("worker", 1), False),
        (WITH_CHIEF, Task("worker", 0), False),
        (WITH_CHIEF, Task("chief", 0), True),
        (WITH_PS, Task("chief", 0), True),
        (WITH_PS, Task("ps", 0), False),
        (WORKERS, Task("evaluator", 0), False),
    ],
)
def test_one_task_alone_is_chief(cluster, task, expected):
    assert TFConfig(cluster, task).is_chief is expected


@pytest.mark.parametrize("task", [Task("worker", 2), Task("chief", 0), Task("ps", 0)])
def test_a_task_outside_of_the_cluster_is_refused(task):
    with pytest.raises(ClusterError, match=f"{task} is not in the cluster: it has 2 workers"):
        TFConfig(WORKERS, task)


def test_the_address_of_a_task_is_found():
    assert WITH_PS.address(Task("ps", 1)) == "q:1"


@pytest.mark.parametrize(
    "extra", [{"cluster": {}}, {"task": {"index": 1}}, {"task": "worker"}, {"task": {"type": "worker"}}]
)
def test_extra_can_not_say_another_cluster_or_task(extra):
    with pytest.raises(ClusterError, match="extra holds"):
        TFConfig(WORKERS, Task("worker", 0), extra)


def test_values_are_equal_and_hash_by_what_they_hold():
    same = Cluster({"chief": ["c:1"], "worker": ["a:1", "b:1"]})
    assert same == WITH_CHIEF != WORKERS
    assert len({same, WITH_CHIEF, WORKERS}) == 2
    configs = {TFConfig(same, Task("chief", 0), {"job": {}}), TFConfig(WITH_CHIEF, Task("chief", 0), {"job": {}})}
    assert len(configs) == 1


def test_values_can_not_be_changed():
    config = TFConfig(WORKERS, Task("worker", 0), {"environment": "cloud"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.task = Task("worker", 1)
    with pytest.raises(TypeError):
        config.cluster.jobs["worker"] = ("z:1",)
    with pytest.raises(TypeError):
        config.extra["environment"] = ""


def test_a_value_does_not_follow_later_changes_of_what_it_was_made_from():
    jobs, extra = {"worker": ["a:1", "b:1"]}, {}
    config = TFConfig(Cluster(jobs), Task("worker", 0), extra)
    jobs["worker"].append("c:1")
    extra["job"] = 1
    assert config == TFConfig(WORKERS, Task("worker", 0))


def test_tasks_sort_by_job_and_index():
    assert sorted([Task("worker", 10), Task("worker", 9), Task("chief", 0)])[0] == Task("chief", 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Task("worker", 1), "worker 1"),
        (WITH_CHIEF, "chief c:1; worker a:1, b:1"),
        (Cluster({"worker": [f"h{i}:1" for i in range(100)]}), "worker h0:1, h1:1, h2:1, ... h99:1 (100 tasks)"),
        (TFConfig(WITH_PS, Task("ps", 1)), "ps 1 at q:1, in a cluster of 1 chief, 2 workers, 2 ps"),
        (TFConfig(WORKERS, Task("evaluator", 0)), "evaluator 0, outside a cluster of 2 workers"),
    ],
)
def test_values_read_as_plain_words(value, text):
    assert str(value) == text


def test_the_repr_of_a_cluster_makes_it_again():
    assert eval(repr(WITH_PS)) == WITH_PS


def test_a_cluster_error_is_caught_as_ours_and_as_a_value_error():
    with pytest.raises(TfdistError):
        Task("worker", -1)
    with pytest.raises(ValueError):
        Task("worker", -1)
