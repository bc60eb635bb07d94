"""Which example went to which task: `audit` plays every task in this one process and compares with one task alone.

Synopsis:

    found = tfdist.data.audit(pipeline, tasks=3)
    print(found)               # a table
    found.where(key)           # the visits of one example
    found.raise_if_wrong()     # in a test of your own
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data.function import InputContext, from_function
from tfdist.data.pipeline import ENDED, Pipeline, call
from tfdist.errors import DataError

SHOWN = 5  # examples that the table names of each kind
STEPS_WITHOUT_END = 1_000_000


class Visit(NamedTuple):
    """One example in one task's batch: `row` counts the task's own rows of that step."""

    epoch: int
    task: int
    step: int
    row: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, task {self.task}, step {self.step}, row {self.row}"


@dataclass(frozen=True)
class Audit:
    """What `audit` found; `print` shows it as a table.

    Attributes:
        name: The pipeline, as it says what it is.
        sizes: Rows per epoch, task and step: `sizes[epoch][task][step]`.
        expected: Examples in one epoch, per epoch: how many one task alone gets.
        holes: Examples that no task got (or not often enough), as (epoch, key).
        overlaps: Examples that were got more often than one task alone gets them, as (epoch, key).
        unlike_one_process: The first (epoch, step) whose batch, put together from all tasks, is not the batch of one
            task alone in the same order, or None. No error for shards of your own; None for arrays and files.
        visits: Where each example went, by its key.
    """

    name: str
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    expected: tuple[int, ...]
    holes: tuple[tuple[int, Hashable], ...]
    overlaps: tuple[tuple[int, Hashable], ...]
    unlike_one_process: tuple[int, int] | None
    visits: Mapping[Hashable, tuple[Visit, ...]] = field(repr=False)

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Examples per epoch and task: `counts[epoch][task]`."""
        return tuple(tuple(sum(steps) for steps in tasks) for tasks in self.sizes)

    @property
    def coverage(self) -> float:
        """The part of the expected examples that some task got, over all epochs: 1.0 where there are no holes."""
        return 1 - len(self.holes) / max(1, sum(self.expected))

    @property
    def is_right(self) -> bool:
        """Whether each example was got by exactly one task in each epoch."""
        return not self.holes and not self.overlaps

    def where(self, key: Hashable) -> tuple[Visit, ...]:
        """Returns where an example went: nothing for one that no task got."""
        return self.visits.get(key, ())

    def raise_if_wrong(self) -> None:
        """Raises DataError, with the table, unless each example was got by exactly one task in each epoch."""
        if not self.is_right:
            raise DataError(str(self))

    def __str__(self) -> str:
        rows = [("epoch", "task", "steps", "examples", "rows per step")]
        rows += [
            (str(epoch), str(task), str(len(steps)), str(sum(steps)), _brief(steps))
            for epoch, tasks in enumerate(self.sizes)
            for task, steps in enumerate(tasks)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [self.name]
        for row in rows:
            lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        expected = " and ".join(str(count) for count in sorted(set(self.expected)))
        lines.append(
            f"expected {expected} examples per epoch: coverage {100 * self.coverage:.4g} %, "
            f"{_plural(len(self.holes), 'hole')}, {_plural(len(self.overlaps), 'overlap')}"
        )
        if self.unlike_one_process is None:
            lines.append("every batch is the one that one process would get")
        else:
            epoch, step = self.unlike_one_process
            lines.append(f"batches are not those that one process would get, from epoch {epoch}, step {step} on")
        for title, found in (("hole", self.holes), ("overlap", self.overlaps)):
            for epoch, key in found[:SHOWN]:
                visits = "; ".join(str(visit) for visit in self.where(key) if visit.epoch == epoch)
                lines.append(f"{title}: {key!r} in epoch {epoch}" + (f" ({visits})" if visits else ""))
            if len(found) > SHOWN:
                lines.append(f"{title}s: {len(found) - SHOWN} more")
        return "\n".join(lines)


def audit(
    source: Pipeline | Callable[[InputContext], tf.data.Dataset],
    *,
    tasks: int,
    epochs: int = 1,
    key: Callable[..., Any] | None = None,
    expected: Iterable[Any] | None = None,
) -> Audit:
    """Returns which example went to which task: coverage, overlaps, holes, and the rows of every step.

    Plays all tasks in this process, one after another, so it needs no cluster; then the pipeline once more as for one
    task alone, which tells what there was to get. Everything is read, so give it a small part of large data.

    Args:
        source: A pipeline, or a function as for `from_function`.
        tasks: The number of tasks to play.
        epochs: The number of epochs.
        key: A function of one example (as NumPy values; a tuple becomes its arguments) that returns what tells it from
            others, such as an id. By default a single number or string is its own key, and of others the bytes are:
            equal examples count as one that comes several times.
        expected: The keys of one epoch, where they are known. By default what one task alone gets.

    Raises:
        DataError: The source can not be read so.

    Example:
        found = tfdist.data.audit(tfdist.data.from_arrays((x, y), 64), tasks=3)
        print(found)
        found.raise_if_wrong()
    """
    if tasks < 1 or epochs < 1:
        raise DataError(f"tasks={tasks}, epochs={epochs}: give 1 or more")
    pipeline = _pipeline(source)
    known = None if expected is None else [_hashable(one) for one in expected]
    visits: defaultdict[Hashable, list[Visit]] = defaultdict(list)
    sizes, counts = [], []
    holes: list[tuple[int, Hashable]] = []
    overlaps: list[tuple[int, Hashable]] = []
    unlike: tuple[int, int] | None = None
    for epoch in range(epochs):
        parts = [_keys(pipeline.for_task(task, tasks, epoch=epoch), key) for task in range(tasks)]
        alone = _keys(pipeline.for_task(0, 1, epoch=epoch), key)
        seen: Counter[Hashable] = Counter()
        for task, steps in enumerate(parts):
            for step, rows in enumerate(steps):
                seen.update(rows)
                for row, one in enumerate(rows):
                    visits[one].append(Visit(epoch, task, step, row))
        wanted = Counter([one for rows in alone for one in rows] if known is None else known)
        holes += [(epoch, one) for one in (wanted - seen).elements()]
        overlaps += [(epoch, one) for one in (seen - wanted).elements()]
        counts.append(wanted.total())
        sizes.append(tuple(tuple(len(rows) for rows in steps) for steps in parts))
        if unlike is None:
            unlike = next(((epoch, step) for step in _differences(parts, alone)), None)
    return Audit(
        name=f"audit of {pipeline!r} on {_plural(tasks, 'task')}",
        sizes=tuple(sizes),
        expected=tuple(counts),
        holes=tuple(holes),
        overlaps=tuple(overlaps),
        unlike_one_process=unlike,
        visits={one: tuple(places) for one, places in visits.items()},
    )


def _pipeline(source: Any) -> Pipeline:
    if isinstance(source, Pipeline):
        return source
    if callable(source):
        return from_function(source)
    # One dataset read by all tasks in turn would tell nothing: it shuffles anew each time, seeded or not.
    raise DataError(
        f"source is a {type(source).__name__}: pass a pipeline, or a function that gets an InputContext and returns "
        "that task's dataset"
    )


def _keys(dataset: tf.data.Dataset, key: Callable[..., Any] | None) -> list[list[Hashable]]:
    """Per step of one task: the keys of its rows."""
    steps: list[list[Hashable]] = []
    for data, rows, total in dataset:
        if total == ENDED:
            break
        steps.append([_key(example, key) for example in _examples(data, int(rows))])
        if len(steps) > STEPS_WITHOUT_END:
            raise DataError(f"an epoch has more than {STEPS_WITHOUT_END} steps: audit a part of it")
    return steps


def _examples(data: Any, rows: int) -> Iterator[Any]:
    """The rows of a batch, one by one, as NumPy values; of a ragged part, nested lists."""

    def values(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return part.to_list()
        return tf.sparse.to_dense(part).numpy() if isinstance(part, tf.SparseTensor) else part.numpy()

    parts = [values(part) for part in tf.nest.flatten(data) if part is not None]
    for row in range(rows):
        mine = iter([part[row] for part in parts])
        yield tf.nest.map_structure(lambda part: None if part is None else next(mine), data)  # noqa: B023


def _key(example: Any, key: Callable[..., Any] | None) -> Hashable:
    if key is not None:
        return _hashable(call(key, example))
    parts = [part for part in tf.nest.flatten(example) if part is not None]
    if len(parts) == 1 and np.ndim(parts[0]) == 0:
        return _hashable(parts[0])
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        array = np.asarray(part)
        # The bytes of an array of objects (strings) would be addresses.
        digest.update(repr(part if array.dtype == object else (array.dtype, array.shape)).encode())
        digest.update(b"" if array.dtype == object else array.tobytes())
    return digest.hexdigest()


def _hashable(value: Any) -> Hashable:
    if isinstance(value, tf.Tensor):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and value != value:
        return "nan"  # which equals itself, as a key must
    return tuple(_hashable(one) for one in value) if isinstance(value, (list, tuple)) else value


def _differences(parts: list[list[list[Hashable]]], alone: list[list[Hashable]]) -> Iterator[int]:
    """The steps whose batch is not the one that one task alone gets."""
    for step in range(max(len(steps) for steps in [*parts, alone])):
        together = [one for steps in parts for one in (steps[step] if step < len(steps) else [])]
        if together != (alone[step] if step < len(alone) else []):
            yield step


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _brief(sizes: tuple[int, ...]) -> str:
    """Equal sizes in a row as one: "4 x3, 2"."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    texts = [str(size) if times == 1 else f"{size} x{times}" for size, times in runs]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:6], "...", texts[-1]])
