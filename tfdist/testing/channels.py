"""The test's ends of its tasks' sockets: JSON lines that say which call to run, and which has returned.

Values travel in files; over a socket goes no more than their names. A task's end is seen at once, as the socket's.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from typing import Any

NAME = "tasks"  # short: a socket's path has a limit


class Channels:
    """Listens in a private folder for the tasks of one run.

    Attributes:
        pids: The process of each task that has connected, by its local index.
        returned: The last call that each task has returned from.
        gone: The tasks whose end was seen.
    """

    def __init__(self, folder: str) -> None:
        self.pids: dict[int, int] = {}
        self.returned: dict[int, int] = {}
        self.gone: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.path.join(folder, NAME)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a run before
        self._listener.bind(path)
        self._listener.listen(128)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def send(self, message: dict[str, Any]) -> None:
        """Tells every connected task; one that is gone will be seen to be."""
        line = json.dumps(message).encode() + b"\n"
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def wait(self, timeout_s: float) -> None:
        """Takes what tasks say, and waits for it for at most `timeout_s`."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                self._selector.register(connection, selectors.EVENT_READ, _Heard())
            else:
                self._take(key.fileobj, key.data)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the tasks that wait for a call: they read the end of the stream."""
        for key in list((self._selector.get_map() or {}).values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._connections.clear()

    def _take(self, connection: socket.socket, heard: _Heard) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            if heard.index is not None:
                self.gone.add(heard.index)
                self._connections.pop(heard.index, None)
            return
        *lines, heard.rest = (heard.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "returned" in message and heard.index is not None:
                self.returned[heard.index] = message["returned"]
            elif "task" in message:
                heard.index = message["task"]
                self.pids[heard.index] = message["pid"]
                self._connections[heard.index] = connection


class _Heard:
    """What came over one connection: which task it is, and the start of a line."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.rest = b""
