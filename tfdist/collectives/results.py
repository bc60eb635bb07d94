"""Memory for results, used again as soon as nobody holds what was in it; fresh pages would cost more than the sum.

From some size on it begins at a multiple of 64 bytes, where TensorFlow takes an array as it is instead of copying it
(tensorflow/python/lib/core/py_func.cc, EIGEN_MAX_ALIGN_BYTES).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64
# Below, new memory costs less than the search for old, and TensorFlow's copy next to nothing.
MIN_POOLED = 16 * 1024
MAX_BLOCKS = 16
# Memory that was not wanted in so many requests is given back.
MAX_AGE = 64


@dataclass(eq=False)
class _Block:
    owner: Bytes
    used_at: int = 0

    @property
    def holders(self) -> int:
        # NumPy lets every view refer to the array that owns the memory, however it was derived.
        return sys.getrefcount(self.owner)


_FREE = _Block(np.empty(0, np.uint8)).holders


class Results:
    """A pool of memory; not for several threads at a time."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._requests = 0

    def __len__(self) -> int:
        """Returns the number of blocks that are kept."""
        return len(self._blocks)

    def bytes(self, size: int) -> Bytes:
        """Returns so many bytes of any content, which are the caller's as long as an array refers to them."""
        if size < MIN_POOLED:
            return np.empty(size, np.uint8)
        self._requests += 1
        capacity = _rounded_up(size) + ALIGNMENT
        for block in self._blocks:
            if block.owner.size == capacity and block.holders == _FREE:
                block.used_at = self._requests
                self._forget()
                return _aligned(block.owner, size)
        self._blocks.append(_Block(np.empty(capacity, np.uint8), self._requests))
        memory = _aligned(self._blocks[-1].owner, size)
        self._forget()
        return memory

    def _forget(self) -> None:
        """Leaves old blocks to those who hold them, or to nobody."""
        youngest = self._requests - MAX_AGE
        self._blocks = [block for block in self._blocks[-MAX_BLOCKS:] if block.used_at > youngest]


def _rounded_up(size: int) -> int:
    """Returns a size at most an eighth larger, so that sizes that vary a little share memory."""
    step: int = 1 << max(12, size.bit_length() - 4)
    return -(-size // step) * step


def _aligned(owner: Bytes, size: int) -> Bytes:
    start = -owner.ctypes.data % ALIGNMENT
    return owner[start : start + size]
