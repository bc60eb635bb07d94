"""The digits example keeps what the README says of it, alone and on several workers, from any folder."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import environment, run_command

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
TEST_IMAGES = 360
DEADLINE_S = 120
LAUNCHER = [sys.executable, "-m", "tfdist.run"]
COMMANDS = {
    "alone": [sys.executable, SCRIPT],
    "2 workers": [*LAUNCHER, "--workers", "2", SCRIPT],
    "3 workers": [*LAUNCHER, "--workers", "3", SCRIPT],
}


@dataclass(frozen=True)
class Trained:
    """What one run of the example left."""

    out: str
    err: str
    files: list[str]

    @property
    def losses(self) -> list[float]:
        return [float(number) for number in re.findall(r"loss: ([\d.]+)", self.out)]

    @property
    def accuracy(self) -> float:
        return float(self.out.split()[-1])

    def __str__(self) -> str:
        return f"{self.out}\n{self.err}"


_runs: dict[str, Trained] = {}


def trained(name: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs the example in an empty folder, once."""
    if name not in _runs:
        folder = tmp_path_factory.mktemp("elsewhere")
        done = run_command(COMMANDS[name], folder, DEADLINE_S)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        _runs[name] = Trained(done.stdout, done.stderr, files)
    return _runs[name]


@pytest.mark.parametrize(
    ("name", "prefix"), [("alone", ""), ("2 workers", "[worker 0] "), ("3 workers", "[worker 0] ")]
)
def test_the_last_line_is_the_accuracy_of_the_saved_model(name, prefix, tmp_path_factory):
    run = trained(name, tmp_path_factory)
    assert re.fullmatch(re.escape(prefix) + r"test accuracy 0\.\d{4}", run.out.splitlines()[-1]), run


@pytest.mark.parametrize("name", COMMANDS)
def test_97_of_100_unseen_digits_are_read_right(name, tmp_path_factory):
    run = trained(name, tmp_path_factory)
    assert run.accuracy >= 0.97, run


@pytest.mark.parametrize("name", COMMANDS)
def test_one_model_is_saved_and_nothing_else(name, tmp_path_factory):
    assert trained(name, tmp_path_factory).files == ["digits.keras"]


@pytest.mark.parametrize("name", ["2 workers", "3 workers"])
def test_workers_have_the_losses_of_one_process(name, tmp_path_factory):
    alone, run = trained("alone", tmp_path_factory), trained(name, tmp_path_factory)
    assert len(alone.losses) > 1
    # Twelve epochs enlarge rounding: one process with other kernels (SSE4 for AVX-512) is 1.6 % off, too.
    assert run.losses == pytest.approx(alone.losses, rel=0.04, abs=1e-3), run


@pytest.mark.parametrize("name", ["2 workers", "3 workers"])
def test_workers_have_the_accuracy_of_one_process_but_for_one_image(name, tmp_path_factory):
    alone, run = trained("alone", tmp_path_factory), trained(name, tmp_path_factory)
    assert abs(run.accuracy - alone.accuracy) <= 1.01 / TEST_IMAGES, run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2 workers", "training on 2 tasks (worker 0, worker 1); global batch 64 = 32 + 32 rows"),
        ("3 workers", "training on 3 tasks (worker 0, worker 1, worker 2); global batch 64 = 21 + 21 + 22 rows"),
    ],
)
def test_the_chief_shows_the_plan(name, words, tmp_path_factory):
    run = trained(name, tmp_path_factory)
    assert f"[worker 0] tfdist: {words}; 23 steps per epoch over 1,437 rows" in run.err, run


@pytest.mark.parametrize("name", ["2 workers", "3 workers"])
def test_stdout_is_the_chiefs_alone(name, tmp_path_factory):
    run = trained(name, tmp_path_factory)
    assert [line for line in run.out.splitlines() if not line.startswith("[worker 0] ")] == []


def test_in_a_terminal_the_chiefs_progress_bar_is_live(tmp_path):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMANDS["2 workers"], "--epochs", "1"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as launcher:
        os.close(theirs)
        text = _read_all(ours, launcher)
        assert launcher.wait(10) == 0, text
    bars = re.findall(r"\[(worker \d)\] \S*\s*(\d+)/23", text)
    assert {task for task, _ in bars} == {"worker 0"}, text
    assert len({step for _, step in bars}) > 2, text  # it grew on the screen
    last = re.sub(r"\x1b\[\d*[A-Za-z]", "", text.rstrip().splitlines()[-1])  # it may stand where a bar was erased
    assert last.startswith("[worker 0] test accuracy 0."), text


def _read_all(terminal: int, launcher: subprocess.Popen[bytes]) -> str:
    data, deadline = b"", time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                data += os.read(terminal, 65536)
    except OSError:  # Linux: everybody has closed the other end
        return data.decode()
    finally:
        os.close(terminal)
    launcher.kill()
    raise AssertionError(f"the launcher did not end within {DEADLINE_S} s\n{data.decode()}")
