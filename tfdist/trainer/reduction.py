"""How sums cross tasks: tensors in every task -> their sums in every task.

Three of the same shape: `Alone` (one task), `ThroughGroup` (NumPy over our own sockets: CPU) and `ThroughStrategy`
(TensorFlow's collectives: NCCL on GPUs, its ring on CPU). All are used inside a traced step and eagerly alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import tensorflow as tf

from tfdist.collectives import Group

_SUMMED_IN = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


class Reduction(Protocol):
    """What the engine asks of a way to add up."""

    size: int
    index: int

    def sum(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """Returns the sum over tasks of each tensor; shapes and dtypes are those of the arguments."""

    def max(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        """Returns the largest over tasks of each tensor's values."""

    def gather(self, slices: tf.IndexedSlices, live: tf.Tensor, tag: str) -> tf.IndexedSlices:
        """Returns the rows of all tasks in task order; a task that is not `live` adds none."""

    def gather_rows(self, tensors: Sequence[tf.Tensor], live: tf.Tensor, tag: str) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns each tensor with the rows of all tasks, in task order, and where this task's begin.

        A task that is not `live` adds none. Tensors of all dtypes but strings, with rows as their first dimension.
        """


class Alone:
    """One task: every sum is its only term."""

    size, index = 1, 0

    def sum(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        return list(tensors)

    def max(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        return list(tensors)

    def gather(self, slices: tf.IndexedSlices, live: tf.Tensor, tag: str) -> tf.IndexedSlices:
        return slices

    def gather_rows(self, tensors: Sequence[tf.Tensor], live: tf.Tensor, tag: str) -> tuple[list[tf.Tensor], tf.Tensor]:
        return list(tensors), tf.constant(0)


class ThroughGroup:
    """Sums NumPy views of the tensors through a `collectives.Group`.

    Attributes:
        failure: What the group raised while TensorFlow ran the step. TensorFlow turns it into an error of its own,
            so the loop looks here for the one to show.
        is_quiet: Whether the caller looks at `failure`. TensorFlow prints what a Python function of its graphs raises
            twice, with tracebacks; a function that returns nothing ends the step as well, with a line.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.index = group, group.size, group.index
        self.failure: Exception | None = None
        self.is_quiet = False

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arrays: np.ndarray) -> Any:
            try:
                return call(*arrays)
            except Exception as error:
                self.failure = self.failure or error
                if self.is_quiet:
                    return []
                raise

        return guarded

    def sum(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        return self._reduced(tensors, "sum", tag)

    def max(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        return self._reduced(tensors, "max", tag)

    def _reduced(self, tensors: Sequence[tf.Tensor], op: Literal["sum", "max"], tag: str) -> list[tf.Tensor]:
        tensors = [tf.convert_to_tensor(t) for t in tensors]

        def on_host(*arrays: np.ndarray) -> list[np.ndarray]:
            return self.group.all_reduce([np.asarray(a) for a in arrays], op=op, tag=tag)

        sums = tf.numpy_function(self._calling(on_host), tensors, [t.dtype for t in tensors])
        sums = list(sums) if isinstance(sums, (list, tuple)) else [sums]
        if len(sums) != len(tensors) and self.failure is not None:  # run eagerly, and quiet
            raise self.failure
        for total, tensor in zip(sums, tensors, strict=True):
            total.set_shape(tensor.shape)
        return sums

    def gather(self, slices: tf.IndexedSlices, live: tf.Tensor, tag: str) -> tf.IndexedSlices:
        def on_host(values: np.ndarray, indices: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            kept = slice(None) if live else slice(0)
            all_values = self.group.all_gather(values[kept], tag=f"{tag} values")
            all_indices = self.group.all_gather(indices[kept], tag=f"{tag} indices")
            return np.concatenate(all_values), np.concatenate(all_indices)

        values, indices = tf.numpy_function(
            self._calling(on_host), [slices.values, slices.indices, live], [slices.values.dtype, slices.indices.dtype]
        )
        values.set_shape([None, *slices.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def gather_rows(self, tensors: Sequence[tf.Tensor], live: tf.Tensor, tag: str) -> tuple[list[tf.Tensor], tf.Tensor]:
        def on_host(live: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            kept = slice(None) if live else slice(0)
            every = [self.group.all_gather(np.asarray(array)[kept], tag=tag) for array in arrays]
            start = sum(len(part) for part in every[0][: self.index])
            return [np.array(start, np.int32), *(np.concatenate(parts) for parts in every)]

        gathered = tf.numpy_function(
            self._calling(on_host), [live, *tensors], [tf.int32, *(tensor.dtype for tensor in tensors)]
        )
        if len(gathered) != len(tensors) + 1 and self.failure is not None:  # run eagerly, and quiet
            raise self.failure
        start, *wholes = gathered
        start.set_shape([])
        for whole, tensor in zip(wholes, tensors, strict=True):
            whole.set_shape([None, *tensor.shape[1:]])
        return wholes, start


class ThroughStrategy(ThroughGroup):
    """Sums gradients with TensorFlow's own collectives, so that on GPUs they never leave the devices.

    Small host-side values (flags, row counts) still go through the group.
    """

    def __init__(self, group: Group, strategy: tf.distribute.Strategy) -> None:
        super().__init__(group)
        self._strategy = strategy

    def sum(self, tensors: Sequence[tf.Tensor], tag: str) -> list[tf.Tensor]:
        def reduce(*local: tf.Tensor) -> Any:
            # Made inside the replica function, or TensorFlow says "destinations can not be empty". 16 bits are added
            # up in 32, as everywhere: on the way round the tasks each would round, or overflow.
            mine = [tf.identity(tf.cast(t, _SUMMED_IN.get(t.dtype, t.dtype))) for t in local]
            sums = tf.distribute.get_replica_context().all_reduce("SUM", mine)
            return [tf.cast(total, t.dtype) for total, t in zip(sums, local, strict=True)]

        return list(self._strategy.run(reduce, args=tuple(tf.convert_to_tensor(t) for t in tensors)))

    def gather(self, slices: tf.IndexedSlices, live: tf.Tensor, tag: str) -> tf.IndexedSlices:
        kept = tf.where(live, tf.shape(slices.indices)[0], 0)
        mine = tf.IndexedSlices(slices.values[:kept], slices.indices[:kept], slices.dense_shape)

        def reduce(local: tf.IndexedSlices) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", local)

        return self._strategy.run(reduce, args=(mine,))
