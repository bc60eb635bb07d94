"""Memory for results: aligned, used again, and never while somebody still has what is in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.collectives.results import ALIGNMENT, MAX_AGE, MAX_BLOCKS, MIN_POOLED, Results


def test_memory_begins_where_tensorflow_takes_it_without_a_copy():
    results = Results()
    for size in (MIN_POOLED, MIN_POOLED + 1, 1 << 20, 5_000_001):
        assert results.bytes(size).ctypes.data % ALIGNMENT == 0
        assert results.bytes(size).size == size


def test_memory_that_nobody_holds_is_used_again():
    results = Results()
    address = results.bytes(1 << 20).ctypes.data
    assert {results.bytes(1 << 20).ctypes.data for _ in range(10)} == {address}


@pytest.mark.parametrize(
    "hold",
    [
        lambda memory: memory,
        lambda memory: memory[5:9],
        lambda memory: memory.view(np.float32).reshape(2, -1)[1:],
        lambda memory: np.ndarray(3, np.float32, buffer=memory, offset=64),
        lambda memory: memory.data,
        lambda memory: memoryview(memory[64:128].view(np.int64)).cast("B"),
        lambda memory: np.asarray(memory.data),
    ],
    ids=["itself", "slice", "view", "array in it", "memoryview", "memoryview of a view", "array of a memoryview"],
)
def test_memory_that_somebody_holds_in_any_form_is_left_alone(hold):
    results = Results()
    memory = results.bytes(1 << 20)
    memory[...] = 1
    address, held = memory.ctypes.data, hold(memory)
    del memory
    for _ in range(3):
        other = results.bytes(1 << 20)
        assert other.ctypes.data != address
        other[...] = 2
    assert bytes(memoryview(held).tobytes()).count(1) > 0
    del held
    assert address in {memory.ctypes.data for memory in [results.bytes(1 << 20) for _ in range(2)]}


def test_memory_is_not_kept_for_ever():
    results = Results()
    held = [results.bytes(1 << 20) for _ in range(3 * MAX_BLOCKS)]
    assert len(results) <= MAX_BLOCKS
    del held
    for _ in range(2 * MAX_AGE):
        results.bytes(2 << 20)
    assert len(results) == 1


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 9)), max_size=60))
def test_no_two_results_that_are_held_overlap(requests):
    results, held = Results(), {}
    for number, (size, slot) in enumerate(requests):
        memory = results.bytes(size)
        memory[...] = number % 251
        held[slot] = (memory, number % 251)
        del memory
        assert all((kept == value).all() for kept, value in held.values())
