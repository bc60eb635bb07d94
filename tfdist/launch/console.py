"""Lines of many tasks -> one stdout and one stderr, each line with its task's name, none torn.

On a terminal the chief's unfinished line (a progress bar) is live: shown as it grows, taken away while another task's
line goes by, and drawn again below it.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Sequence

_ERASE_LINE = b"\r\x1b[K"


class Console:
    """Writes to the launcher's stdout and stderr; used from one thread.

    Args:
        stdout: File descriptor of stdout.
        stderr: File descriptor of stderr.
        on_broken: Called once when nobody reads stdout any more.
    """

    def __init__(self, stdout: int, stderr: int, *, on_broken: Callable[[], None] = lambda: None) -> None:
        self._descriptors = {"stdout": stdout, "stderr": stderr}
        self._broken: set[str] = set()
        self._on_broken = on_broken
        self._live: LiveLine | None = None
        self._is_terminal = {name: _is_terminal(number) for name, number in self._descriptors.items()}

    def is_terminal(self, name: str) -> bool:
        return self._is_terminal[name]

    def write_lines(self, name: str, prefix: bytes, lines: Sequence[bytes]) -> None:
        """Writes whole lines, given without their ends, each after `prefix`."""
        if not lines:
            return
        text = b"".join(b"%b%b\n" % (prefix, line) for line in lines)
        live = self._live if self._is_terminal[name] else None
        if live is not None:
            self._write(live.name, _ERASE_LINE)
        self._write(name, text)
        if live is not None:
            self._write(live.name, live.drawn())

    def show_live(self, line: LiveLine, more: bytes) -> None:
        """Shows an unfinished line that has grown by `more`."""
        if self._live is line:
            self._write(line.name, more.replace(b"\r", b"\r" + line.prefix))
            return
        if self._live is not None:
            self._write(self._live.name, _ERASE_LINE)
        self._live = line
        self._write(line.name, line.drawn())

    def end_live(self, line: LiveLine) -> None:
        """Takes an unfinished line away; its final text is for `write_lines`."""
        if self._live is line:
            self._write(line.name, _ERASE_LINE)
            self._live = None

    def _write(self, name: str, data: bytes) -> None:
        if name in self._broken:
            return
        number = self._descriptors[name]
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(number, view) :]
            except BlockingIOError:
                # Somebody who shares our terminal or pipe has made it non-blocking.
                select.select([], [number], [], 1.0)
            except OSError:
                self._broken.add(name)
                if name == "stdout":
                    self._on_broken()
                return


class LiveLine:
    """The unfinished line of one stream of a task with a terminal.

    Attributes:
        name: "stdout" or "stderr".
        prefix: The task's name, in front of it.
        text: What came since the last line end.
    """

    LIMIT = 1 << 16

    def __init__(self, name: str, prefix: bytes) -> None:
        self.name = name
        self.prefix = prefix
        self.text = b""

    def grow(self, more: bytes) -> None:
        self.text += more
        if len(self.text) > self.LIMIT:
            self.text = visible(self.text)[-self.LIMIT :]

    def drawn(self) -> bytes:
        return self.prefix + visible(self.text)


def visible(text: bytes) -> bytes:
    """Returns what a terminal shows of a line that went back to its start: the part after the last carriage return.

    Backspaces before a carriage return are dropped with what they go over (Keras' progress bar writes both).
    """
    parts = text.rstrip(b"\b\r").split(b"\r")
    return parts[-1] if parts[-1].strip(b"\b") or len(parts) == 1 else parts[-2]


def _is_terminal(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(number)
    return False
