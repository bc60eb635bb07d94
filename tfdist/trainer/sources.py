"""One kind of input each -> a `Source`: this task's rows of every global batch, and how a pass over them begins.

A global batch is what one process would see; task i of n takes its contiguous rows [rows*i//n, rows*(i+1)//n).

- Arrays are indexed, so each task gathers only its own rows.
- A dataset, a PyDataset or a generator is read whole by every task and sliced last: exact for any pipeline, but its
  work is repeated on every task.
- What is split already (`strategy.experimental_distribute_dataset`, `distribute_datasets_from_function`) is taken as it
  comes: the batches of all tasks together are the global batch.

Each element of a source's dataset is (data, rows, total, checksum): this task's rows, their number (0 where `data` is
only a stand-in row), the rows of the whole batch (-1 where only the sum over tasks tells), and a checksum of the whole
batch (0 where none is needed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import batch_size_of


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Source:
    """Input of one kind, as this task reads it.

    Attributes:
        element_spec: The structure of an element's data, rows unknown.
        start: The number of a pass -> an iterator over its elements.
        finish: Called at the end of a pass.
        reset: Called before the first pass of a `fit`, and before each evaluation, as Keras does.
        renew: Called after a pass whose length was known. Keras begins another pass there (epoch_iterator.py,
            `_enumerate_iterator`), which it never reads: a dataset that shuffles draws an order for it.
        batches: Global batches in a pass, or None where that is unknown.
        global_batch_size: Rows of a full batch, or None where that is unknown.
        rows: Rows in a pass, or None where that is unknown.
        split: "indexed" (each task reads its own rows of batches it knows), "sliced" (every task reads the whole
            batches, so they must be the same), or "own" (every task brings rows of its own, whose number is summed).
        fingerprint: What else must be the same on every task, by name.
    """

    element_spec: Any
    start: Callable[[int], Iterator[Any]]
    split: str
    batches: int | None = None
    global_batch_size: int | None = None
    rows: int | None = None
    finish: Callable[[], None] = _nothing
    reset: Callable[[], None] = _nothing
    renew: Callable[[], Any] = _nothing
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


# -- arrays


def from_arrays(adapter: Any, index: int, size: int, *, shuffle: Any, seed: tuple[int, ...]) -> Source:
    """Arrays: every row once per pass, in an order that is a pure function of seed and pass."""
    inputs, rows, batch_size = internals.array_inputs(adapter)
    # Filled anew for every pass. A variable, so that the pipeline is built and traced once.
    with tf.device("/CPU:0"):
        order = tf.Variable(tf.range(rows, dtype=tf.int64), trainable=False)
    arrays = keras.tree.lists_to_tuples(internals.TO_SLICEABLE.find()(inputs, target_backend="tensorflow"))

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
    dataset = dataset.with_options(options).prefetch(2)

    def start(number: int) -> Iterator[Any]:
        if shuffle:
            order.assign(shuffled(rows, batch_size if shuffle == "batch" else None, (*seed, number)))
        return iter(dataset)

    return Source(
        dataset.element_spec[0],
        start,
        "indexed",
        adapter.num_batches,
        batch_size,
        rows,
        fingerprint={} if size == 1 else {"first and last rows (checksum)": _ends(arrays, rows, slice_sparse, wrapper)},
    )


def _ends(arrays: Any, rows: int, slice_sparse: Callable[..., Any], wrapper: type) -> int:
    """A checksum of some rows: tasks that were given other rows, or the same in another order, differ in it."""
    ids = np.unique(np.concatenate([np.arange(min(rows, 32)), np.arange(max(0, rows - 32), rows)]))

    def take(leaf: Any) -> Any:
        if isinstance(leaf, wrapper):
            return slice_sparse(leaf, tf.constant(ids))
        return None if isinstance(leaf, (list, tuple, dict)) else tf.gather(leaf, ids, axis=0)

    return int(_checksum(keras.tree.traverse(take, arrays)))


def shuffled(count: int, block: int | None, seed: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns 0..count-1 in random order, or shuffled only inside blocks of `block`."""
    random = np.random.default_rng(seed)
    if block is None:
        return random.permutation(count)
    order = np.arange(count)
    for first in range(0, count, block):
        random.shuffle(order[first : first + block])
    return order


# -- whole batches, sliced


def from_dataset(dataset: tf.data.Dataset, index: int, size: int, batches: int | None) -> Source:
    """A dataset of global batches, the same on every task."""
    sliced = _slice(dataset, index, size)
    return Source(
        sliced.element_spec[0],
        lambda number: iter(sliced),
        "sliced",
        batches,
        global_batch_size=_batch_size(dataset),
        renew=lambda: iter(sliced),
    )


class _Ordered(keras.utils.PyDataset):
    """A PyDataset whose batches come in another order, chosen anew for each pass."""

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self.order: Any = None

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index if self.order is None else int(self.order[index])]

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def from_py_dataset(
    dataset: keras.utils.PyDataset, index: int, size: int, *, shuffle: Any, seed: tuple[int, ...], class_weight: Any
) -> Source:
    """A PyDataset: its batches are global batches; `shuffle` changes their order, as in Keras."""
    ordered = _Ordered(dataset)
    adapter = internals.GET_ADAPTER.find()(ordered, class_weight=class_weight)
    batches = adapter.num_batches
    sliced = _slice(adapter.get_tf_dataset(), index, size)

    def start(number: int) -> Iterator[Any]:
        if shuffle and batches:
            ordered.order = shuffled(batches, None, (*seed, number))
        adapter.on_epoch_begin()
        return iter(sliced)

    end = adapter.on_epoch_end  # Keras calls it at the end of each pass, and once before the first
    return Source(sliced.element_spec[0], start, "sliced", batches, finish=end, reset=end)


def from_generator(adapter: Any, index: int, size: int) -> Source:
    """A Python generator of global batches, which every task runs for itself."""
    sliced = _slice(adapter.get_tf_dataset(), index, size)
    return Source(sliced.element_spec[0], lambda number: iter(sliced), "sliced")


def _slice(dataset: tf.data.Dataset, index: int, size: int) -> tf.data.Dataset:
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise DataError(
                f"the dataset's elements are single rows ({spec}), not batches; add .batch(global_batch_size)"
            )

    def slice_(number: tf.Tensor, batch: Any) -> Any:
        return slice_batch(batch, index, size, number == 0)

    return dataset.enumerate().map(slice_).prefetch(2)


def slice_batch(batch: Any, index: int, size: int, with_checksum: Any = True) -> Any:
    """Returns (data, rows, total, checksum): this task's rows of a batch that every task holds."""
    total = _rows(tf.nest.flatten(batch)[0])
    if size == 1:
        return batch, total, total, tf.constant(0, tf.int64)
    low, high = total * index // size, total * (index + 1) // size
    checks = [
        tf.debugging.assert_equal(
            _rows(leaf), total, "each part of a batch must have one entry per row, or the tasks can't take theirs"
        )
        for leaf in tf.nest.flatten(batch)
        if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        low = tf.identity(low)
    mine = tf.nest.map_structure(lambda leaf: _take(leaf, low, tf.maximum(high, low + 1)), batch)
    checksum = tf.cond(
        tf.constant(with_checksum) if isinstance(with_checksum, bool) else with_checksum,
        lambda: _checksum(batch),
        lambda: tf.constant(0, tf.int64),
    )
    return mine, high - low, total, checksum


def _take(leaf: Any, low: tf.Tensor, end: tf.Tensor) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[low:end]
    rank = leaf.shape.rank
    start = tf.concat([[tf.cast(low, tf.int64)], tf.zeros([rank - 1], tf.int64)], 0)
    size = tf.concat([[tf.cast(end - low, tf.int64)], leaf.dense_shape[1:]], 0)
    part = tf.sparse.slice(leaf, start, size)
    part = tf.SparseTensor(part.indices, part.values, size)
    part.set_shape([None, *leaf.shape[1:]])
    return part


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _batch_size(dataset: tf.data.Dataset) -> int | None:
    """Rows of a full batch, where the pipeline's own shape or its last `batch` step tells."""
    spec = tf.nest.flatten(dataset.element_spec)[0]
    static = spec.shape[0] if spec.shape.rank else None
    return int(static) if static is not None else batch_size_of(dataset)


def _checksum(batch: Any) -> tf.Tensor:
    """A number that differs, but for one chance in 2**62, where two batches differ."""
    total = tf.constant(0, tf.int64)
    for position, part in enumerate(tf.nest.flatten(batch, expand_composites=True)):
        text = tf.io.serialize_tensor(part)
        total += tf.strings.to_hash_bucket_fast(text, 2**61) // (position + 1)
    return total


# -- pipelines


class Pipeline(Protocol):
    """What a `tfdist.data` pipeline is to the trainer; see `tfdist.data.pipeline`."""

    steps_per_epoch: int | None
    global_batch_size: int | None
    rows: int | None
    has_own_batches: bool

    def for_task(self, index: int, size: int, *, epoch: int = 0, start_step: int = 0) -> tf.data.Dataset: ...

    def own_batches(self, index: int, size: int, epoch: int) -> tf.data.Dataset: ...

    @property
    def element_spec(self) -> Any: ...

    @property
    def fingerprint(self) -> Mapping[str, Any]: ...


def is_pipeline(x: Any) -> bool:
    return callable(getattr(x, "for_task", None)) and hasattr(x, "fingerprint")


def from_pipeline(pipeline: Pipeline, index: int, size: int) -> Source:
    """A pipeline that knows each task's part by itself; an epoch of it is a pass."""

    def start(number: int) -> Iterator[Any]:
        dataset = pipeline.for_task(index, size, epoch=number)
        return iter(dataset.map(lambda data, rows, total: (data, rows, total, tf.constant(0, tf.int64))))

    return Source(
        pipeline.element_spec,
        start,
        # Where it does not know its rows, those of a step are known when the tasks have told each other.
        "own" if pipeline.rows is None else "indexed",
        pipeline.steps_per_epoch,
        pipeline.global_batch_size,
        pipeline.rows,
        fingerprint=pipeline.fingerprint,
    )


# -- rows of each task's own


def from_own(dataset: tf.data.Dataset) -> Source:
    """A dataset that holds this task's rows only: what TensorFlow's own distribution gives it."""

    def counted(*batch: Any) -> Any:
        data = batch if len(batch) > 1 else batch[0]
        rows = _rows(tf.nest.flatten(data)[0])
        return data, rows, tf.constant(-1), tf.constant(0, tf.int64)

    # A batch without rows still needs one to run.
    padded = dataset.map(counted).map(_with_a_row).prefetch(2)
    batches = int(dataset.cardinality())
    return Source(padded.element_spec[0], lambda number: iter(padded), "own", batches if batches >= 0 else None)


def _with_a_row(data: Any, rows: tf.Tensor, total: tf.Tensor, checksum: tf.Tensor) -> Any:
    def padded(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        shape = tf.concat([[tf.maximum(tf.shape(leaf)[0], 1)], tf.shape(leaf)[1:]], 0)
        filled = tf.cond(rows > 0, lambda: leaf, lambda: _blank(shape, leaf.dtype))
        filled.set_shape([None, *leaf.shape[1:]])
        return filled

    return tf.nest.map_structure(padded, data), rows, total, checksum


def _blank(shape: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.fill(shape, "") if dtype == tf.string else tf.zeros(shape, dtype)


def stand_in(spec: Any) -> Any:
    """Returns one row of zeros of this structure, for a task that has never had a row."""

    def blank(leaf: Any) -> Any:
        if not isinstance(leaf, tf.TensorSpec):
            raise DataError(f"this task has no rows at all, and a row of {leaf} can't be made up; give it some")
        return _blank(tf.constant([1, *(d or 1 for d in leaf.shape[1:])]), leaf.dtype)

    return tf.nest.map_structure(blank, spec)
