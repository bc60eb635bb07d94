"""Arrays as the bytes of a message and back, and the two ways to sum them.

In one round every task sends everything to every other and sums for itself. In shares task i sums the i-th share of
every array and sends the result to all: two rounds, but each byte is added once and crosses the network twice. Both add
in task order, so they give the same bits.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tfdist.collectives.exchange import Link, Reader
from tfdist.collectives.reduction import Array, dtype_named, reduce_into
from tfdist.errors import MismatchError

Bytes = npt.NDArray[np.uint8]
# Reads the opening of a peer's message, then returns the length of its payload.
OpeningReader = Generator[memoryview, None, int]
Run = Callable[[Mapping[int, Sequence[memoryview]], Mapping[int, Reader]], None]

# Summed and sent on as soon as it has come from all tasks, while it is in the cache and the next is under way.
PIECE_BYTES = 256 * 1024

_MAX_DIMENSIONS = 64  # NumPy's own limit


class Opening(Protocol):
    """The first bytes of a call's messages, to send and to check."""

    def message(self, size: int) -> memoryview: ...

    def read(self, link: Link) -> OpeningReader: ...


class Scratch:
    """Memory that is kept from call to call; fresh pages would cost more than the sum."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int, int], Bytes] = {}

    def array(self, use: str, peer: int, number: int, size: int, dtype: np.dtype[Any]) -> Array:
        """Returns `size` elements with any content, valid until the same block is asked for again."""
        need = size * dtype.itemsize
        block = self._blocks.get((use, peer, number))
        if block is None or block.nbytes < need:
            block = self._blocks[use, peer, number] = np.empty(need, np.uint8)
        return block[:need].view(dtype)


class Reduction:
    """One all_reduce: the arrays of this task, laid end to end by dtype."""

    def __init__(self, values: Sequence[Array], op: str, index: int, size: int, scratch: Scratch) -> None:
        self._values, self._op, self._index, self._size, self._scratch = values, op, index, size, scratch
        self._by_dtype: dict[np.dtype[Any], list[int]] = {}
        for number, value in enumerate(values):
            self._by_dtype.setdefault(value.dtype, []).append(number)
        self._flats = [self._flat(i, numbers) for i, numbers in enumerate(self._by_dtype.values())]

    def in_one_round(self, opening: Opening, run: Run, links: Sequence[Link]) -> list[Array]:
        """Sends all to all; best for little data."""
        theirs = {link.index: [np.empty_like(flat) for flat in self._flats] for link in links}

        def read(link: Link) -> Reader:
            yield from opening.read(link)
            for flat in theirs[link.index]:
                yield view_bytes(flat)

        message = [opening.message(sum(flat.nbytes for flat in self._flats)), *map(view_bytes, self._flats)]
        run({link.index: message for link in links}, {link.index: read(link) for link in links})
        theirs[self._index] = self._flats
        results = [np.empty_like(flat) for flat in self._flats]
        for i, result in enumerate(results):
            reduce_into(result, [theirs[task][i] for task in range(self._size)], self._op)
        return self._split(results)

    def in_shares(self, opening: Opening, run: Run, links: Sequence[Link]) -> list[Array]:
        """Sums one share here and gets the other shares' sums from the peers; best for much data."""
        results = [np.empty_like(flat) for flat in self._flats]
        shares = [[flat.size * i // self._size for i in range(self._size + 1)] for flat in self._flats]

        def share(flats: Sequence[Array], task: int) -> list[Array]:
            return [flat[bounds[task] : bounds[task + 1]] for flat, bounds in zip(flats, shares, strict=True)]

        mine, out = share(self._flats, self._index), share(results, self._index)
        parts = {
            link.index: [self._scratch.array("part", link.index, i, a.size, a.dtype) for i, a in enumerate(mine)]
            for link in links
        }
        parts[self._index] = mine
        pieces = [piece for i, array in enumerate(mine) for piece in _pieces(i, array)]
        missing = [len(links)] * len(pieces)

        def read(link: Link) -> Reader:
            yield from opening.read(link)
            for number, (i, piece) in enumerate(pieces):
                yield view_bytes(parts[link.index][i][piece])
                missing[number] -= 1
                if missing[number] == 0:
                    done = out[i][piece]
                    reduce_into(done, [parts[task][i][piece] for task in range(self._size)], self._op)
                    for other in links:
                        other.outbox.append(view_bytes(done))
            for result in share(results, link.index):
                yield view_bytes(result)

        messages = {}
        for link in links:
            body = [view_bytes(part) for part in share(self._flats, link.index)]
            messages[link.index] = [opening.message(sum(map(len, body))), *body]
        run(messages, {link.index: read(link) for link in links})
        return self._split(results)

    def _flat(self, number: int, numbers: Sequence[int]) -> Array:
        values = [self._values[i].reshape(-1) for i in numbers]
        if len(values) == 1:
            return values[0]
        flat = self._scratch.array("flat", self._index, number, sum(v.size for v in values), values[0].dtype)
        return np.concatenate(values, out=flat)

    def _split(self, results: Sequence[Array]) -> list[Array]:
        arrays = list(self._values)
        for result, numbers in zip(results, self._by_dtype.values(), strict=True):
            ends = accumulate(self._values[i].size for i in numbers)
            for i, end in zip(numbers, ends, strict=True):
                value = self._values[i]
                arrays[i] = result[end - value.size : end].reshape(value.shape)
        return arrays


def _pieces(number: int, array: Array) -> list[tuple[int, slice]]:
    step = max(1, PIECE_BYTES // array.itemsize)
    return [(number, slice(low, min(low + step, array.size))) for low in range(0, array.size, step)]


def view_bytes(array: Array) -> memoryview:
    """Returns the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def pack_array(array: Array) -> list[memoryview]:
    """Returns an array's shape and data; the dtype is agreed on elsewhere."""
    shape = struct.pack(f"!B{array.ndim}Q", array.ndim, *array.shape)
    return [memoryview(shape), view_bytes(array)]


def unpack_array(body: Bytes, dtype: np.dtype[Any], peer: str) -> Array:
    """Returns the array that `pack_array` packed.

    Raises:
        MismatchError: The body is something else.
    """
    try:
        (dimensions,) = struct.unpack_from("!B", body.data)
        shape = struct.unpack_from(f"!{dimensions}Q", body.data, 1)
        return _unpack(body[1 + 8 * dimensions :], dtype, shape)
    except (struct.error, ValueError) as error:
        raise MismatchError(f"{peer} sent an array that can not be read: {error}") from None


def pack_arrays(arrays: Sequence[Array]) -> list[memoryview]:
    """Returns dtypes, shapes and data of several arrays."""
    heading = json.dumps([[array.dtype.name, array.shape] for array in arrays]).encode()
    return [memoryview(struct.pack("!I", len(heading)) + heading), *map(view_bytes, arrays)]


def unpack_arrays(body: Bytes, peer: str) -> list[Array]:
    """Returns the arrays that `pack_arrays` packed.

    Raises:
        MismatchError: The body is something else, or holds a dtype that this task does not know.
    """
    try:
        (length,) = struct.unpack_from("!I", body.data)
        at, arrays = 4 + length, []
        for name, shape in json.loads(body[4:at].tobytes()):
            dtype = dtype_named(name)
            size = math.prod(shape) * dtype.itemsize
            arrays.append(_unpack(body[at : at + size], dtype, shape))
            at += size
        if at != body.size:
            raise ValueError(f"{body.size:,} bytes where {at:,} were announced")
    except (struct.error, ValueError, TypeError, ImportError, RecursionError) as error:
        raise MismatchError(f"{peer} sent arrays that can not be read: {error}") from None
    return arrays


def _unpack(data: Bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    if len(shape) > _MAX_DIMENSIONS or math.prod(shape) * dtype.itemsize != data.size:
        raise ValueError(f"{data.size:,} bytes for an array of shape {tuple(shape)} and dtype {dtype}")
    # The data lies behind a heading of any length: copied, it is aligned again.
    array: Array = data.copy().view(dtype)
    return array.reshape(shape)
