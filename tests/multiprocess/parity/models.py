"""Kinds of models."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from parity.cases import Run, case, dense, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case
def functional_with_names(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
        hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([left, right]))
        model = keras.Model(
            {"left": left, "right": right},
            {"one": layers.Dense(1, name="one")(hidden), "two": layers.Dense(2, name="two")(hidden)},
        )
        model.compile(
            "adam",
            {"one": "mse", "two": "mae"},
            loss_weights={"one": 1.0, "two": 0.5},
            metrics={"one": ["mae"]},
            jit_compile=False,
        )
    inputs = {"left": x[:, :3], "right": x[:, 3:]}
    return fitted(
        model,
        inputs,
        {"one": y, "two": np.concatenate([y, -y], 1)},
        batch_size=13,
        predict={name: value[:7] for name, value in inputs.items()},
    )


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


@case
def subclassed_unbuilt(run: Run) -> dict:
    return trained(run, model=Subclassed, validation_data=regression(7, 1), predict=regression(7, 2)[0])


@case
def convolution(run: Run) -> dict:
    random = np.random.default_rng(3)
    x, y = random.normal(size=(26, 8, 8, 1)).astype("float32"), random.integers(0, 4, 26)
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(4, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return fitted(model, x, y, batch_size=10, predict=x[:7])


@case
def recurrent(run: Run) -> dict:
    x, y = np.random.default_rng(4).normal(size=(25, 5, 3)).astype("float32"), regression(25)[1]
    with run.scope():
        model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(6), layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=10, predict=x[:7])


@case(core=True)
def embedding(run: Run) -> dict:
    ids = np.random.default_rng(0).integers(0, 50, (40, 4)).astype("int32")
    with run.scope():
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(1)]
        )
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, ids, regression(40)[1], batch_size=13)


@case
def inside_the_scope(run: Run) -> dict:
    """`fit` called inside `with strategy.scope()`, as many tutorials do."""
    with run.scope():
        return trained(run, metrics=["mae"], validation_data=regression(7, 1), predict=regression(7, 2)[0])


@case
def compiled_outside_the_scope(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = dense()
    model.compile(optimizers.Adam(0.01), "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=13)
