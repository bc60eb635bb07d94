"""Training that draws random numbers, and layers with a state, as functions that run on the tasks of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist

sys.path.insert(0, str(Path(__file__).parent))
from parity.cases import regression

X, Y = regression(26)
layers = keras.layers


def _compiled(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.GaussianNoise(0.1),
                layers.Dense(8, activation="tanh"),
                layers.Dropout(0.3),
                layers.Dense(8),
                layers.GaussianDropout(0.2, seed=5),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def _fit(model: Any, epochs: int, *callbacks: Any) -> list[np.ndarray]:
    model.fit(X, Y, batch_size=9, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def without_a_stop(strategy: Any) -> list[np.ndarray]:
    """The weights after four epochs, rows shuffled."""
    return _fit(_compiled(strategy), 4)


def first_half(strategy: Any, folder: str) -> None:
    _fit(_compiled(strategy), 2, tfdist.callbacks.Checkpoint(folder))


def second_half(strategy: Any, folder: str) -> list[np.ndarray]:
    """The same script again: it goes on where the first half ended."""
    return _fit(_compiled(strategy), 4, tfdist.callbacks.Checkpoint(folder))


def plain_batch_norm(strategy: Any, path: str) -> dict[str, Any]:
    """One step of plain BatchNormalization on the whole batch of 26 rows: what it keeps, here and in the file."""
    with strategy.scope():
        norm = layers.BatchNormalization(momentum=0.75)
        model = keras.Sequential([keras.Input((6,)), norm, layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=26, shuffle=False, verbose=0)
    tfdist.save(model, path)
    tfdist.barrier("plain batch norm is saved")
    saved = keras.models.load_model(path).layers[0]
    return {
        "mean": norm.moving_mean.numpy(),
        "variance": norm.moving_variance.numpy(),
        "saved": [saved.moving_mean.numpy(), saved.moving_variance.numpy()],
    }


def adapted_to_other_data(strategy: Any) -> dict[str, str]:
    """What `fit` raises where a layer was adapted to another part of the data on each task."""
    index = tfdist.resolve().training_index
    words = np.array([["a", "b", "c"], ["b", "a", "d"]])[index]
    numbers = X + index

    def lookup() -> Any:
        layer = layers.StringLookup(max_tokens=4, output_mode="one_hot")
        layer.adapt(words)
        return layer, keras.Input((1,), dtype="string"), np.array([["a"]] * 8)

    def vectorization() -> Any:
        layer = layers.TextVectorization(max_tokens=5, output_mode="tf_idf")
        layer.adapt(["a b", "a b" if index else "a c", "c b"])
        return layer, keras.Input((1,), dtype="string"), np.array([["a"]] * 8)

    def normalization() -> Any:
        layer = layers.Normalization()
        layer.adapt(numbers)
        return layer, keras.Input((6,)), X[:8]

    def discretization() -> Any:
        layer = layers.Discretization(num_bins=3, output_mode="one_hot")
        layer.adapt(numbers[:, :1])
        return layer, keras.Input((1,)), X[:8, :1]

    errors = {}
    for make in (lookup, vectorization, normalization, discretization):
        with strategy.scope():
            layer, inputs, x = make()
            model = keras.Model(inputs, layers.Dense(1)(layer(inputs)))
            model.compile("sgd", "mse", jit_compile=False)
        try:
            model.fit(keras.ops.convert_to_tensor(x), Y[:8], verbose=0)
            errors[make.__name__] = ""
        except tfdist.errors.MismatchError as error:
            errors[make.__name__] = str(error)
    return errors
