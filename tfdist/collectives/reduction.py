"""Turns one array per task into their sum, mean, maximum or minimum, element by element and in task order.

Every dtype stays what it is: integers wrap as in NumPy, float64 is added in float64. Types of 16 bits and less are
added in float32 and rounded once. The order of additions is that of the tasks, so the result depends neither on timing
nor on how the elements were cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Op = Literal["sum", "mean", "max", "min", "weighted_sum"]
_PLAIN = frozenset("?bBhHiIlLqQefdgFDG")
OPS = ("sum", "mean", "max", "min", "weighted_sum")


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the dtype of this name; those that NumPy lacks (bfloat16, float8) come from ml_dtypes.

    Raises:
        ValueError: There is no such type, or it is not a plain number.
    """
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = _ml_dtype(name)
    if not is_number(dtype):
        raise ValueError(f"arrays of dtype {name} are not numbers")
    return dtype


def _ml_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # only where such an array arrives: it is TensorFlow's dependency, not ours

    kind = getattr(ml_dtypes, name, None)
    if not isinstance(kind, type):
        raise ValueError(f"there is no dtype {name!r}")
    return np.dtype(kind)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Returns whether elements of this dtype are plain numbers or truth values (no objects, text, dates, records)."""
    return dtype.kind in "biufc" or dtype.type.__module__.partition(".")[0] == "ml_dtypes"


def as_numbers(value: object) -> Array:
    """Returns `value` as an array in native byte order and C order; a copy only where one is needed.

    Raises:
        TypeError: It holds something else than numbers.
    """
    array = np.asarray(value)
    if array.dtype.char in _PLAIN and array.dtype.isnative and array.flags.c_contiguous:
        return array
    if not is_number(array.dtype):
        raise TypeError(f"tasks exchange arrays of numbers, not of dtype {array.dtype}")
    # ascontiguousarray would turn a scalar into one dimension.
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def check_op(op: str, dtype: np.dtype[Any]) -> None:
    """Raises TypeError or ValueError where `op` has no exact meaning for `dtype`."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    if dtype.kind == "b" and op in ("sum", "mean"):
        raise TypeError(f"{op} of bool: use op='max' for any, op='min' for all, or cast to int64 to count")
    if op == "weighted_sum" and (dtype.kind in "iub" or (dtype.kind == "V" and "int" in dtype.name)):
        raise TypeError(f"weighted_sum of {dtype}: weights are no integers, use op='sum' or cast to float64")
    if dtype.kind in "iu" and op == "mean":
        raise TypeError(f"mean of {dtype} is not an integer: use op='sum', or cast to float64")
    if dtype.kind == "V" and "int" in dtype.name:
        raise TypeError(f"{op} of {dtype}: cast to int8 first, where NumPy can calculate")
    if dtype.kind == "c" and op in ("max", "min"):
        raise TypeError(f"{op} of {dtype}: complex numbers have no order")


def reduce_into(out: Array, parts: Sequence[Array], op: str) -> None:
    """Writes the reduction of `parts` (one per task, in task order, same length and dtype) into `out`.

    `out` must not overlap any part.
    """
    if op in ("max", "min"):
        ufunc = np.maximum if op == "max" else np.minimum
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)
        return
    # inf - inf and overflow are the training's business, in every task alike; no warning from here.
    with np.errstate(all="ignore"):
        if out.itemsize <= 2 and is_narrow(out.dtype):
            total = parts[0].astype(np.float32)
            for part in parts[1:]:
                total += part.astype(np.float32)
            if op == "mean":
                total /= np.float32(len(parts))
            out[...] = total.astype(out.dtype)
            return
        np.add(parts[0], parts[1], out)
        for part in parts[2:]:
            np.add(out, part, out)
        if op == "mean":
            np.divide(out, out.dtype.type(len(parts)), out=out)


def weighted(term: Array, weight: float, out: Array) -> None:
    """Writes weight x term into `out`, whose dtype may be wider; a weight of 0 makes it 0, whatever the term holds.

    16 bits are weighed in float32 and rounded once: a third of 16 bits would be a weight of its own.
    """
    if weight == 0:
        out[...] = 0
        return
    with np.errstate(all="ignore"):
        if is_narrow(term.dtype):
            product = (term.astype(np.float32) * np.float32(weight)).astype(term.dtype)
            np.copyto(out, product, casting="unsafe")
        else:
            np.multiply(term, term.dtype.type(weight), out=out)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Returns whether sums of this dtype are made in float32."""
    return dtype.itemsize <= 2 and dtype.kind not in "iub"
