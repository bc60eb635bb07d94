"""The arguments of a reduction, checked and laid out; what is the same from step to step is worked out once."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.collectives.calls import Call, array_text
from tfdist.collectives.layout import Layout, Terms
from tfdist.collectives.payload import view_bytes
from tfdist.collectives.reduction import Array, Op, as_numbers, check_op
from tfdist.collectives.results import Bytes
from tfdist.errors import MismatchError

MAX_KNOWN = 256


class Sums:
    """One call's arrays: some to reduce, some whose rows every task gets.

    Args:
        arrays: To reduce.
        op: Of all arrays, or one for each.
        weight: Factor of this task's arrays whose op is weighted_sum.
        rows: Arrays with rows as their first dimension.

    Raises:
        TypeError, ValueError: An op has no exact meaning, an array holds no numbers or no rows.
    """

    def __init__(self, arrays: Sequence[Any], op: Op | Sequence[Op], weight: float, rows: Sequence[Any]) -> None:
        self._values, self._weight = [as_numbers(array) for array in arrays], weight
        if isinstance(op, str):
            self._specs = tuple([(value.dtype, value.shape, op) for value in self._values])
        elif len(op) == len(self._values):
            self._specs = tuple([(v.dtype, v.shape, its_op) for v, its_op in zip(self._values, op, strict=True)])
        else:
            raise ValueError(f"{len(op)} ops for {len(self._values)} arrays")
        self._rows: list[Array] = []
        self._row_specs: tuple[tuple[Any, ...], ...] = ()
        if rows:
            self._set_rows(rows)

    def _set_rows(self, rows: Sequence[Any]) -> None:
        self._rows = [as_numbers(array) for array in rows]
        self._row_specs = tuple([(row.dtype, row.shape[1:]) for row in self._rows])
        if any(row.ndim == 0 for row in self._rows):
            raise ValueError("an array of no dimension has no rows")

    def call(self, kind: str, tag: str, known: dict[Any, tuple[Call, Layout]]) -> tuple[Call, Terms]:
        """Returns the call and this task's terms.

        Args:
            kind: Name of the method.
            tag: The caller's name for it.
            known: Calls made before.
        """
        key = (kind, tag, self._specs, self._row_specs)
        found = known.get(key)
        if found is None:
            found = self._describe(kind, tag), self._layout()
            if len(known) >= MAX_KNOWN:  # tags that name a step would grow it for ever
                known.clear()
            known[key] = found
        return found[0], Terms(found[1], self._values, self._weight)

    def alone(self) -> tuple[list[Array], list[Array]]:
        """Returns what one task gets."""
        terms = Terms(self._layout(), self._values, self._weight)
        out = np.empty(terms.layout.nbytes, np.uint8)
        terms.copy(out, 0)
        return [array.copy() for array in terms.layout.split(out)], [row.copy() for row in self._rows]

    def body(self) -> list[memoryview]:
        """Returns the rows of this task, after the number of rows of each array."""
        if not self._rows:
            return []
        return [memoryview(struct.pack(f"!{len(self._rows)}Q", *map(len, self._rows))), *map(view_bytes, self._rows)]

    def joined(self, bodies: Mapping[int, Bytes], index: int, names: Sequence[str]) -> list[Array]:
        """Returns the rows of all tasks, in task order.

        Args:
            bodies: Of the peers.
            index: This task.
            names: Of all tasks.

        Raises:
            MismatchError: A body does not hold what it announces.
        """
        if not self._rows:
            return []
        every = [self._rows if i == index else self._split(bodies[i], names[i]) for i in range(len(names))]
        return [np.concatenate([rows[k] for rows in every]) for k in range(len(self._rows))]

    def _split(self, body: Bytes, name: str) -> list[Array]:
        at = 8 * len(self._rows)
        try:
            counts = struct.unpack_from(f"!{len(self._rows)}Q", body.data)
            arrays = []
            for count, (dtype, shape) in zip(counts, self._row_specs, strict=True):
                size = count * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                arrays.append(body[at : at + size].view(dtype).reshape(count, *shape))
                at += size
        except (struct.error, ValueError, OverflowError) as error:
            raise MismatchError(f"{name} sent rows that can not be read: {error}") from None
        if at != body.size:
            raise MismatchError(f"{name} sent rows that can not be read: {body.size:,} bytes, not {at:,}")
        return arrays

    def _layout(self) -> Layout:
        for dtype, _, op in self._specs:
            check_op(op, dtype)
        return Layout(self._specs)

    def _describe(self, kind: str, tag: str) -> Call:
        for dtype, _, op in self._specs:
            check_op(op, dtype)
        ops = sorted({op for _, _, op in self._specs})
        suffixes = [f" {op}" if len(ops) > 1 else "" for _, _, op in self._specs]
        arrays = [array_text(value) + suffix for value, suffix in zip(self._values, suffixes, strict=True)]
        arrays += [f"{dtype.name}[{','.join(map(str, ('rows', *shape)))}]" for dtype, shape in self._row_specs]
        return Call(kind, tag, ", ".join(ops), tuple(arrays), sum(value.nbytes for value in self._values))
