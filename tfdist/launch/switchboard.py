"""Between the main thread, which decides, and the pump's thread, which reads and writes.

Signals, words of tasks and a broken pipe come in through queues and a byte that wakes; lines go out in the order of all
output. The main thread never blocks but in `wait_until`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from tfdist.launch.console import Console
from tfdist.launch.control import ControlServer, Message
from tfdist.launch.pump import Pump
from tfdist.launch.signals import signals_queued


class Switchboard:
    """Open inside its `with`, in which signals are queued; must be used in the main thread.

    Attributes:
        pump: Reads what tasks write and say.
        console: Writes; used by the pump's thread, and by the main thread when `finish` has returned.
        signals: Numbers of the signals that came.
        messages: What tasks said: local index, attempt, message.
        is_pipe_broken: Whether nobody reads our stdout any more.
    """

    def __init__(self, run_dir: str) -> None:
        self.pump = Pump()
        self.console = Console(1, 2, on_broken=self._on_broken_pipe)
        self.signals: deque[int] = deque()
        self.messages: deque[tuple[int, int, Message]] = deque()
        self.is_pipe_broken = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._open = contextlib.ExitStack()
        self.pump.add(ControlServer(run_dir, self.pump, self._on_message))

    def __enter__(self) -> Switchboard:
        self.pump.start()
        self._open.enter_context(self._wake_read)
        self._open.enter_context(self._wake_write)
        self._open.enter_context(signals_queued(self.signals, self._wake_write.fileno()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def wait_until(self, moment: float) -> None:
        """Returns at that moment of the monotonic clock, or before, when something has come or a child has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.select(max(0.001, moment - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def send_after_words(self, index: int, attempt: int, message: Message) -> None:
        """Puts a message behind those that a task has sent before now, soon."""

        def send() -> None:
            self.pump.read_now()
            self._on_message(index, attempt, message)

        self.pump.call(send)

    def say(self, *lines: str) -> None:
        """Writes lines of the launcher to stderr, soon."""
        self.pump.call(lambda: self._write(lines, b"tfdist: "))

    def finish(self, is_waited_for: Callable[[], bool]) -> None:
        """Writes what the tasks have left in their pipes, and ends the pump.

        A reader that takes its time with our output (`| less`) is waited for as long as `is_waited_for()`.
        """
        self.pump.begin_finish()
        while not self.pump.is_finished(0.2) and is_waited_for():
            pass

    def write(self, lines: Sequence[str], prefix: bytes = b"") -> None:
        """Writes lines to stderr at once; only when the pump has finished."""
        self._write(lines, prefix)

    def _write(self, lines: Sequence[str], prefix: bytes) -> None:
        self.console.write_lines("stderr", prefix, [line.encode(errors="replace") for line in lines])

    def _on_message(self, index: int, attempt: int, message: Message) -> None:
        """In the pump's thread."""
        self.messages.append((index, attempt, message))
        self._wake()

    def _on_broken_pipe(self) -> None:
        """In the pump's thread."""
        self.is_pipe_broken = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")
