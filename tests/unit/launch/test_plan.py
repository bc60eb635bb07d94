"""Options -> plan: the tasks and their environment."""

from __future__ import annotations

import json

import pytest

from tfdist import tf_config
from tfdist.errors import LaunchError
from tfdist.launch.plan import Options, make_plan
from tfdist.launch.share import split


def plan(environ=None, processors=8, gpus=(), **options):
    asked = Options(command=("train.py",), **options)
    ports = range(4000, 4000 + asked.port_count)
    return make_plan(asked, ports=ports, run_dir="/run/x", environ=environ or {}, processors=processors, gpus=gpus)


def environ_of(made, index=0):
    return made.tasks[index].environ


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({}, ["worker 0"]),
        ({"workers": 2}, ["worker 0", "worker 1"]),
        ({"workers": 1, "chief": True}, ["chief 0", "worker 0"]),
        ({"workers": 0, "chief": True}, ["chief 0"]),
        ({"workers": 2, "ps": 1}, ["chief 0", "worker 0", "worker 1", "ps 0"]),
        ({"workers": 1, "ps": 2, "chief": True}, ["chief 0", "worker 0", "ps 0", "ps 1"]),
    ],
)
def test_the_tasks_stand_chief_first_each_with_its_own_tf_config(options, tasks):
    made = plan(**options)
    assert [str(task.task) for task in made.tasks] == tasks
    for task in made.tasks:
        config = json.loads(task.environ["TF_CONFIG"])
        assert config["task"] == {"type": task.task.type, "index": task.task.index}
        assert config["cluster"][task.task.type][task.task.index] == task.address
        assert task.environ["TFDIST_LOCAL_INDEX"] == str(task.local_index)


def test_an_evaluator_is_one_more_task_that_the_cluster_does_not_hold():
    made = plan(workers=2, ps=1, evaluator=True)
    assert [str(task.task) for task in made.tasks] == ["chief 0", "worker 0", "worker 1", "ps 0", "evaluator 0"]
    clusters = [json.loads(environ_of(made, i)["TF_CONFIG"]).pop("cluster") for i in range(5)]
    assert clusters == [clusters[0]] * 5
    assert clusters[0].keys() == {"chief", "worker", "ps"}


def test_tasks_are_told_of_their_launcher_and_not_of_its_settings_or_an_outer_one():
    outer = {"TFDIST_RUN_DIR": "/outer", "TFDIST_ATTEMPT": "3", "TFDIST_RUN_WORKERS": "9", "TFDIST_STEP_TIMEOUT_S": "7"}
    environ = environ_of(plan(outer, workers=2, start_timeout_s=60))
    assert {name: value for name, value in environ.items() if name.startswith("TFDIST_")} == {
        "TFDIST_RUN_DIR": "/run/x",
        "TFDIST_LOCAL_INDEX": "0",
        "TFDIST_LOCAL_COUNT": "2",
        "TFDIST_ATTEMPT": "0",
        "TFDIST_START_TIMEOUT_S": "60",
    }


def test_a_task_that_is_started_again_is_told_how_often_and_why_and_else_the_same():
    task = plan(workers=2).tasks[1]
    again = task.again(2, "worker 0 was killed by SIGKILL")
    changed = {"TFDIST_ATTEMPT": "2", "TFDIST_LAST_FAILURE": "worker 0 was killed by SIGKILL"}
    assert again.environ == {**task.environ, **changed}
    assert (again.task, again.address, again.local_index) == (task.task, task.address, task.local_index)


def test_the_step_timeout_is_passed_on_when_given():
    assert environ_of(plan(step_timeout_s=90))["TFDIST_STEP_TIMEOUT_S"] == "90"


def test_a_foreign_tf_config_is_replaced_and_said_so():
    made = plan({"TF_CONFIG": '{"cluster": {"worker": ["old:1"]}}'})
    assert "old" not in environ_of(made)["TF_CONFIG"]
    assert any("TF_CONFIG was set and is replaced" in note for note in made.notes)


def shared_plan(cluster, job, index, count, gpus):
    config = tf_config.parse(json.dumps({"cluster": cluster, "task": {"type": job, "index": index}, "job": "x"}))
    asked = Options(command=("train.py",), share=split(config, count))
    environ = {"TF_CONFIG": "the host's", "http_proxy": "http://proxy:1"}
    return make_plan(asked, run_dir="/run/x", environ=environ, processors=8, gpus=gpus)


def test_a_share_of_a_cluster_gets_the_whole_cluster_with_local_numbers_and_one_gpu_each():
    made = shared_plan({"worker": ["a:2222", "b:2222"]}, "worker", 1, 2, ("4", "MIG-7"))
    assert [str(task) for task in made.tasks] == ["worker 2 at b:2222", "worker 3 at b:2223"]
    for i, environ in enumerate(task.environ for task in made.tasks):
        assert json.loads(environ["TF_CONFIG"]) == {
            "cluster": {"worker": ["a:2222", "a:2223", "b:2222", "b:2223"]},
            "task": {"type": "worker", "index": 2 + i},
            "job": "x",
        }
        assert environ["CUDA_VISIBLE_DEVICES"] == ("4", "MIG-7")[i]
        assert (environ["TFDIST_LOCAL_INDEX"], environ["TFDIST_LOCAL_COUNT"]) == (str(i), "2")
        assert environ["no_grpc_proxy"].startswith("a,b,")
    assert made.notes[0].startswith("TF_CONFIG has 2 entries; each that trains is taken to run 2 tasks, on every host")
    assert not any("replaced" in note for note in made.notes)


@pytest.mark.parametrize(
    ("cluster", "job", "index", "count", "gpus", "shares"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", 0, 3, ("0", "1"), ["0", "1", "0"]),
        ({"worker": ["a:1", "b:1"]}, "worker", 0, 1, (), [None]),
        # An entry for each GPU: this is the second.
        ({"worker": ["a:1", "a:2"]}, "worker", 1, 1, ("0", "1"), ["1"]),
        # ... and its user has picked the GPU already.
        ({"worker": ["a:1", "a:2"]}, "worker", 1, 1, ("1",), ["1"]),
        ({"chief": ["a:1"], "worker": ["b:1"]}, "chief", 0, 2, ("0", "1"), ["0", "1"]),
        ({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "chief", 0, 2, ("0", "1"), [""]),
        ({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "ps", 0, 2, ("0", "1"), [""]),
        ({"worker": ["a:1", "b:1"]}, "evaluator", 0, 2, ("0", "1"), ["0"]),
    ],
)
def test_a_share_deals_out_the_gpus_of_its_host(cluster, job, index, count, gpus, shares):
    made = shared_plan(cluster, job, index, count, gpus)
    assert [task.environ.get("CUDA_VISIBLE_DEVICES") for task in made.tasks] == shares


def test_an_evaluator_has_no_address_and_no_peers_to_train_with():
    made = shared_plan({"worker": ["a:1", "b:1"]}, "evaluator", 0, 1, ())
    assert [str(task) for task in made.tasks] == ["evaluator 0"]
    assert made.trains == ()


def test_an_evaluator_is_not_told_to_use_more_gpus():
    made = shared_plan({"worker": ["a:1", "b:1"]}, "evaluator", 0, 2, ("0", "1"))
    assert not any("GPU" in note for note in made.notes)


@pytest.mark.parametrize(
    ("options", "gpus", "note"),
    [
        ({"workers": 1}, ("0", "1"), "1 of 2 GPUs used, one per task; --workers gpu uses all"),
        ({"workers": 3}, ("0",), "3 tasks share 1 GPU, so that their sums do not go through NCCL"),
        ({"workers": 2}, ("0", "1"), None),
        ({"workers": 1, "ps": 1}, ("0",), None),
        ({"workers": 1, "evaluator": True}, ("0", "1"), None),
    ],
)
def test_gpus_that_are_shared_or_left_over_are_noted(options, gpus, note):
    notes = [text for text in plan(gpus=gpus, **options).notes if "GPU" in text]
    assert notes == ([note] if note else [])


@pytest.mark.parametrize(
    ("options", "environ", "threads"),
    [
        ({"workers": 2}, {}, ("4", "4", "4")),
        ({"workers": 3}, {}, ("2", "2", "2")),
        ({"workers": 2, "evaluator": True}, {}, ("2", "2", "2")),
        ({"workers": 16}, {}, ("1", "1", "2")),
        ({"workers": 2, "threads_per_task": 3}, {}, ("3", "3", "3")),
        ({"workers": 1}, {}, (None, None, None)),
        ({"workers": 1, "threads_per_task": 2}, {}, ("2", "2", "2")),
        ({"workers": 2}, {"OMP_NUM_THREADS": "5"}, ("5", None, None)),
        ({"workers": 2}, {"TF_NUM_INTRAOP_THREADS": "5"}, (None, "5", None)),
    ],
)
def test_processors_are_shared_out_where_the_user_set_no_threads(options, environ, threads):
    made = environ_of(plan(environ, **options))
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    assert tuple(made.get(name) for name in names) == threads


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"no_proxy": "example.org"}, {"no_proxy": "example.org"}),
        (
            {"http_proxy": "http://proxy:1"},
            dict.fromkeys(("no_proxy", "NO_PROXY", "no_grpc_proxy"), "127.0.0.1,localhost,::1"),
        ),
        (
            {"HTTPS_PROXY": "http://proxy:1", "no_proxy": "example.org, localhost"},
            dict.fromkeys(("no_proxy", "NO_PROXY", "no_grpc_proxy"), "example.org,localhost,127.0.0.1,::1"),
        ),
        (
            {"grpc_proxy": "http://proxy:1", "no_grpc_proxy": "grpc.org", "NO_PROXY": "big.org"},
            {
                "no_proxy": "big.org,127.0.0.1,localhost,::1",
                "NO_PROXY": "big.org,127.0.0.1,localhost,::1",
                "no_grpc_proxy": "grpc.org,127.0.0.1,localhost,::1",
            },
        ),
    ],
)
def test_a_proxy_does_not_stand_between_the_tasks(environ, expected):
    made = environ_of(plan(environ, workers=2))
    assert {name: value for name, value in made.items() if name.lower().startswith("no_")} == expected


@pytest.mark.parametrize(
    ("options", "gpus", "shares"),
    [
        ({"workers": 2}, (), [None, None]),
        ({"workers": 2}, ("0", "1"), ["0", "1"]),
        ({"workers": 2}, ("GPU-a", "GPU-b", "GPU-c"), ["GPU-a", "GPU-b"]),
        ({"workers": 3}, ("0", "1"), ["0", "1", "0"]),
        ({"workers": 1, "ps": 1}, ("0", "1"), ["", "0", ""]),
        ({"workers": 1, "ps": 1, "evaluator": True}, ("0", "1"), ["", "0", "", "1"]),
    ],
)
def test_each_task_that_computes_gets_one_gpu_and_no_other_task_any(options, gpus, shares):
    made = plan(gpus=gpus, **options)
    assert [task.environ.get("CUDA_VISIBLE_DEVICES") for task in made.tasks] == shares


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "--workers must be at least 1, not 0"),
        ({"workers": 0, "ps": 1, "chief": True}, "--workers must be at least 1, not 0"),
        ({"ps": -1}, "--ps must be at least 0, not -1"),
        ({"max_restarts": -1}, "--max-restarts must be at least 0, not -1"),
        ({"threads_per_task": 0}, "--threads-per-task must be at least 1, not 0"),
        ({"start_timeout_s": 0.0}, "--start-timeout must be a number of seconds above 0, not 0"),
        ({"step_timeout_s": float("nan")}, "--step-timeout must be a number of seconds above 0, not nan"),
        ({"shutdown_timeout_s": float("inf")}, "--shutdown-timeout must be a number of seconds above 0, not inf"),
        ({"command": ()}, "there is no script to run"),
        ({"command": ("-m",)}, "there is no script to run"),
    ],
)
def test_impossible_options_are_refused_with_their_value(options, words):
    with pytest.raises(LaunchError, match=words):
        Options(**{"command": ("train.py",), **options})
