"""Two records of one training -> where they part: which variable, at which step, by how much more than by rounding.

A record is what `recorder.record` returns. How far apart two trainings may be is measured, not guessed: controls are
the reference's own training with nothing but its rounding changed, and a difference is wrong where it is larger than
the tolerance and than FACTOR times what the controls show there, or earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdist.testing.comparison import Array, error

FACTOR = 10.0
# A variable whose changes are this much smaller than those of its like is compared with them: what symmetry keeps at
# zero holds rounding alone.
SMALLEST = 1e-3
# Where rounding alone does this much, nothing can be told.
NOISE = 0.1

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]

AT_THE_START, NUMBER_OF_STEPS = "weights at the start", "number of steps"
WORDS = {"weights": "change of the weights", "optimizer": "optimizer's variables", "state": "change of other state"}


@dataclass(frozen=True)
class Row:
    """One thing that was compared.

    Attributes:
        what: Its name.
        difference: How far it is off, as a part of its own size; where it is worst.
        rounding: What rounding alone does there.
        verdict: "right", "wrong", or "noise": rounding alone does as much as any fault would.
        where: The variable and step of the difference.
    """

    what: str
    difference: float
    rounding: float
    verdict: str
    where: str = ""


@dataclass(frozen=True)
class Divergence:
    """What comparing two records found.

    Attributes:
        rows: All that was compared.
        first: Where they part first: "step 3 (epoch 1, batch 3)"; empty where they do not.
        off: What is wrong there, one sentence each, variables in the order of the model's layers.
        noise: Variables of which nothing can be told, since rounding alone moves them as far as any fault would.
    """

    rows: tuple[Row, ...]
    first: str = ""
    off: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows that are."""
        return tuple(row for row in self.rows if row.verdict == "wrong")


def compare(got: Record, reference: Record, controls: Sequence[Record], *, tolerance: float) -> Divergence:
    """Returns where `got` parts from `reference`."""
    got, *controls = (_with_names_of(reference, record) for record in (got, *controls))
    steps = list(zip(got["steps"], reference["steps"], strict=False))
    rows = [Row("data", 0.0, 0.0, "right"), _at_the_start(got, reference)]
    parts = [_of_group(group, got, reference, controls, tolerance) for group in WORDS]
    logs = _of_logs(got, reference, controls, tolerance)
    rows += [part.row(steps) for part in (*logs, *parts[:1]) if part.has_values]
    rows += [part.row(steps) for part in parts[1:] if part.has_values]
    rows += _at_the_end(got, reference, controls, tolerance)
    if len(got["steps"]) != len(reference["steps"]):
        words = f"{len(got['steps'])} steps instead of {len(reference['steps'])}"
        rows.insert(1, Row(NUMBER_OF_STEPS, float("inf"), 0.0, "wrong", words))
    first: str = ""
    off: Sequence[str] = ()
    if any(row.verdict == "wrong" for row in rows):
        first, off = _first(rows, logs, parts, steps, reference["steps"])
    return Divergence(tuple(rows), first, tuple(off), tuple(parts[0].noise()))


def same_bits(records: Sequence[Record]) -> Row:
    """Returns whether all tasks hold the same values after every step, to the last bit."""
    what = "same bits on all tasks"
    first, *others = records
    for index, other in enumerate(others, 1):
        for step, (one, two) in enumerate(zip(first["steps"], other["steps"], strict=False)):
            for name, value in one["logs"].items():
                if not np.array_equal(value, two["logs"].get(name), equal_nan=True):
                    return Row(what, float("inf"), 0.0, "wrong", f"{name} of task {index}, {_step_name(one, step)}")
            for group, values in first["groups"].items():
                at = step + (group != "optimizer")
                a, b = values["values"][at], other["groups"][group]["values"][at]
                if not np.array_equal(a, b, equal_nan=True):
                    different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
                    name = _names_of(values)[int(np.argmax(different))]
                    return Row(what, float("inf"), 0.0, "wrong", f"{name} of task {index}, {_step_name(one, step)}")
        for key, when in (("epochs", "after an epoch"), ("evaluate", "of evaluate")):
            for name, value in first[key].items():
                if not np.array_equal(value, other[key].get(name), equal_nan=True):
                    return Row(what, float("inf"), 0.0, "wrong", f"{name} of task {index}, {when}")
    return Row(what, 0.0, 0.0, "right")


def depends_on_order(reference: Record, reordered: Record, rounded: Record) -> bool:
    """Whether the training itself gives another result for the rows of a batch in another order."""
    for group in ("weights",):
        part = _of_group(group, reordered, reference, [rounded], 0.0)
        if part.has_values and np.max(part.errors[0] > np.maximum(1e-2, FACTOR * part.rounding[0])):
            return True
    return False


def _with_names_of(reference: Record, record: Record) -> Record:
    """Returns the record with the metrics' names of the reference: a process calls its second auc auc_1."""
    ours, theirs = (sorted(r["evaluate"] or r["epochs"], key=_with_number) for r in (record, reference))
    if [_with_number(name)[0] for name in ours] != [_with_number(name)[0] for name in theirs]:
        return record
    names = dict(zip(ours, theirs, strict=True))

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    steps = [{**step, "logs": renamed(step["logs"])} for step in record["steps"]]
    return {**record, "steps": steps, "epochs": renamed(record["epochs"]), "evaluate": renamed(record["evaluate"])}


def _with_number(name: str) -> tuple[str, int]:
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (name, 0)


# -- one kind of number at every step


@dataclass(frozen=True)
class _Part:
    """How far one kind of number is off at every step: matrices [step, name]."""

    what: str
    names: Sequence[str]
    errors: Floats
    rounding: Floats
    limits: Floats
    factors: Floats  # the best multiple of the reference, where it is one

    @property
    def has_values(self) -> bool:
        return self.errors.size > 0

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        return ~(self.errors <= self.limits)

    def noise(self) -> list[str]:
        """Names of which nothing can be told at any step."""
        if not self.has_values:
            return []
        return [name for i, name in enumerate(self.names) if self.rounding[0, i] > NOISE and not self.wrong[:, i].any()]

    def row(self, steps: Sequence[tuple[Any, Any]]) -> Row:
        beyond = self.errors / self.limits
        beyond[np.isnan(beyond)] = np.inf
        step, name = map(int, np.unravel_index(int(np.argmax(beyond)), beyond.shape))
        if self.wrong.any():  # the first, not the worst, which follows from it
            step = int(np.argmax(self.wrong.any(axis=1)))
            name = int(np.argmax(np.where(self.wrong[step], beyond[step], -1)))
        where = f"step {step + 1}" if len(self.names) == 1 else f"{self.names[name]}, step {step + 1}"
        verdict = "wrong" if self.wrong.any() else "noise" if np.all(self.rounding[0] > NOISE) else "right"
        return Row(self.what, float(self.errors[step, name]), float(self.rounding[step, name]), verdict, where)


def _of_group(group: str, got: Record, reference: Record, controls: Sequence[Record], tolerance: float) -> _Part:
    right = reference["groups"][group]
    names, sizes = right["names"], right["sizes"]
    kept = [i for i, size in enumerate(sizes) if size]
    ours, theirs = got["groups"][group], right["values"]
    if not kept or ours["values"].shape[1:] != theirs.shape[1:]:
        shape = (1, 1) if kept else (0, 0)
        infinite, zero = np.full(shape, np.inf), np.zeros(shape)
        words = f"{len(ours['names'])} variables instead of {len(names)}"
        return _Part(WORDS[group], [words], infinite, zero, zero, infinite)
    count = min(len(theirs), len(ours["values"]))
    expected = _quantity(group, theirs[:count])
    starts = np.cumsum([0, *sizes])[:-1][kept]
    scales, alike = _scales(expected, starts, [names[i] for i in kept])

    def distance(record: Record) -> Floats:
        values = record["groups"][group]["values"]
        quantity = _quantity(group, values[:count])
        apart = np.abs(quantity - expected)
        apart[(quantity == expected) | (np.isnan(quantity) & np.isnan(expected))] = 0.0
        apart[np.isnan(apart)] = np.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.maximum.reduceat(apart, starts, axis=1) / scales[: len(apart)]
        return np.nan_to_num(relative, nan=0.0, posinf=np.inf)

    errors = distance(got)
    rounding = np.zeros_like(errors)
    for control in controls:
        measured = distance(control)
        rounding[: len(measured)] = np.maximum(rounding[: len(measured)], measured)
    rounding = np.maximum.accumulate(rounding, axis=0)
    limits = np.maximum(tolerance, FACTOR * rounding)
    if group != "optimizer":
        # A change is a difference of two values, each of which is rounded, and a sum of rows, which may cancel: what
        # symmetry keeps at zero (the last bias of a loss of differences) is what rounding leaves of its like's size.
        largest = np.maximum.reduceat(np.nan_to_num(np.abs(theirs[1:count])), starts, axis=1)
        eps = np.array([right["eps"][i] for i in kept])
        with np.errstate(divide="ignore", invalid="ignore"):
            limits = np.maximum(limits, np.nan_to_num(4 * eps * largest / scales, nan=0.0, posinf=0.0))
            limits = np.maximum(limits, np.nan_to_num(8 * eps * alike / scales, nan=0.0, posinf=0.0))
    factors = _factors(_quantity(group, ours["values"][:count]), expected, starts, sizes, kept)
    return _Part(WORDS[group], [names[i] for i in kept], errors, rounding, limits, factors)


def _quantity(group: str, values: Floats) -> Floats:
    """What is compared: the changes of weights, which show what a small learning rate hides, or values as they are."""
    if group == "optimizer":
        return values
    with np.errstate(invalid="ignore"):
        changes: Floats = np.diff(values, axis=0)
    return changes


def _scales(expected: Floats, starts: npt.NDArray[np.int64], names: Sequence[str]) -> tuple[Floats, Floats]:
    """The size of each variable's quantity at each step, at least SMALLEST of the largest among its like; that size."""
    finite = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    sizes: Floats = np.maximum.reduceat(finite, starts, axis=1)
    largest = np.zeros_like(sizes)
    kinds = [name.rpartition("/")[2].rpartition("_")[2] for name in names]
    for kind in set(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        largest[:, alike] = sizes[:, alike].max(axis=1, keepdims=True)
    return np.maximum(sizes, SMALLEST * largest), largest


def _factors(
    got: Floats, expected: Floats, starts: npt.NDArray[np.int64], sizes: Sequence[int], kept: Sequence[int]
) -> Floats:
    """The number f for which got = f x expected, where there is one; NaN elsewhere."""
    factors = np.full((len(expected), len(kept)), np.nan)
    for column, (start, number) in enumerate(zip(starts, kept, strict=True)):
        a, b = got[:, start : start + sizes[number]], expected[:, start : start + sizes[number]]
        with np.errstate(all="ignore"):
            factor = np.sum(a * b, axis=1) / np.sum(b * b, axis=1)
            rest = np.linalg.norm(a - factor[:, None] * b, axis=1) / np.linalg.norm(a, axis=1)
        factors[:, column] = np.where((rest < 1e-3) & (np.abs(factor - 1) > 1e-2), factor, np.nan)
    return factors


def _of_logs(got: Record, reference: Record, controls: Sequence[Record], tolerance: float) -> list[_Part]:
    parts = []
    names = list(
        dict.fromkeys(name for record in (reference, got) for step in record["steps"] for name in step["logs"])
    )
    for name in names:
        errors = _log_errors(got, reference, name)
        rounding = np.zeros_like(errors)
        for control in controls:
            measured = _log_errors(control, reference, name)[: len(errors)]
            rounding[: len(measured)] = np.maximum(rounding[: len(measured)], measured)
        rounding = np.maximum.accumulate(rounding, axis=0)
        limits = np.maximum(tolerance, FACTOR * rounding)
        parts.append(_Part(f"{name}, after each batch", [name], errors, rounding, limits, errors * np.nan))
    return parts


def _log_errors(got: Record, reference: Record, name: str) -> Floats:
    pairs = zip(got["steps"], reference["steps"], strict=False)
    return np.array([[_error(a["logs"].get(name), b["logs"].get(name))] for a, b in pairs]).reshape(-1, 1)


def _error(got: Array | None, expected: Array | None) -> float:
    if got is None or expected is None or np.shape(got) != np.shape(expected):
        return float("inf")
    return error(np.asarray(got), np.asarray(expected))


# -- the rest


def _at_the_start(got: Record, reference: Record) -> Row:
    what = AT_THE_START
    for group in ("weights", "state"):
        ours, theirs = got["groups"][group], reference["groups"][group]
        if ours["values"].shape[1:] != theirs["values"].shape[1:]:
            return Row(what, float("inf"), 0.0, "wrong", f"{len(ours['names'])} instead of {len(theirs['names'])}")
        if not theirs["values"].size:
            continue
        a, b = ours["values"][0], theirs["values"][0]
        if not np.array_equal(a, b, equal_nan=True):
            different = int(np.argmax(~((a == b) | (np.isnan(a) & np.isnan(b)))))
            return Row(what, error(a, b), 0.0, "wrong", _names_of(theirs)[different])
    return Row(what, 0.0, 0.0, "right")


def _at_the_end(got: Record, reference: Record, controls: Sequence[Record], tolerance: float) -> Iterator[Row]:
    for what, key in (("after each epoch", "epochs"), ("of evaluate", "evaluate")):
        for name in dict.fromkeys([*reference[key], *got[key]]):
            found = [_error(r[key].get(name), reference[key].get(name)) for r in (got, *controls)]
            yield _row(f"{name} {what}" if what[0] == "o" else f"{name}, {what}", found, tolerance)
    if reference["predictions"] is not None:
        right = reference["predictions"]
        worst = [
            max((_error(a, b) for a, b in zip(r["predictions"] or [None], right, strict=False)), default=0.0)
            for r in (got, *controls)
        ]
        yield _row("predictions", worst, tolerance)


def _row(what: str, found: Sequence[float], tolerance: float) -> Row:
    difference, rounding = found[0], max(found[1:], default=0.0)
    right = difference <= max(tolerance, FACTOR * rounding)
    return Row(what, difference, rounding, "right" if right else "wrong")


def _names_of(group: Mapping[str, Any]) -> list[str]:
    """The variable that each value is of."""
    return [name for name, size in zip(group["names"], group["sizes"], strict=True) for _ in range(size)]


def _step_name(step: Mapping[str, Any], number: int) -> str:
    return f"step {number + 1} (epoch {step['epoch'] + 1}, batch {step['batch'] + 1})"


def _first(
    rows: Sequence[Row], logs: Sequence[_Part], parts: Sequence[_Part], steps: Sequence[Any], expected: Sequence[Any]
) -> tuple[str, Sequence[str]]:
    """Returns what is wrong first: where, and sentences."""
    for row in rows:
        if row.verdict == "wrong" and row.what == AT_THE_START:
            size = f", off by {_percent(row.difference)}" if np.isfinite(row.difference) else ""
            return "before the first step", [f"{row.what}: {row.where}{size}"]
    count = next((row.where for row in rows if row.what == NUMBER_OF_STEPS), "")
    for step in range(len(steps)):
        ours, theirs = steps[step]
        if (ours["epoch"], ours["batch"]) != (theirs["epoch"], theirs["batch"]):
            return _step_name(theirs, step), [f"{count or 'as many steps'}: this one was not made"]
        words = [
            f"{part.names[0]} is off by {_percent(part.errors[step, 0])}"
            for part in logs
            if step < len(part.errors) and part.wrong[step, 0]
        ]
        words += [
            _variables_off(part, step)
            for part in parts
            if part.has_values and step < len(part.errors) and part.wrong[step].any()
        ]
        if words:
            return _step_name(steps[step][1], step), [*words, *_before(step, (*logs, *parts))]
    if len(steps) < len(expected):
        return _step_name(expected[len(steps)], len(steps)), [f"{count}: this one was not made"]
    wrong = [row for row in rows if row.verdict == "wrong"]
    return "after the last step", [f"{row.what}: off by {_percent(row.difference)}" for row in wrong]


def _variables_off(part: _Part, step: int) -> str:
    off = np.flatnonzero(part.wrong[step])
    first = int(off[0])
    factor = part.factors[step, first]
    is_change = part.what != WORDS["optimizer"]
    size = _percent(part.errors[step, first])
    words = f"{part.names[first]} changes" if is_change else f"the optimizer's {part.names[first]} is"
    words += f" by {factor:.3g} times what it should" if is_change and np.isfinite(factor) else ""
    words += f" {factor:.3g} times what it should be" if not is_change and np.isfinite(factor) else ""
    words += "" if np.isfinite(factor) else f" wrongly, by {size}" if is_change else f" off by {size}"
    if len(off) > 1:
        names = ", ".join(part.names[i] for i in off[1:4]) + (", ..." if len(off) > 4 else "")
        words += f"; wrong as well: {len(off) - 1} more of {len(part.names)} ({names})"
    return words


def _percent(value: float) -> str:
    if not np.isfinite(value):
        return "no finite number"
    return f"{value:.1%}" if value >= 1e-3 else f"{value:.1e}"


def _before(step: int, parts: Sequence[_Part]) -> Iterator[str]:
    if step:
        largest = max((float(part.errors[:step].max()) for part in parts if part.has_values), default=0.0)
        yield f"before it nothing was off by more than {largest:.0e}"
