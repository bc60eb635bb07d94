"""Tests of tfdist.tf_config: every odd TF_CONFIG has an error of its own, or a stated normalisation."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import JOBS, Cluster, Task, TFConfig
from tfdist.errors import ClusterError, TFConfigError
from tfdist.tf_config import build, local_cluster, parse, resolve, validate_for

DOCUMENTS = Path(__file__).parents[2] / "tf_config"
WORKERS = {"worker": ["a:1", "b:1"]}
TWO_WORKERS = Cluster(WORKERS)
WORKER_0 = {"type": "worker", "index": 0}
# A busy machine is no failure, so no deadline per example.
QUICK = settings(deadline=None, max_examples=100, database=None)


def text(cluster=WORKERS, task=WORKER_0, **more):
    return json.dumps({"cluster": cluster, "task": task, **more})


# What is no cluster, and what is no JSON.


@pytest.mark.parametrize(
    "value",
    [None, "", " \n\t", "{}", '{"cluster": {}}', '{"environment": "cloud"}', '{"cluster": {}, "task": {}}']
    + ['{"task": {"type": "worker", "index": 0}}', '{"task": {"type": "master", "index": 0}, "job": {}}']
    + ['{"task": {"type": "evaluator", "index": 0}}'],
)
def test_text_without_a_cluster_means_alone(value):
    assert parse(value) is None


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("cluster", "not JSON: Expecting value at character 0, near 'cluster'"),
        ('{"cluster":', "not JSON: Expecting value at character 11"),
        ("{'cluster': {}}", "JSON has double quotes. Write"),
        ("{} {}", "not JSON: Extra data"),
        ("\ufeff{}", "not JSON"),
        ('{"a": NaN}', "number 'NaN' is not finite"),
        ('{"a": 1e999}', "number '1e999' is not finite"),
        ('{"a": ' + "1" * 5000 + "}", "too many digits"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("[]", "a list, .., and not an object"),
        ('["worker"]', "a list"),
        ('"abc"', "a string, 'abc', and not an object"),
        (json.dumps(text()), "JSON inside a JSON string.*encode it once"),
        ("3", "a number, 3, and not an object"),
        ("-1.5", "a number, -1.5, and not an object"),
        ("null", "is null, and not an object"),
        ("true", "is true, and not an object"),
        ('{"worker": ["a:1"]}', "job 'worker' stands outside of 'cluster'"),
        ('{"Cluster": {"worker": ["a:1"]}}', "no 'cluster' but 'Cluster': write 'cluster'"),
        ('{"task": {"type": "worker", "index": 1}}', "task is worker 1, and there is no cluster"),
        ('{"cluster": {}, "task": {"type": "ps", "index": 1}}', "task is ps 1, and there is no cluster"),
    ],
)
def test_text_that_is_no_tf_config_is_refused(value, complaint):
    with pytest.raises(TFConfigError, match=f"TF_CONFIG: .*{complaint}"):
        parse(value)


def test_the_message_of_a_huge_text_stays_short():
    with pytest.raises(TFConfigError) as caught:
        parse(text({"wörker" * 100_000: ["a:1"] * 1000}))
    assert len(str(caught.value)) < 500


# What is wrong inside.


@pytest.mark.parametrize("cluster", [None, [], ["a:1"], "a:1", 1, True, 0.5])
def test_a_cluster_of_the_wrong_kind_is_refused(cluster):
    with pytest.raises(TFConfigError, match=r"'cluster' is .*: write jobs"):
        parse(text(cluster))


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        ({"worker": []}, "has no address of a chief or worker"),
        ({"worker": {}}, "has no address of a chief or worker"),
        ({"evaluator": ["e:1"]}, "has no address of a chief or worker"),
        ({"ps": ["p:1"]}, "nobody trains"),
        ({"worker": {}, "ps": ["p:1"]}, "nobody trains"),  # what a ps sees under TFJob's enableDynamicWorker
        ({"worker": "a:1"}, r'addresses of job worker are a string, \'a:1\': write a list, \["a:1"\]'),
        ({"worker": None}, "addresses of job worker are null: write a list"),
        ({"worker": 2}, "addresses of job worker are a number, 2: write a list"),
        ({"worker": [1]}, "worker 0: the address 1 is not text"),
        ({"worker": [["a:1"]]}, "worker 0: the address .'a:1'. is not text"),
        ({"worker": ["a:1", None]}, "worker 1: the address None is not text"),
        ({"worker": ["a:1", "b"]}, "worker 1: the address 'b' has no port"),
        ({"worker": ["a:1", "b:0"]}, "worker 1: the address 'b:0' has port '0'"),
        ({"worker": ["localhost:0000", "localhost:0000"]}, "port '0000'"),
        ({"worker": ["a:1", "a:1"]}, "worker 0 and worker 1 have the same address"),
        ({"worker": ["a:1"], "chief": ["a:1"]}, "chief 0 and worker 0 have the same address"),
        ({"worker": ["::1:1"]}, "write an IPv6 address as"),
        ({"chief": ["a:1", "b:1"], **WORKERS}, "2 chiefs"),
        ({"evaluator": ["e:1", "f:1"], **WORKERS}, "2 evaluators"),
        ({"chief": ["c:1"], "master": ["d:1"], **WORKERS}, "both a chief and a master.*leave the master out"),
        ({"Worker": ["a:1"]}, "job 'Worker' is unknown.*write 'worker'"),
        ({"Master": ["a:1"]}, "calls a master 'chief'"),
        ({"workerpool0": ["a:2222"]}, "Vertex AI's CLUSTER_SPEC"),
        ({"localhost": ["a:1"]}, "looks like a host"),
        ({"": ["a:1"]}, "job '' is unknown"),
        ({"worker": {"1": "b:1"}}, "up to index 1 and none for index 0.*enableDynamicWorker"),
        ({"worker": {"0": "a:1", "2": "c:1"}}, "none for index 1"),
        ({"ps": {"1": "p:1"}, "chief": ["c:1"], **WORKERS}, "job ps has addresses up to index 1 and none for index 0"),
        ({"worker": {"0": "a:1", "00": "b:1"}}, "job worker has the index '00'"),
        ({"worker": {"x": "a:1"}}, "job worker has the index 'x'"),
        ({"worker": {"-1": "a:1"}}, "job worker has the index '-1'"),
        ({"worker": {"²": "a:1"}}, "job worker has the index '²'"),
        ({"worker": {"9" * 5000: "a:1"}}, "job worker has the index"),
    ],
)
def test_a_cluster_that_can_not_be_is_refused(cluster, complaint):
    with pytest.raises(TFConfigError, match=complaint):
        parse(text(cluster))


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        (None, "'task' is null: write"),
        ([], r"'task' is a list, \[\]: write"),
        ("worker", "'task' is a string, 'worker': write"),
        (0, "'task' is a number, 0: write"),
        ({}, "without type"),
        ({"index": 0}, "without type"),
        ({"type": None, "index": 0}, "without type"),
        ({"type": "worker"}, "without index"),
        ({"type": "worker", "index": None}, "without index"),
        ({"type": 1, "index": 0}, "job 1 is unknown"),
        ({"type": ["worker"], "index": 0}, r"job \['worker'\] is unknown"),
        ({"type": "Worker", "index": 0}, "write 'worker'"),
        ({"type": "workerpool1", "index": 0}, "Vertex AI"),
        ({"type": "worker", "index": -1}, "worker has index -1"),
        ({"type": "worker", "index": 2}, "worker 2 is not in the cluster: it has 2 workers"),
        ({"type": "worker", "index": "2"}, "worker 2 is not in the cluster"),
        ({"type": "worker", "index": 10**500}, r"worker 10+\.\.\.0+ is not in the cluster"),
        ({"type": "worker", "index": 1.7}, "worker has index 1.7"),
        ({"type": "worker", "index": 1.0}, "worker has index 1.0"),
        ({"type": "worker", "index": True}, "worker has index True"),
        ({"type": "worker", "index": [0]}, r"worker has index \[0\]"),
        ({"type": "worker", "index": ""}, "index is ''"),
        ({"type": "worker", "index": "-1"}, "index is '-1'"),
        ({"type": "worker", "index": "1.0"}, "index is '1.0'"),
        ({"type": "worker", "index": " 1"}, "index is ' 1'"),
        ({"type": "chief", "index": 0}, "chief 0 is not in the cluster"),
        ({"type": "master", "index": 0}, "chief 0 is not in the cluster"),
        ({"type": "ps", "index": 0}, "ps 0 is not in the cluster"),
        ({"type": "evaluator", "index": 1}, "at most one evaluator"),
    ],
)
def test_a_task_that_can_not_be_is_refused(task, complaint):
    with pytest.raises(TFConfigError, match=complaint):
        parse(text(task=task))


def test_a_cluster_without_a_task_is_refused_with_the_line_to_add():
    with pytest.raises(TFConfigError, match=re.escape('add "task": {"type": "worker", "index": 0}')):
        parse(json.dumps({"cluster": WORKERS}))


@pytest.mark.parametrize("layer", ["grpc+verbs", "grpc+gdr", "GRPC", "http", 1, ["grpc"], {}])
def test_an_rpc_layer_that_no_server_speaks_is_refused(layer):
    with pytest.raises(TFConfigError, match=r"'rpc_layer' is .*: write 'grpc', or leave it out"):
        parse(text(rpc_layer=layer))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ('{"cluster": {"worker": ["a:1"]}, "cluster": {"worker": ["a:1"]}, "task": {}}', "'cluster' .* TF_CONFIG"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}', "'worker' .* 'cluster'"),
        ('{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}, "task": {}}', "'0' .* job worker"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0, "index": 1}}',
            "'index' .* 'task'",
        ),
    ],
)
def test_a_key_that_stands_twice_is_refused(value, where):
    with pytest.raises(TFConfigError, match=where.replace(" .* ", " stands twice in ")):
        parse(value)


def test_a_key_that_stands_twice_in_a_part_we_do_not_read_is_let_pass():
    value = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}, "job": {"a": 1, "a": 2}}'
    assert parse(value).extra["job"] == {"a": 2}


# What is put right, and says so.


@pytest.mark.parametrize(
    ("value", "jobs", "task", "reason"),
    [
        (
            text({"master": ["c:1"], **WORKERS}),
            {"chief": ("c:1",), "worker": ("a:1", "b:1")},
            Task("worker", 0),
            "job 'master' is read as 'chief'",
        ),
        (
            text({"master": ["c:1"], **WORKERS}, {"type": "master", "index": 0}),
            {"chief": ("c:1",), "worker": ("a:1", "b:1")},
            Task("chief", 0),
            "task 'master' is read as 'chief'",
        ),
        (
            text({"chief": ["c:1"], **WORKERS}, {"type": "master", "index": 0}),
            {"chief": ("c:1",), "worker": ("a:1", "b:1")},
            Task("chief", 0),
            "task 'master' is read as 'chief'",
        ),
        (
            text({"evaluator": ["e:1"], **WORKERS}),
            {"worker": ("a:1", "b:1")},
            Task("worker", 0),
            "evaluator is taken out of the cluster",
        ),
        (
            text({"evaluator": {"0": "e:1"}, **WORKERS}, {"type": "evaluator", "index": 0}),
            {"worker": ("a:1", "b:1")},
            Task("evaluator", 0),
            "evaluator is taken out of the cluster",
        ),
        (
            text({"worker": {"1": "b:1", "0": "a:1"}}),
            {"worker": ("a:1", "b:1")},
            Task("worker", 0),
            "addresses of job 'worker', given by index, are read as a list",
        ),
        (
            text({"ps": {"0": "p:1"}, "chief": ["c:1"], **WORKERS}),
            {"chief": ("c:1",), "worker": ("a:1", "b:1"), "ps": ("p:1",)},
            Task("worker", 0),
            "addresses of job 'ps', given by index, are read as a list",
        ),
        (
            text({"ps": [], **WORKERS}),
            {"worker": ("a:1", "b:1")},
            Task("worker", 0),
            "job 'ps' has no addresses and is left out",
        ),
        (
            text(task={"type": "worker", "index": "1"}),
            {"worker": ("a:1", "b:1")},
            Task("worker", 1),
            "index '1', a text, is read as a number",
        ),
    ],
)
def test_what_has_one_plain_meaning_is_put_right_with_a_note(caplog, value, jobs, task, reason):
    caplog.set_level(logging.INFO, "tfdist.tf_config")
    config = parse(value)
    assert (dict(config.cluster.jobs), config.task) == (jobs, task)
    assert reason in caplog.text


def test_a_task_without_a_cluster_says_that_it_runs_alone(caplog):
    caplog.set_level(logging.INFO, "tfdist.tf_config")
    parse('{"task": {"type": "worker", "index": 0}}')
    assert "a task, worker 0, and no cluster: it runs alone" in caplog.text


def test_a_plain_text_is_read_without_a_word(caplog):
    caplog.set_level(logging.INFO, "tfdist.tf_config")
    assert parse(text(rpc_layer="grpc")) == TFConfig(TWO_WORKERS, Task("worker", 0), {"rpc_layer": "grpc"})
    assert not caplog.records


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.1.1:1", "localhost:1", "[::1]:1"])
def test_a_loopback_address_beside_other_hosts_is_warned_of(caplog, address):
    parse(text({"worker": ["a:1", address]}))
    assert f"worker 1 has the address {address}" in caplog.text


@pytest.mark.parametrize("addresses", [["127.0.0.1:1", "localhost:2"], ["a:1", "localhost.example.org:1"]])
def test_a_cluster_of_one_kind_of_addresses_is_not_warned_of(caplog, addresses):
    parse(text({"worker": addresses}))
    assert not caplog.records


def test_ipv6_addresses_are_kept():
    assert parse(text({"worker": ["[2001:db8::1]:1", "[2001:db8::2]:1"]})).cluster.jobs["worker"] == (
        "[2001:db8::1]:1",
        "[2001:db8::2]:1",
    )


def test_what_else_the_text_says_is_kept():
    said = {"environment": "cloud", "job": {"workerPoolSpecs": [1, None]}, "session_master": "x"}
    config = parse(text(task={**WORKER_0, "trial": "1", "cloud": "id"}, **said))
    assert config.extra == {**said, "task": {"trial": "1", "cloud": "id"}}


@pytest.mark.parametrize("layer", [None, ""])
def test_an_rpc_layer_that_says_nothing_is_dropped(layer):
    assert "rpc_layer" not in parse(text(rpc_layer=layer)).extra


# Texts as platforms write them.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(
            text(
                {
                    "chief": ["mnist-chief-0.ns.svc:2222"],
                    "evaluator": ["mnist-evaluator-0.ns.svc:2222"],
                    "ps": ["mnist-ps-0.ns.svc:2222"],
                    "worker": ["mnist-worker-0.ns.svc:2222", "mnist-worker-1.ns.svc:2222"],
                },
                {"type": "worker", "index": 1},
                environment="cloud",
            ),
            "worker 1 at mnist-worker-1.ns.svc:2222, in a cluster of 1 chief, 2 workers, 1 ps",
            id="kubeflow-tfjob",
        ),
        pytest.param(
            text(
                {"chief": ["training-workerpool0-ab-0:2222"], "worker": ["training-workerpool1-ab-0:2222"]},
                {"cloud": "id", "index": 0, "trial": "1", "type": "master"},
                environment="cloud",
                job={},
            ),
            "chief 0 at training-workerpool0-ab-0:2222, in a cluster of 1 chief, 1 worker",
            id="vertex-ai",
        ),
        pytest.param(
            text({"worker": ["10.0.0.4:2222", "10.0.0.5:2222"]}, {"type": "worker", "index": 1}),
            "worker 1 at 10.0.0.5:2222, in a cluster of 2 workers",
            id="ray-train",
        ),
    ],
)
def test_a_platform_s_own_text_is_understood(value, expected):
    assert str(parse(value)) == expected


# Building.


@pytest.mark.parametrize("path", sorted(DOCUMENTS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_shipped_document_is_what_build_writes_for_its_task(path):
    job, _, index = path.stem.rpartition("-")
    clusters = {
        "local_mwms": local_cluster(workers=2, ports=range(2222, 2224)),
        "local_mwms_chief": local_cluster(workers=2, chief=True, ports=range(2222, 2225)),
        "local_pss": local_cluster(workers=2, chief=True, ps=2, ports=range(2222, 2227)),
        "evaluator": local_cluster(workers=2, chief=True, ports=range(2222, 2225)),
    }
    cluster, task = clusters[path.parent.name], Task(job, int(index))
    assert json.loads(path.read_text()) == json.loads(build(cluster, task))
    assert parse(path.read_text()) == TFConfig(cluster, task)


@pytest.mark.parametrize("folder", ["local_mwms", "local_mwms_chief", "local_pss"])
def test_a_folder_has_one_document_per_task(folder):
    paths = sorted((DOCUMENTS / folder).glob("*.json"))
    names = {f"{task.type}-{task.index}" for task in parse(paths[0].read_text()).cluster.tasks}
    assert {path.stem for path in paths} == names


@pytest.mark.parametrize("extra", [{"a": {1, 2}}, {"a": float("nan")}, {"a": object()}, {"a": b""}])
def test_extra_that_is_no_json_is_refused(extra):
    with pytest.raises(ClusterError, match="can not be written as JSON"):
        build(TWO_WORKERS, Task("worker", 0), extra)


def test_build_refuses_a_task_that_is_not_in_the_cluster():
    with pytest.raises(ClusterError, match="worker 2 is not in the cluster"):
        build(TWO_WORKERS, Task("worker", 2))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"workers": 2, "ports": [5, 6]}, "worker 127.0.0.1:5, 127.0.0.1:6"),
        ({"workers": 1, "chief": True, "ports": [5, 6]}, "chief 127.0.0.1:5; worker 127.0.0.1:6"),
        (
            {"workers": 1, "chief": True, "ps": 1, "ports": [5, 6, 7]},
            "chief 127.0.0.1:5; worker 127.0.0.1:6; ps 127.0.0.1:7",
        ),
        ({"workers": 1, "ports": [5], "host": "::1"}, "worker [::1]:5"),
        ({"workers": 0, "chief": True, "ports": [5]}, "chief 127.0.0.1:5"),
    ],
)
def test_a_local_cluster_gives_the_ports_to_chief_workers_and_ps_in_this_order(arguments, expected):
    assert str(local_cluster(**arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"workers": 2, "ports": [5]}, "1 ports for 2 worker tasks: give one port per task"),
        ({"workers": 2, "chief": True, "ports": [5]}, "1 ports for 1 chief [+] 2 worker tasks"),
        ({"workers": 1, "ports": [5, 6]}, "2 ports for 1 worker tasks"),
        ({"workers": 0, "ports": []}, "nobody trains"),
        ({"workers": -1, "ports": []}, "-1 tasks of job worker"),
        ({"workers": 2, "ports": [5, 5]}, "same address"),
        ({"workers": 1, "ports": [0]}, "port '0'"),
    ],
)
def test_a_local_cluster_that_can_not_be_is_refused(arguments, complaint):
    with pytest.raises(ClusterError, match=complaint):
        local_cluster(**arguments)


# For a strategy.

FULL = {"chief": ["c:1"], "ps": ["p:1"], **WORKERS}


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        (WORKERS, "multi_worker_mirrored"),
        ({"chief": ["c:1"], **WORKERS}, "multi_worker_mirrored"),
        ({"chief": ["c:1"]}, "multi_worker_mirrored"),
        (WORKERS, "synchronous"),
        (FULL, "parameter_server"),
    ],
)
def test_a_cluster_that_fits_its_strategy_passes(cluster, kind):
    cluster = Cluster(cluster)
    for task in cluster.tasks:
        validate_for(TFConfig(cluster, task), kind)


@pytest.mark.parametrize(
    ("cluster", "kind", "complaint"),
    [
        (FULL, "multi_worker_mirrored", "1 chief, 2 workers, 1 ps, and .* would wait for ps 0"),
        (FULL, "synchronous", "kind='parameter_server'"),
        (WORKERS, "parameter_server", "needs a ps to hold the variables.*kind='multi_worker_mirrored'"),
        ({"ps": ["p:1"], **WORKERS}, "parameter_server", "needs a chief to coordinate.*: add the job chief"),
        ({"ps": ["p:1"], "chief": ["c:1"]}, "parameter_server", "needs a worker to compute.*: add the job worker"),
        (WORKERS, "mirrored", "kind 'mirrored' is unknown: kinds are multi_worker_mirrored"),
        (WORKERS, None, "kind None is unknown"),
    ],
)
def test_a_cluster_that_a_strategy_can_not_run_is_refused(cluster, kind, complaint):
    cluster = Cluster(cluster)
    with pytest.raises(ClusterError, match=complaint):
        validate_for(TFConfig(cluster, cluster.tasks[0]), kind)


@pytest.mark.parametrize("kind", ["multi_worker_mirrored", "synchronous", "parameter_server"])
def test_an_evaluator_takes_part_in_no_strategy(kind):
    with pytest.raises(ClusterError, match="evaluator 0 stands outside the cluster"):
        validate_for(TFConfig(Cluster(FULL), Task("evaluator", 0)), kind)


# Resolving.


def test_resolve_reads_the_variables_that_it_is_given(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text())
    assert resolve({}) is None
    assert resolve({"TF_CONFIG": text(task={"type": "worker", "index": 1})}).task == Task("worker", 1)


def test_resolve_reads_those_of_the_process_by_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text())
    assert resolve() == TFConfig(TWO_WORKERS, Task("worker", 0))


@pytest.mark.parametrize(
    ("environ", "words"), [({}, "this process runs alone"), ({"TF_CONFIG": text()}, "worker 0 at a:1, in a cluster")]
)
def test_resolve_says_what_it_found(caplog, environ, words):
    caplog.set_level(logging.DEBUG, "tfdist.tf_config")
    resolve(environ)
    assert words in caplog.text


# Large, random, and read by TensorFlow.


def test_ten_thousand_tasks_are_read_and_checked_in_less_than_a_second():
    cluster = Cluster({"chief": ["c:1"], "worker": [f"host-{i}.example.internal:2222" for i in range(9_999)]})
    value = build(cluster, Task("worker", 9_998))
    start = time.perf_counter()
    validate_for(parse(value), "synchronous")
    assert time.perf_counter() - start < 1


def json_values():
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    return st.recursive(
        scalars | st.sampled_from([*JOBS, "a:1", "h:0", "cluster", "task", "1"]),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from(JOBS), inner, max_size=4)
        ),
        max_leaves=10,
    )


HOSTS = (
    st.builds("{}{}".format, st.sampled_from(["h", "Host-", "job_", "n.example.org.", "xn--"]), st.integers(0, 99))
    | st.ip_addresses(v=4).filter(lambda ip: not ip.is_unspecified).map(str)
    | st.ip_addresses(v=6).filter(lambda ip: not ip.is_unspecified).map("[{}]".format)
)
ADDRESSES = st.builds("{}:{}".format, HOSTS, st.integers(1, 65535))


@st.composite
def configs(draw):
    addresses = draw(st.lists(ADDRESSES, min_size=1, max_size=12, unique_by=str.lower))
    chief = draw(st.integers(0, 1))
    workers = draw(st.integers(0 if chief else 1, len(addresses)))
    jobs = {
        "chief": addresses[:chief],
        "worker": addresses[chief : chief + workers],
        "ps": addresses[chief + workers :],
    }
    cluster = Cluster({job: listed for job, listed in jobs.items() if listed})
    task = draw(st.sampled_from([*cluster.tasks, Task("evaluator", 0)]))
    names = st.text().filter(lambda name: name not in ("cluster", "task", "rpc_layer"))
    extra = draw(st.dictionaries(names, json_values(), max_size=3))
    about_task = draw(
        st.dictionaries(st.text().filter(lambda n: n not in ("type", "index")), json_values(), max_size=2)
    )
    return TFConfig(cluster, task, {**extra, **({"task": about_task} if about_task else {})})


@QUICK
@given(configs())
def test_what_build_writes_parse_reads(config):
    assert parse(build(config.cluster, config.task, config.extra)) == config


@QUICK
@given(st.text() | json_values().map(json.dumps))
def test_arbitrary_text_and_json_end_in_a_value_or_in_our_error(value):
    read_or_refuse(value)


@st.composite
def almost_right(draw):
    """A good document in which one place, anywhere, was dropped, renamed or replaced."""
    config = draw(configs())
    document = json.loads(build(config.cluster, config.task))
    parent, key = draw(st.sampled_from(list(places(document))))
    value = parent.pop(key)
    change = draw(st.sampled_from(["drop", "rename", "replace"]))
    if change == "replace":
        new = draw(json_values() | st.integers(-1, 3) | st.sampled_from([[value], {"0": value}, str(value)]))
        parent.insert(key, new) if isinstance(parent, list) else parent.update({key: new})
    elif change == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from([*JOBS, "master", "cluster", "task", "0"]))] = value
    return json.dumps(document)


def places(value):
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


@QUICK
@given(almost_right())
def test_a_document_that_is_almost_right_ends_in_a_value_or_in_our_error(value):
    read_or_refuse(value)


def read_or_refuse(value):
    with contextlib.suppress(TFConfigError):
        config = parse(value)
        assert config is None or parse(build(config.cluster, config.task, config.extra)) == config


READ_WITH_TENSORFLOW = """
import json, os, sys
import tensorflow as tf
answers = []
for text in json.load(sys.stdin):
    os.environ["TF_CONFIG"] = text
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    answers.append([resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id, resolver.rpc_layer])
json.dump(answers, sys.stdout)
"""


def test_tensorflow_reads_the_same_cluster_and_task():
    ipv6 = Cluster({"worker": ["[2001:db8::1]:1", "[::1]:2222"]})
    clusters = [TWO_WORKERS, Cluster(FULL), Cluster({"chief": ["c:1"]}), ipv6]
    extra = {"environment": "cloud", "job": {"a": [1]}, "task": {"trial": "1"}, "rpc_layer": "grpc"}
    cases = [(cluster, task) for cluster in clusters for task in (*cluster.tasks, Task("evaluator", 0))]
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_TENSORFLOW],
        input=json.dumps([build(cluster, task, extra) for cluster, task in cases]),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [
        [{job: list(addresses) for job, addresses in cluster.jobs.items()}, task.type, task.index, "grpc"]
        for cluster, task in cases
    ]
    assert json.loads(done.stdout) == expected
