"""A thread that reads whatever becomes readable, so that nothing the tasks do or write can stop the supervisor.

The supervisor's own thread must never block: it handles signals and deadlines. Writing to a console may block for as
long as its reader likes, so all reading from tasks and all writing happens here, in one thread and thus in one order.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

ROUNDS = 10


class Readable(Protocol):
    """Something the pump reads.

    Attributes:
        urgent: Whether it goes before others that are readable at the same time.
    """

    urgent: bool

    def fileno(self) -> int: ...

    def read_ready(self) -> bool:
        """Reads what is there without blocking; returns false at the end of the stream."""
        ...

    def close(self) -> None: ...


class Pump:
    """One thread around a selector; `call` runs functions in it, in order."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._running = True
        self._thread = threading.Thread(target=self._run, name="tfdist output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` in the pump's thread, soon."""
        self._calls.put(function)
        # A full buffer means that it will wake anyway.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"x")

    def add(self, readable: Readable) -> None:
        """Begins to read; callable before `start` and from the pump's own thread."""
        self._selector.register(readable.fileno(), selectors.EVENT_READ, readable)

    def read_now(self) -> None:
        """Reads what is there, in the pump's thread alone."""
        # A connection is accepted in one round and read in the next.
        for _ in range(ROUNDS):
            if not self._read_round(0):
                break

    def finish(self, readables: Sequence[Readable]) -> None:
        """Reads what is still there, then closes these, whoever still holds their other ends; soon."""
        self.call(lambda: self._finish(readables))

    def begin_finish(self) -> None:
        """Makes the thread read what is still there and then end; what an escaped process keeps open is closed."""
        self.call(self._drain)

    def is_finished(self, timeout_s: float) -> bool:
        """Returns whether the thread has ended, after waiting for it for at most `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._running:
            self._read_round(None)
            while not self._calls.empty():
                self._calls.get()()

    def _read_round(self, timeout_s: float | None) -> bool:
        ready = [key.data for key, _ in self._selector.select(timeout_s) if key.data is not None]
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        # What a task says over its control socket decides on how what it prints is taken.
        for readable in sorted(ready, key=lambda readable: not readable.urgent):
            if not readable.read_ready():
                self._selector.unregister(readable.fileno())
                readable.close()
        return bool(ready)

    def _drain(self) -> None:
        self._finish(None)
        self._running = False

    def _finish(self, readables: Sequence[Readable] | None) -> None:
        # Bounded by what the dead tasks left in their pipes, unless an escaped process goes on writing.
        for _ in range(10_000):
            if not self._read_round(0):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None and (readables is None or key.data in readables):
                self._selector.unregister(key.fd)
                key.data.close()
