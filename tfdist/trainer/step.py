"""One step while it is traced: what this task's part weighs, and the sums that make it the whole batch's step.

The step itself is Keras' own `train_step` on this task's rows. One rule makes it right: the gradient of the whole batch
is the sum over tasks of share x gradient, where share = the task's rows / all rows. So uneven, tiny and empty parts are
exact; a task without rows runs row 0 at share 0. `hooks.py` calls the methods here at the places where Keras would
otherwise use a part as if it were the whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import are_unique, local_component
from tfdist.trainer.reduction import Reduction

_tracing = threading.local()


def active() -> Step | None:
    """Returns the step that this thread is tracing (or running eagerly), or None."""
    return getattr(_tracing, "step", None)


@contextmanager
def _active(step: Step) -> Iterator[None]:
    _tracing.step = step
    try:
        yield
    finally:
        _tracing.step = None


def _summed(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the same gradient with each row once."""
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def build_in_scope(optimizer: Any, variables: Any) -> None:
    """Builds an optimizer that a custom `train_step` uses for the first time, while that step is traced."""
    if optimizer.built or variables is None:
        return
    scope = internals.optimizer_strategy(optimizer).scope()
    with internals.outside_stateless_scope(), tf.init_scope(), scope:
        optimizer.build(variables)
        optimizer.built = True


class CaptureScope(keras.StatelessScope):
    """Updates of the captured variables stay in tensors; every other variable behaves as usual.

    Attributes:
        let_go: ids of captured variables that were updated inside a `tf.cond` or `tf.while_loop`, whose tensors don't
            leave it: such an update goes to the variable itself.
    """

    def __init__(self, captured: Sequence[tuple[Any, tf.Tensor]]) -> None:
        super().__init__(state_mapping=captured, collect_losses=True, initialize_variables=False)
        self._captured = {id(variable): self.state_mapping[id(variable)] for variable, _ in captured}
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.let_go: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return value
        native = internals.native(variable)
        return local_component(native) if id(variable) in self.let_go else native

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        key = id(variable)
        is_inside = self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph
        if key in self._captured and is_inside and key not in self.let_go:
            if self.state_mapping[key] is not self._captured[key]:
                raise UnsupportedError(
                    f"the step updates {variable.path} before and inside a tf.cond or tf.while_loop; update it in one "
                    "place"
                )
            self.let_go.add(key)
            del self.state_mapping[key]
        if key in self.let_go:
            local_component(internals.native(variable)).assign(tf.cast(value, variable.dtype))
        elif key in self._captured:
            # Some updates lose their static shape, which the next scope wants to see.
            self.state_mapping[key] = tf.ensure_shape(tf.cast(value, variable.dtype), variable.shape)
        else:
            internals.assign_native(variable, value)


class Step:
    """The part of one global batch that this task computes.

    Args:
        reduction: How gradients cross tasks.
        host: How small numbers that live on the host cross tasks.
        rows: Rows of this task, int32 scalar; 0 where it only repeats row 0.
        total: Rows of all tasks, int32 scalar.
    """

    def __init__(self, reduction: Reduction, host: Reduction, rows: tf.Tensor, total: tf.Tensor) -> None:
        self._reduction, self._host = reduction, host
        self.live = rows > 0
        self._share = tf.cast(rows, tf.float64) / tf.cast(total, tf.float64)
        self._scope: CaptureScope | None = None
        self._moving: list[tuple[Any, tf.Tensor]] = []
        self._applying = False  # inside the outermost optimizer.apply
        self._deferred = False  # the optimizer accumulates: the sum comes later, in _clip_gradients
        self._captured: list[Any] = []
        self._forbidden: type[Exception] | None = None
        self._after: list[tf.Tensor] = []  # sums wait for these; see apply()

    @property
    def size(self) -> int:
        return self._reduction.size

    @property
    def index(self) -> int:
        return self._reduction.index

    def share(self, dtype: Any) -> tf.Tensor:
        """This task's rows / all rows, as a scalar."""
        return tf.cast(self._share, dtype)

    @property
    def captured(self) -> list[Any]:
        """The variables whose updates stay in tensors: metrics and moving statistics."""
        return self._captured

    def value_of(self, variable: Any) -> tf.Tensor:
        assert self._scope is not None
        return self._scope.get_current_value(variable)

    def set_value(self, variable: Any, value: tf.Tensor) -> None:
        assert self._scope is not None
        self._scope.add_update((variable, value))

    @contextmanager
    def without_sums(self, error: type[Exception]) -> Iterator[None]:
        """Code inside that sums over tasks raises this error."""
        self._forbidden = error
        try:
            yield
        finally:
            self._forbidden = None

    def sum(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """Sums over tasks, after every earlier sum of this step."""
        if self._forbidden is not None:
            raise self._forbidden(tag)
        with tf.control_dependencies(self._after):
            return self._reduction.sum(tensors, tag)

    def sum_on_host(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """The same for states of metrics, which never need a device."""
        with tf.control_dependencies(self._after):
            return self._host.sum(tensors, tag) if tensors else []

    # -- running it

    def run(
        self, function: Callable[[Any], Any], data: Any, metrics: Sequence[Any], moving: Sequence[Any]
    ) -> tuple[Any, list[tf.Tensor]]:
        """Runs a Keras step on this task's rows.

        Args:
            function: `model.train_step` or `model.test_step`.
            data: This task's rows.
            metrics: Variables of the metrics. Each task keeps the sums of its own rows.
            moving: Variables that the forward pass updates and all tasks must agree on, e.g. batch-norm statistics.

        Returns:
            What the function returned, and the new values of the metric variables.
        """
        natives = [local_component(internals.native(v)) for v in metrics]
        before = [tf.identity(native) for native in natives]
        self._moving = [(v, tf.identity(internals.native(v))) for v in moving]
        captured = list(zip(metrics, before, strict=True)) + self._moving
        self._captured = [variable for variable, _ in captured]
        with CaptureScope(captured) as self._scope, _active(self):
            logs = function(data)
            if self._moving:  # the step applied no gradients (or accumulates them): the statistics travel alone
                self._merge_gradients([])
            for variable in moving:
                if id(variable) not in self._scope.let_go:
                    internals.assign_native(variable, self._scope.get_current_value(variable))
            after = [
                tf.where(self.live, tf.convert_to_tensor(self._scope.get_current_value(v)), old)
                for v, old in zip(metrics, before, strict=True)
            ]
            for native, value in zip(natives, after, strict=True):
                native.assign(value)
        return logs, after

    # -- gradients

    def _merge_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the whole batch; the moving statistics travel in the same message."""
        merged = list(gradients)
        for i, gradient in enumerate(merged):
            if isinstance(gradient, tf.IndexedSlices):
                scaled = tf.IndexedSlices(
                    gradient.values * self.share(gradient.values.dtype), gradient.indices, gradient.dense_shape
                )
                gathered = self._reduction.gather(scaled, self.live, f"sparse gradient {i}")
                # Rows that one process would bring once must not come once per task: optimizers tell the difference.
                merged[i] = _summed(gathered) if are_unique(gradient.indices) else gathered
        dense = [i for i, g in enumerate(merged) if g is not None and not isinstance(g, tf.IndexedSlices)]
        assert self._scope is not None
        moving = [(variable, old) for variable, old in self._moving if id(variable) not in self._scope.let_go]
        self._moving = []
        changes = [self._scope.get_current_value(v) - old for v, old in moving]
        parts = [self.weigh(merged[i]) for i in dense] + [self.weigh(change) for change in changes]
        if not parts:
            return merged
        sums = self.sum(parts, "gradients")
        for i, total in zip(dense, sums, strict=False):
            merged[i] = total
        for (variable, old), change in zip(moving, sums[len(dense) :], strict=True):
            self._scope.state_mapping[id(variable)] = old + change
        return merged

    def weigh(self, tensor: Any) -> tf.Tensor:
        """Returns share x tensor; a task without rows adds exactly 0, whatever its stand-in row gave (even NaN)."""
        tensor = tf.convert_to_tensor(tensor)
        return tf.where(self.live, tensor * self.share(tensor.dtype), tf.zeros([], tensor.dtype))

    def apply(self, optimizer: Any, apply: Callable[..., Any], gradients: Any, variables: Any) -> Any:
        """Runs `optimizer.apply` with the gradients of the whole batch.

        The order is: sum over tasks, check finite, clip, accumulate, apply. With accumulation each task keeps its own
        weighted sums, and they are added up over tasks once, just before clipping.
        """
        if self._applying:  # LossScaleOptimizer calls the optimizer inside it
            return apply(optimizer, gradients, variables)
        variables = None if variables is None else list(variables)
        gradients = list(gradients)
        build_in_scope(optimizer, variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._deferred = bool(inner.gradient_accumulation_steps)
        if self._deferred:
            gradients = [None if g is None else self.weigh(g) for g in gradients]
        else:
            gradients = self._merge_gradients(gradients)
        self._applying = True
        try:
            result = apply(optimizer, gradients, variables)
        finally:
            self._applying = False
        if self._deferred:
            # The sum sits in a tf.cond, which TensorFlow orders only by the variables that it writes: later sums
            # must wait for one of them, or tasks could send in different orders.
            written = variables or internals.trainable_variables(optimizer)
            smallest = min(written, key=lambda v: math.prod(v.shape))
            native = internals.native(smallest) if isinstance(smallest, keras.Variable) else smallest
            self._after = [tf.identity(native)]
            self._deferred = False
        return result

    def sum_accumulated(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Called just before clipping: accumulated gradients become those of the whole batch."""
        if not self._deferred:
            return gradients
        present = [i for i, g in enumerate(gradients) if g is not None]
        merged = list(gradients)
        for i, total in zip(present, self.sum([gradients[i] for i in present], "accumulated gradients"), strict=True):
            merged[i] = total
        return merged

    def all_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """Called where gradients are not yet summed: finite on all tasks?"""
        if not self._deferred:
            return finite
        return self.sum([tf.cast(~finite, tf.float32)], "finite check")[0] == 0

    # -- losses that are no mean over rows

    def correct_loss(self, loss: tf.Tensor, values: Any, sample_weight: Any, reduction: str | None) -> tf.Tensor:
        """Returns the local loss so that share x loss, summed over tasks, is the loss of the whole batch."""
        if tuple(values.shape) == ():
            return loss
        if reduction == "sum":
            return tf.math.divide_no_nan(loss, self.share(loss.dtype))
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            weight = tf.where(self.live, tf.reduce_sum(tf.cast(sample_weight, loss.dtype)), 0)
            total = self.sum([tf.stop_gradient(weight)], "sample weights")[0]
            return tf.math.divide_no_nan(loss * weight, total * self.share(loss.dtype))
        return loss

    def correct_mask(self, weights: tf.Tensor, mask: tf.Tensor, reduction: str | None) -> tf.Tensor:
        """Returns the weights of a masked mean whose divisor is the number of valid values of all tasks."""
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        valid = tf.where(self.live, tf.reduce_sum(tf.cast(mask, weights.dtype)), 0)
        total = self.sum([valid], "valid values")[0]
        return weights * tf.math.divide_no_nan(valid, total * self.share(weights.dtype))

    # -- layers

    def moments(self, x: tf.Tensor, axes: Sequence[int], keepdims: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance over the rows of all tasks (synchronized BatchNormalization)."""
        kept = tf.reduce_sum(x, axes, keepdims=True)
        count = tf.cast(tf.size(x) // tf.size(kept), x.dtype)

        @tf.custom_gradient
        def total(local: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # Each task's loss weighs by its share, and so does what flows back from it.
                share = self.share(upstream.dtype)
                merged = self.sum([self.weigh(upstream)], "moments gradient")[0]
                return tf.math.divide_no_nan(merged, share)

            return self.sum([local], "moments")[0], gradient

        sums = tf.stack([kept, tf.reduce_sum(tf.square(x), axes, keepdims=True)])
        sums = total(tf.where(self.live, sums, tf.zeros_like(sums)))
        rows = self.sum([tf.where(self.live, count, tf.zeros_like(count))], "moments count")[0]
        mean = sums[0] / rows
        variance = tf.maximum(sums[1] / rows - tf.square(mean), 0)
        if not keepdims:
            mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
        return mean, variance

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns a seed of this task's own; the common state stays the same everywhere."""
        if self.index == 0:
            return seed
        offset = self.index * 0x3779B1 % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype)
