"""N tasks give what one plain Keras process gives, for every case of `parity`.

One cluster runs all cases of one N; a plain Keras process, which never imports tfdist, is the reference. How far arrays
may be apart is what `tfdist.testing` tells users, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import environment, run
from parity import CASES

from tfdist.testing import compare

TASK = Path(__file__).with_name("parity") / "task.py"
DEADLINE_S = 420
EXACT = [name for name, case in CASES.items() if not case.differs]
# TensorFlow's ring differs from our sockets in the sum alone, four tasks from three in their number.
CORE = [name for name, case in CASES.items() if case.is_core]
RUNS = {
    "1 task": (1, "default", []),
    "2 tasks": (2, "default", []),
    "3 tasks": (3, "default", []),
    "2 tasks without TensorFlow's servers": (2, "synchronous", []),
    "4 tasks": (4, "default", CORE),
    "2 tasks through TensorFlow's ring": (2, "ring", CORE),
}

Results = dict[str, list[dict[str, np.ndarray]]]


def _load(folder: Path, size: int) -> Results:
    results: Results = {}
    for name in CASES:
        files = [folder / f"{name}-{index}.npz" for index in range(size)]
        results[name] = [dict(np.load(file)) if file.exists() else {} for file in files]
    return results


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, str(TASK), str(folder), "plain"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return _load(folder, 1)


_finished: dict[str, tuple[Results, str]] = {}


def _run(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """Runs a cluster once, when the first test asks for it."""
    if name not in _finished:
        size, kind, cases = RUNS[name]
        folder = tmp_path_factory.mktemp("tasks")
        ended = run("--workers", size, TASK, folder, kind, *cases, deadline_s=DEADLINE_S)
        _finished[name] = (_load(folder, size), str(ended))
    return _finished[name]


@pytest.mark.parametrize(
    ("cluster", "case"), [(cluster, case) for cluster, (_, _, cases) in RUNS.items() for case in cases or EXACT]
)
def test_tasks_give_what_one_plain_keras_process_gives(cluster, case, plain, tmp_path_factory):
    results, log = _run(cluster, tmp_path_factory)
    reference = plain[case][0]
    assert "error" not in reference, f"plain Keras itself fails: {reference['error']}"
    for index, got in enumerate(results[case]):
        assert got, f"task {index} left nothing; the tasks wrote:\n{log}"
        assert "error" not in got, f"task {index}: {got.get('error')}\n{log}"
        comparison = compare(got, reference)
        assert comparison, f"task {index}:\n{comparison}"


@pytest.mark.parametrize(
    ("cluster", "case"),
    [(cluster, case) for cluster, (size, _, cases) in RUNS.items() if size > 1 for case in cases or CASES],
)
def test_tasks_hold_the_same_bits(cluster, case, tmp_path_factory):
    results, log = _run(cluster, tmp_path_factory)
    first, *others = results[case]
    assert first, log
    for index, other in enumerate(others, 1):
        different = [name for name in first if not np.array_equal(first[name], other.get(name), equal_nan=True)]
        assert not different, f"task {index} differs from task 0 in {different}"


@pytest.mark.parametrize("cluster", [name for name, (size, _, cases) in RUNS.items() if size > 1 and not cases])
def test_dropout_draws_other_numbers_than_one_process(cluster, plain, tmp_path_factory):
    got, reference = _run(cluster, tmp_path_factory)[0]["dropout"][0], plain["dropout"][0]
    assert not compare(got["weight 0"], reference["weight 0"])
    assert np.all(np.isfinite(got["weight 0"]))
