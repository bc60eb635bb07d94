"""`create_strategy(deterministic=True)`: a run twice gives the same bits; what it can't run says what to do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import UnsupportedError

layers = keras.layers
MODELS = {
    "dense, shuffled, with dropout": lambda: [
        keras.Input((36,)),
        layers.Dense(64, activation="relu"),
        layers.Dropout(0.4),
    ],
    "convolutions of augmented images": lambda: [
        keras.Input((36,)),
        layers.Reshape((6, 6, 1)),
        layers.RandomFlip(),
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ],
    "an embedding, where rows meet": lambda: [
        keras.Input((36,)),
        layers.Lambda(lambda x: tf.cast(tf.abs(x) * 3, "int32"), output_shape=(36,)),
        layers.Embedding(16, 8),
        layers.GlobalAveragePooling1D(),
    ],
    "a recurrent layer": lambda: [keras.Input((36,)), layers.Reshape((6, 6)), layers.LSTM(12)],
    "synchronized batch statistics": lambda: [
        keras.Input((36,)),
        layers.Dense(32),
        layers.BatchNormalization(synchronized=True),
        layers.Activation("relu"),
    ],
}


def train(names, **arguments):
    """The numbers of each kind of model; the seed is what create_strategy makes it."""
    strategy = tfdist.create_strategy(deterministic=True, **arguments)
    x = np.random.default_rng(0).normal(size=(310, 36)).astype("float32")
    results = {}
    for name in names:
        with strategy.scope():
            model = keras.Sequential([*MODELS[name](), layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        history = model.fit(x, x[:, :1], batch_size=50, epochs=2, verbose=0)
        results[name] = {**history.history, "weights": model.get_weights(), "outputs": model.predict(x[:9], verbose=0)}
    return results


def train_with_an_op_that_has_no_deterministic_kernel(strategy):
    class Model(keras.Model):
        def train_step(self, data):
            # What TensorFlow says on a GPU; its kernels for CPUs are all deterministic.
            words = "Deterministic GPU implementation of CropAndResizeBackpropImage not available."
            raise tf.errors.UnimplementedError(None, None, words)

        def call(self, x):
            return x

    with strategy.scope():
        model = Model()
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)


@pytest.fixture(scope="module")
def two_runs():
    runs = []
    for _ in range(2):
        with tfdist.testing.local_cluster(workers=2) as cluster:
            runs.append(cluster.run(train, list(MODELS)))
    return runs


def _bits(value):
    return [np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(value)]


@pytest.mark.parametrize("model", MODELS)
def test_two_runs_and_all_tasks_hold_the_same_bits(model, two_runs):
    (first, *others), second = two_runs
    for result in [*others, *second]:
        for name, value in first[model].items():
            assert _bits(result[model][name]) == _bits(value), name


def test_another_seed_gives_other_bits(two_runs):
    """Else the test above could not fail."""
    name = next(iter(MODELS))
    with tfdist.testing.local_cluster(workers=1) as cluster:
        (other,) = cluster.run(train, [name], seed=1)
    assert _bits(other[name]["weights"]) != _bits(two_runs[0][0][name]["weights"])


def test_an_op_without_a_deterministic_kernel_is_told_with_what_to_do():
    with (
        pytest.raises(UnsupportedError, match=r"CropAndResizeBackpropImage.*create_strategy\(deterministic=False\)"),
        tfdist.testing.local_cluster(workers=1, strategy={"deterministic": True}) as cluster,
    ):
        cluster.run(train_with_an_op_that_has_no_deterministic_kernel)
