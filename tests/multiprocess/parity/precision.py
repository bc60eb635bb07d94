"""Other dtypes than float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, fitted
from parity.cases import regression as centred_regression
from parity.own_steps import GuideStep

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses

# One process adds up all rows of a batch before it rounds to 16 bits, tasks round their parts: a gradient is apart by
# one unit in its last place, 2^-11 in float16 and 2^-8 in bfloat16, and a few steps add up.
FLOAT16, BFLOAT16 = 2e-3, 2e-2


def regression(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Residuals that do not cancel in a bias's gradient: else rounding is all that is left of it."""
    x, y = centred_regression(rows, seed)
    return x, y + 2


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """The dtype of what is made inside."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


class Scale(keras.callbacks.Callback):
    """Notes the loss scale and the steps that were applied, after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.values.append([float(optimizer.dynamic_scale), float(optimizer.iterations)])


def scaled(inner: Any, scale: float, growth: int = 2) -> Any:
    return optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=growth)


def small() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])


def with_scale(run: Run, model: Callable[[], keras.Model], optimizer: Callable[[], Any], **fit: Any) -> dict:
    """Trains in mixed_float16; the scale starts so high that steps are lost, and grows back into it."""
    x, y = regression(39)
    with policy("mixed_float16"), run.scope():
        made = model()
        made.compile(optimizer(), "mse", jit_compile=False)
    scale = Scale()
    result = fitted(made, x, y, **{"batch_size": 13, "epochs": 6, "callbacks": [scale], **fit})
    return {**result, "scale and steps": np.array(scale.values)}


@case(core=True, tolerance=FLOAT16)
def mixed_float16(run: Run) -> dict:
    """mixed_float16: loss scale, lost steps and weights"""
    # Of the scales that follow from it, one overflows the sum over all rows alone, and not the tasks' parts of it.
    return with_scale(run, small, lambda: scaled(optimizers.SGD(0.05, global_clipnorm=1.0), 1.375 * 2.0**21))


@case(tolerance=FLOAT16)
def mixed_float16_with_a_regularizer(run: Run) -> dict:
    """mixed_float16 with weight regularizers, whose gradients are float32"""
    l2 = keras.regularizers.L2(0.01)
    regularized = {"kernel_regularizer": l2, "bias_regularizer": l2}

    def model() -> keras.Model:
        made = [layers.Dense(8, activation="tanh", **regularized), layers.Dense(1, **regularized)]
        return keras.Sequential([keras.Input((6,)), *made])

    return with_scale(run, model, lambda: scaled(optimizers.SGD(0.05), 1.375 * 2.0**19))


@case(tolerance=FLOAT16)
def mixed_float16_compiled_by_xla(run: Run) -> dict:
    """mixed_float16 with jit_compile=True"""
    x, y = regression(39)
    with policy("mixed_float16"), run.scope():
        model = small()
        model.compile(scaled(optimizers.SGD(0.05), 2.0**22), "mse", jit_compile=True)
    scale = Scale()
    result = fitted(model, x, y, batch_size=13, epochs=6, callbacks=[scale])
    return {**result, "scale and steps": np.array(scale.values)}


class Scaling(GuideStep):
    """A step of the user's own as Keras' guide to mixed precision has it; it logs its loss scaled, too."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "scaled": scaled_loss}


@case(tolerance=FLOAT16)
def mixed_float16_in_a_step_of_ones_own(run: Run) -> dict:
    """mixed_float16 in a train_step that calls optimizer.scale_loss"""

    def model() -> keras.Model:
        made = Scaling()
        made.build((None, 6))
        return made

    return with_scale(run, model, lambda: scaled(optimizers.SGD(0.05), 2.0**22))


@case(tolerance=FLOAT16)
def fixed_loss_scale(run: Run) -> dict:
    """loss_scale_factor in mixed_float16; a train_step that scales, one that does not"""
    x, y = regression(39)
    result = {}
    for name, make in (("scaling", Scaling), ("not scaling", GuideStep)):
        with policy("mixed_float16"), run.scope():
            model = make()
            model.build((None, 6))
            factor = 1024.0 if make is Scaling else None
            model.compile(
                optimizers.SGD(0.05, loss_scale_factor=factor), "mse", jit_compile=False, auto_scale_loss=False
            )
        model.fit(x, y, batch_size=13, epochs=2, verbose=0, shuffle=False)
        result |= {f"{name} weight {i}": w for i, w in enumerate(model.get_weights())}
    return result


@case(tolerance=FLOAT16)
def mixed_float16_with_accumulation(run: Run) -> dict:
    """mixed_float16 with accumulation: a step of k that overflows is lost, the others count"""
    # One process finds an overflow in the float16 sum over all rows, tasks in theirs: the scale keeps clear of the gap.
    return with_scale(
        run,
        small,
        lambda: scaled(optimizers.SGD(0.05, gradient_accumulation_steps=2), 2.0**13, growth=100),
    )


@case(tolerance=FLOAT16)
def mixed_float16_with_layers_of_many_kinds(run: Run) -> dict:
    """mixed_float16: Embedding, LayerNormalization, BatchNormalization(synchronized=True), GRU"""
    ids = np.random.default_rng(3).integers(0, 12, (39, 5)).astype("int32")
    y = np.random.default_rng(4).normal(size=(39, 1)).astype("float32")
    with policy("mixed_float16"), run.scope():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(12, 6),
                layers.LayerNormalization(),
                layers.GRU(5),
                layers.BatchNormalization(synchronized=True, momentum=0.8),
                layers.Dense(1),
            ]
        )
        model.compile(scaled(optimizers.SGD(0.05, clipnorm=1.0), 2.0**14, growth=3), "mse", jit_compile=False)
    scale = Scale()
    result = fitted(model, ids, y, batch_size=13, epochs=3, callbacks=[scale])
    return {**result, "scale and steps": np.array(scale.values)}


def _with_policy(run: Run, name: str) -> dict:
    x, y = regression(40)
    with policy(name), run.scope():
        model = small()
        model.compile(optimizers.SGD(0.05, momentum=0.5), "mse", metrics=["mae"], jit_compile=False)
    validation, predict = regression(9, 1), regression(9, 2)[0]
    result = fitted(model, x, y, batch_size=13, epochs=1, validation_data=validation, predict=predict)
    return {key: value.astype("float32") for key, value in result.items()}  # NumPy saves no bfloat16


@case(tolerance=BFLOAT16)
def mixed_bfloat16(run: Run) -> dict:
    """mixed_bfloat16"""
    return _with_policy(run, "mixed_bfloat16")


@case(tolerance=BFLOAT16)
def pure_bfloat16(run: Run) -> dict:
    """Variables of bfloat16"""
    return _with_policy(run, "bfloat16")


@case(tolerance=FLOAT16)
def pure_float16(run: Run) -> dict:
    """Variables of float16"""
    return _with_policy(run, "float16")


@case(core=True, tolerance=1e-13)
def float64(run: Run) -> dict:
    """float64: keras.config.set_floatx("float64")"""
    x, y = (array.astype("float64") for array in regression(40))
    ids = np.random.default_rng(3).integers(0, 12, (40, 3))
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        with policy("float64"), run.scope():
            numbers, words = keras.Input((6,)), keras.Input((3,), dtype="int64")
            joined = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(12, 2)(words))])
            hidden = layers.BatchNormalization(synchronized=True)(layers.Dense(8, activation="tanh")(joined))
            model = keras.Model([numbers, words], layers.Dense(1)(hidden))
            optimizer = optimizers.Adam(1e-2, global_clipnorm=0.5, weight_decay=0.01)
            model.compile(optimizer, "mse", metrics=["mae", "r2_score"], jit_compile=False)
        result = fitted(model, [x, ids], y, batch_size=13, sample_weight=np.linspace(0.5, 2, 40))
        assert all(weight.dtype == np.float64 for weight in model.get_weights())
        return result
    finally:
        keras.config.set_floatx(before)


@case
def float64_layers(run: Run) -> dict:
    """float64: layers with dtype="float64" in a float32 program"""
    x, y = (array.astype("float64") for array in regression(40))
    with run.scope():
        made = [keras.Input((6,), dtype="float64"), layers.Dense(8, dtype="float64"), layers.Dense(1, dtype="float64")]
        model = keras.Sequential(made)
        model.compile(optimizers.SGD(0.05), losses.MeanSquaredError(dtype="float64"), jit_compile=False)
    result = fitted(model, x, y, batch_size=13)
    return {key: value for key, value in result.items() if key.startswith("weight")}  # the loss log is float32


@case(tolerance=2e-2)
def float8(run: Run) -> dict:
    """float8: layers after quantize("float8"), with and without accumulation"""
    # 2^-3 is the rounding of float8_e5m2: a value on the edge between two falls on another side in a few steps.
    x, y = regression(39)
    result = {}
    for steps in (None, 2):
        with run.scope():
            model = small()
            model.quantize("float8")
            model.compile(optimizers.SGD(0.05, gradient_accumulation_steps=steps), "mse", jit_compile=False)
        trained = fitted(model, x, y, batch_size=13)
        result |= {f"{steps} {name}": value for name, value in trained.items()}
    return result
