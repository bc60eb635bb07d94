"""A parameter-server cluster, started as a platform would: tasks that die, hang and come back, while `fit` runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import portpicker
import pytest
from launching import environment, wait_for, write

from tfdist import tf_config

# Trains until a file is there. The labels of the last worker are ones, so that their sum counts its rows.
SCRIPT = """
    import os, sys
    import keras, tensorflow as tf, tfdist

    strategy = tfdist.create_strategy(start_timeout_s=60)

    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="of_last_worker")
            self.rows = self.add_weight(name="rows", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(keras.ops.sum(y_true))

        def result(self):
            return self.rows

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Rows()])

    def rows(context):
        is_last = context.input_pipeline_id == context.num_input_pipelines - 1

        def row(_):
            return tf.random.uniform((8, 2)), tf.fill((8, 1), float(is_last))

        return tf.data.Dataset.range(10**9).map(row)

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print("epoch", epoch, "rows of the last worker:", int(logs["of_last_worker"]), flush=True)
            self.model.stop_training = os.path.exists(sys.argv[1])

    model.fit(rows, steps_per_epoch=40, epochs=10**6, verbose=0, callbacks=[Tell()])
    print("iterations", int(model.optimizer.iterations), flush=True)
"""
DEADLINE_S = 240  # on a loaded machine five tasks take minutes to import TensorFlow
HEARTBEAT_S = 6


class Cluster:
    """A chief, workers and ps, started without the launcher, of which all workers train."""

    def __init__(self, folder: Path, *, workers: int, ps: int, heartbeat_s: float = 60) -> None:
        ports = [portpicker.pick_unused_port() for _ in range(1 + workers + ps)]
        self._folder, self._script, self._heartbeat_s = folder, write(folder, SCRIPT), heartbeat_s
        self._cluster = tf_config.local_cluster(workers=workers, ps=ps, chief=True, ports=ports)
        self._last_worker = f"worker {workers - 1}"
        self._names = {str(task): task for task in self._cluster.tasks}
        self._started: list[subprocess.Popen[bytes]] = []
        self.tasks: dict[str, subprocess.Popen[bytes]] = {}
        for name in self._names:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts a task, or starts it anew."""
        with open(self._folder / f"{name}.log", "ab") as log:
            self.tasks[name] = subprocess.Popen(
                [sys.executable, "-u", self._script, self._folder / "stop"],
                env=environment(
                    {
                        "TF_CONFIG": tf_config.build(self._cluster, self._names[name]),
                        "TFDIST_HEARTBEAT_TIMEOUT_S": str(self._heartbeat_s),
                        "TF_CPP_MIN_LOG_LEVEL": "2",
                    }
                ),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(self.tasks[name])

    def __enter__(self) -> Cluster:
        try:
            self.wait_for_epochs(1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def kill(self, name: str) -> None:
        self.tasks[name].kill()
        self.tasks[name].wait()

    def end_of_training(self) -> None:
        """Lets `fit` end after this epoch."""
        (self._folder / "stop").touch()

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_for(condition, what, DEADLINE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self}") from None

    def wait_for_words(self, name: str, words: str) -> None:
        self.wait_for(lambda: words in self.log(name), f"{name} to say {words!r}")

    def wait_for_epochs(self, count: int, *, with_last_worker: bool = True) -> None:
        """Waits until the chief has trained so many more epochs, all with or all without rows of the last worker."""
        begun = len(self.log("chief 0"))
        pattern = r"rows of the last worker: [1-9]" if with_last_worker else r"rows of the last worker: 0\n"
        self.wait_for(
            lambda: len(re.findall(pattern, self.log("chief 0")[begun:])) >= count,
            f"{count} epochs {'with' if with_last_worker else 'without'} {self._last_worker}",
        )

    def codes(self, *names: str) -> dict[str, int]:
        """Waits for tasks to end: all, or those named."""
        tasks = {name: process for name, process in self.tasks.items() if not names or name in names}
        self.wait_for(lambda: all(process.poll() is not None for process in tasks.values()), "the tasks to end")
        return {name: process.returncode for name, process in tasks.items()}

    def __str__(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-6000:]}" for name in self._names)


def test_a_worker_that_is_killed_is_done_without_and_used_again_when_it_is_back(tmp_path):
    with Cluster(tmp_path, workers=2, ps=2) as cluster:
        cluster.kill("worker 1")
        cluster.wait_for_epochs(2, with_last_worker=False)
        cluster.start("worker 1")
        cluster.wait_for_epochs(2)
        cluster.end_of_training()
        assert set(cluster.codes().values()) == {0}, str(cluster)
        said = cluster.log("chief 0")
        gone = (
            "tfdist: worker 1 is gone: its connection closed without a goodbye (killed or crashed?); training goes on "
            "with 1 worker\n"
        )
        assert said.count(gone) == said.count("tfdist: worker 1 is back: 2 workers\n") == 1, said


def test_the_last_worker_is_waited_for_and_leaves_with_the_rest_when_the_chief_is_killed(tmp_path):
    with Cluster(tmp_path, workers=1, ps=1) as cluster:
        cluster.kill("worker 0")
        cluster.wait_for_words("chief 0", "tfdist: waiting for a worker to come back (0 s of 60 s): none is left")
        cluster.start("worker 0")
        cluster.wait_for_epochs(1)
        cluster.kill("chief 0")
        assert cluster.codes() == {"chief 0": -signal.SIGKILL, "worker 0": 1, "ps 0": 1}, str(cluster)
        for name in ("worker 0", "ps 0"):
            assert "PeerLostError: chief 0 is gone" in cluster.log(name), str(cluster)


@pytest.mark.parametrize(
    ("number", "lost", "words"),
    [
        (signal.SIGKILL, "ps 1", "ps 1 is gone"),
        (signal.SIGSTOP, "ps 0", "ps 0 has been silent for"),
        (signal.SIGSTOP, "worker 0", "worker 0 has been silent for"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_what_training_can_not_go_on_without_is_named(number, lost, words, tmp_path):
    with Cluster(tmp_path, workers=1, ps=2, heartbeat_s=HEARTBEAT_S) as cluster:
        cluster.tasks[lost].send_signal(number)
        others = sorted(set(cluster.tasks) - {lost})
        assert set(cluster.codes(*others).values()) == {1}, str(cluster)
        assert f"tfdist.errors.PeerLostError: {words}" in cluster.log("chief 0"), str(cluster)
        for name in others[1:]:
            assert f"PeerLostError: chief 0 left with code 1: PeerLostError: {words}" in cluster.log(name), str(cluster)
