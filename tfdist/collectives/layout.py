"""The arrays of one reduction as one stream of bytes, the same on every task, to be cut and added up anywhere.

Arrays that are reduced alike lie side by side. Each begins at a multiple of 64 bytes, so that a cut at such a multiple
falls between elements; what lies in the gaps means nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.collectives.reduction import Array, is_narrow, reduce_into, weighted
from tfdist.collectives.results import ALIGNMENT, Bytes

Spec = tuple[np.dtype[Any], tuple[int, ...], str]  # dtype, shape and op of an array


@dataclass(frozen=True)
class _Region:
    """Bytes that are reduced alike."""

    dtype: np.dtype[Any]
    op: str
    start: int
    end: int


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
        self._specs = tuple(specs)
        self._is_wide = is_wide
        kinds: dict[tuple[np.dtype[Any], str], list[int]] = {}
        for i, (dtype, _, op) in enumerate(specs):
            op = "sum" if op == "weighted_sum" or (is_wide and op == "mean") else op
            dtype = np.dtype(np.float32) if is_wide and is_narrow(dtype) else dtype
            kinds.setdefault((dtype, op), []).append(i)
        at = 0
        self._starts: list[int] = []
        self._order: list[tuple[int, np.dtype[Any], int]] = []  # array, dtype and length of each start
        self._regions: list[_Region] = []
        for (dtype, op), numbers in kinds.items():
            start = at = aligned(at)
            for i in numbers:
                at = aligned(at)
                size = int(np.prod(specs[i][1], dtype=np.int64)) * dtype.itemsize
                self._starts.append(at)
                self._order.append((i, dtype, size))
                at += size
            self._regions.append(_Region(dtype, op, start, at))
        self.nbytes = at

    def wide(self) -> Layout:
        return Layout(self._specs, is_wide=True)

    @property
    def is_one_array(self) -> bool:
        return len(self._specs) == 1 and not self._is_wide and self._specs[0][2] != "weighted_sum"

    def copy(self, values: Sequence[Array], weight: float, out: Bytes, low: int) -> None:
        """Writes the bytes of the stream from `low` on, as many as `out` holds.

        Args:
            values: One per array.
            weight: Factor of the arrays whose op is weighted_sum.
            out: Where to.
            low: A multiple of 64.
        """
        high = low + out.size
        for k in range(max(0, bisect_right(self._starts, low) - 1), len(self._starts)):
            start = self._starts[k]
            if start >= high:
                break
            i, dtype, size = self._order[k]
            first, last = max(low, start), min(high, start + size)
            if first >= last:
                continue
            value = values[i].reshape(-1)
            if last - first < size:
                value = value[(first - start) // dtype.itemsize : (last - start) // dtype.itemsize]
            place = out[first - low : last - low].view(dtype)
            if self._specs[i][2] == "weighted_sum":
                weighted(value, weight, place)
            else:
                np.copyto(place, value, casting="unsafe")

    def reduce(self, out: Bytes, parts: Sequence[Bytes], low: int) -> None:
        """Reduces the stream from `low` on, as much as `out` holds; `parts` hold the same bytes of each task."""
        high = low + out.size
        for region in self._regions:
            first, last = max(low, region.start) - low, min(high, region.end) - low
            if first < last:
                dtype = region.dtype
                views = [part[first:last].view(dtype) for part in parts]
                reduce_into(out[first:last].view(dtype), views, region.op)

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
        arrays: list[Array | None] = [None] * len(self._specs)
        for start, (i, dtype, _) in zip(self._starts, self._order, strict=True):
            arrays[i] = np.ndarray(self._specs[i][1], dtype, buffer=stream, offset=start)
        return arrays  # type: ignore[return-value]


@dataclass(frozen=True)
class Terms:
    """What this task brings to a reduction."""

    layout: Layout
    values: Sequence[Array]
    weight: float = 1.0
    stream: Bytes | None = None  # where it is laid out already

    def copy(self, out: Bytes, low: int) -> None:
        """Writes the bytes of the stream from `low` on, as many as `out` holds."""
        self.layout.copy(self.values, self.weight, out, low)

    def wide(self) -> Terms:
        return Terms(self.layout.wide(), self.values, self.weight)


EMPTY = Terms(Layout(()), ())


def aligned(size: int) -> int:
    """Returns the next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT
