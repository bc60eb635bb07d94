"""What several tasks can't make right: each function must raise on every task, before or in the first step.

`@refused(feature, words=..., instead=...)` makes a function of a `Run` one of REFUSED. The support matrix lists the
feature and what to use instead; `test_refused.py` runs the function on two tasks and looks for the words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, dense, regression

X, Y = regression(40)


@dataclass(frozen=True)
class Refused:
    """One feature that is refused.

    Attributes:
        name: Of the function.
        feature: What users call it, for the support matrix.
        words: A regular expression that the error's class and text hold.
        instead: What to use; some of its words stand in the message as well, as `words` should ask.
        run: Raises, on every task alike.
    """

    name: str
    feature: str
    words: str
    instead: str
    run: Callable[[Run], object]


REFUSED: dict[str, Refused] = {}


def refused(feature: str, *, words: str, instead: str) -> Callable[[Callable[[Run], object]], Callable[[Run], object]]:
    """Makes a function one of REFUSED."""

    def add(function: Callable[[Run], object]) -> Callable[[Run], object]:
        name = function.__name__
        assert name not in REFUSED, f"two refusals are called {name}"
        REFUSED[name] = Refused(name, feature, words, instead, function)
        return function

    return add


def raised(strategy: Any, names: list[str] | None = None) -> dict[str, str]:
    """Returns the class and text of what each of REFUSED raises on this task; "" where nothing was raised."""
    run = Run(strategy)
    texts = {}
    for name, entry in REFUSED.items():
        if names is None or name in names:
            texts[name] = ""
            try:
                entry.run(run)
            except Exception as error:
                texts[name] = f"{type(error).__name__}: {error}"
    return texts


def compiled(run: Run, loss: Any = "mse", **arguments: Any) -> keras.Model:
    with run.scope():
        model = dense()
        model.compile("sgd", loss, **{"jit_compile": False, **arguments})
    return model


# -- layers


@refused(
    "A stateful RNN",
    words="UnsupportedError: lstm.*: a stateful RNN.*stateful=False",
    instead="`stateful=False`",
)
def stateful_rnn(run: Run) -> object:
    with run.scope():
        inputs = keras.Input(batch_shape=(4, 3, 2))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(3, stateful=True)(inputs)))
        model.compile("sgd", "mse", jit_compile=False)
    return model.fit(np.ones((8, 3, 2)), np.ones((8, 1)), batch_size=4, verbose=0)


# -- metrics


class Largest(keras.metrics.Metric):
    """A maximum: states of two tasks do not add up to it."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.value


class WronglyMerged(Largest):
    """Merges two maxima to their mean."""

    def merge_states(self, states: Any) -> Any:
        return [sum(value for (value,) in states) / len(states)]


@refused(
    "A metric whose `merge_states` makes something else of two parts of the data than all of it gives",
    words=r"UnsupportedError: .*largest: its merge_states\(\) makes \[[0-9.]+\] of the states of two parts",
    instead="a `merge_states` that is right for any number of states, each counted up from a reset",
)
def metric_that_is_merged_wrongly(run: Run) -> object:
    return compiled(run, metrics=[WronglyMerged()]).train_on_batch(X, Y)


class WithNumbersMissing(Largest):
    def merge_states(self, states: Any) -> Any:
        return []


@refused(
    "A metric whose `merge_states` returns another number of values than it has variables",
    words=r"ValueError: the metric largest: merge_states\(\) returned 0 values for 1 variables \(value\)",
    instead="one value for each variable, in their order",
)
def metric_merged_to_too_few_values(run: Run) -> object:
    return compiled(run, metrics=[WithNumbersMissing()]).evaluate(X, Y, verbose=0)


# -- optimizers


class ScalesOneLoss(keras.Model):
    """Two optimizers, of which one scales its loss, behind merged batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        norm = keras.layers.BatchNormalization(synchronized=True)
        self.inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), norm])
        self.out = keras.layers.Dense(1)
        self.scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        self.plain = keras.optimizers.SGD(0.1)

    def train_step(self, data: Any) -> dict:
        x, y = data
        for layer, optimizer in ((self.inner, self.scaling), (self.out, self.plain)):
            weights = layer.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.out(self.inner(x, training=True)) - y) ** 2)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return {"loss": loss}


@refused(
    "A step that scales the loss of one optimizer and not of another, with `BatchNormalization(synchronized=True)`",
    words="UnsupportedError: the step scales the loss of one of its optimizers.*LossScaleOptimizer for all",
    instead="`LossScaleOptimizer` for all optimizers of the step, or for none",
)
def one_of_two_losses_scaled(run: Run) -> object:
    with run.scope():
        model = ScalesOneLoss()
        model.out.build((None, 4))
        model.compile(jit_compile=False)
    model.built = True
    return model.fit(X, Y, verbose=0)


# -- predictions


@refused(
    "`predict` of outputs that are not one per row",
    words="UnsupportedError: predict: an output of shape .* is not one result per row",
    instead="one output per row",
)
def prediction_that_is_not_per_row(run: Run) -> object:
    with run.scope():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Lambda(lambda x: keras.ops.sum(x, axis=0, keepdims=True))(inputs))
    return model.predict(X[:9], verbose=0)


# -- where a model is made


@refused(
    "`fit` on a model made outside the scope",
    words=r"StrategyError: model.fit: \w+ was made outside.*with strategy.scope\(\):",
    instead="make and compile it in `strategy.scope()`",
)
def model_made_outside_the_scope(run: Run) -> object:
    model = dense()
    model.compile("sgd", "mse")
    assert np.isfinite(model.evaluate(X, Y, verbose=0))  # alone, this is right
    return model.fit(X, Y, verbose=0)
