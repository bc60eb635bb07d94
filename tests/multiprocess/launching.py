"""Runs `python -m tfdist.run` on small scripts for the tests beside it, each run with a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 40.0


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def words(self) -> str:
        """The launcher's own lines."""
        return "\n".join(line for line in self.err.splitlines() if not line.startswith("["))

    def said_by(self, task: str) -> list[str]:
        """What one task wrote to stdout."""
        return [line[len(task) + 3 :] for line in self.out.splitlines() if line.startswith(f"[{task}] ")]

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a run, without what a surrounding run or CI machine may have set."""
    unwanted = re.compile("TFDIST_|TF_CONFIG$|TF_CPP|.*_proxy$|OMP_NUM|TF_NUM", re.IGNORECASE)
    return {**{k: v for k, v in os.environ.items() if not unwanted.match(k)}, **(extra or {})}


def run_command(command: Sequence[object], folder: Path, deadline_s: float) -> subprocess.CompletedProcess[str]:
    """Runs any command in a folder to its end, as a user would from a shell without input."""
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


def start(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Starts the launcher, in its own session, where Ctrl-C is not ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.run", *map(str, arguments)],
        stdout=stdout,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=environment(env),
        text=True,
        errors="backslashreplace",
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(launcher: subprocess.Popen[str], started_at: float | None = None, deadline_s: float = DEADLINE_S) -> Ended:
    """Waits for the launcher's end; past the deadline it is killed, and the test fails with what it wrote."""
    began = time.monotonic() if started_at is None else started_at
    try:
        out, err = launcher.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        launcher.kill()
        out, err = launcher.communicate()
        raise AssertionError(f"the launcher did not end within {deadline_s} s\n{out}\n{err}") from None
    return Ended(launcher.returncode, out or "", err or "", time.monotonic() - began)


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> Ended:
    """Runs the launcher to its end."""
    began = time.monotonic()
    return finish(start(*arguments, cwd=cwd, env=env), began, deadline_s)


def write(folder: Path, source: str, name: str = "script.py") -> Path:
    """Writes a script."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Returns when `condition` holds; asks 50 times a second."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s for: {what}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def pids_in(folder: Path, count: int) -> list[int]:
    """Waits until `count` tasks have written files `<pid>.pid` into `folder`, and returns the pids."""
    wait_for(lambda: len(list(folder.glob("*.pid"))) >= count, f"{count} tasks to run")
    return [int(path.stem) for path in folder.glob("*.pid")]


@contextlib.contextmanager
def started(*arguments: object, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A running launcher, killed at the end if the test did not see to its end."""
    launcher = start(*arguments, **options)  # type: ignore[arg-type]
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate(timeout=10)


def first_lines(text: str, count: int = 5) -> Sequence[str]:
    return text.splitlines()[:count]
