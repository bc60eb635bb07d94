"""A `Pipeline` turns (task, number of tasks, epoch, step) into that task's rows of every global batch.

It knows no task and no group, so any process can ask for any task's part: a trainer for its own, `audit` for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from tfdist import process, tf_config
from tfdist.errors import DataError

AUTOTUNE = tf.data.AUTOTUNE
PREFETCH = 2  # batches made ahead of the step

# What `total` says in place of a number of rows.
UNKNOWN = -1
ENDED = 0


class Pipeline(ABC):
    """A deterministic input pipeline, made by `from_arrays`, `from_files` or `from_function`: pass it to `fit`.

    A global batch is what one process would see; of its `total` rows, task i of n gets the contiguous rows
    [total*i//n, total*(i+1)//n). Its position is a number of steps: `for_task(i, n, epoch=2, start_step=500)` gives
    what a run that was never interrupted would get from there on.

    Attributes:
        global_batch_size: Rows of a full batch over all tasks, or None where the pipeline does not say.
        steps_per_epoch: Global batches in one epoch, or None where that shows only at the end.
        rows: Examples in one epoch, or None where that is unknown.
        element_spec: The structure of the data as TensorSpecs, rows unknown.
    """

    global_batch_size: int | None
    steps_per_epoch: int | None
    rows: int | None

    def for_task(self, index: int, size: int, *, epoch: int = 0, start_step: int = 0) -> tf.data.Dataset:
        """Returns the part of task `index` of `size` in one epoch, from step `start_step` on.

        Every element is (data, rows, total), one per step and in the same steps on every task:

        - `data`: this task's rows, in the structure of the source. At least one row: where the task has none, a row
          that is only a stand-in, so that a step can still run.
        - `rows`, int32: how many rows of `data` count. 0 for a stand-in.
        - `total`, int32: rows of the whole batch over all tasks. -1 (`from_function` alone): only the sum of `rows`
          over the tasks tells. 0 (`from_function` alone): this task's share has ended; stand-ins follow, without end
          unless `steps_per_epoch` is known, until every task's `total` is 0.
        """
        for name, value in {"index": index, "size": size, "epoch": epoch, "start_step": start_step}.items():
            if not is_whole(value):
                raise DataError(f"{name}={value!r}: give a whole number")
        if not 0 <= index < size:
            raise DataError(f"there is no task {index} of {size}: index counts from 0")
        if epoch < 0 or start_step < 0:
            raise DataError(f"epoch={epoch}, start_step={start_step}: both count from 0")
        if self.steps_per_epoch is not None and start_step > self.steps_per_epoch:
            raise DataError(f"start_step={start_step} is behind the epoch's end: it has {self.steps_per_epoch} steps")
        dataset = self._for_task(index, size, epoch, start_step)
        options = tf.data.Options()
        options.deterministic = True
        # It is split already: a strategy that is handed it must not split it again, nor warn that it can not.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return dataset.prefetch(PREFETCH).with_options(options)

    # Whether `own_batches` says what a worker reads that keeps step with nobody.
    has_own_batches = False

    def own_batches(self, index: int, size: int, epoch: int) -> tf.data.Dataset:
        """Returns batches of task `index` of `size`, for workers that each train on batches of their own."""
        raise NotImplementedError(f"{self!r} splits global batches; it has no batches of a worker's own")

    @abstractmethod
    def _for_task(self, index: int, size: int, epoch: int, start_step: int) -> tf.data.Dataset: ...

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The structure of the data as TensorSpecs, rows unknown."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """What must be equal on every task, by name, as values that JSON can hold."""

    def batches(self, epoch: int = 0, *, start_step: int = 0) -> tf.data.Dataset:
        """Returns this task's rows of each global batch of an epoch, for a loop of your own.

        Every task gets the same number of batches; one may be empty (0 rows) where a batch has fewer rows than there
        are tasks. (After `from_function` without `steps_per_epoch`, each task's batches end with its own share.)

        Example:
            for epoch in range(3):
                for x, y in pipeline.batches(epoch):
                    strategy.run(step, args=(x, y))
        """
        index, size = place()
        dataset = self.for_task(index, size, epoch=epoch, start_step=start_step)
        return dataset.take_while(lambda data, rows, total: total != ENDED).map(
            lambda data, rows, total: head(data, rows)
        )

    def map(self, fn: Callable[..., Any]) -> Pipeline:
        """Returns a pipeline that applies `fn` to this task's rows of each batch, in parallel, after the split.

        Args:
            fn: As for `tf.data.Dataset.map`, of a batch: what it returns must have the same rows in the same order.

        Example:
            train = tfdist.data.from_arrays((images, labels), 128).map(lambda x, y: (tf.image.flip_up_down(x), y))
        """
        return Mapped(self, fn)


@dataclass(frozen=True, eq=False, repr=False)
class Mapped(Pipeline):
    """A pipeline with a function applied to its data."""

    source: Pipeline
    fn: Callable[..., Any]

    @property
    def global_batch_size(self) -> int | None:  # type: ignore[override]
        return self.source.global_batch_size

    @property
    def steps_per_epoch(self) -> int | None:  # type: ignore[override]
        return self.source.steps_per_epoch

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        return self.source.rows

    def __repr__(self) -> str:
        return f"{self.source!r}.map({name_of(self.fn)})"

    @property
    def has_own_batches(self) -> bool:  # type: ignore[override]
        return self.source.has_own_batches

    def own_batches(self, index: int, size: int, epoch: int) -> tf.data.Dataset:
        fn = self.fn
        return self.source.own_batches(index, size, epoch).map(lambda *batch: fn(*batch), num_parallel_calls=AUTOTUNE)

    def _for_task(self, index: int, size: int, epoch: int, start_step: int) -> tf.data.Dataset:
        fn = self.fn

        @tf.autograph.experimental.do_not_convert
        def keeps_rows(data: Any, result: Any) -> Any:
            checks = [
                tf.debugging.assert_equal(
                    count_rows(part),
                    count_rows(data),
                    f"{name_of(fn)}, which a pipeline maps, must return as many rows as it gets: which rows are whose "
                    "is settled before. Leave rows out, or add some, in the source",
                )
                for part in tf.nest.flatten(result)
                if part is not None
            ]
            with tf.control_dependencies([check for check in checks if check is not None]):
                return tf.nest.map_structure(lambda part: None if part is None else tf.identity(part), result)

        def apply(data: Any, rows: tf.Tensor, total: tf.Tensor) -> Any:
            return keeps_rows(data, call(fn, data)), rows, total

        source = self.source._for_task(index, size, epoch, start_step)  # noqa: SLF001
        return source.map(apply, num_parallel_calls=AUTOTUNE)

    @cached_property
    def element_spec(self) -> Any:
        return self.for_task(0, 1).element_spec[0]

    @property
    def fingerprint(self) -> dict[str, object]:
        return self.source.fingerprint


def share(total: Any, index: int, size: int) -> tuple[Any, Any]:
    """Returns the first row, and the one after the last, that task `index` of `size` gets of `total` rows."""
    return total * index // size, total * (index + 1) // size


def call(fn: Callable[..., Any], data: Any) -> Any:
    """Calls `fn` as `tf.data.Dataset.map` would: a tuple becomes its arguments."""
    return fn(*data) if type(data) is tuple else fn(data)


def head(data: Any, rows: Any) -> Any:
    """Returns the first rows of every part of a batch."""

    def first(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, tf.SparseTensor):
            shape = tf.concat([[tf.cast(rows, tf.int64)], part.dense_shape[1:]], axis=0)
            return tf.sparse.slice(part, tf.zeros_like(shape), shape)
        return part[:rows]

    return tf.nest.map_structure(first, data)


def count_rows(data: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, int32."""
    part = next(part for part in tf.nest.flatten(data) if part is not None)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return tf.cast(part.nrows() if isinstance(part, tf.RaggedTensor) else tf.shape(part)[0], tf.int32)


def check_batching(global_batch_size: int, seed: int) -> None:
    """Raises DataError for a batch size or a seed that can not be."""
    if not is_whole(global_batch_size) or global_batch_size < 1:
        raise DataError(f"global_batch_size={global_batch_size!r}: give the rows of one step over all tasks, 1 or more")
    if not is_whole(seed) or seed < 0:
        raise DataError(f"seed={seed!r}: give a whole number, 0 or more, the same on every task")


def name_of(fn: Any) -> str:
    """Returns how a reader would name a function."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def specs_as_text(spec: Any) -> list[str]:
    """Returns types and shapes of one row, as text."""
    return [
        f"{part.dtype.name}{tuple(part.shape[1:]) if part.shape.rank else ''}"
        for part in tf.nest.flatten(spec)
        if isinstance(part, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec))
    ]


def is_whole(value: object) -> bool:
    """Returns whether a value is an integer, Python's or NumPy's."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def place() -> tuple[int, int]:
    """Returns this process's position among the training tasks, and their number."""
    current = process.current()
    config = tf_config.resolve() if current is None else current.config
    if config is None or not config.trains:
        return 0, 1
    return config.training_index, config.cluster.num_training_tasks
