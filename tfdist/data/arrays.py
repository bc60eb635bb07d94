"""Arrays in memory, or mapped from a file, become a pipeline: each task gathers only its own rows, by index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.pipeline import AUTOTUNE, Pipeline, check_batching, share, specs_as_text
from tfdist.errors import DataError
from tfdist.internals import keras as internals


def from_arrays(
    arrays: Any, global_batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
) -> Pipeline:
    """Returns a pipeline over rows of arrays: the same order on every task, each row once per epoch over all tasks.

    Going to any step costs nothing. With `shuffle`, the order of an epoch is
    `numpy.random.default_rng((seed, epoch)).permutation(rows)`: a function of seed and epoch alone, so it is another
    one in every epoch, and the same one in every task and every run.

    Args:
        arrays: What `fit` takes, as one value: x, (x, y), (x, y, sample_weight), each an array, or a dict, tuple or
            list of arrays with the same number of rows. NumPy arrays (of `np.load(path, mmap_mode="r")` each task reads
            only its own rows), tensors, ragged and sparse ones too, and data frames. Floats become
            `keras.config.floatx()`, as in `fit`.
        global_batch_size: Rows of one step over all tasks.
        shuffle: Whether each epoch has an order of its own.
        seed: A whole number that chooses the orders.
        drop_remainder: Whether the rows that do not fill a last batch are left out.

    Raises:
        DataError: Arrays of different lengths, or something that is no array.

    Example:
        train = tfdist.data.from_arrays((x, y), 128, shuffle=True, seed=7)
        model.fit(train, epochs=5)
    """
    check_batching(global_batch_size, seed)
    arrays = keras.tree.lists_to_tuples(arrays)
    rows = _rows_of(arrays)
    if drop_remainder:
        if rows < global_batch_size:
            raise DataError(f"{rows} rows fill no batch of {global_batch_size}: leave out drop_remainder=True")
        rows -= rows % global_batch_size
    return ArrayPipeline(arrays, rows, int(global_batch_size), bool(shuffle), int(seed), bool(drop_remainder))


@dataclass(frozen=True, eq=False, repr=False)
class ArrayPipeline(Pipeline):
    """See `from_arrays`."""

    arrays: Any
    rows: int
    global_batch_size: int
    shuffle: bool
    seed: int
    drop_remainder: bool

    def __repr__(self) -> str:
        parts = keras.tree.flatten(self.arrays)
        shapes = ", ".join("None" if part is None else f"{_dtype(part)}{tuple(part.shape)}" for part in parts)
        how = (f", shuffle=True, seed={self.seed}" if self.shuffle else "") + (
            ", drop_remainder=True" if self.drop_remainder else ""
        )
        return f"from_arrays({shapes}, global_batch_size={self.global_batch_size}{how})"

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return -(-self.rows // self.global_batch_size)

    @property
    def fingerprint(self) -> dict[str, object]:
        return {
            "source": "arrays",
            "rows": self.rows,
            "global batch size": self.global_batch_size,
            "shuffle": self.seed if self.shuffle else None,
            "data": specs_as_text(self.element_spec),
        }

    @cached_property
    def element_spec(self) -> Any:
        return self.for_task(0, 1).element_spec[0]

    @cached_property
    def _parts(self) -> tuple[Any, ...]:
        # Made when first asked for, and once: it starts TensorFlow's runtime, which create_strategy must come before.
        convert = internals.TO_SLICEABLE.find()
        with tf.device("/CPU:0"):
            return tuple(
                None if isinstance(part, np.memmap) else convert(_with_strings(part), target_backend="tensorflow")
                for part in keras.tree.flatten(self.arrays)
            )

    def _for_task(self, index: int, size: int, epoch: int, start_step: int) -> tf.data.Dataset:
        batch_size, rows = self.global_batch_size, self.rows
        originals = keras.tree.flatten(self.arrays)
        order = np.random.default_rng((self.seed, epoch)).permutation(_rows_of(self.arrays)) if self.shuffle else None

        @tf.autograph.experimental.do_not_convert
        def gather(step: tf.Tensor, whole: tuple[Any, ...]) -> Any:
            parts, order, _ = whole
            first = step * batch_size
            total = tf.minimum(tf.constant(batch_size, tf.int64), rows - first)
            low, high = share(total, index, size)
            end = tf.maximum(high, low + 1)
            chosen = tf.range(first + low, first + end) if order is None else order[first + low : first + end]
            mine = [_take(part, original, chosen) for part, original in zip(parts, originals, strict=True)]
            data = keras.tree.pack_sequence_as(self.arrays, mine)
            return data, tf.cast(high - low, tf.int32), tf.cast(total, tf.int32)

        with tf.device("/CPU:0"):
            # Of mapped files alone there may be nothing to hand over, and a dataset must have something.
            whole = tf.data.Dataset.from_tensors((self._parts, order, 0)).repeat()
            steps = tf.data.Dataset.range(start_step, self.steps_per_epoch)
            dataset = tf.data.Dataset.zip((steps, whole)).map(gather, num_parallel_calls=AUTOTUNE)
        options = tf.data.Options()
        # The graph rewrites would serialise the arrays.
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.with_options(options)


def _with_strings(part: Any) -> Any:
    """NumPy's own strings as tensors, since Keras' conversion knows those of dtype object alone."""
    return tf.constant(part) if isinstance(part, np.ndarray) and part.dtype.kind in "US" else part


def _take(part: Any, original: Any, chosen: tf.Tensor) -> Any:
    """Rows of one array, in a graph."""
    if isinstance(original, np.memmap):
        return _read(original, chosen)
    if part is None:
        return None
    if isinstance(part, internals.SPARSE_WRAPPER.find()):
        return internals.SLICE_SPARSE.find()(part, chosen)
    return tf.gather(part, chosen, axis=0)


def _read(array: np.memmap[Any, Any], chosen: tf.Tensor) -> tf.Tensor:
    dtype = array.dtype.newbyteorder("=")  # TensorFlow takes the bytes of a big-endian array for this machine's
    if np.issubdtype(dtype, np.floating):
        dtype = np.dtype(keras.config.floatx())
    taken = tf.numpy_function(lambda ids: np.asarray(array[ids], dtype), [chosen], tf.as_dtype(dtype), stateful=False)
    return tf.ensure_shape(taken, (None, *array.shape[1:]))


def _dtype(part: Any) -> str:
    dtype = getattr(part, "dtype", None)
    return getattr(dtype, "name", None) or str(dtype or type(part).__name__)


def _rows_of(arrays: Any) -> int:
    lengths = {}
    for path, part in keras.tree.flatten_with_path(arrays):
        if part is None:
            continue
        name = "arrays" + "".join(f"[{key!r}]" for key in path)
        shape = getattr(part, "shape", None)
        if shape is None:
            raise DataError(
                f"{name} is a {type(part).__name__}: pass arrays or tensors (numpy.asarray makes one of a list)"
            )
        if not len(shape):
            raise DataError(f"{name} is a single value: the first dimension of an array counts its rows")
        lengths[name] = int(shape[0])
    if not lengths:
        raise DataError("there is no array to read from")
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise DataError(f"{first} has {rows} rows and {name} has {length}: they must have the same number of rows")
    if not rows:
        raise DataError(f"{first} has no rows")
    return rows
