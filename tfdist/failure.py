"""An exception that ends a task -> what its launcher and its peers are told of it."""

from __future__ import annotations

import os
import re
import socket
import time
import traceback

from tfdist.errors import MeetingError, PeerLostError, WaitError

EXIT_TIMEOUT = 75
# What TensorFlow raises where a peer of its collectives or parameter servers is gone.
_TENSORFLOW_PEER_ERRORS = ("AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError")


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a task that dies of `error`: 75 for a time-out of the group, else 1."""
    for link in _chain(error):
        if isinstance(link, WaitError) or (isinstance(link, MeetingError) and link.timed_out):
            return EXIT_TIMEOUT
    return 1


def describe(error: BaseException, *, task: str | None, code: int, step: int | None) -> dict[str, object]:
    """Returns the content of the error file: plain values, of limited length."""
    links = _chain(error)
    return {
        "task": task,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "code": code,
        "step": step,
        "error": type(error).__name__,
        "message": str(error)[:4000],
        "traceback": "".join(traceback.format_exception(error))[-20000:],
        # Those who wait for a meeting in vain know no more than that.
        "consequence": any(map(_is_about_others, links)) and not any(map(_is_late_meeting, links)),
        "lost": next((lost for link in links if (lost := _lost_task(link))), None),
    }


def one_line(error: BaseException) -> str:
    """Returns the error's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _is_about_others(error: BaseException) -> bool:
    """Whether an error says that another task, or the way to it, is gone."""
    kind = type(error)
    if kind.__module__.startswith("tensorflow.") and kind.__name__ in _TENSORFLOW_PEER_ERRORS:
        return True
    if isinstance(error, MeetingError):
        return not error.timed_out
    if isinstance(error, WaitError):
        return error.task is not None
    # An error out of a TensorFlow op carries the Python error only as text.
    return isinstance(error, PeerLostError) or "PeerLostError" in str(error)


def _is_late_meeting(error: BaseException) -> bool:
    return isinstance(error, MeetingError) and error.timed_out


def _lost_task(error: BaseException) -> str | None:
    if isinstance(error, (PeerLostError, WaitError)) and error.task is not None:
        return str(error.task)
    match = re.search(r"PeerLostError: (\w+ \d+) ", str(error))
    return match[1] if match else None


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links
