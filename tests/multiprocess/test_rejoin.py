"""A parameter-server cluster, started as a platform would: tasks that die, hang and come back, while `fit` runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import portpicker
import pytest
from launching import environment, wait_for, write

from tfdist import tf_config

# Trains until a file is there. Each worker's rows hold its index, so that the count of rows says who trained.
SCRIPT = """
    import json, os, sys, time
    import keras, tensorflow as tf, tfdist

    strategy = tfdist.create_strategy(start_timeout_s=60)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="rows_of_worker_1")
            self.rows = self.add_weight(name="rows", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(keras.ops.sum(y_true))

        def result(self):
            return self.rows

    with strategy.scope():
        model.compile("sgd", "mse", metrics=[Rows()])

    def rows(context):
        def row(_):
            return tf.random.uniform((8, 2)), tf.fill((8, 1), float(context.input_pipeline_id))

        return tf.data.Dataset.range(10**9).map(row)

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print("epoch", epoch, "rows of worker 1:", int(logs["rows_of_worker_1"]), flush=True)
            self.model.stop_training = os.path.exists(sys.argv[1])

    model.fit(rows, steps_per_epoch=40, epochs=10**6, verbose=0, callbacks=[Tell()])
    print("iterations", int(model.optimizer.iterations), flush=True)
"""
DEADLINE_S = 90
HEARTBEAT_S = 4


class Cluster:
    """A chief, two workers and two ps, started without the launcher."""

    def __init__(self, folder: Path) -> None:
        ports = [portpicker.pick_unused_port() for _ in range(5)]
        self._folder, self._script = folder, write(folder, SCRIPT)
        self._cluster = tf_config.local_cluster(workers=2, ps=2, chief=True, ports=ports)
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
                        "TFDIST_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_S),
                        "TF_CPP_MIN_LOG_LEVEL": "2",
                    }
                ),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(self.tasks[name])

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def kill(self, name: str) -> None:
        self.tasks[name].kill()
        self.tasks[name].wait()

    def stop(self, name: str) -> None:
        self.tasks[name].send_signal(signal.SIGSTOP)

    def end_of_training(self) -> None:
        """Lets `fit` end after this epoch."""
        (self._folder / "stop").touch()

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_words(self, name: str, words: str, after: int = 0) -> None:
        wait_for(lambda: words in self.log(name)[after:], f"{name} to say {words!r}\n{self}", DEADLINE_S)

    def wait_for_epochs(self, count: int, worker_1: bool) -> None:
        """Waits until the chief has trained so many more epochs, with or without worker 1."""
        begun = len(self.log("chief 0"))
        pattern = r"rows of worker 1: [1-9]" if worker_1 else r"rows of worker 1: 0\n"
        wait_for(
            lambda: len(re.findall(pattern, self.log("chief 0")[begun:])) >= count,
            f"{count} epochs {'with' if worker_1 else 'without'} worker 1\n{self}",
            DEADLINE_S,
        )

    def codes(self, *names: str, timeout_s: float = DEADLINE_S) -> dict[str, int]:
        """Waits for tasks to end."""
        tasks = {name: process for name, process in self.tasks.items() if not names or name in names}
        wait_for(lambda: all(p.poll() is not None for p in tasks.values()), f"the tasks to end\n{self}", timeout_s)
        return {name: process.returncode for name, process in tasks.items()}

    def __str__(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-6000:]}" for name in self._names)


@pytest.fixture
def cluster(tmp_path):
    """A cluster in which both workers train."""
    with Cluster(tmp_path) as cluster:
        cluster.wait_for_epochs(1, worker_1=True)
        yield cluster


def test_a_worker_that_is_killed_is_done_without_and_used_again_when_it_comes_back(cluster):
    for _ in range(2):
        cluster.kill("worker 1")
        cluster.wait_for_epochs(2, worker_1=False)
        cluster.start("worker 1")
        cluster.wait_for_epochs(2, worker_1=True)
    cluster.end_of_training()
    assert set(cluster.codes().values()) == {0}, str(cluster)
    said = cluster.log("chief 0")
    gone = (
        "tfdist: worker 1 is gone: its connection closed without a goodbye (killed or crashed?); training goes on with "
        "1 worker\n"
    )
    assert said.count(gone) == said.count("tfdist: worker 1 is back: 2 workers\n") == 2, said
