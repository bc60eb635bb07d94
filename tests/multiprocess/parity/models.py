"""Kinds of models."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from parity.cases import Run, case, dense, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case
def functional_with_names(run: Run) -> dict:
    """Functional models of several inputs and outputs by name, with `loss_weights`."""
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
    """Subclassed models that are not built yet."""
    return trained(run, model=Subclassed, validation_data=regression(7, 1), predict=regression(7, 2)[0])


@case
def convolution(run: Run) -> dict:
    """Convolutions and pooling."""
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
    """`LSTM`."""
    x, y = np.random.default_rng(4).normal(size=(25, 5, 3)).astype("float32"), regression(25)[1]
    with run.scope():
        model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(6), layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=10, predict=x[:7])


@case(core=True)
def embedding(run: Run) -> dict:
    """`Embedding`: sparse gradients."""
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
    """A model made in the scope and compiled outside it."""
    x, y = regression(40)
    with run.scope():
        model = dense()
    model.compile(optimizers.Adam(0.01), "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=13)


@case
def recurrent_with_masks(run: Run) -> dict:
    """`Bidirectional`, returned states and sequences, behind a mask; an output without a loss."""
    random = np.random.default_rng(6)
    ids = random.integers(1, 9, (25, 4)) * (np.arange(4) < random.integers(1, 5, (25, 1)))
    with run.scope():
        inputs = keras.Input((4,), dtype="int32")
        hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
        both, *states = layers.Bidirectional(layers.GRU(3, return_sequences=True, return_state=True))(hidden)
        outputs = {"one": layers.Dense(1, name="one")(states[0]), "each": layers.Dense(2, name="each")(both)}
        model = keras.Model(inputs, outputs)
        # "one" has no loss of its own; its layer learns nothing.
        model.compile("adam", {"one": None, "each": "mse"}, loss_weights={"one": 1.0, "each": 0.5}, jit_compile=False)
    y = {"one": regression(25)[1], "each": random.normal(size=(25, 4, 2)).astype("float32")}
    return fitted(model, ids.astype("int32"), y, batch_size=10)


@case
def attention(run: Run) -> dict:
    """`MultiHeadAttention` with a causal and a padding mask, several outputs with `loss_weights` as a list."""
    random = np.random.default_rng(7)
    ids = random.integers(1, 9, (25, 6)) * (np.arange(6) < random.integers(1, 7, (25, 1)))
    with run.scope():
        inputs = keras.Input((6,), dtype="int32")
        hidden = layers.Embedding(9, 8, mask_zero=True)(inputs)
        mixed = layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, mixed]))
        words, mean = layers.Dense(9)(hidden), layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden))
        model = keras.Model(inputs, [words, mean])
        crossentropy = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizers.SGD(0.1),
            [crossentropy, "mae"],
            loss_weights=[1.0, 0.3],
            metrics=[["accuracy"], ["mse"]],
            jit_compile=False,
        )
    following = np.concatenate([ids[:, 1:], np.zeros((25, 1), ids.dtype)], 1)
    return fitted(model, ids.astype("int32"), [following, regression(25)[1]], batch_size=10)
