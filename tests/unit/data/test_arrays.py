"""Arrays: all tasks together get each row of each global batch once, in an order that follows from seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (13, 5), (1, 1), (2, 5), (7, 3), (5, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tasks_together_get_each_row_of_each_batch_once_in_order(rows, batch_size, size, in_order, cut):
    pipeline = tfdist.data.from_arrays(np.arange(rows), batch_size)
    assert in_order(pipeline, size) == cut(range(rows), batch_size)
    assert pipeline.steps_per_epoch == len(cut(range(rows), batch_size))
    assert pipeline.rows == rows


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("epoch", [0, 4])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_a_shuffled_order_is_numpys_permutation_for_seed_and_epoch(size, epoch, drop_remainder, in_order, cut):
    pipeline = tfdist.data.from_arrays(np.arange(20), 6, shuffle=True, seed=7, drop_remainder=drop_remainder)
    order = np.random.default_rng((7, epoch)).permutation(20).tolist()
    assert in_order(pipeline, size, epoch=epoch) == cut(order, 6, drop_remainder)


def test_other_epochs_and_seeds_have_other_orders(in_order):
    def order(seed, epoch):
        return in_order(tfdist.data.from_arrays(np.arange(30), 30, shuffle=True, seed=seed), 1, epoch=epoch)[0]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert all(sorted(one) == list(range(30)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4


def test_an_unseeded_shuffle_has_the_same_order_whatever_seed_tensorflow_has(in_order):
    def order():
        return in_order(tfdist.data.from_arrays(np.arange(30), 30, shuffle=True), 2)

    tf.random.set_seed(1)
    first = order()
    tf.random.set_seed(2)
    assert order() == first


@pytest.mark.parametrize("start_step", [0, 1, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_can_be_entered_at_any_step(shuffle, start_step, in_order):
    pipeline = tfdist.data.from_arrays(np.arange(14), 4, shuffle=shuffle, seed=1)
    whole = in_order(pipeline, 3, epoch=2)
    assert in_order(pipeline, 3, epoch=2, start_step=start_step) == whole[start_step:]


def test_examples_keep_their_structure_and_floats_become_floatx():
    x = {"a": np.array(["x", "yy", "z"], dtype=object), "b": [np.arange(3.0), np.arange(3)]}
    pipeline = tfdist.data.from_arrays((x, np.arange(3), None), 3)
    (inputs, labels, weights), rows, _ = next(iter(pipeline.for_task(1, 2)))
    assert inputs["a"].numpy().tolist() == [b"yy", b"z"]
    assert inputs["b"][0].dtype == tf.float32
    assert labels.numpy().tolist() == [1, 2]
    assert weights is None
    assert int(rows) == 2
    assert pipeline.element_spec[0]["b"][1] == tf.TensorSpec([None], tf.int64)


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_other_kinds_of_arrays_are_indexed_too(kind):
    dense = np.array([[1, 2], [0, 3], [4, 0], [0, 0], [5, 6]], "float32")
    if kind == "ragged":
        dense_of = tf.RaggedTensor.to_tensor
        source = tf.RaggedTensor.from_tensor(dense)
    else:
        dense_of = tf.sparse.to_dense
        source = tf.sparse.from_dense(dense)
    pipeline = tfdist.data.from_arrays(source, 5)
    parts = [dense_of(next(iter(pipeline.for_task(index, 2)))[0]) for index in range(2)]
    assert np.concatenate(parts).tolist() == dense.tolist()


def test_of_a_mapped_file_a_task_reads_its_own_rows_only(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(24.0).reshape(12, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pipeline = tfdist.data.from_arrays((mapped, np.arange(12)), 6, shuffle=True, seed=2)
    assert pipeline.element_spec[0] == tf.TensorSpec([None, 2], tf.float32)
    for (x, y), _, _ in pipeline.for_task(1, 3, epoch=1):
        assert x.numpy().tolist() == [[2.0 * row, 2.0 * row + 1] for row in y.numpy()]


@pytest.mark.parametrize("dtype", [">i4", "<f8", "S2", "<U2"])
def test_a_mapped_file_alone_gives_what_it_holds(dtype, tmp_path, in_order, cut):
    """Big-endian numbers, as of idx files, are read as numbers; without a shuffle nothing else need be there."""
    np.save(tmp_path / "x.npy", np.arange(10, 17).astype(dtype))
    pipeline = tfdist.data.from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), 3)
    rows = [str(row).encode() for row in range(10, 17)] if dtype[1:] in ("2", "U2") else range(10, 17)
    assert in_order(pipeline, 2) == cut(rows, 3)


@pytest.mark.parametrize("dtype", ["S2", "U2", object])
def test_strings_of_any_dtype_of_numpys_are_strings(dtype, in_order):
    pipeline = tfdist.data.from_arrays(np.array(["a", "bb", "c"], dtype), 3)
    assert in_order(pipeline, 2) == [[b"a", b"bb", b"c"]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((np.zeros((3, 1)), np.zeros(2)), r"arrays\[0\] has 3 rows and arrays\[1\] has 2: .* same number"),
        ({"x": [1, 2]}, r"arrays\['x'\]\[0\] is a int: pass arrays"),
        (np.float32(3), "single value"),
        (np.zeros((0, 2)), "arrays has no rows"),
        (None, "no array"),
    ],
)
def test_what_is_no_set_of_rows_is_refused_by_name(arrays, message):
    with pytest.raises(DataError, match=message):
        tfdist.data.from_arrays(arrays, 2)


def test_a_batch_larger_than_the_data_can_not_drop_its_remainder():
    with pytest.raises(DataError, match="3 rows fill no batch of 4"):
        tfdist.data.from_arrays(np.zeros(3), 4, drop_remainder=True)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"index": 2, "size": 2}, "there is no task 2 of 2"),
        ({"index": "0", "size": 2}, "index='0': give a whole number"),
        ({"index": 0, "size": 1, "epoch": 0.5}, r"epoch=0\.5: give a whole number"),
        ({"index": 0, "size": 1, "epoch": -1}, "epoch=-1, start_step=0"),
        ({"index": 0, "size": 1, "start_step": 4}, "start_step=4 is behind the epoch's end: it has 3 steps"),
    ],
)
def test_a_place_that_can_not_be_is_refused(place, message):
    with pytest.raises(DataError, match=message):
        tfdist.data.from_arrays(np.zeros(6), 2).for_task(**place)


def test_it_says_what_it_is():
    pipeline = tfdist.data.from_arrays((np.zeros((5, 2)), np.zeros(5, "int32")), 2, shuffle=True, seed=3)
    assert repr(pipeline) == "from_arrays(float64(5, 2), int32(5,), global_batch_size=2, shuffle=True, seed=3)"
