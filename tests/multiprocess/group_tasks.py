"""Tasks of a group as real processes, without TensorFlow: they start in a moment."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 30.0

PRELUDE = """
import os, signal, subprocess, sys, time
import numpy as np
from tfdist.cluster import Task
from tfdist.collectives import meet, meeting, sharing, waiting
from tfdist.errors import GroupError

waiting.FIRST_WORD_S = meeting.FIRST_WORD_S = 0.2  # what a task waits for is on its stderr

def say(*words):
    print(*words, flush=True)

def wait():
    sys.stdin.readline()

index, addresses, settings = int(sys.argv[1]), sys.argv[2].split(","), eval(sys.argv[3])
tasks = [Task("worker", i) for i in range(len(addresses))]
if "hosts" in settings:
    name = settings.pop("hosts")[index]
    sharing.boot_id = lambda: name
say("started")
try:
    group = meet(addresses, tasks, index, secret=b"secret", **{"start_timeout_s": 20, "step_timeout_s": 20, **settings})
    say("met")
    BODY
    group.leave(0)  # who ends without a word is taken for dead by those who still read what it sent
except GroupError as error:
    say(f"{type(error).__name__} for {getattr(error, 'task', None)} at {time.monotonic()}: {error}")
    raise SystemExit(1)
"""


class Tasks:
    """Processes that each run `body` with `group` in scope; stdin pokes them, stdout answers."""

    def __init__(
        self,
        folder: Path,
        count: int,
        body: str,
        *,
        start: int | None = None,
        addresses: Sequence[str] = (),
        prefixes: Sequence[Sequence[str]] = (),
        **settings: object,
    ) -> None:
        script = folder / "task.py"
        script.write_text(PRELUDE.replace("BODY", body.strip().replace("\n", "\n    ")))
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = addresses or [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
        for sock in sockets:
            sock.close()
        self.output = [""] * count
        self._arguments = [
            [*prefix, sys.executable, str(script), str(i), ",".join(addresses), repr(settings)]
            for i, prefix in enumerate(prefixes or [()] * count)
        ]
        self._all: list[subprocess.Popen[bytes]] = []
        self.processes = [self._start(index) for index in range(count if start is None else start)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._arguments[index], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        self._all.append(process)
        return process

    def start_anew(self, index: int) -> subprocess.Popen[bytes]:
        """Starts another process of a task; returns the former one."""
        former, self.processes[index] = self.processes[index], self._start(index)
        self.output[index] = ""
        return former

    def expect(self, index: int, pattern: str, *, within_s: float = DEADLINE_S) -> re.Match[str]:
        """Waits until the task's output holds the pattern."""
        stdout = self.processes[index].stdout
        assert stdout is not None
        deadline = time.monotonic() + within_s
        while not (match := re.search(pattern, self.output[index])):
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(stdout.fileno(), 65536).decode() if readable else ""
            assert piece, f"task {index} did not say {pattern!r}:\n{self.all_output()}"
            self.output[index] += piece
        return match

    def poke(self, index: int) -> None:
        stdin = self.processes[index].stdin
        assert stdin is not None
        stdin.write(b"\n")

    def signal(self, index: int, number: signal.Signals) -> float:
        """Sends a signal; returns when, on the clock of the tasks' own times."""
        self.processes[index].send_signal(number)
        return time.monotonic()

    def ends(self, index: int, *, within_s: float = DEADLINE_S) -> int:
        try:
            return self.processes[index].wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"task {index} did not end:\n{self.all_output()}")

    def all_output(self) -> str:
        return "\n".join(f"task {i}:\n{text}" for i, text in enumerate(self.output))

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


DEATH = r"PeerLostError for worker 1 at ([\d.]+): worker 1 is gone: its connection closed without a goodbye"


@contextmanager
def started(folder: Path) -> Iterator[Callable[..., Tasks]]:
    """Yields a function that starts tasks, which end with the block."""
    made = []

    def start(count: int, body: str, **settings: object) -> Tasks:
        made.append(Tasks(folder, count, body, **settings))
        return made[-1]

    try:
        yield start
    finally:
        for tasks in made:
            tasks.close()
