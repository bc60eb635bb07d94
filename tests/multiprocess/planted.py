"""Models to verify, and faults to plant in the tasks that train them: what the checker must find.

A fault is a context manager that makes tfdist, or the model, wrong in this process while it is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import keras as internals
from tfdist.testing import recorder
from tfdist.trainer import sources
from tfdist.trainer.gradients import Gradients
from tfdist.trainer.reduction import ThroughGroup
from tfdist.trainer.step import Step, active
from tfdist.trainer.synchronous import SynchronousEngine

layers, optimizers = keras.layers, keras.optimizers
ROWS, BATCH_SIZE = 45, 13  # shares of 6 and 7 rows, and a last batch of 6


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    return x, (x @ np.linspace(-1, 1, 6)[:, None] + 0.3 * np.sin(3 * x[:, :1])).astype("float32")


def _dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="tanh", name="first"), layers.Dense(1)])


touch: Callable[[keras.Model], None] = lambda model: None  # noqa: E731 (what a fault does to a compiled model)


def _compiled(model: keras.Model, optimizer: Any, loss: Any = "mse", **arguments: Any) -> keras.Model:
    model.compile(optimizer, loss, jit_compile=False, **arguments)
    touch(model)
    return model


# -- models


def synchronized() -> Any:
    norm = layers.BatchNormalization(synchronized=True, momentum=0.8, name="norm")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="first"), norm, layers.Dense(1, name="last")])
    return _compiled(model, optimizers.SGD(0.05, momentum=0.9), metrics=["mae"]), *data()


def without_data() -> keras.Model:
    return _compiled(_dense(), "adam")


def clipped() -> Any:
    return _compiled(_dense(), optimizers.SGD(0.1, global_clipnorm=0.05)), *data()


def summed() -> Any:
    return _compiled(_dense(), optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction="sum")), *data()


def weighted() -> Any:
    return _compiled(_dense(), "adam"), *data(), np.random.default_rng(5).uniform(0.1, 3, ROWS).astype("float32")


def accumulating() -> Any:
    return _compiled(_dense(), optimizers.SGD(0.1, gradient_accumulation_steps=2)), *data()


def decaying() -> Any:
    return _compiled(_dense(), optimizers.AdamW(1e-2, weight_decay=0.1)), *data()


def averaged() -> Any:
    return _compiled(_dense(), optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.8)), *data()


def masked() -> Any:
    ids = np.random.default_rng(0).integers(1, 9, (ROWS, 5)).astype("int32")
    ids[:, 2:] *= np.random.default_rng(1).integers(0, 2, (ROWS, 3)).astype("int32")
    embedding = layers.Embedding(9, 4, mask_zero=True, name="words")
    model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, layers.Dense(1)])
    return _compiled(model, optimizers.SGD(0.1)), ids, np.random.default_rng(2).normal(size=(ROWS, 5, 1))


def not_built_yet() -> Any:
    return _compiled(keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(1)]), "adam"), *data()


class WithoutCall(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _dense()

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(x, training=True) - y) ** 2)
        weights = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"error": loss}


def without_call() -> Any:
    return _compiled(WithoutCall(), optimizers.SGD(0.05), None), *data()


def with_dropout() -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5, name="drop"), layers.Dense(1)])
    return _compiled(model, "adam"), *data()


def of_a_dataset() -> Any:
    return _compiled(_dense(), "adam"), tf.data.Dataset.from_tensor_slices(data()).batch(BATCH_SIZE)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return tuple(part[BATCH_SIZE * index : BATCH_SIZE * (index + 1)] for part in data())


def of_a_py_dataset() -> Any:
    return _compiled(_dense(), "adam"), Batches()


def plain_batch_norm() -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization(name="norm"), layers.Dense(1)])
    return _compiled(model, "sgd"), *data()


def losing_with_coupled_rows() -> Any:
    """The loss compares each row with the next one: it is found to need the whole batch, so tasks give the same."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean((y_pred - tf.roll(y_pred, 1, 0) - y_true) ** 2)

    return _compiled(_dense(), "sgd", loss), *data()


class Roll(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - 0.5 * tf.roll(x, 1, 0)


def coupling_rows() -> Any:
    """A layer mixes each row with the one before it."""
    model = keras.Sequential([keras.Input((6,)), Roll(), layers.Dense(16, activation="tanh"), layers.Dense(1)])
    return _compiled(model, "sgd"), *data()


def other_data_each_time() -> Any:
    x = np.random.default_rng().normal(size=(ROWS, 6))
    return _compiled(_dense(), "sgd"), x, x[:, :1]


# -- faults

FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def fault(function: Callable[[], Any]) -> Callable[[], Any]:
    FAULTS[function.__name__] = function
    return function


def _touching(change: Callable[[keras.Model], None]) -> Any:
    return mock.patch(f"{__name__}.touch", change)


@contextmanager
def _summing(change: Callable[[ThroughGroup, list[Any], str], list[Any]]) -> Iterator[None]:
    """`change` stands before every sum over tasks."""
    original = ThroughGroup.sum

    def wrong(self: ThroughGroup, tensors: Any, tag: str) -> Any:
        return original(self, change(self, list(tensors), tag), tag)

    with mock.patch.object(ThroughGroup, "sum", wrong):
        yield


def _changing(change: Callable[[list[Any]], list[Any]]) -> Any:
    """`change` takes the gradients of this task before they are summed."""
    original = Gradients.apply

    def wrong(self: Gradients, optimizer: Any, apply: Any, gradients: Any, variables: Any) -> Any:
        return original(self, optimizer, apply, change(list(gradients)), variables)

    return mock.patch.object(Gradients, "apply", wrong)


@fault
def clips_before_the_sum() -> Any:
    return _changing(lambda gradients: tf.clip_by_global_norm(gradients, 0.02)[0])


@fault
def adds_up_where_a_mean_belongs() -> Any:
    return _changing(lambda gradients: [2.0 * gradient for gradient in gradients])


@fault
def weighs_uneven_shares_alike() -> Any:
    return mock.patch.object(Step, "share", lambda self, dtype: tf.cast(1 / self.size, dtype))


@fault
def gives_both_tasks_the_same_rows() -> Any:
    original = sources.from_arrays
    return mock.patch.object(sources, "from_arrays", lambda data, index, size, **rest: original(data, 0, size, **rest))


@fault
def drops_the_last_batch() -> Any:
    original = internals.array_inputs

    def without(adapter: Any) -> Any:
        inputs, rows, batch_size = original(adapter)
        return inputs, max(batch_size, rows // batch_size * batch_size), batch_size

    return mock.patch.object(internals, "array_inputs", without)


@fault
def normalizes_by_its_own_rows() -> Any:
    return mock.patch.object(
        Step, "moments", lambda self, x, axes, keepdims: tf.nn.moments(x, axes, keepdims=bool(keepdims))
    )


@fault
def logs_the_metric_of_the_chiefs_rows() -> Any:
    def change(self: ThroughGroup, tensors: list[Any], tag: str) -> list[Any]:
        return [t * (self.index == 0) for t in tensors] if tag in ("logs", "epoch logs") else tensors

    return _summing(change)


@fault
def does_not_sum_one_gradient() -> Any:
    def change(self: ThroughGroup, tensors: list[Any], tag: str) -> list[Any]:
        if tag == "gradients":
            tensors[1] = tensors[1] * (2.0 if self.index == 0 else 0.0)
        return tensors

    return _summing(change)


@fault
def is_wrong_in_step_3_alone() -> Any:
    steps: list[Any] = []

    def change(self: ThroughGroup, tensors: list[Any], tag: str) -> list[Any]:
        if tag == "gradients":
            tensors[2] = tensors[2] * tf.where(tf.equal(steps[0].optimizer.iterations.value, 2), 1.01, 1.0)
        return tensors

    @contextmanager
    def both() -> Iterator[None]:
        with _touching(steps.append), _summing(change):
            yield

    return both()


@fault
def multiplies_the_learning_rate() -> Any:
    def change(model: keras.Model) -> None:
        model.optimizer.learning_rate = 2 * float(model.optimizer.learning_rate)

    return _touching(change)


@fault
def starts_from_another_weight() -> Any:
    def change(model: keras.Model) -> None:
        first = model.layers[0].kernel
        first.assign(first + 1e-4)

    return _touching(change)


@fault
def takes_a_sum_for_a_mean() -> Any:
    return mock.patch.object(Step, "correct_loss", lambda self, loss, *rest: loss)


@fault
def ignores_sample_weights() -> Any:
    original = recorder.Data.fit.fget

    def without(self: recorder.Data) -> dict[str, Any]:
        return {name: value for name, value in original(self).items() if name != "sample_weight"}

    return mock.patch.object(recorder.Data, "fit", property(without))


@fault
def sums_in_every_micro_step() -> Any:
    return _changing(lambda gradients: active().sum(gradients, "too early"))


@fault
def decays_twice() -> Any:
    def change(model: keras.Model) -> None:
        model.optimizer.weight_decay = 0.2

    return _touching(change)


@fault
def keeps_no_moving_average() -> Any:
    def change(model: keras.Model) -> None:
        setattr(model.optimizer, "_update_model_variables_moving_average", lambda variables: None)  # noqa: B010

    return _touching(change)


@fault
def means_over_its_own_valid_values() -> Any:
    return mock.patch.object(Step, "correct_mask", lambda self, weights, mask, reduction: weights)


@fault
def mixes_up_predictions() -> Any:
    original = SynchronousEngine.whole
    return mock.patch.object(SynchronousEngine, "whole", lambda self, out, rows: original(self, out, rows)[::-1])


@fault
def lets_tasks_draw_apart() -> Any:
    """Something in the logs that each task has of its own."""
    original = SynchronousEngine.results

    def results(self: SynchronousEngine, model: Any, logs: Any) -> Any:
        return {name: value + 1e-12 * self.index for name, value in original(self, model, logs).items()}

    return mock.patch.object(SynchronousEngine, "results", results)


def record_with(strategy: Any, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Records a training on this task while a fault is planted."""
    with FAULTS[name]() if name else nullcontext():
        return recorder.record(strategy, job)
