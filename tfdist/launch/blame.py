"""What is known of each task -> which one failed first, and so made the others fail.

A dying task takes its peers with it, and often a peer is gone before it. Three kinds of trouble, in order of trust:

    own         a task died by itself: its own exception, a signal, an exit code
    left        a task ended with 0 and another lost it
    hearsay     a task says that it lost another, which did not die (yet)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.cluster import Task


@dataclass(frozen=True)
class Words:
    """What a task said of its own death before it died.

    Attributes:
        at: When the launcher heard it.
        code: The exit code it will leave with.
        consequence: Whether the error is about another task.
        lost: The name of that task, where it is known.
        text: The error's kind and the first line of its message.
    """

    at: float
    code: int
    consequence: bool = False
    lost: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Seen:
    """What the launcher knows of one task.

    Attributes:
        task: Which task.
        code: Its exit code (-n for signal n), or None while it lives and has not said goodbye.
        ended_at: When the launcher saw it end.
        stopped: Whether the launcher had asked it to end.
        words: What it said.
        spared: Whether the run goes on without it: it is to blame only where another is lost for want of it.
    """

    task: Task
    code: int | None = None
    ended_at: float | None = None
    stopped: bool = False
    words: Words | None = None
    spared: bool = False


@dataclass(frozen=True)
class Verdict:
    """Which task failed first.

    Attributes:
        task: The one that died, left, or is said to be lost; the one that says so where it names none.
        kind: "own", "left" or "hearsay".
        by: Who says it, for hearsay.
        elsewhere: The task that is said to be lost where it runs on another host; `task` is then the one that says so.
    """

    task: Task
    kind: str
    by: Task | None = None
    elsewhere: str | None = None


def first_failure(tasks: Sequence[Seen]) -> Verdict | None:
    """Returns the first failure, or None while there is none.

    A verdict of kind "hearsay" may change when the task that is said to be lost turns out to be dead.
    """
    own: list[tuple[float, Task]] = []
    hearsay: list[tuple[float, Seen]] = []
    for seen in tasks:
        if seen.stopped or seen.spared:
            continue
        if seen.words is not None:
            if seen.words.consequence:
                hearsay.append((seen.words.at, seen))
            else:
                own.append((seen.words.at, seen.task))
        elif seen.code not in (None, 0):
            own.append((seen.ended_at or 0.0, seen.task))
    if own:
        return Verdict(min(own)[1], "own")
    if not hearsay:
        return None
    hearsay.sort(key=lambda entry: entry[0])
    lost = {seen.words.lost for _, seen in hearsay if seen.words is not None}
    for seen in tasks:
        if str(seen.task) in lost and seen.spared:
            return Verdict(seen.task, "own")
        if str(seen.task) in lost and seen.code == 0:
            return Verdict(seen.task, "left")
    # Those who say something are alive to the rest; the lost one is silent.
    silent = {str(seen.task): seen.task for seen in tasks if seen.words is None}
    for _, seen in hearsay:
        if seen.words is not None and seen.words.lost in silent:
            return Verdict(silent[seen.words.lost], "hearsay", seen.task)
    here = {str(seen.task) for seen in tasks}
    for _, seen in hearsay:
        if seen.words is not None and seen.words.lost is not None and seen.words.lost not in here:
            return Verdict(seen.task, "hearsay", seen.task, elsewhere=seen.words.lost)
    return Verdict(hearsay[0][1].task, "hearsay", hearsay[0][1].task)
