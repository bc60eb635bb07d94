"""Tasks started from a TF_CONFIG written by hand, without the launcher, as other platforms do.

They are forked from one process that has imported TensorFlow, so that each costs tenths of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launching import environment, is_alive, wait_for


class Task:
    """A started task, or one that has ended."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._path = folder / name

    @property
    def pid(self) -> int:
        path = self._path.with_suffix(".pid")
        wait_for(path.exists, f"{self.name} to start")
        return int(path.read_text())

    @property
    def out(self) -> str:
        return _read(self._path.with_suffix(".out"))

    @property
    def err(self) -> str:
        return _read(self._path.with_suffix(".err"))

    @property
    def has_ended(self) -> bool:
        return self._path.with_suffix(".end").exists()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Returns the exit code, -n for signal n; past the deadline the test fails."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: self.has_ended, "", timeout_s)
        assert self.has_ended, f"after {timeout_s} s {self}"
        return int(self._end[0])

    @property
    def seconds(self) -> float:
        """The time it ran."""
        return float(self._end[1]) - self.started_at

    @property
    def _end(self) -> list[str]:
        return self._path.with_suffix(".end").read_text().split()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def __str__(self) -> str:
        end = f"ended with {self.wait()}" if self.has_ended else "runs"
        return f"{self.name} {end}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def _read(path: Path) -> str:
    return path.read_text(errors="backslashreplace") if path.exists() else ""


class Template:
    """The process that tasks are forked from."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("template.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd=folder,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def start(self, script: Path, name: str, config: Mapping[str, object] | None, env: Mapping[str, str]) -> Task:
        task = Task(script.parent, name)
        extra = {} if config is None else {"TF_CONFIG": json.dumps(config)}
        request = {
            "argv": [str(script)],
            "environ": environment({**extra, **env}),
            **{what: str(script.parent / f"{name}.{what}") for what in ("out", "err", "end")},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return task

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class ByHand:
    """Starts tasks of one test; those that still run at its end are killed."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._tasks: list[Task] = []

    def start(
        self,
        script: Path,
        workers: Sequence[str],
        index: int,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Task:
        """Starts worker `index` of the cluster with these addresses."""
        config = {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}}
        return self.start_with(script, config, name=name or f"worker-{index}", env=env)

    def start_with(
        self, script: Path, config: Mapping[str, object] | None, *, name: str, env: Mapping[str, str] | None = None
    ) -> Task:
        task = self._template.start(script, name, config, env or {})
        self._tasks.append(task)
        return task

    def close(self) -> None:
        for task in self._tasks:
            if not task.has_ended:
                with contextlib.suppress(ProcessLookupError, AssertionError):
                    task.kill()
                    wait_for(lambda pid=task.pid: not is_alive(pid), "its end", 5)


def addresses(count: int) -> list[str]:
    """Free addresses of this host."""
    held = [socket.socket() for _ in range(count)]
    try:
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in held]
    finally:
        for sock in held:
            sock.close()
