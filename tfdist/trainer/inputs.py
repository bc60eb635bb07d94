"""What `fit`, `evaluate` and `predict` are given -> this task's rows of every global batch.

A global batch is what one process would see; task i of n takes its contiguous rows [rows*i//n, rows*(i+1)//n). Arrays
are indexed, so each task gathers only its own rows; a dataset is iterated whole by every task and sliced last, which is
exact for any pipeline and repeats its work on every task.

Each element of `Input.dataset` is (data, rows, total, checksum): this task's rows, their number (0 where `data` is only
a stand-in row), the rows of the whole batch, and a checksum of the whole batch (0 where none was asked for).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import batch_size_of


class Input:
    """The batches of one `fit`, `evaluate` or `predict` call.

    Attributes:
        dataset: Elements (data, rows, total, checksum), see above.
        batches: Global batches in one pass over the data, or None where that is unknown.
        steps: Steps of one epoch, or None where that is unknown.
        global_batch_size: Rows of a full batch, or None where that is unknown.
        rows: Rows in one pass over the data, or None where that is unknown.
        is_sliced: Every task reads the whole batches, so they must be the same.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        index: int,
        size: int,
        batch_size: int | None = None,
        steps: int | None = None,
        shuffle: Any = False,
        class_weight: Any = None,
        seed: tuple[int, ...] = (),
    ) -> None:
        cap = internals.MAX_STEPS.find()()
        if cap and (not steps or cap < steps):
            warnings.warn(f"Limiting steps_per_epoch to {cap}", stacklevel=2)
            steps = cap
        self._index, self._size, self._seed, self._wanted_steps = index, size, seed, steps
        adapter = internals.GET_ADAPTER.find()(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=False,
            class_weight=class_weight,
        )
        self.batches: int | None = adapter.num_batches
        self.rows: int | None = None
        self.global_batch_size: int | None
        self.is_sliced = False
        self._order: tf.Variable | None = None
        if isinstance(adapter, internals.ARRAY_ADAPTER.find()):
            inputs, self.rows, self.global_batch_size = internals.array_inputs(adapter)
            self._shuffle = shuffle
            self.dataset = self._from_arrays(inputs)
        elif isinstance(adapter, internals.DATASET_ADAPTER.find()):
            self._shuffle, self.is_sliced = False, True
            dataset = adapter.get_tf_dataset()
            if not isinstance(dataset, tf.data.Dataset):
                raise UnsupportedError(
                    f"a {type(dataset).__name__} is already split over the tasks; pass the tf.data.Dataset itself, "
                    "each task takes its rows of every batch"
                )
            self.global_batch_size = _batch_size(dataset)
            self.dataset = self._from_dataset(dataset)
        else:
            raise UnsupportedError(
                f"x is a {type(x).__name__}; pass arrays or a tf.data.Dataset "
                "(tf.data.Dataset.from_generator makes one of a generator), with the same batches on every task"
            )
        self.steps: int | None = steps or self.batches
        self._passes = 0
        self._iterator: Any = None
        self._seen = 0

    @property
    def element_spec(self) -> Any:
        """The structure of `data`, rows unknown, as TensorSpecs."""
        return self.dataset.element_spec[0]

    def summary(self, prefix: str) -> dict[str, Any]:
        """What must be the same on every task."""
        return {
            f"{prefix}steps": self.steps,
            f"{prefix}batch size": self.global_batch_size,
            f"{prefix}number of rows": self.rows,
            f"{prefix}data": [
                f"{spec.dtype.name}{tuple(spec.shape[1:])}"
                for spec in tf.nest.flatten(self.element_spec)
                if getattr(spec, "dtype", None) is not None and spec.shape.rank
            ],
        }

    def _from_arrays(self, inputs: Any) -> tf.data.Dataset:
        rows, batch_size = self.rows, self.global_batch_size
        assert rows is not None
        assert batch_size is not None
        index, size = self._index, self._size
        # Filled anew for every pass. A variable, so that the pipeline is built and traced once.
        with tf.device("/CPU:0"):
            order = self._order = tf.Variable(tf.range(rows, dtype=tf.int64), trainable=False)
        arrays = internals.TO_SLICEABLE.find()(inputs, target_backend="tensorflow")
        arrays = keras.tree.lists_to_tuples(arrays)

        def choose(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            first = batch * batch_size
            total = tf.minimum(tf.constant(batch_size, tf.int64), rows - first)
            low, high = total * index // size, total * (index + 1) // size
            chosen = order[first + low : first + tf.maximum(high, low + 1)]
            return chosen, tf.cast(high - low, tf.int32), tf.cast(total, tf.int32)

        wrapper, slice_sparse = internals.SPARSE_WRAPPER.find(), internals.SLICE_SPARSE.find()

        def gather(chosen: tuple[tf.Tensor, tf.Tensor, tf.Tensor], data: Any) -> Any:
            ids, mine, total = chosen

            def take(leaf: Any) -> Any:
                if isinstance(leaf, wrapper):
                    return slice_sparse(leaf, ids)
                if isinstance(leaf, (list, tuple, dict)):
                    return None  # go deeper
                return tf.gather(leaf, ids, axis=0) if tf.is_tensor(leaf) else leaf

            return keras.tree.traverse(take, data), mine, total, tf.constant(0, tf.int64)

        steps = tf.data.Dataset.range(math.ceil(rows / batch_size)).map(choose)
        whole = tf.data.Dataset.from_tensors(arrays).repeat()
        dataset = tf.data.Dataset.zip((steps, whole)).map(gather, num_parallel_calls=tf.data.AUTOTUNE)
        options = tf.data.Options()
        # Keras' own choice: the graph rewrites would serialise the arrays.
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.with_options(options).prefetch(2)

    def _from_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        index, size = self._index, self._size
        for spec in tf.nest.flatten(dataset.element_spec):
            if isinstance(spec, tf.SparseTensorSpec) and size > 1:
                raise UnsupportedError(
                    "a dataset of tf.SparseTensor can not be split over the tasks yet; make it dense "
                    "(dataset.map(tf.sparse.to_dense)) or pass the sparse tensor itself as x"
                )
            if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
                raise DataError(
                    f"the dataset's elements are single rows ({spec}), not batches; add .batch(global_batch_size)"
                )

        def slice_(number: tf.Tensor, batch: Any) -> Any:
            leaves = tf.nest.flatten(batch)
            total = _rows(leaves[0])
            low, high = total * index // size, total * (index + 1) // size
            end = tf.maximum(high, low + 1)
            mine = tf.nest.map_structure(lambda leaf: leaf[low:end], batch) if size > 1 else batch
            checksum = tf.constant(0, tf.int64)
            if size > 1:
                checksum = tf.cond(number == 0, lambda: _checksum(batch), lambda: tf.constant(0, tf.int64))
            return mine, high - low, total, checksum

        return dataset.enumerate().map(slice_).prefetch(2)

    def epoch(self, epoch: int, steps_per_execution: int) -> Iterator[tuple[int, int, Any]]:
        """Yields (first step, steps, iterator) of each execution of an epoch.

        Without `steps`, each epoch is one pass over the data. With it, an epoch takes that many batches and the next
        goes on where it stopped, as Keras does; a finite dataset starts anew when it has been read once.
        """
        if self._wanted_steps is None or self._iterator is None:
            self._restart(epoch)
        step = 0
        while self.steps is None or step < self.steps:
            count = steps_per_execution if self.steps is None else min(steps_per_execution, self.steps - step)
            if self.batches and self._wanted_steps:
                count = min(count, self.batches - self._seen)
                if count <= 0:
                    self._warn_out_of_data()
                    self._restart(epoch)
                    return
            self._seen += count
            yield step, count, self._iterator
            step += count
        if self.batches and self._seen >= self.batches:
            self._iterator = None

    def ran_out(self, step: int) -> None:
        """Notes that the data ended before step `step` of an epoch."""
        if self.steps is None:
            self.steps = self.batches = step or None
        else:
            self._warn_out_of_data()
        self._iterator = None

    def _warn_out_of_data(self) -> None:
        warnings.warn(
            "Your input ran out of data; interrupting training. Make sure that your dataset can generate at least "
            "`steps_per_epoch * epochs` batches. You may need to use `.repeat()` when building your dataset.",
            stacklevel=3,
        )

    def _restart(self, epoch: int) -> None:
        if self._order is not None and self._shuffle:
            # A pure function of the agreed seed and the pass: equal on all tasks, each row once.
            number = epoch if self._wanted_steps is None else self._passes
            random = np.random.default_rng((*self._seed, number))
            order = np.arange(self.rows or 0)
            if self._shuffle == "batch":
                for first in range(0, len(order), self.global_batch_size or 1):
                    random.shuffle(order[first : first + (self.global_batch_size or 1)])
            else:
                order = random.permutation(len(order))
            self._order.assign(order)
        self._passes += 1
        self._seen = 0
        self._iterator = iter(self.dataset)


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.shape(leaf)[0]


def _batch_size(dataset: tf.data.Dataset) -> int | None:
    """Rows of a full batch, where the pipeline's own shape or its last `batch` step tells."""
    spec = tf.nest.flatten(dataset.element_spec)[0]
    static = spec.shape[0] if spec.shape.rank else None
    if static is not None:
        return int(static)
    return batch_size_of(dataset)


def _checksum(batch: Any) -> tf.Tensor:
    """A number that differs, but for one chance in 2**62, where two batches differ."""
    total = tf.constant(0, tf.int64)
    for position, part in enumerate(tf.nest.flatten(batch, expand_composites=True)):
        text = tf.io.serialize_tensor(part)
        total += tf.strings.to_hash_bucket_fast(text, 2**61) // (position + 1)
    return total
