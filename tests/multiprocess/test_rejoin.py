"""A parameter-server cluster, started as a platform would: tasks that die, hang and come back, while `fit` runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from without_launcher import Cluster

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
HEARTBEAT_S = 6


class Training(Cluster):
    """All its workers train."""

    def __init__(self, folder: Path, *, workers: int, ps: int, heartbeat_s: float = 60) -> None:
        self._stop = folder / "stop"
        env = {"TFDIST_HEARTBEAT_TIMEOUT_S": str(heartbeat_s)}
        super().__init__(folder, SCRIPT, self._stop, workers=workers, ps=ps, env=env)

    def __enter__(self) -> Training:
        super().__enter__()
        try:
            self.wait_for_epochs(1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def end_of_training(self) -> None:
        """Lets `fit` end after this epoch."""
        self._stop.touch()

    def wait_for_epochs(self, count: int, *, with_last_worker: bool = True) -> None:
        """Waits until the chief has trained so many more epochs, all with or all without rows of the last worker."""
        self.wait_for_words(f"rows of the last worker: {'[1-9]' if with_last_worker else '0$'}", count)


def test_a_worker_that_is_killed_is_done_without_and_used_again_when_it_is_back(tmp_path):
    with Training(tmp_path, workers=2, ps=2) as cluster:
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
    with Training(tmp_path, workers=1, ps=1) as cluster:
        cluster.kill("worker 0")
        cluster.wait_for_words(r"tfdist: waiting for a worker to come back \(0 s of 60 s\): none is left", begun=0)
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
    with Training(tmp_path, workers=1, ps=2, heartbeat_s=HEARTBEAT_S) as cluster:
        cluster.tasks[lost].send_signal(number)
        others = sorted(set(cluster.tasks) - {lost})
        assert set(cluster.codes(*others).values()) == {1}, str(cluster)
        assert f"tfdist.errors.PeerLostError: {words}" in cluster.log("chief 0"), str(cluster)
        for name in others[1:]:
            assert f"PeerLostError: chief 0 left with code 1: PeerLostError: {words}" in cluster.log(name), str(cluster)
