"""The runs of the parity cases: one plain Keras process, and clusters of several sizes and kinds; how far apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from launching import environment, run

from parity.cases import CASES
from tfdist.testing import Comparison, compare
from tfdist.testing.comparison import TOLERANCE

TASK = Path(__file__).with_name("task.py")
DEADLINE_S = 900

Arrays = dict[str, np.ndarray]
Results = dict[str, list[Arrays]]  # case -> the arrays of each task; empty for a task that left nothing


@dataclass(frozen=True)
class Clusters:
    """One column of the matrix.

    Attributes:
        name: What it is called in tests and in the support matrix.
        size: The number of tasks.
        kind: What `task.py` calls the strategy.
        core: Whether only core cases run: TensorFlow's ring differs from our sockets in the sum alone, four tasks from
            three in their number, and the strategy without TensorFlow's servers in how it starts.
    """

    name: str
    size: int
    kind: str = "default"
    core: bool = False

    @property
    def cases(self) -> list[str]:
        return [name for name, case in CASES.items() if case.is_core or not self.core]


RUNS = {
    clusters.name: clusters
    for clusters in (
        Clusters("1 task", 1),
        Clusters("2 tasks", 2),
        Clusters("3 tasks", 3),
        Clusters("2 tasks without TensorFlow's servers", 2, "synchronous", core=True),
        Clusters("4 tasks", 4, core=True),
        Clusters("2 tasks through TensorFlow's ring", 2, "ring", core=True),
    )
}


def run_plain(folder: Path, cases: Sequence[str] = ()) -> Results:
    """Returns what the cases (all, by default) give in one process that never imports tfdist."""
    command = [sys.executable, str(TASK), str(folder), "plain", *cases]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return _load(folder, 1)


def run_tasks(name: str, folder: Path, cases: Sequence[str] = ()) -> tuple[Results, str]:
    """Returns what the cases (all of this run, by default) give on each task of a cluster, and what the tasks wrote."""
    clusters = RUNS[name]
    chosen = [case for case in clusters.cases if not cases or case in cases]
    ended = run("--workers", clusters.size, TASK, folder, clusters.kind, *chosen, deadline_s=DEADLINE_S)
    return _load(folder, clusters.size), str(ended)


def _load(folder: Path, size: int) -> Results:
    results: Results = {}
    for name in CASES:
        files = [folder / f"{name}-{index}.npz" for index in range(size)]
        results[name] = [dict(np.load(file)) if file.exists() else {} for file in files]
    return results


def compared(case: str, got: Arrays, reference: Arrays) -> Comparison:
    """Returns how far one task's arrays of a case are from those of one process; an error is infinitely far."""
    if not got or "error" in got or "error" in reference:
        return compare({"ended": 0}, {"ended": 1, "left": 1})
    return compare(got, reference, tolerance=CASES[case].tolerance or TOLERANCE)


def other_bits(results: Sequence[Mapping[str, np.ndarray]], index: int) -> list[str]:
    """Returns the arrays of which a task holds other bits than task 0."""
    first, other = results[0], results[index]
    return [name for name in {**first, **other} if not _same(first.get(name), other.get(name))]


def _same(array: np.ndarray | None, other: np.ndarray | None) -> bool:
    if array is None or other is None:
        return False
    return np.array_equal(array, other, equal_nan=array.dtype.kind in "fc")
