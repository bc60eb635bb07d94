"""A user's model and data -> a table: does training them on N workers give what one plain Keras process gives?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.errors import LaunchError, ParityError
from tfdist.testing import divergence, functions
from tfdist.testing.cluster import PLAIN, LocalCluster
from tfdist.testing.comparison import TOLERANCE
from tfdist.testing.divergence import Divergence, Row

TIMEOUT_S = 600.0
EPOCHS, BATCH_SIZE, STEPS = 2, 32, 20


@dataclass(frozen=True)
class Report:
    """What `verify` found; true where every number is right, and printed as a table.

    Attributes:
        name: Of the user's function.
        training: What was trained, in words.
        runs: For each number of workers what was compared with one process.
        hints: What of the model is known to be other on several tasks, or was left out.
    """

    name: str
    training: str
    runs: Mapping[int, Divergence]
    hints: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not any(run.wrong for run in self.runs.values())

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.training}"]
        for workers, run in self.runs.items():
            lines += ["", f"{_workers(workers)}, against one process of plain Keras", *_table(run.rows)]
            if run.noise:
                lines.append(
                    f"noise: rounding alone moves {_some(run.noise)} as far as any fault would, so it tells nothing: "
                    "its gradient is zero but for rounding, or its precision is low"
                )
            if run.wrong:
                lines += [f"WRONG from {run.first} on:", *(f"  {words}" for words in run.off)]
            else:
                lines.append(f"right on {_workers(workers)}")
        if self.hints:
            lines += ["", *(f"note: {hint}" for hint in self.hints)]
        return "\n".join(lines)

    __repr__ = __str__  # what pytest shows of `assert verify(...)`

    def check(self) -> None:
        """Raises the table where anything is wrong.

        Raises:
            ParityError: It is.
        """
        if not self:
            raise ParityError(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Returns the same as plain values, for JSON; a number that is not finite is None there."""

        def plain(row: Row) -> dict[str, Any]:
            numbers = {"difference": row.difference, "rounding": row.rounding}
            finite = {name: value if abs(value) < float("inf") else None for name, value in numbers.items()}
            return {"what": row.what, **finite, "verdict": row.verdict, "where": row.where}

        return {
            "name": self.name,
            "training": self.training,
            "right": bool(self),
            "workers": {
                str(workers): {
                    "right": not run.wrong,
                    "first": run.first,
                    "off": list(run.off),
                    "noise": list(run.noise),
                    "rows": [plain(row) for row in run.rows],
                }
                for workers, run in self.runs.items()
            },
            "notes": list(self.hints),
        }


def verify(
    model: Callable[[], Any],
    data: Any = None,
    *,
    workers: int | Sequence[int] = 2,
    epochs: int = EPOCHS,
    batch_size: int = BATCH_SIZE,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    strategy: bool | str | Mapping[str, Any] = True,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> Report:
    """Returns whether a model trains on several workers as in one process of plain Keras, number by number.

    The model is trained for a few steps in one process of plain Keras and on N workers. Compared are the data, the
    weights at the start, the logs of every batch and epoch, every variable after every step, and what `evaluate` and
    `predict` give. A difference is wrong where it is larger than `tolerance` and than ten times what rounding does to
    this training by itself, which is measured: the one process trains twice more, with the rows of each batch in
    reverse and with initial weights one rounding away. Dropout is switched off: it draws other numbers on each task.

    Args:
        model: A function at the top level of a file, which returns a compiled model; or a tuple of it and what `fit`
            takes: (model, x, y), (model, dataset).
        data: What `fit` takes, where `model` returns the model alone: arrays (x, y) or (x, y, sample_weight), or a
            function at the top level of a file that returns these, a `tf.data.Dataset` of batches or a PyDataset.
        workers: The number of workers, or several to try one after the other.
        epochs: How many epochs.
        batch_size: Rows of a batch of arrays, over all workers.
        steps: At most so many steps in each epoch.
        tolerance: The largest difference, as a part of the number's own size, that always counts as equal.
        strategy: What the workers make: True, a kind ("synchronous"), or arguments of `create_strategy`.
        seed: What `keras.utils.set_random_seed` is given before `model` is called.
        timeout_s: How long each number of workers may take.
        env: Environment variables of all processes.

    Raises:
        TravelError: The function or the data can not be sent to other processes; the message says what to do.
        Exception: What a function raises, or `fit`: UnsupportedError for what tfdist refuses.

    Example:
        def build():  # at the top level of a file
            model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
            return model

        def test_my_model_trains_on_workers_as_in_one_process():
            report = tfdist.testing.verify(build, (x, y), workers=[2, 3])
            assert report, report
    """
    counts = [workers] if isinstance(workers, int) else list(workers)
    if not counts or min(counts) < 1:
        raise LaunchError(f"workers={workers!r}; it must be a number from 1 on, or several")
    described = functions.describe(model)
    source = None
    if callable(data):
        source = {"function": functions.describe(data)}
    elif data is not None:
        source = {"arrays": data}
    return verify_described(
        {"model": described, "data": source, "epochs": epochs, "batch_size": batch_size, "steps": steps, "seed": seed},
        counts,
        tolerance=tolerance,
        strategy=strategy,
        timeout_s=timeout_s,
        env=env,
    )


def verify_described(
    job: Mapping[str, Any],
    counts: Sequence[int],
    *,
    tolerance: float = TOLERANCE,
    strategy: bool | str | Mapping[str, Any] = True,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda words: None,
) -> Report:
    """Returns the report of a job whose functions are described, as by `functions.describe`."""

    @contextlib.contextmanager
    def cluster(count: int, kind: bool | str | Mapping[str, Any]) -> Iterator[LocalCluster]:
        with LocalCluster(workers=count, strategy=kind, seed=job["seed"], timeout_s=timeout_s, env=env) as made:
            yield made

    on_progress("one process of plain Keras trains, and twice more to measure rounding")
    with cluster(1, PLAIN) as plain:
        reference = run_reference(plain, job)
    runs = {}
    for count in counts:
        on_progress(f"{_workers(count)} train")
        with cluster(count, strategy) as tasks:
            runs[count] = judge(run_tasks(tasks, job, reference), reference, tolerance=tolerance)
    return Report(job["model"]["name"], _describe(job, reference), runs, tuple(hints(reference, runs)))


def run_reference(cluster: LocalCluster, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the records of one plain process, by name: its training, and the controls of it."""
    (records,) = cluster.run(_record, {**job, "is_reference": True})
    return dict(records)


def run_tasks(cluster: LocalCluster, job: Mapping[str, Any], reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the record of each task."""
    return [records[""] for records in cluster.run(_record, asked_of_tasks(job, reference))]


def asked_of_tasks(job: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job of tasks: what one plain process could not do of it, such as `evaluate`, they leave out."""
    right = reference[""]
    return {
        **job,
        "is_reference": False,
        "evaluated": bool(right["evaluate"]),
        "predicted": right["predictions"] is not None,
        "checksum": right["data"],
    }


def judge(
    records: Sequence[dict[str, Any]], reference: Mapping[str, Any], *, tolerance: float = TOLERANCE
) -> Divergence:
    """Returns what the records of N tasks are against that of one process."""
    numbers = {record["data"] for record in records}
    if numbers != {reference[""]["data"]}:
        who = "on the tasks" if len(numbers) == 1 else "on each task"
        row = Row("data", float("inf"), 0.0, "wrong", f"other values {who} than in one process")
        return Divergence((row,), "before the first step", (f"data: {row.where}; no training was compared",))
    controls = {name: record for name, record in reference.items() if name}
    if "reversed" in controls and _depends_on_order(reference):
        del controls["reversed"]  # no rounding: the training is another one
    found = divergence.compare(records[0], reference[""], list(controls.values()), tolerance=tolerance)
    same = divergence.same_bits(records)
    first, off = found.first, found.off
    if same.verdict == "wrong":
        off = (*off, f"the tasks hold different values: {same.where}")
    return Divergence((*found.rows, same), first or same.where.rpartition(", ")[2], off, found.noise)


def _record(strategy: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in the processes of a cluster."""
    from tfdist.testing import recorder

    return recorder.record(strategy, job)


def _depends_on_order(reference: Mapping[str, Any]) -> bool:
    if "reversed" not in reference:
        return False
    return divergence.depends_on_order(reference[""], reference["reversed"], reference["rounded"])


def _describe(job: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    steps = reference[""]["steps"]
    values = sum(reference[""]["facts"]["sizes"])
    return (
        f"{len(steps)} steps in {job['epochs']} epoch{'s' * (job['epochs'] > 1)}, "
        f"{len(reference['']['groups']['weights']['names'])} trainable variables of {values:,} values"
    )


def hints(reference: Mapping[str, Any], runs: Mapping[int, Divergence]) -> Iterator[str]:
    """Yields what of the model is known to be other on several tasks, and what was left out."""
    facts = reference[""]["facts"]
    wrong = {row.what for run in runs.values() for row in run.wrong}
    if facts["silenced"]:
        yield (
            f"dropout and noise were switched off in {_some(facts['silenced'])}: each task draws other numbers, as it "
            "should"
        )
    if not wrong:
        return
    if "data" in wrong:
        yield (
            "the data function gives other values each time: seed it (numpy.random.default_rng(0), "
            "Dataset.shuffle(n, seed=0))"
        )
    elif "weights at the start" in wrong:
        yield "the initial weights are others in each process: seed what draws them, or load them from a file"
    if facts["random"]:
        yield f"{_some(facts['random'])} draws other numbers on each task by design: leave it out to verify the rest"
    if facts["batch_norm"]:
        yield (
            f"BatchNormalization ({_some(facts['batch_norm'])}) uses each task's own rows by design: "
            "BatchNormalization(synchronized=True) gives what one process gives"
        )
    if _depends_on_order(reference):
        yield (
            "one process itself gives another result when the rows of a batch come in another order: a loss, metric or "
            "layer looks at several rows at once, and a task sees its own rows of a batch only"
        )
    elif facts["loss"]:
        yield (
            f"the loss {_some(facts['loss'])} is your own: it must be a mean or sum over rows, since a task sees its "
            "own rows of a batch only (return one value per row, and let Keras reduce them)"
        )


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _table(rows: Sequence[Row]) -> list[str]:
    wide = max(len(row.what) for row in rows)
    lines = [f"  {'compared':<{wide}}  difference  rounding  verdict"]
    for row in rows:
        where = f"  {row.where}" if row.where and row.verdict == "wrong" else ""
        numbers = f"{_number(row.difference):>10}  {_number(row.rounding):>8}"
        verdict = row.verdict.upper() if row.verdict == "wrong" else row.verdict
        lines.append(f"  {row.what:<{wide}}  {numbers}  {verdict}{where}")
    return lines


def _number(value: float) -> str:
    return "0" if value == 0 else "-" if abs(value) == float("inf") else f"{value:.1e}"
