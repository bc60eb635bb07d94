"""Arrays in messages: what was packed comes back, and whatever else comes is a MismatchError that names the peer."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tfdist.collectives import calls, payload, reduction
from tfdist.collectives.calls import Call, Made
from tfdist.errors import MismatchError

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
ARRAYS = hnp.arrays(st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u4", "?", "c8"]), SHAPES, fill=st.nothing())


def as_body(views: list[memoryview]) -> payload.Bytes:
    return np.frombuffer(bytearray(b"".join(views)) or bytearray(1), np.uint8)[: sum(map(len, views))]


@settings(deadline=None)
@given(st.lists(ARRAYS, max_size=4))
def test_arrays_come_back_as_they_were(arrays):
    for array, back in zip(arrays, payload.unpack_arrays(as_body(payload.pack_arrays(arrays)), "x"), strict=True):
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@settings(deadline=None)
@given(ARRAYS)
def test_an_array_comes_back_as_it_was(array):
    back = payload.unpack_array(as_body(payload.pack_array(array)), array.dtype, "x")
    assert (back.shape, back.tobytes()) == (array.shape, array.tobytes())


def heading(*arrays) -> bytes:
    text = json.dumps(arrays).encode()
    return struct.pack("!I", len(text)) + text


@settings(deadline=None)
@given(st.binary(max_size=60))
@example(heading(["float32", [2]]))
@example(heading(["float32", [-1]]) + b"1234")
@example(heading(["float32", [2**62, 2**62]]))
@example(heading(["float32", ["a"]]))
@example(heading(["float32", [1.5]]) + b"123456")
@example(heading(["object", [1]]) + b"12345678")
@example(heading(["no_such_dtype", [1]]))
@example(heading(["finfo", [1]]))
@example(heading(["float32", [1] * 65]) + b"1234")
@example(heading(["V4", [1]]) + b"1234")
@example(heading(5))
@example(heading(["float32"]))
@example(heading() + b"too much")
@example(struct.pack("!I", 2**32 - 1))
@example(struct.pack("!I", 7) + b"[" * 7)
def test_what_is_not_packed_arrays_is_a_mismatch(body):
    try:
        payload.unpack_arrays(np.frombuffer(body, np.uint8) if body else np.empty(0, np.uint8), "worker 3")
    except MismatchError as error:
        assert str(error).startswith("worker 3 sent arrays that can not be read: ")  # noqa: PT017


@settings(deadline=None)
@given(st.binary(max_size=40))
@example(b"\xff" * 30)
@example(struct.pack("!BQ", 1, 2**63) + b"1234")
def test_what_is_not_a_packed_array_is_a_mismatch(body):
    try:
        payload.unpack_array(np.frombuffer(body or b"\1", np.uint8), np.dtype("f4"), "worker 3")
    except MismatchError as error:
        assert str(error).startswith("worker 3 sent an array that can not be read: ")  # noqa: PT017


@settings(deadline=None)
@given(st.binary(min_size=calls.OPENING.size, max_size=calls.OPENING.size))
def test_bytes_that_open_no_call_are_a_mismatch(opening):
    with pytest.raises(MismatchError, match="worker 3 sent bytes that open no call"):
        calls.parse_opening(opening, "worker 3")


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=50), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
@example(b"[" * 100_000)
@example('["a", "b", "c", [1, [2]], "5"]')
def test_any_description_of_another_call_gives_a_mismatch(description):
    mine = Made(0, "worker 0", 1, Call("barrier", "end").description)
    theirs = Made(3, "worker 3", 1, description if isinstance(description, bytes) else description.encode())
    error = calls.mismatch(mine, theirs)
    assert isinstance(error, MismatchError)
    assert "worker 3" in str(error)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float8_e5m2", ml_dtypes.float8_e5m2), ("bool", bool)],
)
def test_a_dtype_is_found_by_its_name(name, dtype):
    assert reduction.dtype_named(name) == np.dtype(dtype)


@pytest.mark.parametrize("name", ["object", "datetime64[s]", "U5", "i4,f4", "nothing", "finfo", "__name__"])
def test_what_is_no_number_is_no_dtype(name):
    with pytest.raises(ValueError, match="dtype"):
        reduction.dtype_named(name)
