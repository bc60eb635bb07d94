"""`jit_compile=True` on several tasks: forward and backward of Keras' own step compiled by XLA, the sums outside.

A sum over tasks can't be compiled, since it leaves the program. So the step is split: what one task computes alone is
compiled, then gradients are summed and applied as always. A step that needs a sum in between (synchronized
BatchNormalization, masked losses) or is not Keras' own runs without XLA, and says so once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import float16_terms
from tfdist.trainer.function import Steps
from tfdist.trainer.step import CaptureScope, active


class NotCompilableError(Exception):
    """The part to be compiled asked for a sum over tasks; never leaves the trainer."""


def can_split(model: Any) -> bool:
    """Whether the model trains with Keras' own `train_step`."""
    return internals.has_stock_train_step(model)


def split_step(model: Any) -> Callable[[Any], Any]:
    """Returns a `train_step` whose forward and backward pass are compiled.

    Raises, when it is traced:
        NotCompilableError: The forward or backward pass needs a sum over tasks.
    """

    terms: list[str] = []  # what the sums outside must know of each gradient, and see inside only

    def compute(x: Any, y: Any, sample_weight: Any, captured: list[Any], values: list[tf.Tensor]) -> Any:
        with CaptureScope(list(zip(captured, values, strict=True))) as scope:
            with tf.GradientTape() as tape:
                y_pred = internals.call_for_training(model, x)
                loss = internals.compute_loss(model, x, y, y_pred, sample_weight)
                rows = tf.shape(tf.nest.flatten(x)[0])[0]
                internals.loss_tracker(model).update_state(loss, sample_weight=rows)
                loss = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, model.trainable_weights)
            terms[:] = map(float16_terms, gradients)
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            return gradients, [scope.get_current_value(variable) for variable in captured]

    def train_step(data: Any) -> Any:
        step = active()
        assert step is not None
        x, y, sample_weight = internals.UNPACK.find()(data)
        captured = step.captured

        @tf.function(jit_compile=True, autograph=False, reduce_retracing=True)
        def compiled(x: Any, y: Any, sample_weight: Any, values: list[tf.Tensor]) -> Any:
            return compute(x, y, sample_weight, captured, values)

        with step.without_sums(NotCompilableError):
            gradients, values = compiled(x, y, sample_weight, [step.value_of(variable) for variable in captured])
        for variable, value in zip(captured, values, strict=True):
            step.set_value(variable, value)
        step.gradients.know_terms(gradients, terms)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return model.get_metrics_result()

    return train_step


class UntilNotCompilable:
    """A step function that turns to another, for good, when its first trace finds that XLA can't compile it."""

    def __init__(self, compiled: Steps, other: Callable[[], Steps], say: Callable[[], None]) -> None:
        self._function, self._other, self._say = compiled, other, say

    def on_element(self, element: Any) -> tuple[Any, Any]:
        return self._or_other(lambda: self._function.on_element(element))

    def __call__(self, iterator: Any, steps: int) -> tuple[Any, Any]:
        return self._or_other(lambda: self._function(iterator, steps))

    def _or_other(self, run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        try:
            return run()
        except NotCompilableError:  # raised while tracing: nothing has run
            self._function = self._other()
            self._say()
            return run()
