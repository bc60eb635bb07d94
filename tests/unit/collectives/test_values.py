"""What the collective calls return: exact values, for every dtype and shape, on any number of tasks."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from tfdist.collectives import memory, segment, tcp
from tfdist.collectives.reduction import reduce_into

FLOATS = ["float16", "bfloat16", "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128"]
INTS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def numbers(dtype: str, shape: tuple[int, ...], task: int) -> np.ndarray:
    rng = np.random.default_rng((task, len(shape)))
    values = rng.normal(size=shape) * 100
    if dtype == "bool":
        return values > 60
    if dtype in COMPLEX:
        values = values + 1j * rng.normal(size=shape)
    if dtype in INTS:
        values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, size=shape, dtype=dtype, endpoint=True)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.asarray(values).astype(kind)


def cut_up(monkeypatch: pytest.MonkeyPatch, in_shares: bool) -> None:
    """Makes small arrays take the ways of large ones, or large ones those of small ones."""
    monkeypatch.setattr(tcp, "ONE_ROUND_BYTES", 0 if in_shares else 1 << 30)
    monkeypatch.setattr(tcp, "PIECE_BYTES", 512)
    monkeypatch.setattr(memory, "MAX_DIRECT", 1 if in_shares else 99)
    monkeypatch.setattr(memory, "DIRECT_BYTES", 0)
    monkeypatch.setattr(segment, "PIECE_BYTES", 512)


def in_stated_order(values: list[np.ndarray], op: str, by_host: list[list[int]]) -> np.ndarray:
    """The result as plain NumPy gives it: on each host one task after the other, then one host after the other."""
    first = values[0]
    if op in ("max", "min"):
        return functools.reduce(np.maximum if op == "max" else np.minimum, values)
    narrow = first.dtype.itemsize == 2 and first.dtype.kind not in "iu"
    with np.errstate(all="ignore"):
        terms = [value.astype(np.float32) if narrow else value for value in values]
        hosts = [functools.reduce(np.add, [terms[i] for i in tasks]) for tasks in by_host]
        total = functools.reduce(np.add, hosts)
        if op == "mean":
            total = total / total.dtype.type(len(values))
        return np.asarray(total).astype(first.dtype)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, d) for op in ("sum", "mean", "max", "min") for d in FLOATS]
    + [(op, d) for op in ("sum", "mean") for d in COMPLEX]
    + [(op, d) for op in ("sum", "max", "min") for d in INTS]
    + [(op, "bool") for op in ("max", "min")],
)
@pytest.mark.parametrize("in_shares", [True, False], ids=["in shares", "in one round"])
def test_all_reduce_equals_numpy_bit_for_bit(together, monkeypatch, op, dtype, in_shares):
    cut_up(monkeypatch, in_shares)
    shapes = [(3, 7), (), (0,), (2, 0, 4), (1,), (1001,)]
    brought = [[numbers(dtype, shape, task) for shape in shapes] for task in range(len(together.groups))]
    results = together.values(lambda group: group.all_reduce(brought[group.index], op=op, tag="x"))
    for arrays in results:
        for i, array in enumerate(arrays):
            expected = in_stated_order([task[i] for task in brought], op, together.by_host)
            np.testing.assert_array_equal(array, expected, strict=True)
            if dtype != "longdouble":  # whose padding may hold anything
                assert array.tobytes() == expected.tobytes()


def test_all_reduce_takes_arrays_of_many_dtypes_in_one_call(together):
    mixed = [np.ones(3, np.float32), np.arange(4), np.ones((2, 2), np.float32), np.full(2, 2, np.uint8), np.float64(7)]
    results = together.values(lambda group: group.all_reduce(mixed, tag="mixed"))
    size = len(together.groups)
    for arrays in results:
        for array, one in zip(arrays, mixed, strict=True):
            np.testing.assert_array_equal(array, np.asarray(one * size), strict=True)


def test_integers_beyond_double_precision_stay_exact(together):
    big = 2**53 + 1
    results = together.values(lambda group: group.all_reduce([np.int64(big)], tag="count"))
    assert [int(total) for (total,) in results] == [big * len(together.groups)] * len(together.groups)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_are_rounded_once(make_together, dtype):
    """1 + e/2 + e/2, with e the step above 1, is 1 when rounded after each addition."""
    half_step = float(ml_dtypes.finfo(dtype).eps) / 2
    brought = [np.array([value], dtype) for value in (1, half_step, half_step)]
    results = make_together(3).values(lambda group: group.all_reduce([brought[group.index]], tag="x"))
    assert [float(total[0]) for (total,) in results] == [1 + 2 * half_step] * 3


@pytest.mark.parametrize(
    "strange",
    [
        np.arange(24.0).reshape(4, 6)[::2, ::-1],
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(6, dtype=">f4"),
        np.broadcast_to(np.float64(3), (2, 2)),
        [[1.0, 2.0], [3.0, 4.0]],
        3.5,
    ],
    ids=["strided", "Fortran order", "big-endian", "broadcast", "nested list", "number"],
)
def test_all_reduce_takes_whatever_is_an_array_in_some_memory_order(together, strange):
    results = together.values(lambda group: group.all_reduce([strange], tag="x"))
    for (array,) in results:
        np.testing.assert_array_equal(array, np.asarray(strange) * len(together.groups))
        assert array.dtype.isnative


def test_results_do_not_share_memory_with_arguments_or_later_results(together):
    brought = [np.ones(50_000, np.float32) for _ in together.groups]
    first = together.values(lambda group: group.all_reduce([brought[group.index]], tag="x"))
    for (array,) in first:
        array[...] = -1
    second = together.values(lambda group: group.all_reduce([brought[group.index]], tag="x"))
    assert all((array == len(together.groups)).all() for (array,) in second)
    assert all((array == 1).all() for array in brought)


def test_non_finite_values_pass_without_a_warning(together, recwarn):
    brought = np.array([np.inf, -np.inf, np.nan, 3e38], np.float32)
    results = together.values(
        lambda group: group.all_reduce([brought if group.index % 2 == 0 else -brought], op="sum", tag="x")
    )
    assert len({array.tobytes() for (array,) in results}) == 1
    assert not recwarn.list


@pytest.mark.parametrize(
    ("op", "value", "message"),
    [
        ("mean", np.ones(2, np.int32), "mean of int32 is not an integer"),
        ("sum", np.ones(2, bool), "sum of bool: use op='max' for any"),
        ("max", np.ones(2, np.complex64), "complex numbers have no order"),
        ("sum", np.array(["a"]), "arrays of numbers, not of dtype <U1"),
        ("sum", np.array([object()]), "arrays of numbers, not of dtype object"),
        ("sum", np.ones(2, ml_dtypes.int4), "cast to int8 first"),
    ],
)
def test_what_has_no_exact_meaning_is_refused_and_leaves_the_group_whole(together, op, value, message):
    refused = together.run(lambda group: group.all_reduce([value], op=op, tag="x"))
    assert all(isinstance(error, TypeError) and message in str(error) for error in refused)
    together.values(lambda group: group.barrier("still whole"))


def test_an_unknown_op_is_refused(together):
    refused = together.run(lambda group: group.all_reduce([1.0], op="product", tag="x"))
    assert all("op must be one of sum, mean, max, min, weighted_sum, not 'product'" in str(error) for error in refused)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64", "float8_e4m3fn"])
def test_all_gather_returns_arrays_of_differing_shapes_in_task_order(together, dtype):
    kind = getattr(ml_dtypes, dtype, dtype)
    brought = [np.arange(task * 3).reshape(task, 3).astype(kind) for task in range(len(together.groups))]
    results = together.values(lambda group: group.all_gather(brought[group.index], tag="rows"))
    for arrays in results:
        for array, expected in zip(arrays, brought, strict=True):
            assert array.dtype == expected.dtype
            assert array.shape == expected.shape
            assert array.tobytes() == expected.tobytes()


def test_all_gather_bytes_returns_everybodys_bytes_in_task_order(together):
    brought = [b"", b"one", b"\0" * 100_000, b"three", b"4"]
    results = together.values(lambda group: group.all_gather_bytes(brought[group.index], tag="names"))
    assert results == [brought[: len(together.groups)]] * len(together.groups)


def test_broadcast_gives_the_roots_arrays_whatever_the_others_pass(together):
    root = len(together.groups) - 1
    sent = [np.arange(6).reshape(2, 3), np.float32(2.5), np.zeros((0, 4)), np.ones(3, ml_dtypes.bfloat16), np.True_]
    results = together.values(
        lambda group: group.broadcast(sent if group.index == root else None, root=root, tag="weights")
    )
    for arrays in results:
        for array, expected in zip(arrays, sent, strict=True):
            assert array.dtype == expected.dtype
            assert array.shape == expected.shape
            assert array.tobytes() == expected.tobytes()
            array[...] = 0  # new and writable


def test_broadcast_needs_a_root_that_exists(together):
    size = len(together.groups)
    errors = together.run(lambda group: group.broadcast([], root=size, tag="x"))
    assert all(f"root must be the index of a task (0 to {size - 1}), not {size}" in str(error) for error in errors)


def test_broadcast_needs_the_roots_arrays(together):
    with pytest.raises(ValueError, match="worker 0 is the root of broadcast 'x' and must pass the arrays"):
        together.groups[0].broadcast(None, root=0, tag="x")


def test_large_arrays_cross_in_full(make_together):
    size = 64 << 20
    brought = [np.full(size // 8, task + 0.5) for task in range(2)]
    for (array,) in make_together(2).values(lambda group: group.all_reduce([brought[group.index]], tag="large")):
        assert array.nbytes == size
        assert (array == 2.0).all()


def test_reduction_of_pieces_equals_reduction_of_the_whole():
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=1000).astype(np.float32) for _ in range(5)]
    whole, pieces = np.empty(1000, np.float32), np.empty(1000, np.float32)
    reduce_into(whole, parts, "mean")
    for low, high in [(0, 1), (1, 8), (8, 333), (333, 1000)]:
        reduce_into(pieces[low:high], [part[low:high] for part in parts], "mean")
    assert whole.tobytes() == pieces.tobytes()
