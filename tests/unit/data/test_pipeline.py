"""What every pipeline can: batches for a loop of one's own, map, options, fingerprints; and any sizes whatever."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tfdist import process
from tfdist.data.pipeline import share
from tfdist.errors import DataError


@pytest.fixture
def task(monkeypatch):
    """(index, size) -> this process is that task."""

    def become(index, size):
        cluster = tfdist.Cluster({"worker": [f"host{i}:2222" for i in range(size)]})
        config = tfdist.TFConfig(cluster, tfdist.Task("worker", index))
        monkeypatch.setattr(process, "_current", process.Current(config))

    return become


@given(total=st.integers(0, 1000), size=st.integers(1, 50))
def test_shares_are_contiguous_and_differ_by_one_row_at_most(total, size):
    shares = [share(total, index, size) for index in range(size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == total
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(shares))
    assert {high - low for low, high in shares} <= {total // size, -(-total // size)}


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 40),
    batch_size=st.integers(1, 16),
    tasks=st.integers(1, 6),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2**40),
    data=st.data(),
)
def test_arrays_of_any_size_are_shared_exactly(rows, batch_size, tasks, shuffle, epoch, data, in_order, cut):
    pipeline = tfdist.data.from_arrays(np.arange(rows), batch_size, shuffle=shuffle, seed=5)
    start_step = data.draw(st.integers(0, pipeline.steps_per_epoch))
    order = np.random.default_rng((5, epoch)).permutation(rows).tolist() if shuffle else range(rows)
    assert in_order(pipeline, tasks, epoch=epoch, start_step=start_step) == cut(order, batch_size)[start_step:]


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    batch_size=st.integers(1, 9),
    tasks=st.integers(1, 6),
    window=st.integers(1, 30),
    shuffle=st.booleans(),
    start_step=st.integers(0, 4),
)
def test_files_of_any_size_are_shared_exactly(
    sizes, batch_size, tasks, window, shuffle, start_step, in_order, cut, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("files")
    numbers = iter(range(1000))
    for place, size in enumerate(sizes):
        (folder / f"{place}.bin").write_bytes(np.array([next(numbers) for _ in range(size)], "<i4").tobytes())
    pipeline = tfdist.data.from_files(
        folder / "*.bin",
        lambda file: tf.data.FixedLengthRecordDataset(file, 4),
        lambda record: tf.io.decode_raw(record, tf.int32)[0],
        global_batch_size=batch_size,
        shuffle=shuffle,
        shuffle_window=window,
    )
    one = in_order(pipeline, 1)
    together = in_order(pipeline, tasks, start_step=start_step)
    assert together == one[start_step:]
    assert [len(batch) for batch in one] == [len(batch) for batch in cut(range(sum(sizes)), batch_size)]
    order = [row for batch in one for row in batch]
    assert sorted(order) == list(range(sum(sizes)))
    assert shuffle or order == sorted(order)


@pytest.mark.parametrize("size", [1, 3])
def test_batches_are_those_of_the_task_that_this_process_is(size, task):
    pipeline = tfdist.data.from_arrays((np.arange(8), np.arange(8)), 7)
    got = []
    for index in range(size):
        task(index, size)
        got.append([x.numpy().tolist() for x, _ in pipeline.batches()])
    assert got == ([[[0, 1, 2, 3, 4, 5, 6], [7]]] if size == 1 else [[[0, 1], []], [[2, 3], []], [[4, 5, 6], [7]]])


def test_batches_before_the_strategy_follow_tf_config(monkeypatch):
    cluster = {"worker": ["a:1", "b:1"]}
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    assert [x.numpy().tolist() for x in tfdist.data.from_arrays(np.arange(4), 4).batches()] == [[2, 3]]


def test_batches_of_an_epoch_begin_at_a_step(task):
    task(0, 1)
    pipeline = tfdist.data.from_arrays(np.arange(20), 5, shuffle=True)
    whole = [x.numpy().tolist() for x in pipeline.batches(3)]
    assert [x.numpy().tolist() for x in pipeline.batches(3, start_step=2)] == whole[2:]


def test_batches_of_a_share_end_with_it(task):
    pipeline = tfdist.data.from_function(lambda c: tf.data.Dataset.range(5 - 3 * c.input_pipeline_id).batch(2))
    task(1, 2)
    assert [x.numpy().tolist() for x in pipeline.batches()] == [[0, 1]]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_batches_without_rows_are_empty_for_every_kind_of_tensor(kind, task):
    ragged = tf.ragged.constant([[1], [2, 3]])
    task(0, 3)
    (part,) = tfdist.data.from_arrays(ragged if kind == "ragged" else ragged.to_sparse(), 2).batches()
    assert part.shape[0] == 0


def test_map_gets_this_tasks_rows_as_tf_data_would_give_them():
    pipeline = tfdist.data.from_arrays((np.arange(6), np.arange(6)), 4).map(lambda x, y: {"sum": x + y})
    got = [(data["sum"].numpy().tolist(), int(rows), int(total)) for data, rows, total in pipeline.for_task(1, 2)]
    assert got == [([4, 6], 2, 4), ([10], 1, 2)]
    assert (pipeline.steps_per_epoch, pipeline.rows, pipeline.global_batch_size) == (2, 6, 4)
    assert pipeline.element_spec == {"sum": tf.TensorSpec([None], tf.int64)}
    assert repr(pipeline).endswith(".map(test_map_gets_this_tasks_rows_as_tf_data_would_give_them.<locals>.<lambda>)")


def test_a_function_of_python_s_own_if_can_be_mapped():
    def halve(x):
        if tf.reduce_sum(x) > 5:
            x = x // 2
        return x

    pipeline = tfdist.data.from_arrays(np.arange(6), 3).map(halve)
    assert [data.numpy().tolist() for data, _, _ in pipeline.for_task(0, 1)] == [[0, 1, 2], [1, 2, 2]]


@pytest.mark.parametrize("fn", [lambda x, y: (x[:1], y[:1]), lambda x, y: (x, tf.repeat(y, 2))])
def test_a_mapped_function_that_changes_the_number_of_rows_is_refused(fn):
    pipeline = tfdist.data.from_arrays((np.arange(8), np.arange(8)), 8).map(fn)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must return as many rows as it gets"):
        list(pipeline.for_task(0, 2))


def test_batches_and_maps_leave_a_part_that_is_none(task):
    task(0, 1)
    pipeline = tfdist.data.from_arrays((np.arange(3), None, np.arange(3)), 2).map(lambda x, y, w: (x, y, w))
    assert [(x.numpy().tolist(), y) for x, y, _ in pipeline.batches()] == [([0, 1], None), ([2], None)]


@pytest.fixture
def every(tmp_path):
    """One pipeline of each source."""
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    return {
        "arrays": tfdist.data.from_arrays(np.arange(3), 2),
        "files": tfdist.data.from_files(tmp_path / "*.txt", tf.data.TextLineDataset, global_batch_size=2),
        "function": tfdist.data.from_function(lambda context: tf.data.Dataset.range(3).batch(2)),
    }


@pytest.mark.parametrize("source", ["arrays", "files", "function"])
def test_a_strategy_is_told_that_the_data_is_split_already(source, every):
    options = every[source].for_task(0, 2).options()
    assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF
    assert options.deterministic


@pytest.mark.parametrize("source", ["arrays", "files", "function"])
def test_elements_have_open_rows_and_counts(source, every):
    data, rows, total = every[source].for_task(1, 2).element_spec
    assert data.shape.as_list() == [None]
    assert rows == total == tf.TensorSpec([], tf.int32)
    assert data == every[source].element_spec


@pytest.mark.parametrize("source", ["arrays", "files", "function"])
def test_what_tasks_compare_is_plain_data(source, every):
    text = json.dumps(every[source].fingerprint)
    assert json.loads(text)["source"] == source


@pytest.mark.parametrize("changed", [{"shuffle": True}, {"global_batch_size": 3}, {"drop_remainder": True}])
def test_tasks_whose_pipelines_differ_have_other_fingerprints(changed):
    def fingerprint(**arguments):
        return tfdist.data.from_arrays(np.arange(8), **{"global_batch_size": 5, **arguments}).fingerprint

    assert fingerprint() == fingerprint()
    assert fingerprint(**changed) != fingerprint()


def test_tasks_whose_shares_are_of_another_kind_have_other_fingerprints(task):
    def fingerprint(index, width):
        task(index, 2)

        def rows(context):
            return tf.data.Dataset.from_tensors(tf.zeros([4, width[context.input_pipeline_id]]))

        return tfdist.data.from_function(rows).fingerprint

    assert fingerprint(0, [1, 1]) == fingerprint(1, [1, 1])
    assert fingerprint(0, [1, 2]) != fingerprint(1, [1, 2])


def test_a_pipeline_is_frozen():
    pipeline = tfdist.data.from_arrays(np.arange(3), 2)
    with pytest.raises(AttributeError):
        pipeline.seed = 3


def test_making_a_pipeline_starts_no_runtime():
    code = (
        "import numpy as np, tfdist\n"
        "from tfdist.internals.tensorflow import is_initialized\n"
        "p = tfdist.data.from_arrays((np.zeros((4, 2)), np.zeros(4)), 2)\n"
        "tfdist.data.from_files(__import__('os').__file__, lambda f: f, global_batch_size=2)\n"
        "repr(p), p.rows, p.steps_per_epoch\n"
        "assert not is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", tfdist.data.__all__)
def test_a_public_name_says_what_it_is(name):
    assert getattr(tfdist.data, name).__doc__


@pytest.mark.parametrize("name", ["audit", "from_arrays", "from_files", "from_function"])
def test_a_public_function_has_an_example(name):
    assert f"tfdist.data.{name}(" in getattr(tfdist.data, name).__doc__.partition("Example:")[2]


def test_batch_sizes_may_be_numpys_numbers_but_not_fractions():
    assert tfdist.data.from_arrays(np.arange(3), np.int64(2)).global_batch_size == 2
    with pytest.raises(DataError, match=r"global_batch_size=2\.5"):
        tfdist.data.from_arrays(np.arange(3), 2.5)
