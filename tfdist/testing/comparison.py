"""Two results of one function -> how far apart they are, array by array.

The error of an array is max|a - b| / max|b|: a wrong weight counts by what weights are like, and rounding in a value
near zero does not count by that value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TOLERANCE = 1e-5
# A bias that symmetry keeps at zero holds 1e-8 of rounding; it is compared with what a weight is like.
FLOOR = 1e-2


@dataclass(frozen=True)
class Difference:
    """One array that both results hold, or that one of them lacks.

    Attributes:
        name: Where it is in the result: "weights[0]".
        error: max|a - b| / max(max|b|, floor); infinite where no number can say it.
        reason: What differs where no number can say it: "shape (3,), expected (4,)".
    """

    name: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name:<40} {self.reason or format(self.error, '.1e')}"


@dataclass(frozen=True)
class Comparison:
    """All arrays of two results, the worst first.

    Attributes:
        differences: One for each array.
        tolerance: The largest error that counts as equal.
    """

    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def worst(self) -> float:
        """The largest error; 0 where nothing is compared."""
        return self.differences[0].error if self.differences else 0.0

    @property
    def too_far(self) -> tuple[Difference, ...]:
        """The arrays over the tolerance."""
        return tuple(difference for difference in self.differences if not difference.error <= self.tolerance)

    def __bool__(self) -> bool:
        return not self.too_far

    def __str__(self) -> str:
        shown = self.too_far or self.differences
        lines = [str(difference) for difference in shown[:20]]
        if len(shown) > len(lines):
            lines.append(f"and {len(shown) - len(lines)} more")
        return "\n".join(lines)


def compare(got: Any, expected: Any, *, tolerance: float = TOLERANCE, floor: float = FLOOR) -> Comparison:
    """Returns how far `got` is from `expected`; true where no array is further than `tolerance`.

    Args:
        got: An array or number, or lists, tuples and dicts of them.
        expected: The same, from the reference.
        tolerance: The largest error that counts as equal.
        floor: Arrays whose largest value is below this are compared with it instead.

    Example:
        >>> bool(tfdist.testing.compare({"loss": [0.5, 0.25]}, {"loss": [0.5, 0.2500001]}))
        True
        >>> print(tfdist.testing.compare({"loss": [0.5]}, {"loss": [0.4]}))
        loss                                     2.5e-01
    """
    one, other = flatten(got), flatten(expected)
    differences = [_difference(name, one.get(name), other.get(name), floor) for name in {**other, **one}]
    return Comparison(tuple(sorted(differences, key=lambda difference: -difference.error)), tolerance)


def flatten(value: Any, name: str = "") -> dict[str, Array]:
    """Returns the arrays in a result by their names: {"loss": [1, 2], "weights": [a, b]} has loss, weights[0], ...

    Example:
        >>> flatten({"log": {"loss": [1, 2]}, "weights": [np.zeros(3)]}).keys()
        dict_keys(['log.loss', 'weights[0]'])
    """
    if isinstance(value, Mapping):
        parts = {f"{name}.{key}" if name else str(key): item for key, item in value.items()}
    elif isinstance(value, (list, tuple)) and not _is_row(value):
        parts = {f"{name}[{i}]": item for i, item in enumerate(value)}
    else:
        return {name or "result": np.asarray(value)}
    return {inner: array for part, item in parts.items() for inner, array in flatten(item, part).items()}


def _is_row(value: Sequence[Any]) -> bool:
    """Whether a list is an array: of numbers or texts, as a log's values over the epochs are."""
    return all(isinstance(item, (bool, int, float, complex, str, bytes, np.generic)) for item in value)


def _difference(name: str, got: Array | None, expected: Array | None, floor: float) -> Difference:
    if got is None or expected is None:
        return Difference(name, float("inf"), "missing" if got is None else "not expected")
    if got.shape != expected.shape:
        return Difference(name, float("inf"), f"shape {got.shape}, expected {expected.shape}")
    if not (_is_numeric(got) and _is_numeric(expected)):
        equal = bool(np.array_equal(got, expected))
        return Difference(name, 0.0 if equal else float("inf"), "" if equal else _first_other(got, expected))
    return Difference(name, error(got, expected, floor=floor))


def error(got: Array, expected: Array, *, floor: float = FLOOR) -> float:
    """Returns max|got - expected| / max(max|expected|, floor) of two arrays of one shape; NaN equals NaN."""
    if got.size == 0:
        return 0.0
    wide = "complex128" if "c" in (got.dtype.kind, expected.dtype.kind) else "float64"
    a, b = got.astype(wide), expected.astype(wide)
    # Infinity equals itself, and NaN does so here.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if np.all(same):
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.max(np.abs(a - b)[~same])
    scale = np.max(np.abs(b[np.isfinite(b)]), initial=floor)
    return float(distance / scale) if np.isfinite(distance) else float("inf")


def _is_numeric(array: Array) -> bool:
    return array.dtype.kind in "biufc" or array.dtype.type.__module__.partition(".")[0] == "ml_dtypes"


def _first_other(got: Array, expected: Array) -> str:
    for one, other in zip(got.ravel().tolist(), expected.ravel().tolist(), strict=True):
        if one != other:
            return f"{one!r}, expected {other!r}"
    return "not the same"
