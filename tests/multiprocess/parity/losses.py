"""Losses and metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case
def loss_sum(run: Run) -> dict:
    return trained(run, optimizer=lambda: optimizers.SGD(1e-3), loss=losses.MeanSquaredError(reduction="sum"))


@case
def loss_mean_with_sample_weight(run: Run) -> dict:
    return trained(
        run,
        loss=losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        sample_weight=np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32"),
    )


@case
def loss_scalar(run: Run) -> dict:
    # Not Adam: it blows up the rounding of a gradient that is nearly zero.
    return trained(run, optimizer=lambda: optimizers.SGD(0.05), loss=lambda t, p: tf.reduce_mean(tf.abs(t - p) ** 1.5))


class MeanSquareLoss(keras.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x * x))
        return x


@case
def regularizers(run: Run) -> dict:
    def model() -> keras.Model:
        hidden = layers.Dense(
            16,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.01),
            activity_regularizer=keras.regularizers.L2(0.02),
        )
        return keras.Sequential([keras.Input((6,)), hidden, MeanSquareLoss(), layers.Dense(1)])

    return trained(run, model=model)


@case(core=True)
def masked(run: Run) -> dict:
    ids = np.random.default_rng(0).integers(0, 9, (40, 7))
    ids[:, 4:] *= np.random.default_rng(1).integers(0, 2, (40, 3))
    y = np.random.default_rng(2).normal(size=(40, 7, 2)).astype("float32")
    with run.scope():
        model = keras.Sequential(
            [keras.Input((7,), dtype="int32"), layers.Embedding(9, 5, mask_zero=True), layers.Dense(2)]
        )
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return fitted(model, ids.astype("int32"), y, batch_size=13)


@case
def additive_metrics(run: Run) -> dict:
    x, y = regression(41)
    labels = np.eye(3, dtype="float32")[np.digitize(y[:, 0], [-0.5, 0.5])]
    m = keras.metrics
    with run.scope():
        model = dense(3, "softmax")
        model.compile(
            "adam",
            "categorical_crossentropy",
            metrics=[
                m.AUC(),
                m.F1Score(),
                m.Precision(),
                m.Recall(),
                m.OneHotMeanIoU(3),
                m.CategoricalAccuracy(),
                m.TopKCategoricalAccuracy(2),
                m.R2Score(),
            ],
            jit_compile=False,
        )
    return fitted(model, x, labels, batch_size=13, validation_data=(x[:9], labels[:9]))


class WithinHalf(keras.metrics.Metric):
    """A metric of the user's own: a share of all values, kept as two counts and a histogram."""

    def __init__(self) -> None:
        super().__init__(name="within_half")
        self.near = self.add_weight(name="near", initializer="zeros")
        self.all = self.add_weight(name="all", initializer="zeros")
        self.histogram = self.add_weight(name="histogram", shape=(4,), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.abs(y_true - y_pred)
        self.near.assign_add(keras.ops.sum(keras.ops.cast(error < 0.5, "float32")))
        self.all.assign_add(keras.ops.cast(keras.ops.size(error), "float32"))
        bins = keras.ops.cast(keras.ops.minimum(error, 3.0), "int32")
        self.histogram.assign_add(keras.ops.sum(keras.ops.one_hot(keras.ops.reshape(bins, (-1,)), 4), axis=0))

    def result(self) -> Any:
        return self.near / self.all + keras.ops.max(self.histogram) / 1000


@case(core=True)
def custom_metric(run: Run) -> dict:
    return trained(run, metrics=[WithinHalf(), "mae"], validation_data=regression(7, 1), rows=41)
