"""A checkpoint written by one cluster goes on in another, with other numbers of workers and ps, or in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import environment

TASK = Path(__file__).with_name("restoring_task.py")
DEADLINE_S = 120
STEPS = 2 * 4
# (workers, ps), what it reads, what it writes; in this order.
RUNS = (
    ((2, 2), "", "of two"),
    ((0, 0), "of two", "of one"),
    ((3, 1), "of two,of one", "of three"),
    ((2, 2), "of one,of three", ""),
)
WRITERS = {write: cluster for cluster, _, write in RUNS if write}


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Returns what a cluster has of a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for (workers, ps), read, write in RUNS:
        command = [sys.executable, TASK, folder, workers, ps, read, write]
        ended = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=environment(),
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def of(name: str, cluster: tuple[int, int]) -> dict[str, np.ndarray]:
        return dict(np.load(folder / f"{name} by {cluster[0]} and {cluster[1]}.npz"))

    return of


@pytest.mark.parametrize(
    ("name", "reader"), [(name, cluster) for cluster, read, _ in RUNS for name in filter(None, read.split(","))]
)
def test_all_values_are_those_that_were_saved(name, reader, values):
    saved, restored = values(name, WRITERS[name]), values(name, reader)
    assert restored.pop("epochs") == 0, "nothing was left to train"
    assert saved.pop("epochs") == 2
    assert restored.keys() == saved.keys()
    for variable, value in saved.items():
        assert np.array_equal(restored[variable], value), variable
    assert saved["iteration 0"] == STEPS
    assert np.any(saved["momentum 2"])
