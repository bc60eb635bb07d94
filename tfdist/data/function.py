"""A function that gives each task a dataset of its own becomes a pipeline: shards may be uneven, sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from tfdist.data.pipeline import (
    AUTOTUNE,
    ENDED,
    UNKNOWN,
    Pipeline,
    count_rows,
    head,
    is_whole,
    name_of,
    place,
    share,
    specs_as_text,
)
from tfdist.errors import DataError


class InputContext(tf.distribute.InputContext):
    """Which share a function of `from_function` is asked for.

    Attributes:
        input_pipeline_id: The task, counted from 0.
        num_input_pipelines: The number of tasks (so is `num_replicas_in_sync`).
        epoch: The epoch, counted from 0.
    """

    def __init__(self, index: int, size: int, epoch: int) -> None:
        super().__init__(num_input_pipelines=size, input_pipeline_id=index, num_replicas_in_sync=size)
        self.epoch = epoch

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns this task's rows of a batch; sizes that the tasks do not divide differ by one."""
        low, high = share(global_batch_size, self.input_pipeline_id, self.num_input_pipelines)
        return max(1, high - low)


def from_function(
    fn: Callable[[InputContext], tf.data.Dataset],
    *,
    global_batch_size: int | None = None,
    steps_per_epoch: int | None = None,
) -> Pipeline:
    """Returns a pipeline whose tasks each read a dataset of their own, made by `fn`.

    Use it where reading is what costs, and each task shall read its own part alone. Step k takes the k-th batch of
    every task, so sizes may differ: what is summed counts rows. A task whose share has ended goes on with stand-in
    rows that count nothing, until all shares have ended. Which examples a task gets is up to `fn`: check it with
    `tfdist.data.audit`.

    Args:
        fn: A function of a `tf.distribute.InputContext` (with `epoch`, too), called once per epoch, that returns this
            task's `tf.data.Dataset` of batches.
        global_batch_size: Rows of a full batch over all tasks, where it is known; nothing depends on it.
        steps_per_epoch: How many steps an epoch has. By default, as many as the longest share has batches. A dataset
            without end needs it, and goes on in each epoch where the last one stopped: put `repeat()` last, so that
            TensorFlow knows of it. (What only turns out to have no end begins each epoch anew; vary it by
            `context.epoch`.)

    Example:
        def mine(context):
            dataset = tf.data.Dataset.range(1000).shard(context.num_input_pipelines, context.input_pipeline_id)
            dataset = dataset.shuffle(1000, seed=context.epoch)
            return dataset.batch(context.get_per_replica_batch_size(64))

        train = tfdist.data.from_function(mine)
    """
    for name, value in (("global_batch_size", global_batch_size), ("steps_per_epoch", steps_per_epoch)):
        if value is not None and (not is_whole(value) or value < 1):
            raise DataError(f"{name}={value!r}: give 1 or more, or leave it out")
    if not callable(fn):
        raise DataError(
            f"fn is a {type(fn).__name__}: give a function of an InputContext that returns that task's tf.data.Dataset"
        )
    return FunctionPipeline(fn, global_batch_size, steps_per_epoch)


@dataclass(frozen=True, eq=False, repr=False)
class FunctionPipeline(Pipeline):
    """See `from_function`."""

    fn: Callable[[InputContext], tf.data.Dataset]
    global_batch_size: int | None
    steps_per_epoch: int | None

    rows = None
    has_own_batches = True

    def own_batches(self, index: int, size: int, epoch: int) -> tf.data.Dataset:
        return self._dataset(InputContext(index, size, epoch))

    def __repr__(self) -> str:
        parts = [name_of(self.fn)]
        parts += [f"{name}={getattr(self, name)}" for name in ("global_batch_size", "steps_per_epoch")]
        return f"from_function({', '.join(part for part in parts if not part.endswith('=None'))})"

    @property
    def fingerprint(self) -> dict[str, object]:
        return {
            "source": "function",
            "global batch size": self.global_batch_size,
            "steps per epoch": self.steps_per_epoch,
            "data": specs_as_text(self.element_spec),
        }

    @cached_property
    def element_spec(self) -> Any:
        # Of this task's own share: tasks compare it, and each share is made by another call.
        return self.for_task(*place()).element_spec[0]

    def _for_task(self, index: int, size: int, epoch: int, start_step: int) -> tf.data.Dataset:
        dataset = self._dataset(InputContext(index, size, epoch))
        past = start_step
        if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            if self.steps_per_epoch is None:
                raise DataError(f"{name_of(self.fn)} returned a dataset without end: give steps_per_epoch")
            past += epoch * self.steps_per_epoch
        specs = tf.nest.flatten(dataset.element_spec)
        with tf.device("/CPU:0"):
            stand_in = tf.nest.map_structure(_stand_in, dataset.element_spec)
        has_ended = tf.data.Dataset.from_tensors((stand_in, True)).repeat()
        batches = dataset.skip(past).map(_marked, num_parallel_calls=AUTOTUNE).concatenate(has_ended)
        if self.steps_per_epoch is not None:
            batches = batches.take(self.steps_per_epoch - start_step)
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            return batches.map(lambda batch, ended: _element(batch, ended, stand_in))
        # A row that was read is a better stand-in than one that was made up.
        return batches.scan(stand_in, _remember)

    def _dataset(self, context: InputContext) -> tf.data.Dataset:
        dataset = self.fn(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise DataError(
                f"{name_of(self.fn)} returned a {type(dataset).__name__}: it gets an InputContext and must return a "
                "tf.data.Dataset of batches"
            )
        for spec in tf.nest.flatten(dataset.element_spec):
            if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
                raise DataError(
                    f"the elements of {name_of(self.fn)} are single examples ({spec}), not batches: "
                    "add .batch(context.get_per_replica_batch_size(global_batch_size))"
                )
        return dataset


@tf.autograph.experimental.do_not_convert
def _marked(*batch: Any) -> Any:
    """A batch whose shape leaves the rows open, and that it is not the end."""
    data = batch if len(batch) > 1 else batch[0]

    def open_rows(part: Any) -> Any:
        if not isinstance(part, tf.Tensor):
            return part
        return tf.compat.v1.placeholder_with_default(part, [None, *part.shape[1:]])

    return tf.nest.map_structure(open_rows, data), False


@tf.autograph.experimental.do_not_convert
def _element(batch: Any, ended: tf.Tensor, stand_in: Any) -> Any:
    """(data, rows, total) of one step."""
    rows = tf.where(ended, 0, count_rows(batch))
    parts = [part for part in tf.nest.flatten(batch) if part is not None]
    others = [part for part in tf.nest.flatten(stand_in) if part is not None]
    chosen = iter(tf.cond(rows > 0, lambda: parts, lambda: others))
    data = tf.nest.map_structure(lambda part: None if part is None else next(chosen), batch)
    return data, rows, tf.where(ended, ENDED, UNKNOWN)


@tf.autograph.experimental.do_not_convert
def _remember(row: Any, batch: tuple[Any, tf.Tensor]) -> Any:
    """The first row of the latest batch, which stands in where the next ones have none; and the step's element."""
    data, rows, total = _element(*batch, row)
    return head(data, 1), (data, rows, total)


def _stand_in(spec: Any) -> Any:
    """One row of a dataset that may have none: ones for floats, since people divide by them, and zeros."""
    if not hasattr(spec, "dtype"):  # None, or the spec of None, whose class TensorFlow 2.19 does not export
        return None
    shape = [1, *(size or 1 for size in spec.shape[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    make = tf.ones if spec.dtype.is_floating else tf.zeros
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = [tf.constant([0, 1], spec.row_splits_dtype)] * spec.ragged_rank
        values = make([1, *shape[spec.ragged_rank + 1 :]], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, splits)
    return make(shape, spec.dtype)
