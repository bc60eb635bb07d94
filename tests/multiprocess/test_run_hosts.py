"""Several launchers, each with the TF_CONFIG of its host, start one cluster; loopback addresses stand for hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time

import pytest
from launching import finish, is_alive, pids_in, run, start, wait_for, write

A, B, C = "127.0.0.1", "127.0.0.2", "127.0.0.3"

# Without TensorFlow: the real group, met as create_strategy lets it meet.
MEET = """
import os, signal, sys, time
import tfdist
from tfdist import process
from tfdist.collectives import meet

config = tfdist.resolve()
tasks = config.cluster.training_tasks
info = process.LaunchInfo.read(os.environ)
process.report("phase", phase="strategy")
group = meet(
    [config.cluster.address(task) for task in tasks], tasks, tasks.index(config.task), secret=info.secret,
    start_timeout_s=info.start_timeout_s or 30, step_timeout_s=30,
)
process.set_current(process.Current(config, group))
process.install_exit_hooks()
process.report("phase", phase="connected")
open(f"{os.getpid()}.pid", "w").close()
"""

TRAIN = """
import json, os
import keras
import numpy as np
import tfdist

strategy = tfdist.create_strategy()
x = np.arange(24, dtype="float32").reshape(8, 3) / 24
y = x.sum(1, keepdims=True) + 1
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.5), "mse")
losses = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
print(json.dumps([
    os.environ["CUDA_VISIBLE_DEVICES"], json.loads(os.environ["TF_CONFIG"])["task"]["index"],
    strategy.num_replicas_in_sync, tfdist.all_reduce(1), losses,
]))
"""


@pytest.fixture(scope="module", autouse=True)
def loopback():
    try:
        socket.create_server((C, 0)).close()
    except OSError:
        pytest.skip("this system has one loopback address only")


def free_port(count: int = 2) -> int:
    """A port that is free on all addresses, as those after it are."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            port = 0
            for _ in range(count):
                sock = stack.enter_context(socket.socket())
                sock.bind(("0.0.0.0", port))
                port = sock.getsockname()[1] + 1
            return port - count


def tf_config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def run_hosts(folder, script, cluster, *, flags=(), arguments=(), gpus=("0,1", "0,1"), deadline_s=60.0):
    """Runs one launcher per worker entry, each in a folder of its own as on a host of its own."""
    launchers = []
    began = time.monotonic()
    try:
        for index in range(len(cluster["worker"])):
            host = folder / f"host-{index}"
            host.mkdir(exist_ok=True)
            env = {"TF_CONFIG": tf_config(cluster, "worker", index), "CUDA_VISIBLE_DEVICES": gpus[index]}
            own_flags = flags[index] if flags else ()
            launchers.append(start(*own_flags, "--log-dir", "logs", script, *arguments, cwd=host, env=env))
        return [finish(launcher, began, deadline_s) for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.communicate(timeout=10)


def two_hosts():
    return {"worker": [f"{A}:{free_port()}", f"{B}:{free_port()}"]}


def reference(epochs, rate):
    """The losses of full-batch gradient descent on the same rows, in numpy."""
    import numpy as np

    x = np.arange(24, dtype=np.float64).reshape(8, 3) / 24
    y = x.sum(1, keepdims=True) + 1
    kernel, bias, losses = np.zeros((3, 1)), np.zeros(1), []
    for _ in range(epochs):
        error = x @ kernel + bias - y
        losses.append(float((error**2).mean()))
        kernel, bias = kernel - rate * 2 * x.T @ error / 8, bias - rate * 2 * error.mean()
    return losses


def test_two_hosts_with_two_gpus_each_train_one_model_on_four_tasks(tmp_path):
    first, second = run_hosts(tmp_path, write(tmp_path, TRAIN), two_hosts(), deadline_s=120)
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    said = [json.loads(ended.said_by(f"worker {i}")[-1]) for i, ended in enumerate([first, first, second, second])]
    assert [line[:4] for line in said] == [["0", 0, 4, 4], ["1", 1, 4, 4], ["0", 2, 4, 4], ["1", 3, 4, 4]]
    for *_, losses in said:
        assert losses == pytest.approx(reference(3, 0.5), rel=1e-5)
    assert "2 of the cluster's 4 tasks on this host: worker 2 at 127.0.0.2:" in second.words
    assert "each that trains is taken to run 2 tasks, on every host alike" in second.words


def test_a_chief_and_workers_that_share_out_uneven_gpus_meet_with_the_same_number_of_tasks(tmp_path):
    # The second host has one GPU, and is told that the first has two.
    script = write(tmp_path, MEET + "print(config.task, os.environ['CUDA_VISIBLE_DEVICES'], tfdist.all_reduce(1))\n")
    cluster = {"chief": [f"{A}:{free_port()}"], "worker": [f"{B}:{free_port()}"]}
    began = time.monotonic()
    chief = start(
        "--tasks-per-host",
        2,
        script,
        cwd=tmp_path,
        env={"TF_CONFIG": tf_config(cluster, "chief"), "CUDA_VISIBLE_DEVICES": "0,1"},
    )
    other = run(
        "--tasks-per-host", 2, script, cwd=tmp_path, env={"TF_CONFIG": tf_config(cluster), "CUDA_VISIBLE_DEVICES": "5"}
    )
    ended = finish(chief, began)
    assert (ended.code, other.code) == (0, 0), f"{ended}\n{other}"
    assert ended.said_by("chief 0") == ["chief 0 0 4"]
    assert ended.said_by("worker 0") == ["worker 0 1 4"]
    assert (other.said_by("worker 1"), other.said_by("worker 2")) == (["worker 1 5 4"], ["worker 2 5 4"])
    assert "2 tasks share 1 GPU" in other.words


def test_entries_for_each_task_of_one_host_are_not_split_and_get_a_gpu_each(tmp_path):
    script = write(tmp_path, MEET + "print(os.environ['CUDA_VISIBLE_DEVICES'], tfdist.all_reduce(1))\n")
    port = free_port()
    cluster = {"worker": [f"{A}:{port}", f"{A}:{port + 1}"]}
    ended = run_hosts(tmp_path, script, cluster)
    assert [e.code for e in ended] == [0, 0], ended
    assert [e.said_by(f"worker {i}") for i, e in enumerate(ended)] == [["0 2"], ["1 2"]]


def test_a_task_that_dies_ends_both_hosts_and_each_names_it(tmp_path):
    script = write(
        tmp_path,
        MEET
        + """
tfdist.barrier("step 5")
if config.task.index == 3:
    os._exit(7)
tfdist.barrier("step 6")
""",
    )
    cluster = two_hosts()
    first, second = run_hosts(tmp_path, script, cluster)
    assert (first.code, second.code) == (1, 7), f"{first}\n{second}"
    assert "script.py failed: worker 3 was first" in second.words
    assert "end  : exit code 7" in second.words
    assert "script.py failed: worker 3, which runs on another host, was first" in first.words
    host, port = cluster["worker"][1].split(":")
    assert f"task : worker 3 at {host}:{int(port) + 1}; its own launcher tells how it ended" in first.words
    assert "PeerLostError: worker 3 is gone" in first.words
    summary = json.loads((tmp_path / "host-0" / "logs" / "summary.json").read_text())
    assert (summary["first_failure"], summary["exit_code"]) == ("worker 3", 1)


def test_hosts_that_may_restart_meet_again_after_a_task_of_one_was_killed(tmp_path):
    script = write(
        tmp_path,
        MEET
        + """
tfdist.barrier("step 5")
if config.task.index == 3 and info.attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
tfdist.barrier("step 6")
print("met", info.attempt)
""",
    )
    first, second = run_hosts(tmp_path, script, two_hosts(), flags=[("--max-restarts", 1)] * 2)
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert first.said_by("worker 0") == second.said_by("worker 3") == ["met 1"]
    assert "worker 3, which runs on another host, was lost by worker " in first.words
    assert "; all 2 tasks are started again in 1 s (restart 1 of 1)" in first.words


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_end_of_one_launcher_ends_the_other(tmp_path, number, code):
    # The second host waits in a call that needs the first.
    script = write(tmp_path, MEET + "if config.task.index < 2:\n    time.sleep(60)\ntfdist.barrier('b')\n")
    cluster = two_hosts()
    hosts = []
    for index in range(2):
        env = {"TF_CONFIG": tf_config(cluster, "worker", index), "CUDA_VISIBLE_DEVICES": "0,1"}
        hosts.append(start(script, cwd=tmp_path, env=env))
    try:
        pids = pids_in(tmp_path, 4)
        hosts[0].send_signal(number)
        first, second = finish(hosts[0]), finish(hosts[1])
    finally:
        for host in hosts:
            if host.poll() is None:
                host.kill()
    assert (first.code, second.code) == (code, 1), f"{first}\n{second}"
    assert "which runs on another host, was first" in second.words
    wait_for(lambda: not any(map(is_alive, pids)), "the end of all tasks", 5)


def test_hosts_that_split_differently_do_not_meet_and_say_what_each_believes(tmp_path):
    ended = run_hosts(tmp_path, write(tmp_path, MEET), two_hosts(), flags=[(), ("--tasks-per-host", "1")])
    assert [e.code for e in ended] == [1, 1], ended
    for one in ended:
        assert "believes the cluster is worker 0 at 127.0.0.1:" in one.words
        assert "(4 tasks)" in one.words
        assert "(2 tasks)" in one.words
    assert "1 of 2 GPUs used, one per task; --tasks-per-host gpu uses all" in ended[1].words


def test_a_port_that_somebody_has_is_named_before_anything_starts(tmp_path):
    port = free_port()
    with socket.create_server(("0.0.0.0", port + 1)):
        env = {"TF_CONFIG": tf_config({"worker": [f"{A}:{port}", f"{B}:{port}"]}), "CUDA_VISIBLE_DEVICES": "0,1"}
        ended = run(write(tmp_path, "print('started')\n"), env=env)
    assert ended.code == 1
    assert ended.out == ""
    assert ended.err.startswith(f"tfdist: port {port + 1} of this host is taken")


@pytest.mark.parametrize(
    ("job", "tasks"), [("ps", ["ps 0"]), ("evaluator", ["evaluator 0"]), ("worker", ["worker 0", "worker 1"])]
)
def test_a_host_without_the_chief_of_a_parameter_server_cluster_runs_its_own_tasks_to_their_end(tmp_path, job, tasks):
    cluster = {"chief": [f"{A}:{free_port()}"], "worker": [f"{B}:{free_port()}"], "ps": [f"{C}:{free_port()}"]}
    script = write(tmp_path, "import os, tfdist\nprint(tfdist.resolve().task, os.environ['CUDA_VISIBLE_DEVICES'])\n")
    ended = run(script, env={"TF_CONFIG": tf_config(cluster, job), "CUDA_VISIBLE_DEVICES": "0,1"})
    assert ended.code == 0, ended
    gpus = {"ps": [""], "evaluator": ["0"], "worker": ["0", "1"]}[job]
    assert [ended.said_by(task) for task in tasks] == [[f"{task} {gpu}"] for task, gpu in zip(tasks, gpus, strict=True)]


def test_a_tf_config_of_one_host_becomes_a_cluster_with_a_secret_of_its_own(tmp_path):
    script = write(tmp_path, MEET + "print(info.secret is not None, tfdist.all_reduce(1))\n")
    env = {"TF_CONFIG": tf_config({"worker": [f"{A}:{free_port(3)}"]}), "CUDA_VISIBLE_DEVICES": "0,1,2"}
    ended = run(script, cwd=tmp_path, env=env)
    assert ended.code == 0, ended
    assert [ended.said_by(f"worker {i}") for i in range(3)] == [["True 3"]] * 3


def test_several_hosts_are_refused_a_cluster_of_one_host_alone(tmp_path):
    ended = run("--workers", 2, write(tmp_path, ""), env={"TF_CONFIG": tf_config({"worker": ["a:1", "b:1"]})})
    assert (ended.code, ended.out) == (2, "")
    assert "TF_CONFIG names a cluster of 2 workers, and --workers asks for another one on this host alone" in ended.err
