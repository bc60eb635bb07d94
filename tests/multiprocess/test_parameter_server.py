"""Parameter servers: the chief gets a strategy and trains, workers and ps serve and leave with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import portpicker
import pytest
from launching import environment, run, wait_for, write

from tfdist import tf_config

# Prints what happens; with "wait" the chief stays until it is killed.
SCRIPT = """
    import sys, time
    import keras, tensorflow as tf, tfdist

    strategy = tfdist.create_strategy(start_timeout_s=float(sys.argv[2]))
    print("chief", tfdist.is_chief(), type(strategy).__name__, flush=True)
    with strategy.scope():
        total = tf.Variable(0.0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step():
        total.assign_add(1.0)
        return total.read_value()

    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()
    print("total", float(total.numpy()), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(60)
    x = tf.random.stateless_normal((60, 2), seed=(1, 2)).numpy()
    history = model.fit(x, x @ [[1.0], [2.0]], batch_size=10, epochs=4, verbose=0)
    alone = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    alone.compile("sgd", "mse")
    for _ in range(2):
        alone.fit(x, x[:, :1], verbose=0)
    print("fell", history.history["loss"][-1] < history.history["loss"][0], int(model.optimizer.iterations), flush=True)
"""
CLEAN = ["chief True ParameterServerStrategyV2", "total 20.0", "fell True 24"]
DEADLINE_S = 90


class Started:
    """A cluster of one chief, one worker and one ps, started without the launcher as a platform would."""

    def __init__(self, folder: Path, argument: str, without: str = "", start_timeout_s: float = 60) -> None:
        ports = [portpicker.pick_unused_port() for _ in range(3)]
        cluster = tf_config.local_cluster(workers=1, ps=1, chief=True, ports=ports)
        script = write(folder, SCRIPT)
        self._command = [sys.executable, "-u", str(script), argument, str(start_timeout_s)]
        self._environments = {str(task): {"TF_CONFIG": tf_config.build(cluster, task)} for task in cluster.tasks}
        self._logs = {name: folder / f"{name}.log" for name in self._environments}
        self._started: list[subprocess.Popen[bytes]] = []
        self.tasks: dict[str, subprocess.Popen[bytes]] = {}
        for name in self._environments:
            if name != without:
                self.start(name)

    def start(self, name: str) -> None:
        """Starts a task, or starts it anew."""
        with open(self._logs[name], "wb") as log:
            self.tasks[name] = subprocess.Popen(
                self._command, env=environment(self._environments[name]), stdout=log, stderr=subprocess.STDOUT
            )
        self._started.append(self.tasks[name])

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def log(self, task: str) -> str:
        return self._logs[task].read_text(errors="replace") if self._logs[task].exists() else ""

    def codes(self, timeout_s: float) -> dict[str, int]:
        wait_for(lambda: all(p.poll() is not None for p in self.tasks.values()), f"all to end\n{self}", timeout_s)
        return {name: process.returncode for name, process in self.tasks.items()}

    def __str__(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self._logs)


def test_launched_workers_and_ps_end_with_the_chief(tmp_path):
    ended = run("--workers", 2, "--ps", 1, write(tmp_path, SCRIPT), "go", 60)
    assert ended.code == 0, str(ended)
    assert ended.said_by("chief 0") == CLEAN
    words = "sequential_1 was made outside the strategy's scope, so this task trains it alone"
    assert str(ended).count(words) == 1
    assert not ended.said_by("worker 0"), "a worker serves, and runs nothing below create_strategy"


def test_without_the_launcher_workers_and_ps_leave_by_themselves(tmp_path):
    with Started(tmp_path, "go") as cluster:
        assert cluster.codes(timeout_s=DEADLINE_S) == {"chief 0": 0, "worker 0": 0, "ps 0": 0}, str(cluster)
        assert "total 20.0" in cluster.log("chief 0")


def test_when_the_chief_is_killed_workers_and_ps_leave_and_name_it(tmp_path):
    with Started(tmp_path, "wait") as cluster:
        wait_for(lambda: "total 20.0" in cluster.log("chief 0"), f"the chief to work\n{cluster}", DEADLINE_S)
        cluster.tasks["chief 0"].send_signal(signal.SIGKILL)
        codes = cluster.codes(timeout_s=10)
        assert codes == {"chief 0": -signal.SIGKILL, "worker 0": 1, "ps 0": 1}, str(cluster)
        for task in ("worker 0", "ps 0"):
            assert "PeerLostError: chief 0 is gone" in cluster.log(task)


def test_a_ps_that_starts_anew_in_a_run_that_has_begun_is_told_that_its_variables_are_lost(tmp_path):
    with Started(tmp_path, "wait") as cluster:
        wait_for(lambda: "total 20.0" in cluster.log("chief 0"), f"the chief to work\n{cluster}", DEADLINE_S)
        cluster.tasks["ps 0"].kill()
        cluster.tasks["ps 0"].wait()
        cluster.start("ps 0")
        assert cluster.tasks["ps 0"].wait(DEADLINE_S) == 1, str(cluster)
        words = "ps 0 is started anew in a run that has begun: the variables on it were lost with the ps 0 before it"
        assert f"MeetingError: {words}; start the run again" in cluster.log("ps 0"), str(cluster)
        assert cluster.tasks["chief 0"].poll() is None, "it does something else meanwhile"


@pytest.mark.parametrize("missing", ["ps 0", "chief 0"])
def test_a_task_that_never_starts_is_named(missing, tmp_path):
    with Started(tmp_path, "go", without=missing, start_timeout_s=6) as cluster:
        codes = cluster.codes(timeout_s=DEADLINE_S)
        assert set(codes.values()) == {75}, str(cluster)
        for task in codes:
            assert f"MeetingError: {missing}" in cluster.log(task) or f"{missing} at" in cluster.log(task), str(cluster)


def test_the_cluster_document_of_the_shipped_sample_is_of_this_shape():
    sample = json.loads((Path(__file__).parents[2] / "tf_config/local_pss/ps-0.json").read_text())
    assert set(sample["cluster"]) == {"chief", "worker", "ps"}
