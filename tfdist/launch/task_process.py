"""One task's process: started in its own process group, watched, stopped, and cleaned up after."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cluster import Task
from tfdist.launch.blame import Seen, Words
from tfdist.launch.console import Console
from tfdist.launch.plan import TaskPlan
from tfdist.launch.pump import Pump
from tfdist.launch.streams import TaskOutput, TaskStream
from tfdist.launch.terminal import open_pty, resize_pty

# What a task leaves behind in its process group is asked to end; Python's resource tracker, which takes no notice, ends
# by itself when it has cleaned up.
GROUP_GRACE_S = 1.0
MEETING = ("strategy", "waiting")


class TaskProcess:
    """One started task.

    Attributes:
        plan: What it is.
        output: Where its lines go.
        attempt: How often the task was started before.
        stands_in: Whether it was started alone, in the place of one that died while the others went on.
        streams: What is read of it.
        pid: Its process, which is also its process group.
        started_at: When it was started, by the monotonic clock, as all times here.
        ended_at: When it was seen to have ended.
        code: Its exit code, -n for signal n; None while it lives.
        stopped: Whether we asked it to end.
        kill_at: When it is killed, should it still live then; None where it may live on.
        killed: Whether we killed it.
        given_up: Why it was killed as one that is lost to the others; it then counts as one that died.
        spared: Whether the run goes on in spite of its death.
        returns: Why another is started in its place as soon as nothing of it is left; "" where none is.
        phase: The last phase it reported; "" before the first.
        asked_at: When it asked for the cluster.
        waiting_for: What it said it waits for, while it meets the others.
        step: The last step it reported.
        words: What it said of its own death.
        is_heard: Whether all that it said before it ended has been heard.
        has_left: Whether it said goodbye with code 0.
        greeted: Whether it has connected to the control socket, and so dumps its stacks on SIGUSR1.
    """

    def __init__(self, plan: TaskPlan, output: TaskOutput, attempt: int = 0, *, stands_in: bool = False) -> None:
        self.plan = plan
        self.output = output
        self.attempt = attempt
        self.stands_in = stands_in
        self.streams: list[TaskStream] = []
        self.pid = 0
        self.started_at = 0.0
        self.ended_at: float | None = None
        self.code: int | None = None
        self.stopped = False
        self.kill_at: float | None = None
        self.killed = False
        self.given_up = ""
        self.spared = False
        self.returns = ""
        self.phase = ""
        self.asked_at: float | None = None
        self.waiting_for = ""
        self.step: int | None = None
        self.words: Words | None = None
        self.greeted = False
        self.has_left = False
        self.is_heard = False
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
        return Seen(
            self.task, code=code, ended_at=self.ended_at, stopped=self.stopped, words=self.words, spared=self.spared
        )

    @property
    def is_meeting(self) -> bool:
        return self.is_alive and self.phase in MEETING

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
                self.streams.append(self.output.stream(name, ours, live=live))
                pump.call(functools.partial(pump.add, self.streams[-1]))
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

    def hear(self, message: Mapping[str, Any]) -> None:
        """Takes in what the task said of itself."""
        kind = message.get("kind")
        if isinstance(message.get("step"), int):
            self.step = message["step"]
        if kind == "hello":
            self.greeted = True
        elif kind == "phase":
            self.phase = str(message.get("phase"))
            self.waiting_for = str(message.get("for", self.waiting_for))
            if self.phase in MEETING and self.asked_at is None:
                self.asked_at = time.monotonic()
        elif kind == "bye":
            self.has_left = message.get("code") == 0
        elif kind == "error":
            self.hear_last_words(message)
        elif kind == "ended":
            self.is_heard = True

    def hear_last_words(self, record: Mapping[str, Any]) -> None:
        """Takes in what the task said of its own death; what it said first counts."""
        code, lost = record.get("code"), record.get("lost")
        message = str(record.get("message", "")).strip().splitlines()
        self.words = self.words or Words(
            at=time.monotonic(),
            code=code if isinstance(code, int) and 0 < code < 256 else 1,
            consequence=bool(record.get("consequence")),
            lost=lost if isinstance(lost, str) else None,
            text=": ".join([str(record.get("error", "an error")), *message[:1]]),
        )

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
            # Before its script runs, an interrupt would only show Python's own insides.
            self.send(number if self.greeted else signal.SIGTERM)

    def send(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the task with all of its process group."""
        if self.is_alive:
            self.stopped = self.killed = True
            self._signal_group(signal.SIGKILL)

    def give_up(self, why: str) -> None:
        """Kills the task with all of its process group, as one that is lost to the others."""
        if self.is_alive:
            self.given_up = self.given_up or why
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
