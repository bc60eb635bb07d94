"""Files: exact batches, each record once per epoch over all tasks, whatever the number and sizes of the files."""

from __future__ import annotations

import collections
import struct

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError

SIZES = {"one file": [13], "unequal files": [1, 7, 0, 5], "empty at the ends": [0, 6, 0], "one record": [1]}


@pytest.fixture
def write(tmp_path):
    """(sizes, kind) -> a pattern of files with those numbers of records, which count up from 0."""

    def files(sizes, kind="text"):
        numbers = iter(range(sum(sizes)))
        for place, size in enumerate(sizes):
            path = str(tmp_path / f"part-{place:02d}")
            mine = [next(numbers) for _ in range(size)]
            if kind == "tfrecord":
                with tf.io.TFRecordWriter(path) as writer:
                    for number in mine:
                        feature = {"x": tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))}
                        writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
            elif kind == "fixed":
                (tmp_path / path).write_bytes(b"".join(struct.pack("<i", number) for number in mine))
            else:
                header = "number,half\n" if kind == "csv" else ""
                lines = [f"{number},{number / 2}" if kind == "csv" else f"{number}" for number in mine]
                (tmp_path / path).write_text(header + "".join(line + "\n" for line in lines))
        return str(tmp_path / "part-*")

    return files


def number(line):
    return tf.strings.to_number(line, tf.int64)


def feature(record):
    return tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.int64)})["x"]


def csv(line):
    return tf.io.decode_csv(line, [0, 0.0])[0]


READERS = {
    "text": (tf.data.TextLineDataset, number),
    "tfrecord": (tf.data.TFRecordDataset, feature),
    "csv": (lambda file: tf.data.TextLineDataset(file).skip(1), csv),
    "csv dataset": (lambda file: tf.data.experimental.CsvDataset(file, [0, 0.0], header=True), lambda n, half: n),
    "fixed": (
        lambda file: tf.data.FixedLengthRecordDataset(file, 4),
        lambda record: tf.reshape(tf.io.decode_raw(record, tf.int32), []),
    ),
}


def lines(pattern, batch_size, **arguments):
    return tfdist.data.from_files(pattern, tf.data.TextLineDataset, number, global_batch_size=batch_size, **arguments)


@pytest.mark.parametrize("kind", READERS)
def test_every_kind_of_file_is_shared_by_tasks(kind, write, in_order, cut):
    pattern = write([4, 9], kind.removesuffix(" dataset"))
    reader, parse = READERS[kind]
    pipeline = tfdist.data.from_files(pattern, reader, parse, global_batch_size=5)
    assert in_order(pipeline, 2) == cut(range(13), 5)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("batch_size", "size"), [(4, 1), (4, 2), (1, 3), (4, 3), (8, 5)])
def test_batches_are_exact_whatever_the_files(sizes, batch_size, size, write, in_order, cut):
    assert in_order(lines(write(sizes), batch_size), size) == cut(range(sum(sizes)), batch_size)


def test_a_share_that_is_larger_in_the_last_batch_is_whole(write, in_order, cut):
    # Of 8 rows the third of five tasks gets one, of 7 it gets two.
    assert in_order(lines(write([15]), 8), 5) == cut(range(15), 8)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_shuffled_epoch_has_each_record_once_in_an_order_that_all_tasks_share(size, write, in_order):
    pipeline = lines(write([30, 3, 0, 20, 7]), 8, shuffle=True, seed=3, shuffle_window=16)
    batches = in_order(pipeline, size, epoch=1)
    order = [row for batch in batches for row in batch]
    assert [len(batch) for batch in batches] == [8] * 7 + [4]
    assert sorted(order) == list(range(60))
    assert order != sorted(order)
    assert batches == in_order(pipeline, 1, epoch=1)


def test_the_order_depends_on_seed_and_epoch_and_on_no_seed_of_tensorflow(write, in_order):
    pattern = write([10, 10, 10])

    def order(seed, epoch, other):
        tf.random.set_seed(other)
        return tuple(in_order(lines(pattern, 30, shuffle=True, seed=seed), 1, epoch=epoch)[0])

    assert order(1, 1, other=5) == order(1, 1, other=6)
    assert len({order(0, 0, 5), order(0, 1, 5), order(1, 0, 5), order(1, 1, 5)}) == 4


def test_a_window_as_large_as_the_data_mixes_all_of_it(write, in_order):
    pattern = write([64])
    orders = np.array([in_order(lines(pattern, 64, shuffle=True), 1, epoch=epoch)[0] for epoch in range(6)])
    # The mean of 384 draws from 0..63, first halves only, has a standard deviation of 1.3.
    assert abs(orders[:, :32].mean() - 31.5) < 6
    assert len({tuple(order) for order in orders}) == 6


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_can_be_entered_at_any_step(shuffle, write, in_order):
    pipeline = lines(write([9, 20]), 4, shuffle=shuffle, seed=1, shuffle_window=12)
    whole = in_order(pipeline, 2, epoch=2)
    for start_step in (1, 3, 5, 7, 8, 9):
        assert in_order(pipeline, 2, epoch=2, start_step=start_step) == whole[start_step:]


def test_the_remainder_is_dropped_on_request(write, in_order, cut):
    assert in_order(lines(write([9, 5]), 4, drop_remainder=True), 3) == cut(range(14), 4, drop_remainder=True)


def test_a_task_parses_its_own_records_only(write):
    parsed = collections.Counter()

    def note(line):
        parsed[line.numpy()] += 1
        return int(line.numpy())

    def parse(line):
        return tf.ensure_shape(tf.py_function(note, [line], tf.int64), [])

    pipeline = tfdist.data.from_files(write([12, 12]), tf.data.TextLineDataset, parse, global_batch_size=6)
    for _ in pipeline.for_task(1, 3):
        pass
    assert sorted(int(line) for line in parsed) == [row for row in range(24) if row % 6 in (2, 3)]
    assert set(parsed.values()) == {1}


def test_records_of_unequal_shapes_are_grouped_before_they_are_parsed(write, in_order, cut):
    def reader(file):
        return tf.data.TextLineDataset(file).map(lambda line: {"ids": tf.repeat(number(line), 1 + number(line) % 3)})

    pipeline = tfdist.data.from_files(write([7, 4]), reader, lambda record: record["ids"][0], global_batch_size=4)
    assert in_order(pipeline, 2) == cut(range(11), 4)


def test_examples_keep_their_structure(write):
    def parse(line):
        return {"x": number(line), "text": line}, tf.cast(number(line), tf.float32)

    pipeline = tfdist.data.from_files(write([5]), tf.data.TextLineDataset, parse, global_batch_size=5)
    (x, y), rows, _ = next(iter(pipeline.for_task(1, 2)))
    assert x["text"].numpy().tolist() == [b"2", b"3", b"4"]
    assert y.numpy().tolist() == [2.0, 3.0, 4.0]
    assert int(rows) == 3
    assert pipeline.element_spec[0]["x"] == tf.TensorSpec([None], tf.int64)


def test_whole_batches_of_records_can_be_parsed_at_once(write, in_order, cut):
    pipeline = tfdist.data.from_files(write([6, 5]), tf.data.TextLineDataset, global_batch_size=4).map(number)
    assert in_order(pipeline, 3) == cut(range(11), 4)


def test_files_are_sorted_and_each_is_read_once(tmp_path, write, in_order, cut):
    pattern = write([2, 2, 2])
    paths = [tmp_path / "part-02", pattern, str(tmp_path / "part-01")]
    assert in_order(lines(paths, 3), 1) == cut(range(6), 3)


def test_a_name_may_hold_characters_of_patterns(tmp_path, in_order):
    (tmp_path / "a[1].txt").write_text("0\n1\n")
    assert in_order(lines(tmp_path / "a[1].txt", 2), 1) == [[0, 1]]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (lambda folder: folder / "no-*", "no file matches '.*no-\\*'"),
        (lambda folder: folder, r"is a folder: name its files, '.*/\*'"),
        (lambda folder: [], "patterns is empty"),
    ],
)
def test_patterns_without_files_say_so(patterns, message, tmp_path):
    with pytest.raises(DataError, match=message):
        lines(patterns(tmp_path), 2)


def test_a_reader_that_returns_no_dataset_is_named(write):
    def reader(file):
        return tf.io.read_file(file)

    pipeline = tfdist.data.from_files(write([3]), reader, global_batch_size=2)
    with pytest.raises(DataError, match=r"the reader .*reader returned a \w*Tensor: .* must return a tf.data.Dataset"):
        pipeline.for_task(0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "global_batch_size=0: give the rows"),
        ({"batch_size": 2, "seed": -1}, "seed=-1: give a whole number"),
        ({"batch_size": 2, "seed": None}, "seed=None: give a whole number"),
        ({"batch_size": 2, "shuffle_window": 0}, "shuffle_window=0"),
    ],
)
def test_arguments_that_can_not_be_are_refused(arguments, message, write):
    with pytest.raises(DataError, match=message):
        lines(write([2]), **arguments)


def test_it_says_what_it_is(write, tmp_path):
    text = repr(lines(write([2, 2]), 2, shuffle=True, seed=4, shuffle_window=5))
    assert text == (
        f"from_files(2 files from '{tmp_path}/part-00' on, TextLineDatasetV2, number, global_batch_size=2, "
        "shuffle=True, seed=4, shuffle_window=6)"
    )


@pytest.mark.parametrize("arguments", [{"reader": "tfrecord"}, {"reader": tf.data.TextLineDataset, "parse": "csv"}])
def test_a_reader_or_parser_that_is_no_function_is_refused_at_once(arguments, tmp_path):
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(DataError, match="is no function"):
        tfdist.data.from_files(tmp_path / "a.txt", **arguments, global_batch_size=2)
