"""Any arrays through any way between tasks: the bits of NumPy's sums in the stated order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from group_threads import Together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_values import in_stated_order, numbers

from tfdist.collectives import memory
from tfdist.errors import MismatchError

HOSTS = {2: ["aa", "ab"], 3: ["aaa", "abc", "aab"], 5: ["aaaaa", "abcde", "abbac"]}
SUMMED = ["float16", "bfloat16", "float32", "float64", "int8", "int64", "uint16", "complex64"]
ARRAYS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(SUMMED), st.just("sum")),
        st.tuples(st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.sampled_from(["mean", "max"])),
        st.tuples(st.sampled_from(["bool", "int32"]), st.sampled_from(["max", "min"])),
        st.tuples(st.sampled_from(["bfloat16", "float32", "float64"]), st.just("weighted_sum")),
    ).flatmap(lambda kind: st.tuples(*map(st.just, kind), st.sampled_from([0, 1, 7, 100, 5000, 200_000]))),
    max_size=5,
)


@pytest.fixture(scope="module", params=HOSTS, ids="{} tasks".format)
def ways(request):
    """Groups of one size, one for each way."""
    groups = [Together(request.param, hosts=hosts) for hosts in HOSTS[request.param]]
    yield groups
    for group in groups:
        group.close()


def weighted(value: np.ndarray, weight: float) -> np.ndarray:
    if weight == 0:
        return np.zeros_like(value)
    if value.dtype.itemsize == 2:
        return (value.astype(np.float32) * np.float32(weight)).astype(value.dtype)
    return value * value.dtype.type(weight)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=ARRAYS, rows=st.lists(st.integers(0, 300), min_size=5, max_size=5), seed=st.integers(0, 3))
def test_every_way_gives_numpys_bits(ways, kinds, rows, seed):
    count = len(ways[0].groups)
    weights = [0, 0.3, 1.0, 1 / 3, 2.5][:count]
    brought = [[numbers(dtype, (size,), task + 10 * seed) for dtype, _, size in kinds] for task in range(count)]
    lines = [np.random.default_rng(task).normal(size=(rows[task], 3)).astype(np.float32) for task in range(count)]
    names = [np.arange(rows[-task - 1], dtype=np.int64) + task for task in range(count)]
    ops = [op for _, op, _ in kinds]
    for way in ways:

        def call(group):
            mine = [lines[group.index], names[group.index]]
            return group.exchange(brought[group.index], op=ops, weight=weights[group.index], rows=mine, tag="x")

        expected = []
        for i, op in enumerate(ops):
            each = [task[i] for task in brought]
            if op == "weighted_sum":
                each = [weighted(value, weight) for value, weight in zip(each, weights, strict=True)]
            expected.append(in_stated_order(each, "sum" if op == "weighted_sum" else op, way.by_host))
        for arrays, gathered in way.values(call):
            for array, wanted in zip(arrays, expected, strict=True):
                assert (array.dtype, array.shape, array.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
            assert gathered[0].tobytes() == np.concatenate(lines).tobytes()
            assert gathered[1].tobytes() == np.concatenate(names).tobytes()
            assert gathered[0].shape == (sum(rows[:count]), 3)


def test_sums_of_one_host_or_of_none_are_the_same_bits(ways):
    brought = [[numbers("float32", (300_000,), task)] for task in range(len(ways[0].groups))]
    together, alone = (
        way.values(lambda group: group.all_reduce(brought[group.index], tag="x")[0].tobytes()) for way in ways[:2]
    )
    assert together == alone


@pytest.mark.parametrize("in_shares", [True, False])
def test_bodies_of_any_length_cross_in_pieces(ways, monkeypatch, in_shares):
    monkeypatch.setattr(memory, "MAX_DIRECT", 1 if in_shares else 99)
    count = len(ways[0].groups)
    brought = [np.random.default_rng(task).bytes((0, 3, 2_000_001, 524_288, 77)[task]) for task in range(count)]
    sent = np.arange(700_001.0)
    for way in ways:
        assert way.values(lambda group: group.all_gather_bytes(brought[group.index], tag="x")) == [brought] * count
        for (array,) in way.values(lambda group: group.broadcast([sent] if group.index else None, root=1, tag="w")):
            np.testing.assert_array_equal(array, sent)


def test_a_weight_of_0_leaves_out_what_is_no_number(make_together):
    brought = [np.array([np.nan, np.inf], np.float32), np.array([1.0, 2.0], np.float32)]
    results = make_together(2).values(
        lambda group: group.all_reduce([brought[group.index]], op="weighted_sum", weight=0.5 * group.index, tag="x")
    )
    assert [total.tolist() for (total,) in results] == [[0.5, 1.0]] * 2


def test_16_bits_are_weighed_in_float32(make_together):
    third = np.array([3.0], ml_dtypes.bfloat16)
    for (total,) in make_together(2).values(
        lambda group: group.all_reduce([third], op="weighted_sum", weight=1 / 3, tag="x")
    ):
        assert float(total[0]) == 2.0  # 1/3 in bfloat16 is 0.333984


def test_one_task_gets_its_own_weighted_arrays_and_rows(make_together):
    (group,) = make_together(1).groups
    arrays, rows = group.exchange(
        [np.ones(2), np.ones(2, bool)], op=["weighted_sum", "max"], weight=0.25, rows=[np.eye(2)], tag="x"
    )
    assert arrays[0].tolist() == [0.25, 0.25]
    assert arrays[1].tolist() == [True, True]
    assert rows[0].tolist() == np.eye(2).tolist()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"op": ["sum", "max"]}, {"op": ["max", "sum"]}, "array 0 is float64[3] sum in worker 0 and float64[3] max"),
        ({"rows": [np.ones((2, 3))]}, {"rows": [np.ones((2, 4))]}, "float64[rows,3] in worker 0 and float64[rows,4]"),
        ({"rows": [np.ones(2)]}, {}, "2 arrays"),
    ],
    ids=["ops", "rows", "no rows"],
)
def test_different_exchanges_are_named_on_both_tasks(make_together, first, second, message):
    arrays = [np.ones(3), np.ones(3)]
    errors = make_together(2).run(
        lambda group: group.exchange(arrays, tag="x", **first), lambda group: group.exchange(arrays, tag="x", **second)
    )
    assert [type(error) for error in errors] == [MismatchError, MismatchError]
    assert all(message in str(error) for error in errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": ["sum"]}, "1 ops for 2 arrays"),
        ({"rows": [np.float64(1)]}, "an array of no dimension has no rows"),
        ({"op": ["sum", "weighted_sum"], "arrays": [1.0, 1]}, "weighted_sum of int64: weights are no integers"),
    ],
)
def test_what_can_not_be_exchanged_is_refused_and_leaves_the_group_whole(make_together, arguments, message):
    together = make_together(2)
    errors = together.run(lambda group: group.exchange(**{"arrays": [1.0, 2.0], "tag": "x", **arguments}))
    assert all(isinstance(error, (TypeError, ValueError)) and message in str(error) for error in errors)
    together.values(lambda group: group.barrier("still whole"))
