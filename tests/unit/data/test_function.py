"""A function of a task's share: uneven shards go on with stand-ins until all have ended."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError


def shards(sizes, batch_size=2):
    """A function that gives task i the numbers 100*i, 100*i+1, ..., sizes[i] of them."""

    def mine(context):
        first = 100 * context.input_pipeline_id
        return tf.data.Dataset.range(first, first + sizes[context.input_pipeline_id]).batch(batch_size)

    return mine


def elements(dataset, limit=None):
    return [(data.numpy().tolist(), int(rows), int(total)) for data, rows, total in itertools.islice(dataset, limit)]


def test_a_share_that_ends_goes_on_with_its_last_row_that_counts_nothing():
    pipeline = tfdist.data.from_function(shards([5, 2]))
    assert elements(pipeline.for_task(0, 2), 5) == [
        ([0, 1], 2, -1),
        ([2, 3], 2, -1),
        ([4], 1, -1),
        ([4], 0, 0),
        ([4], 0, 0),
    ]
    assert elements(pipeline.for_task(1, 2), 3) == [([100, 101], 2, -1), ([100], 0, 0), ([100], 0, 0)]


def test_an_empty_share_is_made_up():
    pipeline = tfdist.data.from_function(
        lambda context: (
            tf.data.Dataset.from_tensor_slices(
                {"x": np.ones((3, 2), "float32"), "n": np.arange(3), "s": np.array(["a", "b", "c"])}
            )
            .skip(3 * context.input_pipeline_id)
            .batch(3)
        )
    )
    (data, rows, total), *_ = itertools.islice(pipeline.for_task(1, 2), 1)
    assert (int(rows), int(total)) == (0, 0)
    assert data["x"].numpy().tolist() == [[1.0, 1.0]]
    assert data["n"].numpy().tolist() == [0]
    assert data["s"].numpy().tolist() == [b""]


def test_a_batch_without_rows_is_not_the_end():
    def mine(context):
        return tf.data.Dataset.from_tensor_slices([3, 4, 0, 5]).batch(2).map(lambda batch: batch[batch > 3])

    def empty_in_between(context):
        return tf.data.Dataset.from_tensor_slices([5, 6, 1, 2, 7, 8]).batch(2).map(lambda x: tf.boolean_mask(x, x > 4))

    assert elements(tfdist.data.from_function(mine).for_task(0, 1), 3) == [([4], 1, -1), ([5], 1, -1), ([5], 0, 0)]
    assert elements(tfdist.data.from_function(empty_in_between).for_task(0, 1), 4) == [
        ([5, 6], 2, -1),
        ([5], 0, -1),
        ([7, 8], 2, -1),
        ([7], 0, 0),
    ]


def test_rows_stay_open_in_the_spec_also_where_every_batch_has_one_row():
    pipeline = tfdist.data.from_function(lambda c: tf.data.Dataset.range(3).batch(1, drop_remainder=True))
    assert pipeline.element_spec == tf.TensorSpec([None], tf.int64)


def test_a_part_that_is_missing_stays_missing():
    pipeline = tfdist.data.from_function(
        lambda context: tf.data.Dataset.range(2).batch(2).map(lambda x: (x, None, tf.cast(x, tf.float32)))
    )
    got = [data for data, _, _ in itertools.islice(pipeline.for_task(0, 1), 2)]
    assert [(x.numpy().tolist(), y) for x, y, _ in got] == [([0, 1], None), ([0], None)]


@pytest.mark.parametrize("composite", ["ragged", "sparse"])
def test_ragged_and_sparse_batches_stand_in_too(composite):
    def mine(context):
        dataset = tf.data.Dataset.from_tensors(tf.ragged.constant([[1, 2], [3]]))
        return dataset if composite == "ragged" else dataset.map(lambda part: part.to_sparse())

    got = list(itertools.islice(tfdist.data.from_function(mine).for_task(0, 1), 2))
    assert [(int(rows), int(total)) for _, rows, total in got] == [(2, -1), (0, 0)]
    assert [int(data.shape[0]) for data, _, _ in got] == [2, 1]


def test_known_steps_cut_long_shares_and_fill_short_ones():
    pipeline = tfdist.data.from_function(shards([9, 3]), steps_per_epoch=3)
    assert [rows for _, rows, _ in elements(pipeline.for_task(0, 2))] == [2, 2, 2]
    assert [rows for _, rows, _ in elements(pipeline.for_task(1, 2))] == [2, 1, 0]


def test_a_dataset_without_end_goes_on_where_the_last_epoch_stopped():
    def mine(context):
        return tf.data.Dataset.range(10).repeat().batch(2)

    pipeline = tfdist.data.from_function(mine, steps_per_epoch=3)
    epochs = [[data for data, _, _ in elements(pipeline.for_task(0, 1, epoch=epoch))] for epoch in range(2)]
    assert epochs == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [0, 1]]]
    assert elements(pipeline.for_task(0, 1, epoch=1, start_step=2)) == [([0, 1], 2, -1)]
    with pytest.raises(DataError, match="returned a dataset without end: give steps_per_epoch"):
        tfdist.data.from_function(mine).for_task(0, 1)


def test_an_epoch_can_be_entered_at_any_step():
    pipeline = tfdist.data.from_function(shards([7, 2]))
    assert elements(pipeline.for_task(0, 2, start_step=2), 3) == elements(pipeline.for_task(0, 2), 5)[2:]
    assert elements(pipeline.for_task(1, 2, start_step=2), 1) == [([0], 0, 0)]


def test_the_function_is_told_task_tasks_and_epoch():
    told = []

    def mine(context):
        told.append(context)
        return tf.data.Dataset.range(4).batch(context.get_per_replica_batch_size(8))

    tfdist.data.from_function(mine).for_task(1, 3, epoch=2)
    (context,) = told
    assert isinstance(context, tf.distribute.InputContext)
    assert (context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync) == (1, 3, 3)
    assert context.epoch == 2
    assert [tfdist.data.InputContext(i, 3, 0).get_per_replica_batch_size(8) for i in range(3)] == [2, 3, 3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda: [1, 2], "returned a list: it gets an InputContext"),
        (lambda: tf.data.Dataset.range(3), r"single examples \(TensorSpec.*add \.batch\("),
    ],
)
def test_what_is_no_dataset_of_batches_is_refused(returned, message):
    with pytest.raises(DataError, match=message):
        tfdist.data.from_function(lambda context: returned()).for_task(0, 1)


@pytest.mark.parametrize("argument", ["global_batch_size", "steps_per_epoch"])
def test_numbers_that_can_not_be_are_refused(argument):
    with pytest.raises(DataError, match=f"{argument}=0"):
        tfdist.data.from_function(shards([1]), **{argument: 0})


def test_it_says_what_it_is():
    text = repr(tfdist.data.from_function(shards([1]), steps_per_epoch=4))
    assert text == "from_function(shards.<locals>.mine, steps_per_epoch=4)"


def test_a_dataset_in_place_of_a_function_is_refused_at_once():
    with pytest.raises(DataError, match="give a function"):
        tfdist.data.from_function(tf.data.Dataset.range(4).batch(2))


@pytest.mark.parametrize("steps", [0, 2.5, "3", True])
def test_steps_that_are_no_number_of_steps_are_refused(steps):
    with pytest.raises(DataError, match="steps_per_epoch="):
        tfdist.data.from_function(lambda context: tf.data.Dataset.range(4).batch(2), steps_per_epoch=steps)
