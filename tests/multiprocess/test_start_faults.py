"""Faults while the tasks of a cluster meet: one readable error each, in the stated time, and a code other than 0."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from by_hand import ByHand, addresses
from faulty_training import training
from launching import environment, run, wait_for, write

START_TIMEOUT_S = 6.0
# A busy machine takes a while to start and end processes.
MARGIN_S = 6.0

MEET = f"""
import os, pathlib
if "FAKE_VERSION" in os.environ:
    import importlib.metadata
    importlib.metadata.version = lambda name: os.environ["FAKE_VERSION"]
import tfdist
tfdist.create_strategy(start_timeout_s={START_TIMEOUT_S})
print("met")
"""

# Each cluster is told to each of its tasks in letters, one an address: ("ab", 0) is worker 0 of a cluster of two.
# What the task must say, and whether it must wait for the start time-out to know.
WAITS, KNOWS = 75, 1
CLUSTERS = {
    "worker 1 was never started": [("ab", 0, WAITS, r"worker 1 at {b} \(never connected\)")],
    "worker 0 was never started": [("ab", 1, WAITS, r"worker 0 at {a} \(connection refused\)")],
    "worker 1 has a wrong address of worker 0": [
        ("ab", 0, WAITS, r"worker 1 at {b} \(never connected\)"),
        ("cb", 1, WAITS, r"worker 0 at {c} \(connection refused\)"),
    ],
    "worker 0 has a wrong address of worker 1": [
        ("ac", 0, KNOWS, r"worker 1 believes the cluster is .*{b}.*, worker 0 believes it is .*{c}"),
        ("ab", 1, KNOWS, r"worker 0 believes the cluster is .*{c}.*, worker 1 believes it is .*{b}"),
    ],
    "worker 1 counts three workers": [
        ("ab", 0, KNOWS, r"worker 1 believes .*\(3 tasks\), worker 0 believes .*\(2 tasks\)"),
        ("abc", 1, KNOWS, r"worker 0 believes .*\(2 tasks\), worker 1 believes .*\(3 tasks\)"),
    ],
}


def cluster_named(name, letters, by_hand, folder, env=None):
    script = write(folder, MEET)
    return [
        by_hand.start(script, [letters[a] for a in cluster], index, name=f"{number}-worker-{index}", env=env)
        for number, (cluster, index, *_) in enumerate(CLUSTERS[name])
    ]


@pytest.fixture(scope="module")
def clusters(template, tmp_path_factory):
    """All clusters of the table at once: most of their time they wait."""
    tasks = ByHand(template)
    started = {}
    for name in CLUSTERS:
        letters = dict(zip("abc", addresses(3), strict=True))
        started[name] = letters, cluster_named(name, letters, tasks, tmp_path_factory.mktemp("cluster"))
    yield started
    tasks.close()


def the_error(task):
    """The one error of a task: the last line of its stderr."""
    assert task.err.count("Traceback (most recent call last)") == 1, task
    return task.err.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, rows in CLUSTERS.items() for number in range(len(rows))]
)
def test_tasks_that_do_not_find_each_other_say_who_is_missing(clusters, name, number):
    letters, tasks = clusters[name]
    _, _, code, words = CLUSTERS[name][number]
    task = tasks[number]
    assert task.wait(START_TIMEOUT_S + 3 * MARGIN_S) == code, task
    assert re.search("MeetingError: .*" + words.format(**letters), the_error(task)), task
    limit_s = START_TIMEOUT_S + MARGIN_S if code == WAITS else START_TIMEOUT_S
    assert task.seconds < limit_s, task


def test_a_wait_is_announced_after_some_seconds(clusters):
    letters, (task,) = clusters["worker 1 was never started"]
    task.wait()
    assert re.search(rf"waiting for worker 1 at {letters['b']} \(5 s of 6 s", task.err), task


# -- the port


def test_a_taken_port_is_named_with_its_holder(by_hand, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        task = by_hand.start(write(tmp_path, MEET), [f"127.0.0.1:{port}", *addresses(1)], 0)
        assert task.wait() == 1, task
    error = the_error(task)
    assert f"can not listen at 127.0.0.1:{port}: the port is taken by process {os.getpid()} (" in error, task
    assert task.seconds < START_TIMEOUT_S, task


def test_the_same_addresses_in_another_order_are_one_port_for_two_tasks(by_hand, tmp_path):
    a, b = addresses(2)
    script = write(tmp_path, MEET)
    tasks = [by_hand.start(script, [a, b], 0, name="first"), by_hand.start(script, [b, a], 1, name="second")]
    # Whoever comes first waits for the other, which can't listen.
    assert sorted(task.wait() for task in tasks) == [1, 75], [str(task) for task in tasks]
    waited, refused = sorted(tasks, key=lambda task: -task.wait())
    assert f"{a}: the port is taken by process {waited.pid} (" in the_error(refused), refused
    assert f" at {b} (" in the_error(waited), waited


# -- those that have met


def test_latecomers_do_not_disturb_a_pair_that_has_met(by_hand, tmp_path):
    a, b, c = addresses(3)
    pair_folder, late_folder = tmp_path / "pair", tmp_path / "late"
    pair_folder.mkdir()
    late_folder.mkdir()
    stop = "self.model.stop_training = (here / 'stop').exists()"
    pair_script = training(pair_folder, step=stop, every_step=True)
    pair = [by_hand.start(pair_script, [a, b], index) for index in range(2)]
    wait_for(lambda: (pair_folder / "pid-0").exists() and (pair_folder / "pid-1").exists(), "the pair to train")
    late_script = write(late_folder, MEET)
    same = by_hand.start(late_script, [a, b], 1, name="same")
    other = by_hand.start(late_script, [a, c], 1, name="other")
    assert same.wait() == 1, same
    assert f"{b}: the port is taken by process {pair[1].pid} (" in the_error(same), same
    assert other.wait(START_TIMEOUT_S + 2 * MARGIN_S) == 75, other
    assert f"worker 0 at {a} (" in the_error(other), other
    (pair_folder / "stop").touch()
    assert [task.wait() for task in pair] == [0, 0], [str(task) for task in pair]
    assert not any(re.search(r"Traceback|\wError\b|UNAVAILABLE", task.err) for task in pair), [str(t) for t in pair]


# Worker 1 comes to the meeting, but not out of the constructor of TensorFlow's strategy, which waits for all tasks.
HALF_WAY = """
import os, signal, time
import tensorflow as tf
import tfdist
if tfdist.resolve().task.index == 1:
    def no_further(self, *args, **kwargs):
        {fault}
    tf.distribute.MultiWorkerMirroredStrategy.__init__ = no_further
tfdist.create_strategy(start_timeout_s={start_timeout_s})
"""


@pytest.mark.parametrize(
    ("fault", "start_timeout_s", "limit_s", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, 10, "worker 1 died while TensorFlow's servers started"),
        ("raise ValueError('boo')", 60, 10, "worker 1 died while TensorFlow's servers started"),
        ("time.sleep(600)", 6, 6 + 2 * MARGIN_S, "worker 1 (5 s of 6 s)"),
    ],
)
def test_a_task_that_waits_for_tensorflows_servers_in_vain_says_so_and_ends(
    by_hand, tmp_path, fault, start_timeout_s, limit_s, words
):
    script = write(tmp_path, HALF_WAY.format(fault=fault, start_timeout_s=start_timeout_s))
    both = addresses(2)
    task, _ = [by_hand.start(script, both, index) for index in range(2)]
    assert task.wait(limit_s + MARGIN_S) == -signal.SIGABRT, task
    assert task.seconds < limit_s, task
    assert words in task.err, task
    assert re.search(r"File .*collective_all_reduce_strategy.py", task.err), task
    assert f'"{script}", line' in task.err, task


def test_the_launcher_ends_those_that_wait_for_tensorflows_servers_in_vain(tmp_path):
    script = write(tmp_path, HALF_WAY.format(fault="os.kill(os.getpid(), signal.SIGKILL)", start_timeout_s=60))
    ended = run("--workers", 2, script)
    assert ended.code == 137, ended
    assert "worker 1 was first" in ended.words, ended
    assert "killed by SIGKILL" in ended.words, ended
    assert "Traceback" not in ended.err, ended


# -- what must be the same, or right, before tasks meet


def test_different_versions_are_named_on_both_tasks(by_hand, tmp_path):
    script, both = write(tmp_path, MEET), addresses(2)
    tasks = [by_hand.start(script, both, 0), by_hand.start(script, both, 1, env={"FAKE_VERSION": "9.8.7"})]
    for task in tasks:
        assert task.wait() == 1, task
        assert "MeetingError" in the_error(task), task
        assert "TensorFlow 9.8.7" in the_error(task), task
        assert task.seconds < START_TIMEOUT_S, task


@pytest.mark.parametrize(
    ("lines", "env", "words"),
    [
        (
            "tfdist.create_strategy(expected_tasks=3)",
            {},
            "expected_tasks=3, but this process is one of 2 training tasks",
        ),
        ("tfdist.create_strategy()", {"TF_USE_LEGACY_KERAS": "1"}, "TF_USE_LEGACY_KERAS is set"),
        ("tfdist.create_strategy('mirrored')", {}, "kind='mirrored'; it must be one of"),
        ("tfdist.create_strategy(kind='parameter_server')", {}, "ps"),
    ],
)
def test_what_can_not_work_is_refused_before_anybody_waits(by_hand, tmp_path, lines, env, words):
    task = by_hand.start(write(tmp_path, f"import tfdist\n{lines}\n"), addresses(2), 0, env=env)
    assert task.wait() == 1, task
    assert words in task.err, task
    assert task.err.count("Traceback") == 1, task


def test_another_keras_backend_is_refused(tmp_path):
    script = write(tmp_path, "import tfdist\ntfdist.create_strategy()\n")
    ended = subprocess.run(
        [sys.executable, script],
        env=environment({"KERAS_BACKEND": "jax"}),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1, ended
    assert (
        ended.stderr.rstrip()
        .splitlines()[-1]
        .endswith(
            "the Keras backend is 'jax'; tfdist trains with TensorFlow: set KERAS_BACKEND=tensorflow before keras is "
            "imported"
        )
    ), ended


def test_a_cluster_that_comes_after_the_strategy_is_an_error_of_fit(by_hand, tmp_path):
    script = write(
        tmp_path,
        """
import json, os
import keras, numpy as np
import tfdist
strategy = tfdist.create_strategy()
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}})
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
""",
    )
    task = by_hand.start_with(script, None, name="alone")
    assert task.wait() == 1, task
    assert "StrategyError: TF_CONFIG was set after create_strategy()" in task.err, task


# -- TensorFlow was used before


@pytest.mark.parametrize(
    "use", ["x = tf.constant(1.0)", "tf.config.list_logical_devices()", "keras.layers.Dense(3).build((1, 1))"]
)
def test_the_line_that_used_tensorflow_before_is_named(by_hand, tmp_path, use):
    script = write(tmp_path, f"import keras, tensorflow as tf\nimport tfdist\n\n{use}\n\ntfdist.create_strategy()\n")
    task = by_hand.start(script, addresses(2), 0)
    assert task.wait() == 1, task
    assert f"The first use was\n    {script}:4: {use}\n" in task.err, task


def test_the_line_is_named_in_launched_scripts_too(tmp_path):
    lines = "import tensorflow as tf\n\ndef prepare():\n    return tf.zeros(3) + 1\n\nprepare()\n"
    script = write(tmp_path, f"{lines}import tfdist\ntfdist.create_strategy()\n")
    ended = run("--workers", 2, script)
    assert ended.code == 1, ended
    assert f"The first use was\n    {script}:4: return tf.zeros(3) + 1\n" in ended.words, ended


def test_a_use_that_nobody_saw_is_refused_without_a_line(by_hand, tmp_path):
    script = write(tmp_path, "import tensorflow as tf\ntf.constant(1)\nimport tfdist\ntfdist.create_strategy()\n")
    task = by_hand.start(script, addresses(2), 0)
    assert task.wait() == 1, task
    assert (
        "TensorFlow was used before create_strategy(), so this process can no longer join a cluster. Making" in task.err
    ), task


# -- the way


def test_a_proxy_does_not_stand_between_launched_tasks(tmp_path):
    dead = "http://127.0.0.1:9"
    ended = run(
        "--workers", 2, training(tmp_path, steps=3), env={"http_proxy": dead, "https_proxy": dead, "grpc_proxy": dead}
    )
    assert ended.code == 0, ended


def test_a_proxy_does_not_stand_between_tasks_started_by_hand(by_hand, tmp_path):
    script, both = training(tmp_path, steps=3), addresses(2)
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    tasks = [by_hand.start(script, both, index, env=proxies) for index in range(2)]
    assert [task.wait(40) for task in tasks] == [0, 0], [str(task) for task in tasks]
