"""The socket over which tasks tell the launcher where they are: JSON lines, from the same user only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from tfdist.launch.pump import Pump

LONGEST_LINE = 1 << 16

Message = dict[str, Any]
OnMessage = Callable[[int, int, Message], None]


class ControlServer:
    """Listens at `control.sock` in the run's private folder; a `Readable` of the pump.

    Args:
        run_dir: The folder, which other users can not enter.
        pump: Reads the connections.
        on_message: Called in the pump's thread with the task's local index, its attempt, and what it said.
    """

    urgent = True

    def __init__(self, run_dir: str, pump: Pump, on_message: OnMessage) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.path.join(run_dir, "control.sock"))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._pump = pump
        self._on_message = on_message

    def fileno(self) -> int:
        return self._listener.fileno()

    def read_ready(self) -> bool:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._pump.add(_Connection(connection, self._on_message))
        return True

    def close(self) -> None:
        self._listener.close()


class _Connection:
    urgent = True

    def __init__(self, connection: socket.socket, on_message: OnMessage) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_message = on_message
        self._task: tuple[int, int] | None = None
        self._rest = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def read_ready(self) -> bool:
        try:
            data = self._connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        return bool(data) and len(self._rest) < LONGEST_LINE

    def close(self) -> None:
        self._connection.close()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if message.get("kind") == "hello":
            with contextlib.suppress(TypeError, ValueError):
                self._task = int(str(message.get("task"))), int(str(message.get("attempt")))
        if self._task is not None:
            self._on_message(*self._task, message)
