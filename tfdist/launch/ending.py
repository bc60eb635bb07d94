"""How tasks are ended: asked first, killed when their time is over; those that tell of a failure may finish."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfdist.launch.task_process import TaskProcess

# The others are doomed once one has failed, and an MWMS worker ignores SIGTERM.
FAILURE_GRACE_S = 2.0
# A task that fails lets its atexit functions run for up to 3 s.
FAILING_TASK_GRACE_S = 5.0
STACK_DUMP_S = 0.5
KILL_AGAIN_S = 0.5
# Some tools pass a Ctrl-C on that the terminal has sent as well.
SAME_SIGNAL_S = 0.3


@dataclass
class Stop:
    """Why all tasks end, and when.

    Attributes:
        kind: "failure", "start time-out", "signal" or "broken pipe".
        code: The exit code that it means.
        number: The signal that asks the tasks to end.
        grace_s: From then until SIGKILL.
        began_at: When it was decided.
        ask_at: When the tasks are asked.
        failing: The task that failed first.
        speaks: Whether what that task still writes is of use to the reader.
        asked: Whether the tasks have been asked.
        interrupted: Whether a signal that ends the run has come since.
    """

    kind: str
    code: int
    number: int
    grace_s: float
    began_at: float
    ask_at: float
    failing: TaskProcess | None = None
    speaks: bool = False
    asked: bool = False
    interrupted: bool = False


class Ending:
    """The end of the tasks of one attempt.

    Args:
        tasks: All of them; the list may change.
        say: Tells the user a line.

    Attributes:
        stop: Why all of them end; None while they may go on.
    """

    def __init__(self, tasks: Sequence[TaskProcess], say: Callable[[str], None]) -> None:
        self.stop: Stop | None = None
        self._tasks = tasks
        self._say = say

    def begin(
        self,
        kind: str,
        code: int,
        *,
        number: int = signal.SIGTERM,
        grace_s: float = FAILURE_GRACE_S,
        failing: TaskProcess | None = None,
        speaks: bool = False,
        dump: bool = False,
    ) -> None:
        """Begins the end of all tasks.

        Args:
            kind, code, number, grace_s, failing, speaks: As of a `Stop`.
            dump: Whether each task first writes where it is.
        """
        now = time.monotonic()
        self.stop = Stop(kind, code, number, grace_s, now, now + STACK_DUMP_S * dump, failing, speaks)
        if dump:
            for task in self._tasks:
                if task.greeted:
                    task.send(signal.SIGUSR1)

    def dismiss(self, tasks: Sequence[TaskProcess]) -> None:
        """Ends tasks that have nothing more to do, and whose last words are of no use."""
        for task in tasks:
            task.output.muted = True
            task.ask_to_end(signal.SIGTERM)
            task.kill_at = time.monotonic() + FAILURE_GRACE_S

    def take_another_signal(self, number: int) -> None:
        """Ends the tasks at once on a second Ctrl-C, which is for one who will not wait."""
        now = time.monotonic()
        assert self.stop is not None
        self.stop.interrupted = True
        if number == signal.SIGINT and now > self.stop.began_at + SAME_SIGNAL_S:
            self.stop.ask_at = min(self.stop.ask_at, now)
            self.stop.grace_s = now - self.stop.ask_at
            for task in self._tasks:
                task.kill_at = now

    def press_on(self) -> None:
        """Asks and kills those whose time has come."""
        now = time.monotonic()
        if self.stop is not None and not self.stop.asked and now >= self.stop.ask_at:
            self._ask(self.stop)
        for task in self._tasks:
            if not task.is_alive or task.kill_at is None or now < task.kill_at:
                continue
            if self.stop is not None and self.stop.kind == "signal" and not task.killed:
                waited_s = task.kill_at - self.stop.ask_at
                self._say(f"{task.task} (pid {task.pid}) did not end within {waited_s:g} s and is killed")
            task.kill()
            task.kill_at = now + KILL_AGAIN_S

    @property
    def next_moment(self) -> float | None:
        """When `press_on` has something to do."""
        if self.stop is not None and not self.stop.asked:
            return self.stop.ask_at
        return min((task.kill_at for task in self._tasks if task.is_alive and task.kill_at is not None), default=None)

    def _ask(self, stop: Stop) -> None:
        stop.asked = True
        for task in self._tasks:
            is_failing = task is stop.failing
            if stop.kind != "signal" and not (is_failing and stop.speaks):
                # What they say now comes of the failure, or of our asking.
                task.output.muted = True
            if is_failing and task.words is not None:
                task.kill_at = stop.began_at + FAILING_TASK_GRACE_S
            else:
                task.ask_to_end(stop.number)
                task.kill_at = stop.ask_at + stop.grace_s
