"""A pseudo-terminal for the chief, so that its progress bar is as live as without a launcher."""

from __future__ import annotations

import contextlib
import os
import struct


def open_pty(like: int, margin: int) -> tuple[int, int]:
    """Returns our end and the task's end of a new pty, `margin` columns narrower than the terminal `like`."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    # Bytes as they are: our own terminal makes \r\n of \n, and nobody types here.
    mode[1] &= ~termios.OPOST
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    resize_pty(ours, like, margin)
    return ours, theirs


def resize_pty(ours: int, like: int, margin: int) -> None:
    """Gives the pty the size of the terminal `like`, less `margin` columns for the task's name."""
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        columns, lines = os.get_terminal_size(like)
        if columns:
            size = struct.pack("HHHH", lines, max(20, columns - margin), 0, 0)
            fcntl.ioctl(ours, termios.TIOCSWINSZ, size)
