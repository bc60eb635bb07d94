"""Files become a pipeline of exact global batches, whatever their number and sizes.

Every task enumerates the records of all files in one order, and parses only those of its own rows. So reading is
repeated on every task (it is cheap: bytes from the disk or the page cache), parsing and mapping, which cost the time,
are shared. Splitting by file instead would save the reading, but gives exact batches only to files of equal sizes whose
number the tasks divide.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.pipeline import (
    AUTOTUNE,
    Pipeline,
    call,
    check_batching,
    count_rows,
    head,
    name_of,
    share,
    specs_as_text,
)
from tfdist.errors import DataError

# A shuffled epoch reads so many files at the same time, so many records of each in turn.
FILES_AT_ONCE = 16
RECORDS_IN_TURN = 16

Reader = Callable[[tf.Tensor], tf.data.Dataset]
Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def from_files(
    patterns: Patterns,
    reader: Reader,
    parse: Callable[..., Any] | None = None,
    *,
    global_batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    shuffle_window: int = 4096,
    drop_remainder: bool = False,
) -> Pipeline:
    """Returns a pipeline over the records of files: exact batches, each record once per epoch over all tasks.

    Fewer files than tasks, files of unequal sizes and a single file are fine: every task reads the records of all
    files, in the same order, and parses those of its own rows alone. So keep `reader` cheap (bytes), and put decoding
    and augmentation into `parse`, which runs in parallel and ahead of the steps.

    Without `shuffle`, records come in the order of the sorted file names. With it, an epoch reads the files in an order
    of its own, 16 at a time, 16 records of each in turn, and gives each window of `shuffle_window` records a random
    order: all of it a function of seed and epoch. Beginning at a later step reads past the records before it, without
    parsing them.

    Args:
        patterns: A file name or pattern such as "data/train-*.tfrecord", or several.
        reader: A function of one file name (a string tensor) that returns a `tf.data.Dataset` of its records, the same
            ones each time. Among others:

            - TFRecord: `tf.data.TFRecordDataset`
            - lines of text: `tf.data.TextLineDataset`
            - CSV with a header: `lambda file: tf.data.TextLineDataset(file).skip(1)`, and
              `parse=lambda line: tf.io.decode_csv(line, [0.0, 0.0, 0])`
            - records of 28 bytes: `lambda file: tf.data.FixedLengthRecordDataset(file, 28)`
        parse: A function of one record, as for `tf.data.Dataset.map`, that returns one example: (x, y), say. Examples
            are stacked into batches, so they need equal shapes. What works on whole batches of records, such as
            `tf.io.parse_example`, goes into `.map` of the pipeline instead.
        global_batch_size: Rows of one step over all tasks.
        shuffle: Whether each epoch has an order of its own.
        seed: A whole number that chooses the orders.
        shuffle_window: Records that are held and shuffled together, rounded up to whole batches.
        drop_remainder: Whether the records that do not fill a last batch are left out.

    Raises:
        DataError: A pattern that no file matches.

    Example:
        def parse(record):
            example = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([4], tf.float32)})
            return example["x"]

        train = tfdist.data.from_files("train-*.tfrecord", tf.data.TFRecordDataset, parse, global_batch_size=64)
    """
    check_batching(global_batch_size, seed)
    for name, fn in (("reader", reader), ("parse", parse)):
        if not callable(fn) and not (fn is None and name == "parse"):
            raise DataError(f"{name}={fn!r} is no function; for TFRecord files, say, reader is tf.data.TFRecordDataset")
    if shuffle_window < 1:
        raise DataError(f"shuffle_window={shuffle_window!r}: give the records that are shuffled together, 1 or more")
    return FilePipeline(
        _list(patterns),
        reader,
        parse,
        int(global_batch_size),
        bool(shuffle),
        int(seed),
        -(-int(shuffle_window) // int(global_batch_size)) if shuffle else 1,
        bool(drop_remainder),
    )


@dataclass(frozen=True, eq=False, repr=False)
class FilePipeline(Pipeline):
    """See `from_files`; `window` counts batches."""

    files: tuple[str, ...]
    reader: Reader
    parse: Callable[..., Any] | None
    global_batch_size: int
    shuffle: bool
    seed: int
    window: int
    drop_remainder: bool

    rows = None
    steps_per_epoch = None

    def __repr__(self) -> str:
        files = repr(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files from {self.files[0]!r} on"
        parts = [files, name_of(self.reader)]
        parts += [] if self.parse is None else [name_of(self.parse)]
        parts.append(f"global_batch_size={self.global_batch_size}")
        if self.shuffle:
            parts.append(f"shuffle=True, seed={self.seed}, shuffle_window={self.window * self.global_batch_size}")
        parts += ["drop_remainder=True"] if self.drop_remainder else []
        return f"from_files({', '.join(parts)})"

    @property
    def fingerprint(self) -> dict[str, object]:
        # The folder may differ from host to host.
        names = "\n".join(os.path.basename(file) for file in self.files)
        return {
            "source": "files",
            "files": f"{len(self.files)}, checksum of the names {zlib.crc32(names.encode()):08x}",
            "global batch size": self.global_batch_size,
            "shuffle": (self.seed, self.window) if self.shuffle else None,
            "drop remainder": self.drop_remainder,
            "data": specs_as_text(self.element_spec),
        }

    @cached_property
    def element_spec(self) -> Any:
        return self.for_task(0, 1).element_spec[0]

    def _for_task(self, index: int, size: int, epoch: int, start_step: int) -> tf.data.Dataset:
        # What one task has of a batch at most. Constant, so that rows can be parsed one by one, in parallel, and
        # stacked again; what a smaller share lacks is filled up and cut off.
        most = -(-self.global_batch_size // size)
        windows, steps = divmod(start_step, self.window)
        records, unpack = _packed(self._records(epoch))
        records = records.skip(windows * self.window * self.global_batch_size)
        chosen = (
            records.batch(self.window * self.global_batch_size)
            .enumerate(windows)
            .map(self._choose(index, size, most, epoch), num_parallel_calls=AUTOTUNE)
            .unbatch()
            .skip(steps * most)
        )
        parse = self.parse

        def example(record: Any, counts: tf.Tensor) -> Any:
            record = unpack(record)
            return record if parse is None else call(parse, record), counts

        @tf.autograph.experimental.do_not_convert
        def cut(data: Any, counts: tf.Tensor) -> Any:
            rows, total = tf.unstack(counts[0])
            return head(data, tf.maximum(rows, 1)), rows, total

        return chosen.map(example, num_parallel_calls=AUTOTUNE).batch(most, drop_remainder=True).map(cut)

    def _records(self, epoch: int) -> tf.data.Dataset:
        """The records of all files, in the same order on every task."""
        reader, wrong = self.reader, []

        def read(file: tf.Tensor) -> tf.data.Dataset:
            records = reader(file)
            if isinstance(records, tf.data.Dataset):
                return records
            # An error raised here would be wrapped in one of TensorFlow's.
            wrong.append(type(records).__name__)
            return tf.data.Dataset.from_tensors(0)

        names = list(self.files)
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(names))
            names = [names[place] for place in order]
        records = tf.data.Dataset.from_tensor_slices(names)
        if self.shuffle:
            records = records.interleave(
                read,
                cycle_length=min(FILES_AT_ONCE, len(names)),
                block_length=RECORDS_IN_TURN,
                num_parallel_calls=AUTOTUNE,
                deterministic=True,
            )
        else:
            records = records.flat_map(read)
        if wrong:
            raise DataError(
                f"the reader {name_of(reader)} returned a {wrong[0]}: it gets one file name and must return a "
                "tf.data.Dataset of its records"
            )
        return records

    def _choose(self, index: int, size: int, most: int, epoch: int) -> Callable[..., Any]:
        """Of a window of records, `most` per batch: this task's own, then others in their place."""
        batch_size, shuffle, drop_remainder = self.global_batch_size, self.shuffle, self.drop_remainder
        # Not tf.data's shuffle: its order depends on TensorFlow's global seed, too, which may differ between tasks.
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)[0] >> 1)

        @tf.autograph.experimental.do_not_convert
        def choose(number: tf.Tensor, window: Any) -> Any:
            length = count_rows(window)
            order = tf.range(length)
            if shuffle:
                order = tf.random.experimental.stateless_shuffle(order, seed=tf.stack([seed, number]))
            batches = length // batch_size if drop_remainder else -(-length // batch_size)
            first = tf.range(batches) * batch_size
            total = tf.minimum(batch_size, length - first)
            low, high = share(total, index, size)
            within = tf.minimum(low[:, tf.newaxis] + tf.range(most), total[:, tf.newaxis] - 1)
            rows = tf.gather(order, tf.reshape(first[:, tf.newaxis] + within, [-1]))
            mine = tf.nest.map_structure(lambda part: tf.gather(part, rows), window)
            each = tf.broadcast_to(tf.stack([high - low, total], axis=1)[:, tf.newaxis], [batches, most, 2])
            return mine, tf.reshape(each, [-1, 2])

        return choose


def _packed(records: tf.data.Dataset) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
    """Records that can be stacked whatever their shapes, and the function that gives one back as it was."""
    spec = records.element_spec
    parts = tf.nest.flatten(spec)
    if all(isinstance(part, tf.TensorSpec) and part.shape.is_fully_defined() for part in parts):
        return records, lambda record: record
    flat = tf.nest.flatten(spec, expand_composites=True)

    @tf.autograph.experimental.do_not_convert
    def pack(*record: Any) -> Any:
        record = record if type(spec) is tuple else record[0]
        return tf.stack([tf.io.serialize_tensor(part) for part in tf.nest.flatten(record, expand_composites=True)])

    @tf.autograph.experimental.do_not_convert
    def unpack(text: tf.Tensor) -> Any:
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(text[place], part.dtype), part.shape) for place, part in enumerate(flat)
        ]
        return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)

    return records.map(pack, num_parallel_calls=AUTOTUNE), unpack


def _list(patterns: Patterns) -> tuple[str, ...]:
    """The files that the patterns match, sorted, each once."""
    single = isinstance(patterns, (str, os.PathLike))
    files: list[str] = []
    for pattern in [patterns] if single else patterns:  # type: ignore[union-attr]
        text = os.fspath(pattern)  # type: ignore[arg-type]
        # A name may hold characters that mean something in a pattern.
        found = [text] if tf.io.gfile.exists(text) else tf.io.gfile.glob(text)
        if not found:
            raise DataError(f"no file matches {text!r}")
        folders = [file for file in found if tf.io.gfile.isdir(file)]
        if folders:
            raise DataError(f"{folders[0]!r} is a folder: name its files, {os.path.join(folders[0], '*')!r}")
        files += found
    if not files:
        raise DataError("patterns is empty: name at least one file")
    return tuple(sorted(dict.fromkeys(files)))
