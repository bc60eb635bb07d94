"""The audit finds planted duplicates and holes, and says which example went where."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError


def sharded(context, dataset):
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)


@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_are_covered_without_overlap_as_in_one_process(tasks, shuffle):
    found = tfdist.data.audit(
        tfdist.data.from_arrays(np.arange(22), 5, shuffle=shuffle, drop_remainder=True), tasks=tasks, epochs=2
    )
    found.raise_if_wrong()
    assert found.is_right
    assert found.coverage == 1
    assert found.expected == (20, 20)
    assert found.unlike_one_process is None
    assert [sum(counts) for counts in found.counts] == [20, 20]


def test_even_and_seeded_shards_are_right_though_unlike_one_process():
    found = tfdist.data.audit(lambda context: sharded(context, tf.data.Dataset.range(20).shuffle(20, seed=1)), tasks=3)
    found.raise_if_wrong()
    assert found.unlike_one_process == (0, 0)
    assert sorted(found.counts[0]) == [6, 7, 7]
    assert "batches are not those that one process would get, from epoch 0, step 0 on" in str(found)


def test_an_unseeded_shuffle_before_the_shard_is_found():
    found = tfdist.data.audit(lambda context: sharded(context, tf.data.Dataset.range(200).shuffle(200)), tasks=2)
    assert found.holes
    assert found.overlaps
    assert len(found.holes) == len(found.overlaps)
    (_, key), *_ = found.overlaps
    assert {visit.task for visit in found.where(key)} == {0, 1}
    (_, missing), *_ = found.holes
    assert found.where(missing) == ()


def test_a_dataset_that_every_task_reads_whole_is_all_overlap():
    found = tfdist.data.audit(lambda context: tf.data.Dataset.range(6).batch(2), tasks=2)
    assert found.overlaps == tuple((0, number) for number in range(6))
    assert found.where(3) == ((0, 0, 1, 1), (0, 1, 1, 1))
    with pytest.raises(DataError, match="0 holes, 6 overlaps"):
        found.raise_if_wrong()


def test_a_shard_that_nobody_reads_is_a_hole_in_every_epoch():
    found = tfdist.data.audit(
        lambda c: tf.data.Dataset.range(8).shard(4, c.input_pipeline_id).batch(2), tasks=3, epochs=2, expected=range(8)
    )
    assert found.holes == ((0, 3), (0, 7), (1, 3), (1, 7))
    assert found.coverage == 0.75


def test_the_table_shows_tasks_steps_and_the_first_finds():
    found = tfdist.data.audit(
        lambda context: tf.data.Dataset.range(9 - context.input_pipeline_id).batch(3), tasks=2, expected=range(10)
    )
    title, *lines = str(found).splitlines()
    assert title.endswith("on 2 tasks")
    assert lines == [
        "epoch  task  steps  examples  rows per step",
        "    0     0      3         9           3 x3",
        "    0     1      3         8        3 x2, 2",
        "expected 10 examples per epoch: coverage 90 %, 1 hole, 8 overlaps",
        "batches are not those that one process would get, from epoch 0, step 0 on",
        "hole: 9 in epoch 0",
        *(
            f"overlap: {n} in epoch 0 (epoch 0, task 0, step {n // 3}, row {n % 3}; "
            f"epoch 0, task 1, step {n // 3}, row {n % 3})"
            for n in range(5)
        ),
        "overlaps: 3 more",
    ]


def test_equal_examples_count_as_often_as_they_come():
    found = tfdist.data.audit(tfdist.data.from_arrays(np.array([7, 7, 7, 8]), 2), tasks=2)
    found.raise_if_wrong()
    assert len(found.where(7)) == 3


def test_a_key_tells_examples_apart_whose_bytes_change():
    def noisy(x, name):
        return x + tf.random.uniform(tf.shape(x)), name

    x, name = np.zeros((6, 2), "float32"), np.array(list("abcdef"), dtype=object)
    pipeline = tfdist.data.from_arrays((x, name), 4).map(noisy)
    assert not tfdist.data.audit(pipeline, tasks=2).is_right
    found = tfdist.data.audit(pipeline, tasks=2, key=lambda x, name: name)
    found.raise_if_wrong()
    assert found.where(b"e") == ((0, 0, 1, 0),)


@pytest.mark.parametrize(
    "part",
    [np.arange(12.0).reshape(6, 2), np.array(["a", "b", "c", "d", "e", "f"], dtype=object), "ragged", "sparse"],
    ids=["matrix", "strings", "ragged", "sparse"],
)
def test_examples_of_every_kind_have_keys_of_their_own(part):
    if isinstance(part, str):
        ragged = tf.ragged.constant([[1], [], [2, 3], [4], [5, 6], [7]])
        part = ragged if part == "ragged" else ragged.to_sparse()
    found = tfdist.data.audit(tfdist.data.from_arrays((part, np.zeros(6)), 4), tasks=2)
    found.raise_if_wrong()
    assert len(found.visits) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": [1], "tasks": 2}, "source is a list"),
        ({"source": lambda c: None, "tasks": 0}, "tasks=0, epochs=1"),
        (
            {"source": tf.data.Dataset.range(3).batch(2), "tasks": 2},
            "source is a _BatchDataset: .* returns that task's",
        ),
        ({"source": lambda c: tf.data.Dataset.range(3), "tasks": 2}, "single examples"),
        ({"source": lambda c: tf.data.Dataset.range(3).batch(2).repeat(), "tasks": 2}, "without end"),
    ],
)
def test_what_can_not_be_audited_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        tfdist.data.audit(arguments.pop("source"), **arguments)


def test_an_example_that_is_not_a_number_is_found_again():
    assert tfdist.data.audit(tfdist.data.from_arrays(np.array([np.nan, 1, np.nan]), 2), tasks=2).is_right
