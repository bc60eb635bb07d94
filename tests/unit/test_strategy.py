"""`create_strategy` in one process: what it decides, what it refuses. Several tasks: tests/multiprocess."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ClusterError, StrategyError
from tfdist.internals.keras import GLOBAL_STATE


def tf_config(task: str = "worker", index: int = 0, **jobs: int) -> dict[str, str]:
    ports = iter(range(2000, 3000))
    cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in jobs.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}


@pytest.mark.parametrize(
    "environ", [{}, {"TF_CONFIG": ""}, tf_config(worker=1), tf_config("evaluator", worker=2)], ids=str
)
def test_one_task_gets_a_strategy_of_one_device(environ):
    strategy = tfdist.create_strategy(environ=environ)
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.num_replicas_in_sync == 1


def test_alone_the_collective_names_do_nothing():
    tfdist.create_strategy(environ={})
    assert tfdist.all_reduce(3) == 3
    tfdist.barrier("alone")
    assert tfdist.is_chief()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "mirrored"}, r"kind='mirrored'; it must be one of 'multi_worker_mirrored'"),
        ({"communication": "gloo"}, r"communication='gloo'; it must be one of 'auto'"),
        ({"expected_tasks": 2}, r"expected_tasks=2, but this process is one of 1 training task .*--workers 2"),
        ({"environ": {"TF_USE_LEGACY_KERAS": "1"}}, "TF_USE_LEGACY_KERAS is set.*unset it on every task"),
        ({"environ": {"TFDIST_STEP_TIMEOUT_S": "soon"}}, "TFDIST_STEP_TIMEOUT_S must be a number, not 'soon'"),
        ({"environ": tf_config(worker=2)}, r"TensorFlow was used before create_strategy\(\)"),
        ({"environ": tf_config(worker=1, ps=1, chief=1)}, r"TensorFlow was used before create_strategy\(\)"),
    ],
    ids=str,
)
def test_what_can_not_be_made_is_refused_with_what_to_type(arguments, message):
    tf.constant(1)  # TensorFlow has started in this process
    with pytest.raises(StrategyError, match=message):
        tfdist.create_strategy(**arguments)


@pytest.mark.parametrize(
    ("kind", "environ"),
    [
        ("parameter_server", {}),
        ("multi_worker_mirrored", tf_config(worker=2, ps=1, chief=1)),
        ("parameter_server", tf_config(worker=2)),
        (None, tf_config("worker", worker=1, ps=1)),
    ],
    ids=str,
)
def test_a_kind_that_does_not_fit_the_cluster_is_an_error_of_the_cluster(kind, environ):
    with pytest.raises(ClusterError):
        tfdist.create_strategy(kind, environ=environ)


def test_seed_makes_a_lone_script_repeatable():
    def draw() -> np.ndarray:
        tfdist.create_strategy(seed=11)
        # Not keras.random: in Keras 3.12 its generator keeps its state when the seed is set again.
        return np.asarray(keras.initializers.RandomNormal()((3,)))

    np.testing.assert_array_equal(draw(), draw())


def test_without_a_seed_a_lone_script_stays_random():
    def losses() -> list[float]:
        keras.utils.set_random_seed(1)
        GLOBAL_STATE.find()("global_random_seed", None)  # as if the script had set none
        strategy = tfdist.create_strategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        x = np.arange(64, dtype="float32")[:, None] / 64
        return model.fit(x, np.sin(40 * x), batch_size=4, verbose=0).history["loss"]

    assert losses() != losses()


def test_a_model_made_in_the_scope_keeps_its_class_and_trains_like_any_other(tmp_path):
    strategy = tfdist.create_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((5, 2), "float32")
    model.fit(x, x[:, :1], verbose=0)
    assert type(model) is keras.Sequential
    model.save(tmp_path / "m.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(x, verbose=0), model.predict(x, verbose=0))
    assert keras.models.load_model(tmp_path / "m.keras").evaluate(x, x[:, :1], verbose=0) == pytest.approx(
        model.evaluate(x, x[:, :1], verbose=0)
    )
