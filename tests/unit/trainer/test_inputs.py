"""What each task gets of every global batch: all tasks together get each row once, in order."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.internals.keras import MAX_STEPS
from tfdist.trainer.inputs import Input


def rows_of(data: Input, epoch: int = 0, steps_per_execution: int = 1) -> list[tuple[list[int], int]]:
    """Per step: the rows that count, and the size of the global batch."""
    result = []
    for _, count, iterator in data.epoch(epoch, steps_per_execution):
        for _ in range(count):
            part, rows, total, _ = next(iterator)
            leaf = tf.nest.flatten(part)[0]
            assert leaf.shape[0] >= 1, "a task without rows still needs one to run"
            result.append(([int(v) for v in leaf[: int(rows)].numpy().ravel()], int(total)))
    return result


def batches(source: str, rows: int, batch_size: int, size: int, **arguments) -> list[list[tuple[list[int], int]]]:
    numbers = np.arange(rows)
    made = []
    for index in range(size):
        if source == "arrays":
            data = Input(numbers, batch_size=batch_size, index=index, size=size, **arguments)
        else:
            data = Input(tf.data.Dataset.from_tensor_slices(numbers).batch(batch_size), index=index, size=size)
        made.append(rows_of(data))
    return made


@pytest.mark.parametrize("source", ["arrays", "dataset"])
@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (13, 5), (1, 1), (2, 5), (7, 3), (5, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tasks_together_get_each_row_of_each_batch_once_in_order(source, rows, batch_size, size):
    parts = batches(source, rows, batch_size, size)
    for step, first in enumerate(range(0, rows, batch_size)):
        expected = list(range(first, min(first + batch_size, rows)))
        assert [row for part in parts for row in part[step][0]] == expected
        assert {part[step][1] for part in parts} == {len(expected)}
    shares = [[len(part[step][0]) for part in parts] for step in range(len(parts[0]))]
    assert all(max(s) - min(s) <= 1 for s in shares), "no task may get much more than another"


def test_shuffled_tasks_agree_on_an_order_that_follows_from_seed_and_epoch():
    def order(epoch: int, seed: tuple[int, ...]) -> list[int]:
        inputs = [Input(np.arange(20), batch_size=6, index=i, size=3, shuffle=True, seed=seed) for i in range(3)]
        parts = [rows_of(data, epoch) for data in inputs]
        return [row for step in zip(*parts, strict=True) for rows, _ in step for row in rows]

    expected = np.random.default_rng((7, 0, 4)).permutation(20).tolist()
    assert order(4, (7, 0)) == expected
    assert order(4, (7, 0)) == expected
    assert sorted(order(5, (7, 0))) == list(range(20))
    assert order(5, (7, 0)) != expected
    assert order(4, (8, 0)) != expected


def test_shuffle_batch_keeps_rows_in_their_blocks():
    (part,) = batches("arrays", 10, 4, 1, shuffle="batch", seed=(3,))
    blocks = [rows for rows, _ in part]
    assert [sorted(block) for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert blocks != [sorted(block) for block in blocks]


@pytest.mark.parametrize("source", ["arrays", "dataset"])
def test_steps_per_epoch_goes_on_where_the_last_epoch_stopped_and_warns_at_the_end(source):
    x = np.arange(10)
    data = Input(
        x if source == "arrays" else tf.data.Dataset.from_tensor_slices(x).batch(2),
        batch_size=2 if source == "arrays" else None,
        steps=3,
        index=0,
        size=1,
    )
    assert [rows for rows, _ in rows_of(data, 0)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.warns(UserWarning, match="ran out of data"):
        assert [rows for rows, _ in rows_of(data, 1)] == [[6, 7], [8, 9]]
    assert [rows for rows, _ in rows_of(data, 2)] == [[0, 1], [2, 3], [4, 5]]


def test_executions_of_several_steps_end_with_a_shorter_one():
    data = Input(np.arange(10), batch_size=2, index=0, size=1)
    assert [(step, count) for step, count, _ in data.epoch(0, 3)] == [(0, 3), (3, 2)]


@pytest.mark.parametrize(
    ("pipeline", "size"),
    [
        (lambda d: d.batch(4), 4),
        (lambda d: d.batch(4, drop_remainder=True), 4),
        (lambda d: d.batch(4).prefetch(1), 4),
        (lambda d: d.batch(4).repeat(2).prefetch(1), 4),
        (lambda d: d.batch(4).unbatch().batch(3), 3),
        (lambda d: d.batch(4).map(lambda x: x[:2]), None),
    ],
)
def test_the_global_batch_size_is_read_from_the_pipeline_where_it_tells(pipeline, size):
    data = Input(pipeline(tf.data.Dataset.range(20)), index=0, size=1)
    assert data.source.global_batch_size == size


def test_float64_arrays_become_floatx_as_in_keras():
    data = Input(np.zeros((3, 2)), batch_size=2, index=0, size=1)
    part, *_ = data.peek(0)
    assert tf.nest.flatten(part)[0].dtype == tf.float32


@pytest.mark.parametrize("difference", ["one value", "order", "dtype"])
def test_the_checksum_of_the_first_batch_tells_other_data(difference):
    x = np.arange(12, dtype="int64")
    other = {"one value": x + (x == 11), "order": x[::-1].copy(), "dtype": x.astype("int32")}[difference]

    def first_checksum(values: np.ndarray, index: int) -> int:
        data = Input(tf.data.Dataset.from_tensor_slices(values).batch(12), index=index, size=2)
        return int(data.peek(0)[3])

    assert first_checksum(x, 0) == first_checksum(x, 1)
    assert first_checksum(x, 0) != first_checksum(other, 1)


def test_ragged_rows_are_sliced_too():
    ragged = tf.ragged.constant([[1], [2, 2], [], [4, 4, 4], [5]])
    parts = []
    for index in range(2):
        data = Input(tf.data.Dataset.from_tensors(ragged), index=index, size=2)
        part, rows, total, _ = data.peek(0)
        parts.append(part.to_list()[: int(rows)])
        assert int(total) == 5
    assert parts == [[[1], [2, 2]], [[], [4, 4, 4], [5]]]


def test_strings_and_dicts_keep_their_structure():
    x = {"a": np.array(["x", "yy", "z"], dtype=object), "b": np.arange(3)}
    data = Input(x, np.arange(3), batch_size=3, index=1, size=2)
    (inputs, labels), rows, _, _ = data.peek(0)
    assert [v.decode() for v in inputs["a"].numpy()] == ["yy", "z"]
    assert labels.numpy().tolist() == [1, 2]
    assert int(rows) == 2


def test_a_dataset_of_single_rows_says_what_to_add():
    with pytest.raises(DataError, match=r"single rows .*add \.batch\(global_batch_size\)"):
        Input(tf.data.Dataset.range(5), index=0, size=2)


class Numbers(keras.utils.PyDataset):
    """Six batches of two, which notes when its epochs begin and end."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return (np.array([[2 * index], [2 * index + 1]]),)

    def on_epoch_begin(self):
        self.heard.append("begin")

    def on_epoch_end(self):
        self.heard.append("end")


def test_a_py_dataset_hears_of_its_epochs_and_is_shuffled_by_batches():
    numbers = Numbers()
    data = Input(numbers, index=0, size=1, shuffle=True, seed=(7,))
    for epoch in range(2):
        batches = [rows for rows, _ in rows_of(data, epoch)]
        order = np.random.default_rng((7, epoch)).permutation(6)
        assert batches == [[2 * i, 2 * i + 1] for i in order]
    assert numbers.heard == ["begin", "end", "begin", "end"]


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_sparse_batch_are_sliced_too(size):
    dense = np.diag(np.arange(1, 6)).astype("float32")
    parts = []
    for index in range(size):
        data = Input(tf.data.Dataset.from_tensors(tf.sparse.from_dense(dense)), index=index, size=size)
        part, rows, total, _ = data.peek(0)
        assert int(total) == 5
        parts.append(tf.sparse.to_dense(part).numpy()[: int(rows)])
    np.testing.assert_array_equal(np.concatenate(parts), dense)


def test_the_debugging_cap_of_keras_holds(monkeypatch):
    monkeypatch.setattr(sys.modules[MAX_STEPS.module], "_MAX_STEPS_PER_EPOCH", 2)
    with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 2"):
        data = Input(np.arange(10), batch_size=2, index=0, size=1)
    assert data.steps == 2
