"""One step while it is traced: what this task's part weighs, and the sums that make it the whole batch's step.

The step itself is Keras' own `train_step` on this task's rows. One rule makes it right: the gradient of the whole batch
is the sum over tasks of share x gradient, where share = the task's rows / all rows. So uneven, tiny and empty parts are
exact; a task without rows runs row 0 at share 0. `hooks.py` calls the methods here at the places where Keras would
otherwise use a part as if it were the whole.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component, outside_strategy
from tfdist.trainer.gradients import Gradients
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


@contextmanager
def suspended() -> Iterator[None]:
    """Code inside sees no step: it runs on rows that need no sum over tasks."""
    step = active()
    _tracing.step = None
    try:
        yield
    finally:
        _tracing.step = step


@functools.cache
def _turns() -> tf.Variable:
    """A variable that every sum of a graph reads before it and writes after it, so that all tasks sum in one order.

    TensorFlow runs the stateful operations of a graph in the order in which they were made, but orders a tf.cond that
    writes variables (an optimizer's) only by these.
    """
    with tf.init_scope(), outside_strategy(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="tfdist_turns")


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

    def _is_inside(self) -> bool:
        """Whether a tf.cond, a tf.while_loop or another tf.function is being traced, whose tensors don't leave it."""
        return self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        key = id(variable)
        if key in self._captured and self._is_inside() and key not in self.let_go:
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
        scales_loss: Whether every loss of the step passes `optimizer.scale_loss`.

    Attributes:
        live: Whether this task has rows.
        gradients: What the step does with gradients.
    """

    def __init__(
        self, reduction: Reduction, host: Reduction, rows: tf.Tensor, total: tf.Tensor, *, scales_loss: bool = False
    ) -> None:
        self._reduction, self._host = reduction, host
        self.live = rows > 0
        self._share = tf.cast(rows, tf.float64) / tf.cast(total, tf.float64)
        self._scope: CaptureScope | None = None
        self._moving: list[tuple[Any, tf.Tensor]] = []
        self._captured: list[Any] = []
        self._forbidden: type[Exception] | None = None
        # A tensor of the step's own graph: TensorFlow can't take the gradient of a tf.cond that reads an eager one.
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._turns: Any = None if graph is None else graph.capture(_turns().handle)
        self.gradients = Gradients(self, scales_loss=scales_loss)

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
        return self._in_order(lambda: self._reduction.sum(tensors, tag))

    def sum_on_host(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """The same for states of metrics, which never need a device."""
        return self._in_order(lambda: self._host.sum(tensors, tag)) if tensors else []

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
            # Where the step applied no gradients, or accumulates them, the statistics travel alone.
            self.sum_with_moving([], "moving statistics")
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

    # -- what gradients need

    def sum_with_moving(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """Sums tensors over tasks; moving statistics that were not merged yet travel in the same message."""
        assert self._scope is not None
        moving = [(variable, old) for variable, old in self._moving if id(variable) not in self._scope.let_go]
        self._moving = []
        changes = [self.weigh(self._scope.get_current_value(v) - old) for v, old in moving]
        if not tensors and not changes:
            return []
        sums = self.sum([*tensors, *changes], tag)
        for (variable, old), change in zip(moving, sums[len(tensors) :], strict=True):
            self._scope.state_mapping[id(variable)] = old + change
        return sums[: len(tensors)]

    def max(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """Returns the largest of each tensor's values over the tasks that have rows."""
        lowest = [tf.where(self.live, t, t.dtype.min) for t in tensors]
        return self._in_order(lambda: self._host.max(lowest, tag)) if lowest else []

    def gather(self, slices: tf.IndexedSlices, tag: str) -> tf.IndexedSlices:
        """Returns the rows of all tasks that have some, in task order."""
        if self._forbidden is not None:
            raise self._forbidden(tag)
        return self._in_order(lambda: self._reduction.gather(slices, self.live, tag))

    def gather_rows(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]:
        """Returns each tensor with the rows of all tasks, and a function that takes this task's rows of such a tensor.

        What flows back from them on all tasks flows to the rows of each.
        """
        if self._forbidden is not None:
            raise self._forbidden("rows of the whole batch")
        start = tf.constant(0)

        def gather(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal start
            wholes, start = self._in_order(lambda: self._host.gather_rows(parts, self.live, "rows of the whole batch"))
            return wholes

        def own_rows(whole: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
            return whole[start : start + count]

        @tf.custom_gradient
        def with_gradient(*parts: tf.Tensor) -> Any:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                merged = [self.gradients.merged_moments(u) for u in upstream]
                # A task without rows has a stand-in, to which nothing flows back.
                return [
                    tf.concat([own_rows(m, tf.where(self.live, tf.shape(p)[0], 0)), tf.zeros_like(p)], 0)[
                        : tf.shape(p)[0]
                    ]
                    for m, p in zip(merged, parts, strict=True)
                ]

            return gather(parts), gradient

        result = list(tensors)
        floating = [i for i, t in enumerate(tensors) if t.dtype.is_floating]
        others = [i for i, t in enumerate(tensors) if not t.dtype.is_floating]
        for indices, call in ((floating, lambda parts: with_gradient(*parts)), (others, gather)):
            if indices:
                for i, whole in zip(indices, call([tensors[i] for i in indices]), strict=True):
                    result[i] = whole
        rows = tf.where(self.live, tf.shape(tensors[0])[0], 0)
        return result, lambda whole: own_rows(whole, rows)

    def _in_order(self, make: Callable[[], Any]) -> Any:
        """Returns the tensors that `make` makes, after every earlier sum of the step and before every later one."""
        if tf.executing_eagerly():
            return make()
        with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=self._turns, dtype=tf.int64)]):
            made = make()
        with tf.control_dependencies(tf.nest.flatten(made, expand_composites=True)):
            tf.raw_ops.AssignAddVariableOp(resource=self._turns, value=tf.constant(1, tf.int64))
        return made

    def if_live(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor; of a task without rows exactly 0, whatever its stand-in row gave (even NaN)."""
        tensor = tf.convert_to_tensor(tensor)
        return tf.where(self.live, tensor, tf.zeros([], tensor.dtype))

    def times_share(self, tensor: Any) -> tf.Tensor:
        """Returns share x tensor; 1/3 of 16 bits would be a share of its own, so those are weighed in float32."""
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype not in (tf.float16, tf.bfloat16):
            return tensor * self.share(tensor.dtype)
        return tf.cast(tf.cast(tensor, tf.float32) * self.share(tf.float32), tensor.dtype)

    def weigh(self, tensor: Any) -> tf.Tensor:
        """Returns share x tensor, exactly 0 of a task without rows."""
        return self.if_live(self.times_share(tensor))

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
        sums = self._total(tf.stack([kept, tf.reduce_sum(tf.square(x), axes, keepdims=True)]))
        rows = self.sum([self.if_live(count)], "moments count")[0]
        mean = sums[0] / rows
        variance = tf.maximum(sums[1] / rows - tf.square(mean), 0)
        if not keepdims:
            mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
        return mean, variance

    def masked_moments(self, x: tf.Tensor, mask: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance over what the mask leaves of the rows of all tasks, as Keras forms them of one.

        Args:
            x: [rows, ..., channels].
            mask: [rows, ...]; true where a value counts.
            axes: All but the channels'.
        """
        valid = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))
        epsilon = tf.cast(keras.backend.epsilon(), x.dtype)
        count = tf.reduce_sum(tf.cast(valid, x.dtype), axes, keepdims=True)
        total = self.sum([self.if_live(count)], "masked moments count")[0] + epsilon
        mean = self._total(tf.reduce_sum(tf.where(valid, x, 0), axes, keepdims=True)) / total
        squares = tf.square(tf.where(valid, x - mean, 0))
        variance = self._total(tf.reduce_sum(squares, axes, keepdims=True)) / total
        return tf.squeeze(mean), tf.squeeze(variance)

    def _total(self, local: tf.Tensor) -> tf.Tensor:
        """The sum over tasks; what flows back from it on all tasks flows to each."""

        @tf.custom_gradient
        def total(local: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self.sum([local], "moments")[0], self.gradients.merged_moments

        return total(tf.where(self.live, local, tf.zeros_like(local)))

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns a seed of this task's own; the common state stays the same everywhere."""
        if self.index == 0:
            return seed
        offset = self.index * 0x3779B1 % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype)
