"""Ways to run."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, fitted, regression, trained
from parity.state import batch_norm

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case
def several_steps_per_execution(run: Run) -> dict:
    """`steps_per_execution`."""
    return trained(
        run,
        batch_size=6,
        validation_data=regression(11, 1),
        compile_arguments={"steps_per_execution": 3, "jit_compile": False},
    )


@case
def compiled_by_xla(run: Run) -> dict:
    """`jit_compile=True`."""
    return trained(
        run,
        metrics=["mae", "r2_score"],
        optimizer=lambda: optimizers.Adam(1e-2, clipnorm=0.1),
        validation_data=regression(7, 1),
        predict=regression(7, 2)[0],
        compile_arguments={"jit_compile": True},
    )


@case
def compiled_where_xla_can_not(run: Run) -> dict:
    """`jit_compile=True` where a sum over tasks stands amid the step: it runs without XLA.

    Synchronized batch statistics are sums over tasks in the middle of the step.
    """
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: batch_norm(True, epsilon=1.0),
        compile_arguments={"jit_compile": True},
    )


@case
def eagerly(run: Run) -> dict:
    """`run_eagerly=True`."""
    return trained(run, epochs=1, metrics=["mae"], compile_arguments={"run_eagerly": True})


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            self.model.stop_training = True


@case(core=True)
def stopped_by_one_task(run: Run) -> dict:
    """A callback that sets `stop_training` on one task alone: all stop at that step.

    A callback stops on the last task alone: all stop at the same step.
    """
    x, y = regression(48)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    callbacks = [StopAt(2)] if run.is_plain or run.is_last else []
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    return {"iterations": np.array(model.optimizer.iterations), "loss": np.array(history.history["loss"])}


@case
def terminated_on_nan(run: Run) -> dict:
    """`TerminateOnNaN`."""
    x, y = regression(48)
    x[20] = np.nan
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    callbacks = [keras.callbacks.TerminateOnNaN()]
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    return {"iterations": np.array(model.optimizer.iterations)}


@case
def early_stopping_and_plateau(run: Run) -> dict:
    """`EarlyStopping` and `ReduceLROnPlateau`."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile(optimizers.SGD(0.2), "mse", jit_compile=False)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.3, min_delta=0.01),
        keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
    ]
    validation = regression(9, 1)
    result = fitted(model, x, y, batch_size=13, epochs=12, callbacks=callbacks, validation_data=validation)
    return {**result, "learning rate": np.array(model.optimizer.learning_rate)}


@case
def learning_rates_by_callbacks(run: Run) -> dict:
    """LearningRateScheduler with a state of its own, and ReduceLROnPlateau."""
    x, y = regression(40)
    rates = itertools.cycle([0.2, 0.1, 0.05])
    with run.scope():
        model = dense()
        model.compile("sgd", "mse", jit_compile=False)
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: next(rates) if epoch % 2 == 0 else rate),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.3),
    ]
    return fitted(model, x, y, batch_size=13, epochs=6, callbacks=callbacks)


class EvaluateInside(keras.callbacks.Callback):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.numbers: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.numbers.append(np.ravel(self.model.evaluate(self.x, self.y, batch_size=4, verbose=0)))
        self.numbers.append(np.ravel(self.model.predict(self.x, batch_size=4, verbose=0)))


@case
def evaluated_in_a_callback(run: Run) -> dict:
    """`evaluate` and `predict` inside a callback."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    inside = EvaluateInside(*regression(9, 1))
    result = fitted(model, x, y, batch_size=13, callbacks=[inside])
    return {**result, "inside": np.concatenate(inside.numbers)}


@case
def fit_twice(run: Run) -> dict:
    """`fit`, `compile`, `fit` again."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    first = fitted(model, x, y, batch_size=13)
    model.compile(optimizers.SGD(0.01), "mae", jit_compile=False)
    second = fitted(model, x, y, batch_size=7)
    return {**{f"first {k}": v for k, v in first.items()}, **second}


@case
def unknown_length_and_several_steps_per_execution(run: Run) -> dict:
    """`steps_per_execution` that does not divide an epoch of unknown length.

    9 rows in batches of 2 are 5 steps, which 3 does not divide: none may be lost in later epochs.
    """
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False, steps_per_execution=1 if run.is_plain else 3)
    data = tf.data.Dataset.from_tensor_slices(regression(9)).batch(2).filter(lambda *_: True)
    if run.is_plain:
        result = fitted(model, data.repeat(), steps_per_epoch=5, epochs=3)
    else:
        result = fitted(model, data, epochs=3)
    result["iterations"] = np.array(model.optimizer.iterations)
    del result["batch logs"]  # one per execution
    return result
