"""The arrays of one reduction as one stream of bytes, the same on every task, to be cut and added up anywhere.

Arrays that are reduced alike lie side by side. Each begins at a multiple of 64 bytes, so that a cut at such a multiple
falls between elements; what lies in the gaps means nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tfdist.collectives.reduction import Array, is_narrow, reduce_into, weighted
from tfdist.collectives.results import ALIGNMENT, Bytes

# Pieces of streams of a gigabyte.
MAX_CUTS = 4096

Spec = tuple[np.dtype[Any], tuple[int, ...], str]  # dtype, shape and op of an array


@dataclass(frozen=True)
class _Copy:
    """An array, or a part of one, in a cut.

    Attributes:
        array: Which.
        elements: Which of its elements, in C order; None: all, in their shape.
        start, end: Where its bytes lie in the cut.
    """

    array: int
    elements: slice | None
    start: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_weighted: bool


@dataclass(frozen=True)
class _Span:
    """Bytes that are reduced alike."""

    dtype: np.dtype[Any]
    op: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Cut:
    """Some bytes of the stream; its methods take memory of just this size."""

    copies: tuple[_Copy, ...]
    spans: tuple[_Span, ...]

    def places(self, memory: Bytes) -> list[Array]:
        """Returns where each array, or part of one, goes."""
        return [np.ndarray(c.shape, c.dtype, buffer=memory, offset=c.start) for c in self.copies]

    def fill(self, places: Sequence[Array], values: Sequence[Array], weight: float) -> None:
        """Writes this task's arrays, of which those to be weighted are multiplied by `weight`."""
        for copy, place in zip(self.copies, places, strict=True):
            value = values[copy.array]
            if copy.elements is not None:
                value = value.reshape(-1)[copy.elements]
            if copy.is_weighted:
                weighted(value, weight, place)
            else:
                np.copyto(place, value, casting="unsafe")

    def views(self, memory: Bytes) -> list[Array]:
        """Returns what is reduced alike, as one array each."""
        return [memory[span.start : span.end].view(span.dtype) for span in self.spans]

    def reduce(self, outs: Sequence[Array], parts: Sequence[Sequence[Array]]) -> None:
        """Reduces the views of each task into those of the result."""
        for span, out, *views in zip(self.spans, outs, *parts, strict=True):
            reduce_into(out, views, span.op)


class Layout:
    """Where each array lies in the stream.

    Args:
        specs: One per array.
        is_wide: Whether types of 16 bits and less travel as float32 and means as sums, for sums in several stages
            (`finish` does the rest).

    Attributes:
        nbytes: Length of the stream.
    """

    def __init__(self, specs: Sequence[Spec], *, is_wide: bool = False) -> None:
        self._specs, self._is_wide = tuple(specs), is_wide
        self._wide: Layout | None = None
        self._cuts: dict[tuple[int, int], Cut] = {}
        kinds: dict[tuple[np.dtype[Any], str], list[int]] = {}
        for i, (dtype, _, op) in enumerate(specs):
            op = "sum" if op == "weighted_sum" or (is_wide and op == "mean") else op
            dtype = np.dtype(np.float32) if is_wide and is_narrow(dtype) else dtype
            kinds.setdefault((dtype, op), []).append(i)
        at = 0
        self._arrays: list[_Copy] = []
        self._spans: list[_Span] = []
        for (dtype, op), numbers in kinds.items():
            start = at = aligned(at)
            for i in numbers:
                _, shape, its_op = specs[i]
                at = aligned(at)
                end = at + math.prod(shape) * dtype.itemsize
                self._arrays.append(_Copy(i, None, at, end, dtype, shape, its_op == "weighted_sum"))
                at = end
            self._spans.append(_Span(dtype, op, start, at))
        self._starts = [array.start for array in self._arrays]
        self.nbytes = at
        # The stream of one array is its memory as it is.
        self.is_one_array = len(specs) == 1 and not is_wide and specs[0][2] != "weighted_sum"

    def wide(self) -> Layout:
        if self._wide is None:
            self._wide = Layout(self._specs, is_wide=True)
        return self._wide

    def cut(self, low: int, size: int) -> Cut:
        """Returns `size` bytes from `low` on; both cut between elements, as multiples of 64 and the end do."""
        cut = self._cuts.get((low, size))
        if cut is None:
            if len(self._cuts) >= MAX_CUTS:
                self._cuts.clear()
            cut = self._cuts[low, size] = self._cut(low, low + size)
        return cut

    def _cut(self, low: int, high: int) -> Cut:
        copies = []
        for array in self._arrays[max(0, bisect_right(self._starts, low) - 1) :]:
            if array.start >= high:
                break
            start, end = max(low, array.start), min(high, array.end)
            if start >= end:
                continue
            part = replace(array, start=start - low, end=end - low)
            if end - start < array.end - array.start:
                size = array.dtype.itemsize
                elements = slice((start - array.start) // size, (end - array.start) // size)
                part = replace(part, elements=elements, shape=((end - start) // size,))
            copies.append(part)
        spans = [
            replace(span, start=max(low, span.start) - low, end=min(high, span.end) - low)
            for span in self._spans
            if max(low, span.start) < min(high, span.end)
        ]
        return Cut(tuple(copies), tuple(spans))

    def reduce(self, out: Bytes, parts: Sequence[Bytes], low: int) -> None:
        """Reduces the stream from `low` on, as much as `out` holds; `parts` hold the same bytes of each task."""
        cut = self.cut(low, out.size)
        cut.reduce(cut.views(out), [cut.views(part) for part in parts])

    def finish(self, stream: Bytes, out: Bytes, target: Layout, count: int) -> None:
        """Writes a wide stream of sums as the stream of `target`: means divided by `count`, 16 bits rounded."""
        wide, narrow = self.split(stream), target.split(out)
        with np.errstate(all="ignore"):
            for (_, _, op), total, result in zip(self._specs, wide, narrow, strict=True):
                if op == "mean":
                    np.divide(total, total.dtype.type(count), out=total)
                np.copyto(result, total, casting="unsafe")

    def split(self, stream: Bytes) -> list[Array]:
        """Returns the arrays in a stream, as views."""
        arrays: list[Any] = [None] * len(self._arrays)
        for array in self._arrays:
            arrays[array.array] = np.ndarray(array.shape, array.dtype, buffer=stream, offset=array.start)
        return arrays


class Terms(NamedTuple):
    """What this task brings to a reduction."""

    layout: Layout
    values: Sequence[Array]
    weight: float = 1.0
    stream: Bytes | None = None  # where it is laid out already

    def copy(self, out: Bytes, low: int) -> None:
        """Writes the bytes of the stream from `low` on, as many as `out` holds."""
        cut = self.layout.cut(low, out.size)
        cut.fill(cut.places(out), self.values, self.weight)

    def wide(self) -> Terms:
        return Terms(self.layout.wide(), self.values, self.weight)


EMPTY = Terms(Layout(()), ())


def aligned(size: int) -> int:
    """Returns the next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT
