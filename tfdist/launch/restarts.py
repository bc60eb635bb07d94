"""After which failures tasks are started again, how often, and after how long a pause."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tfdist.launch.blame import Verdict, Words

EXIT_PREEMPTED = 42
EXIT_TIMEOUT = 75
# A shell, or a script that waits for another, says 128 + n where signal n ended it.
FIRST_SIGNAL_CODE, LAST_SIGNAL_CODE = 128 + 1, 128 + 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


def is_retryable_end(code: int, words: Words | None) -> bool:
    """Returns whether a task that ended so may end well when it is started again.

    So do signals, the loss of another task, time-outs and a preemption, but not an error of the script's own.

    Args:
        code: Its exit code, -n for signal n.
        words: What it said of its death.
    """
    if words is not None and words.consequence:
        return True
    return code < 0 or code in (EXIT_PREEMPTED, EXIT_TIMEOUT) or FIRST_SIGNAL_CODE <= code <= LAST_SIGNAL_CODE


def is_retryable(verdict: Verdict, code: int, words: Words | None) -> bool:
    """Returns whether a run that failed so may end well when all its tasks are started again.

    Args:
        verdict: Which task failed first.
        code: Its exit code.
        words: What it said of its death.
    """
    if verdict.kind == "own":
        return is_retryable_end(code, words)
    # A script that leaves too early would do so again; one that lost a task it could not name may find it.
    return verdict.kind == "hearsay"


@dataclass(frozen=True)
class Restart:
    """One start after the first.

    Attributes:
        task: The name of the task, or None for all tasks.
        why: What had happened.
        at: When, in seconds since the epoch.
    """

    task: str | None
    why: str
    at: float


class Restarts:
    """The restarts of a run.

    Attributes:
        limit: How many there may be, of all tasks and of single ones together.
        made: Those so far.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.made: list[Restart] = []

    @property
    def are_left(self) -> bool:
        return len(self.made) < self.limit

    def take(self, task: str | None, why: str) -> str:
        """Counts one, and returns which it is: "1 of 3"."""
        self.made.append(Restart(task, why, time.time()))
        return f"{len(self.made)} of {self.limit}"

    @property
    def pause_s(self) -> float:
        """Seconds to wait before all tasks are started again."""
        before = sum(restart.task is None for restart in self.made)
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(before, 10)))
