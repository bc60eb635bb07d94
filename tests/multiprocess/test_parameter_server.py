"""Parameter servers: the chief gets a strategy and trains, workers and ps serve and leave with it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launching import run, write
from without_launcher import Cluster

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


def started(folder: Path, argument: str, without: str = "", start_timeout_s: float = 60) -> Cluster:
    return Cluster(folder, SCRIPT, argument, start_timeout_s, workers=1, ps=1, without=without)


def test_launched_workers_and_ps_end_with_the_chief(tmp_path):
    ended = run("--workers", 2, "--ps", 1, write(tmp_path, SCRIPT), "go", 60)
    assert ended.code == 0, str(ended)
    assert ended.said_by("chief 0") == CLEAN
    words = "sequential_1 was made outside the strategy's scope, so this task trains it alone"
    assert str(ended).count(words) == 1
    assert not ended.said_by("worker 0"), "a worker serves, and runs nothing below create_strategy"


def test_without_the_launcher_workers_and_ps_leave_by_themselves(tmp_path):
    with started(tmp_path, "go") as cluster:
        assert cluster.codes() == {"chief 0": 0, "worker 0": 0, "ps 0": 0}, str(cluster)
        assert "total 20.0" in cluster.log("chief 0")


def test_when_the_chief_is_killed_workers_and_ps_leave_and_name_it(tmp_path):
    with started(tmp_path, "wait") as cluster:
        cluster.wait_for_words("total 20.0", begun=0)
        cluster.kill("chief 0")
        codes = cluster.codes(timeout_s=10)
        assert codes == {"chief 0": -signal.SIGKILL, "worker 0": 1, "ps 0": 1}, str(cluster)
        for task in ("worker 0", "ps 0"):
            assert "PeerLostError: chief 0 is gone" in cluster.log(task)


def test_a_ps_that_starts_anew_in_a_run_that_has_begun_is_told_that_its_variables_are_lost(tmp_path):
    with started(tmp_path, "wait") as cluster:
        cluster.wait_for_words("total 20.0", begun=0)
        cluster.kill("ps 0")
        cluster.start("ps 0")
        assert cluster.codes("ps 0") == {"ps 0": 1}, str(cluster)
        words = "ps 0 is started anew in a run that has begun: the variables on it were lost with the ps 0 before it"
        assert f"MeetingError: {words}; start the run again" in cluster.log("ps 0"), str(cluster)
        assert cluster.tasks["chief 0"].poll() is None, "it does something else meanwhile"


@pytest.mark.parametrize("missing", ["ps 0", "chief 0"])
def test_a_task_that_never_starts_is_named(missing, tmp_path):
    with started(tmp_path, "go", without=missing, start_timeout_s=6) as cluster:
        codes = cluster.codes()
        assert set(codes.values()) == {75}, str(cluster)
        for task in codes:
            assert f"MeetingError: {missing}" in cluster.log(task) or f"{missing} at" in cluster.log(task), str(cluster)


def test_the_cluster_document_of_the_shipped_sample_is_of_this_shape():
    sample = json.loads((Path(__file__).parents[2] / "tf_config/local_pss/ps-0.json").read_text())
    assert set(sample["cluster"]) == {"chief", "worker", "ps"}
