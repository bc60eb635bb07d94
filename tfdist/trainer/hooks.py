"""Where Keras would use a task's part as if it were the whole batch: each place asks the step being traced.

Installed once, when the first strategy is made. Without a step of ours in the calling thread every hook runs the
original, so other models in the process never notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.internals import keras as internals
from tfdist.trainer import whole_batch
from tfdist.trainer.gradients import build_in_scope
from tfdist.trainer.step import active
from tfdist.trainer.trying import recorded

_is_ours: Callable[[Any], bool] = lambda strategy: False  # noqa: E731


def install(is_ours: Callable[[Any], bool]) -> None:
    """Puts the hooks in place; called once. `is_ours` tells our strategies from others."""
    global _is_ours
    _is_ours = is_ours
    for name in internals.optimizer_apply():
        internals.override(name, _apply)
    for name in internals.SCALE_LOSS:
        internals.override(name, _scale_loss)
    internals.override(internals.CLIP, _clip_gradients)
    internals.override(internals.CHECK_FINITE, _check_finite)
    internals.override(internals.LOSS_CALL, _loss_call)
    internals.override(internals.METRIC_WRAPPER_UPDATE, _metric_wrapper_update)
    internals.override(internals.REDUCE_VALUES, _reduce_values)
    internals.override(internals.APPLY_MASK, _apply_mask)
    internals.override(internals.MEAN_UPDATE, _mean_update)
    internals.override(internals.SEED_NEXT, _next_seed)
    internals.override(internals.BATCH_NORM_MOMENTS, _batch_norm_moments)
    internals.override(internals.MOMENTS_SYNC, _moments)


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        step = active()
        if step is None:
            if not self.built and _is_ours(internals.optimizer_strategy(self)) and not tf.distribute.has_strategy():
                trainable_variables = None if trainable_variables is None else list(trainable_variables)
                build_in_scope(self, trainable_variables)
            return original(self, grads, trainable_variables)
        return step.gradients.apply(self, original, grads, trainable_variables)

    return apply


def _scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss(self: Any, loss: Any) -> Any:
        step = active()
        return original(self, loss) if step is None else step.gradients.scale_loss(self, original, loss)

    return scale_loss


def _clip_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(self: Any, grads: Any) -> Any:
        step = active()
        return original(self, grads if step is None else step.gradients.sum_accumulated(grads))

    return clip


def _check_finite(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_finite(self: Any, grads: Any) -> Any:
        step, finite = active(), original(self, grads)
        return finite if step is None else step.gradients.all_finite(finite)

    return check_finite


def _loss_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        recorded(self, y_true, y_pred)
        step = active()
        if step is None:
            return original(self, y_true, y_pred, sample_weight)
        return whole_batch.call_loss(step, original, self, y_true, y_pred, sample_weight)

    return call


def _metric_wrapper_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        recorded(self, y_true, y_pred)
        step = active()
        if step is None:
            return original(self, y_true, y_pred, sample_weight)
        return whole_batch.update_metric(step, original, self, y_true, y_pred, sample_weight)

    return update_state


def _reduce_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size") -> Any:
        step, loss = active(), original(values, sample_weight, reduction)
        return loss if step is None else step.correct_loss(loss, values, sample_weight, reduction)

    return reduce_values


def _apply_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
        step, weights = active(), original(sample_weight, mask, dtype, reduction)
        return weights if step is None else step.correct_mask(weights, mask, reduction)

    return apply_mask


def _mean_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = active()
        if step is not None and sample_weight is None and _is_scalar(values):
            sample_weight = step.share(self.dtype)  # one number for the batch: this task's is a part of it
        return original(self, values, sample_weight)

    return update_state


def _is_scalar(values: Any) -> bool:
    shape = getattr(values, "shape", ())
    return getattr(shape, "rank", len(shape) if isinstance(shape, tuple) else None) == 0


def _next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_seed(self: Any, ordered: bool = True) -> Any:
        step, seed = active(), original(self, ordered)
        return seed if step is None else step.own_seed(seed)

    return next_seed


def _batch_norm_moments(original: Callable[..., Any]) -> Callable[..., Any]:
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        step = active()
        if step is None or mask is None or not self.synchronized:
            return original(self, inputs, mask)
        return step.masked_moments(inputs, mask, self._reduction_axes)

    return moments


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    def moments(x: Any, axes: Any, keepdims: bool) -> Any:
        step = active()
        return original(x, axes, keepdims) if step is None else step.moments(x, axes, keepdims)

    return moments
