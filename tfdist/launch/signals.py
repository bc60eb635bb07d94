"""Signals to the launcher -> a queue and a byte that wakes its select."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)


@contextlib.contextmanager
def signals_queued(queue: deque[int], wake: int) -> Iterator[None]:
    """Puts the signals that end a run, and a new window size, into `queue`; a child's end only wakes.

    Args:
        queue: Takes signal numbers.
        wake: File descriptor, not blocking, to which each signal writes a byte.
    """

    def take(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            queue.append(number)

    before = {}
    for number in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH):
        # nohup and `&` in a script make a process ignore a signal on purpose.
        if number in STOP_SIGNALS and signal.getsignal(number) is signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, take)
    wakeup = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
