"""A script in two plain processes with TF_CONFIG, without the launcher: plan, results and end are as good as with it.

What the tasks say when one is missing or dies is tested in tests/multiprocess.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from by_hand import addresses
from launching import environment

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
OPTIONS = ["--epochs", "2"]
DEADLINE_S = 90


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    code: int
    out: str
    err: str

    @property
    def losses(self) -> list[float]:
        return [float(number) for number in re.findall(r"loss: ([\d.]+)", self.out)]

    @property
    def said(self) -> str:
        """tfdist's own lines."""
        return "\n".join(line for line in self.err.splitlines() if line.startswith("tfdist: "))

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def run_together(folder: Path, configs: list[dict[str, str]]) -> list[Ended]:
    """Runs the example once for each TF_CONFIG, all at the same time."""
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *OPTIONS],
            cwd=folder,
            env=environment(config),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for config in configs
    ]
    try:
        # One after another is safe: their few lines fit into the pipes.
        outputs = [task.communicate(timeout=DEADLINE_S) for task in started]
    finally:
        for task in started:
            task.kill()
            task.wait()
    return [Ended(task.returncode, *output) for task, output in zip(started, outputs, strict=True)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    workers = addresses(2)
    configs = [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}
        for index in range(2)
    ]
    return run_together(tmp_path_factory.mktemp("by_hand"), configs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_together(tmp_path_factory.mktemp("alone"), [{}])[0]


def test_both_tasks_end_with_0(tasks):
    assert [task.code for task in tasks] == [0, 0], "\n".join(map(str, tasks))


def test_the_losses_are_those_of_one_process(tasks, alone):
    assert len(alone.losses) == 2, alone
    assert tasks[0].losses == pytest.approx(alone.losses, abs=1e-3), tasks[0]


def test_the_chief_shows_the_plan_once(tasks):
    plan = "tfdist: training on 2 tasks (worker 0, worker 1); global batch 64 = 32 + 32 rows; 23 steps per epoch"
    assert tasks[0].said.count(plan) == 1, tasks[0]


def test_the_other_task_shows_no_plan_and_writes_nothing_to_stdout(tasks):
    assert "training on" not in tasks[1].said, tasks[1]
    assert tasks[1].out == "", tasks[1]
