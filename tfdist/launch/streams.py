"""What one task writes: cut into lines, into its log file whole, onto the console filtered and with its name."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from tfdist.control import QUIET_MARK
from tfdist.launch.console import Console, LiveLine, visible

CHUNK = 1 << 16
# A longer line goes out in pieces of this size, each with the task's name: a task that never ends its line must not
# fill the launcher's memory.
LONGEST_LINE = 1 << 20
TAIL_LINES = 20
_QUIET_MARK = QUIET_MARK.encode()


class TaskOutput:
    """The two streams of one task.

    Attributes:
        tail: The last lines of stderr that are not noise, for the report of a failure.
        muted: Whether the console leaves this task's lines out.
        stderr_muted: Whether it leaves out those of stderr; so from the mark on that a dying task writes.
    """

    def __init__(self, label: str, console: Console, log: BinaryIO | None, is_noise: Callable[[bytes], bool]) -> None:
        self.prefix = f"[{label}] ".encode()
        self.console = console
        self.is_noise = is_noise
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.muted = False
        self.stderr_muted = False
        self._log = log

    def stream(self, name: str, number: int, *, live: bool) -> TaskStream:
        """Returns a reader of file descriptor `number`, which it closes at its end."""
        return TaskStream(self, name, number, live=live)

    def log(self, data: bytes) -> None:
        if self._log is not None:
            try:
                self._log.write(data)
                self._log.flush()
            except OSError:
                # A full disk must not end the training.
                self._log = None

    def is_shown(self, name: str) -> bool:
        return not (self.muted or (name == "stderr" and self.stderr_muted))


class TaskStream:
    """stdout or stderr of one task; a `Readable` of the pump."""

    urgent = False

    def __init__(self, output: TaskOutput, name: str, number: int, *, live: bool) -> None:
        os.set_blocking(number, False)
        self._output = output
        self._name = name
        self._number = number
        self._rest = b""
        self._live = LiveLine(name, output.prefix) if live else None

    def fileno(self) -> int:
        return self._number

    def read_ready(self) -> bool:
        try:
            data = os.read(self._number, CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            # Linux says EIO when the last holder of a pty's other end is gone.
            return False
        if not data:
            return False
        self._take(data)
        return True

    def close(self) -> None:
        """Writes the rest of an unfinished line, and closes."""
        if self._rest:
            self._take(b"\n")
        os.close(self._number)

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n") if b"\n" in data else (self._rest + data,)
        if lines and self._live is not None:
            self._output.console.end_live(self._live)
            self._live.text = b""
        if len(rest) >= LONGEST_LINE:
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._write(lines)
        if rest and self._live is not None and self._output.is_shown(self._name):
            more = rest if lines else data
            self._live.grow(more)
            self._output.console.show_live(self._live, more)

    def _write(self, lines: list[bytes]) -> None:
        if self._name == "stderr":
            for i, line in enumerate(lines):
                if line.endswith(_QUIET_MARK):
                    before = line[: -len(_QUIET_MARK)]
                    self._write_whole([*lines[:i], before] if before else lines[:i])
                    self._output.stderr_muted = True
                    self._write(lines[i + 1 :])
                    return
        self._write_whole(lines)

    def _write_whole(self, lines: list[bytes]) -> None:
        if not lines:
            return
        output = self._output
        output.log(b"".join(line + b"\n" for line in lines))
        if self._name == "stderr":
            lines = [line for line in lines if not output.is_noise(line)]
            output.tail.extend(visible(line)[:2000] for line in lines)
        if output.is_shown(self._name):
            output.console.write_lines(self._name, output.prefix, [visible(line) for line in lines])
