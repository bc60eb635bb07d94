"""Gradients of a task's rows -> those of the whole batch, before Keras uses them.

The order is: loss, share of the task, backward, sum over tasks, check finite, clip, accumulate, apply. The share goes
in where Keras scales the loss (`optimizer.scale_loss`), so that what flows back through the layers is what one process
has: float16 overflows and rounds at the same places. A step of the user's own whose optimizer does not scale may leave
that call out, so its gradients are weighed just before they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import are_unique, float16_terms

if TYPE_CHECKING:
    from tfdist.trainer.step import Step


class Gradients:
    """What one step does with gradients.

    Args:
        step: The step being traced.
        scales_loss: Whether every loss of the step is known to pass `optimizer.scale_loss`, as in Keras' own
            `train_step`; else only the optimizers that really scale can be trusted to have seen each loss.
    """

    def __init__(self, step: Step, *, scales_loss: bool) -> None:
        self._step, self._scales_loss = step, scales_loss
        self._applying = False  # inside the outermost optimizer.apply
        self._deferred = False  # the optimizer accumulates: the sum comes later, in _clip_gradients
        self._scaled: list[Any] = []  # optimizers from whose loss shares flow back
        self._known_terms: list[tuple[Any, str]] = []  # gradients, and what float16_terms says of them
        self._merged_moments = False  # a backward pass through merged batch statistics was traced
        self._applied_kinds: set[bool] = set()  # of each apply: was the loss weighed before backward?

    def scale_loss(self, optimizer: Any, scale_loss: Callable[..., Any], loss: Any) -> Any:
        """Runs `optimizer.scale_loss`, and weighs what flows back from the loss by the task's share."""
        scaled = scale_loss(optimizer, loss)
        if getattr(scaled.shape, "rank", 0) != 0:
            # One value per row (reduction=None), whose gradient is their sum: this task's rows are a part of it.
            self._scaled.append(optimizer)
            return scaled
        if not (self._scales_loss or internals.scales_loss(optimizer)):
            return scaled
        self._scaled.append(optimizer)

        @tf.custom_gradient
        def weighed(loss: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            # The loss itself stays what it is: a step may log it.
            return tf.identity(loss), self._step.times_share

        return weighed(scaled)

    def merged_moments(self, upstream: tf.Tensor) -> tf.Tensor:
        """Returns what flows back to every task from statistics that were merged over the tasks."""
        self._merged_moments = True
        step = self._step
        if self._scaled:
            return step.sum([step.if_live(upstream)], "moments gradient")[0]
        # This task's gradients weigh by its share later, and so does what flows back from the others.
        merged = step.sum([step.weigh(upstream)], "moments gradient")[0]
        return tf.math.divide_no_nan(merged, step.share(upstream.dtype))

    def apply(self, optimizer: Any, apply: Callable[..., Any], gradients: Any, variables: Any) -> Any:
        """Runs `optimizer.apply` with the gradients of the whole batch.

        With accumulation each task keeps its own weighted sums, and they are added up over tasks once, just before
        clipping.
        """
        if self._applying:  # LossScaleOptimizer and MultiOptimizer call the optimizers inside them
            return apply(optimizer, gradients, variables)
        variables = None if variables is None else list(variables)
        build_in_scope(optimizer, variables)
        is_weighed = any(scaled is optimizer for scaled in self._scaled)
        self._require_one_kind(is_weighed)
        gradients = list(gradients)
        known = variables or internals.trainable_variables(optimizer)
        self._deferred = internals.accumulates(optimizer)
        if self._deferred:
            gradients = [
                g if internals.is_overwritten_by_gradient(v) else self._weighed(g, is_weighed)
                for g, v in zip(self._with_largest(gradients, known), known, strict=True)
            ]
        else:
            gradients = self.merge(gradients, known, is_weighed)
        self._applying = True
        try:
            return apply(optimizer, gradients, variables)
        finally:
            self._applying = self._deferred = False

    def _require_one_kind(self, is_weighed: bool) -> None:
        self._applied_kinds.add(is_weighed)
        if self._merged_moments and len(self._applied_kinds) > 1:
            raise UnsupportedError(
                "the step scales the loss of one of its optimizers and not that of another, and its model has "
                "BatchNormalization(synchronized=True), whose gradients can't then be told apart; use "
                "LossScaleOptimizer for all optimizers of the step or for none"
            )

    # -- sums

    def merge(self, gradients: Sequence[Any], variables: Sequence[Any], is_weighed: bool) -> list[Any]:
        """Returns the gradients of the whole batch; the moving statistics travel in the same message.

        Args:
            gradients: Of this task's rows; None where a variable has none.
            variables: What they are the gradients of.
            is_weighed: Whether the task's share is in them already.
        """
        step, merged = self._step, self._with_largest(gradients, variables)
        for i, gradient in enumerate(merged):
            if isinstance(gradient, tf.IndexedSlices):
                gathered = step.gather(self._weighed(gradient, is_weighed), f"sparse gradient {i}")
                # Rows that one process would bring once must not come once per task: optimizers tell the difference.
                merged[i] = _summed(gathered) if are_unique(gradient.indices) else gathered
        dense = [
            i
            for i, (g, v) in enumerate(zip(merged, variables, strict=True))
            if _is_dense(g) and not internals.is_overwritten_by_gradient(v)
        ]
        rounded = [self._terms(merged[i]) for i in dense]
        parts = [self._weighed(merged[i], is_weighed) for i in dense]
        for i, total, terms in zip(dense, step.sum_with_moving(parts, "gradients"), rounded, strict=True):
            merged[i] = _as_one_float16_sum(total, terms)
        return merged

    def know_terms(self, gradients: Sequence[Any], terms: Sequence[str]) -> None:
        """Tells of gradients that come out of a compiled function what `float16_terms` says of them inside."""
        self._known_terms = list(zip(gradients, terms, strict=True))

    def _terms(self, gradient: Any) -> str:
        return next((terms for known, terms in self._known_terms if known is gradient), None) or float16_terms(gradient)

    def sum_accumulated(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Called just before clipping: accumulated gradients become those of the whole batch."""
        if not self._deferred:
            return gradients
        step, merged = self._step, list(gradients)
        for i, gradient in enumerate(merged):
            if isinstance(gradient, tf.IndexedSlices):  # beside an optimizer that accumulates, in a MultiOptimizer
                merged[i] = step.gather(gradient, f"sparse gradient {i}")
        present = [i for i, g in enumerate(merged) if _is_dense(g)]
        for i, total in zip(present, step.sum([merged[i] for i in present], "accumulated gradients"), strict=True):
            merged[i] = total
        return merged

    def all_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """Called where gradients are not yet summed: finite on all tasks?"""
        if not self._deferred:
            return finite
        return self._step.sum([tf.cast(~finite, tf.float32)], "finite check")[0] == 0

    def _with_largest(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients; of those that are a new scale of float8, which is a maximum, the largest of all."""
        merged = list(gradients)
        pairs = zip(gradients, variables, strict=True)
        scales = [i for i, (g, v) in enumerate(pairs) if g is not None and internals.is_overwritten_by_gradient(v)]
        for i, value in zip(scales, self._step.max([merged[i] for i in scales], "float8 scales"), strict=True):
            merged[i] = value
        return merged

    def _weighed(self, gradient: Any, is_weighed: bool) -> Any:
        """Returns this task's term of the sum."""
        weigh = self._step.if_live if is_weighed else self._step.weigh
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(weigh(gradient.values), gradient.indices, gradient.dense_shape)
        return weigh(gradient)


def build_in_scope(optimizer: Any, variables: Any) -> None:
    """Builds an optimizer that a custom `train_step` uses for the first time, while that step is traced."""
    if optimizer.built or variables is None:
        return
    scope = internals.optimizer_strategy(optimizer).scope()
    with internals.outside_stateless_scope(), tf.init_scope(), scope:
        optimizer.build(variables)
        optimizer.built = True


def _is_dense(gradient: Any) -> bool:
    return gradient is not None and not isinstance(gradient, tf.IndexedSlices)


def _summed(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the same gradient with each row once."""
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _as_one_float16_sum(total: tf.Tensor, terms: str) -> tf.Tensor:
    """Returns a sum of what float16 layers gave to float32 variables as if one float16 sum had made it.

    One process adds up all rows in float16, which overflows where the parts of the tasks do not yet.

    Args:
        total: The sum over tasks.
        terms: As `float16_terms` says it of this task's part.
    """
    if terms == "none":
        return total
    one_sum = tf.cast(tf.cast(total, tf.float16), total.dtype)
    return one_sum if terms == "all" else tf.where(tf.math.is_inf(one_sum), one_sum, total)
