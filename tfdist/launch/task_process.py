"""One task's process: started in its own process group, watched, stopped, and cleaned up after."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tfdist.cluster import Task
from tfdist.launch.blame import Seen, Words
from tfdist.launch.console import Console
from tfdist.launch.plan import TaskPlan
from tfdist.launch.pump import Pump
from tfdist.launch.streams import TaskOutput
from tfdist.launch.terminal import open_pty, resize_pty

# What a task leaves behind in its process group is asked to end; Python's resource tracker, which takes no notice, ends
# by itself when it has cleaned up.
GROUP_GRACE_S = 1.0


class TaskProcess:
    """One started task.

    Attributes:
        plan: What it is.
        output: Where its lines go.
        pid: Its process, which is also its process group.
        started_at: When it was started, by the monotonic clock, as all times here.
        ended_at: When it was seen to have ended.
        code: Its exit code, -n for signal n; None while it lives.
        stopped: Whether we asked it to end.
        phase: The last phase it reported; "" before the first.
        waiting_for: What it said it waits for, while it meets the others.
        step: The last step it reported.
        words: What it said of its own death.
        has_left: Whether it said goodbye with code 0.
        greeted: Whether it has connected to the control socket, and so dumps its stacks on SIGUSR1.
    """

    def __init__(self, plan: TaskPlan, output: TaskOutput) -> None:
        self.plan = plan
        self.output = output
        self.pid = 0
        self.started_at = 0.0
        self.ended_at: float | None = None
        self.code: int | None = None
        self.stopped = False
        self.phase = ""
        self.waiting_for = ""
        self.step: int | None = None
        self.words: Words | None = None
        self.greeted = False
        self.has_left = False
        self._popen: subprocess.Popen[bytes] | None = None
        self._group_until = 0.0
        self._ptys: list[tuple[int, str]] = []

    @property
    def task(self) -> Task:
        return self.plan.task

    @property
    def is_alive(self) -> bool:
        return self._popen is not None and self.code is None

    @property
    def seen(self) -> Seen:
        # One that waits for its peers to end has left them all the same.
        code = 0 if self.code is None and self.has_left else self.code
        return Seen(self.task, code=code, ended_at=self.ended_at, stopped=self.stopped, words=self.words)

    def start(self, command: Sequence[str], pump: Pump, console: Console, *, pty: bool) -> None:
        """Starts the task. Must be called in the main thread: the parent-death signal comes when the thread dies."""
        ends: dict[str, int] = {}
        closing: list[int] = []
        margin = len(self.output.prefix)
        try:
            for name, number in (("stdout", 1), ("stderr", 2)):
                live = pty and console.is_terminal(name)
                ours, theirs = open_pty(number, margin) if live else os.pipe()
                closing.append(theirs)
                ends[name] = theirs
                if live:
                    self._ptys.append((ours, name))
                pump.call(functools.partial(pump.add, self.output.stream(name, ours, live=live)))
            self.started_at = time.monotonic()
            self._popen = subprocess.Popen(
                [sys.executable, "-u", "-m", "tfdist.process", *command],
                stdin=subprocess.DEVNULL,
                stdout=ends["stdout"],
                stderr=ends["stderr"],
                env=dict(self.plan.environ),
                start_new_session=True,
            )
        finally:
            for number in closing:
                os.close(number)
        self.pid = self._popen.pid

    def resize(self) -> None:
        """Passes a new size of our terminal on."""
        for ours, name in self._ptys:
            resize_pty(ours, 1 if name == "stdout" else 2, len(self.output.prefix))

    def poll(self) -> bool:
        """Returns whether the task has just ended."""
        if self._popen is None or self.code is not None or self._popen.poll() is None:
            return False
        self.code = self._popen.returncode
        self.ended_at = time.monotonic()
        self._group_until = self.ended_at + GROUP_GRACE_S
        self._ptys.clear()
        self._signal_group(signal.SIGTERM)
        return True

    def ask_to_end(self, number: int) -> None:
        """Sends the task a signal that asks it to end."""
        if self.is_alive:
            self.stopped = True
            self.send(number)

    def send(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the task with all of its process group."""
        if self.is_alive:
            self.stopped = True
            self._signal_group(signal.SIGKILL)

    def is_group_gone(self) -> bool:
        """Returns whether nothing of an ended task's process group is left, and kills what stays too long."""
        try:
            os.killpg(self.pid, 0)
        except OSError:
            return True
        if time.monotonic() >= self._group_until:
            self._signal_group(signal.SIGKILL)
            return True
        return False

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)
