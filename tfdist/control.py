"""A task's words to its launcher: JSON lines over the socket in the run's private folder.

Nothing here raises or waits for more than a moment: a task trains as well without being heard.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping

STEP_REPORT_INTERVAL_S = 0.5
TIMEOUT_S = 1.0
# A line on stderr after which the launcher's console has heard enough: its report tells the traceback once. A terminal
# shows nothing of it.
QUIET_MARK = "\x1b]tfdist-quiet\x07"


class Control:
    """The connection to the launcher's control socket; quiet when there is none.

    Args:
        environ: Says where the socket is, at the time of the first word.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._next_step_report = 0.0

    def connect(self) -> bool:
        """Returns whether the launcher hears us; false without a launcher or when it is gone."""
        with self._lock:
            return self._connected() is not None

    def send(self, message: Mapping[str, object]) -> None:
        line = json.dumps(message, default=str).encode() + b"\n"
        if not self._lock.acquire(timeout=TIMEOUT_S):
            return
        try:
            connection = self._connected()
            if connection is not None:
                connection.sendall(line)
        except OSError:
            # A line cut in the middle would garble the next one; a launcher that is gone needs no words.
            self._close()
        finally:
            self._lock.release()

    def is_time_for_step(self) -> bool:
        now = time.monotonic()
        if now < self._next_step_report:
            return False
        self._next_step_report = now + STEP_REPORT_INTERVAL_S
        return True

    def _connected(self) -> socket.socket | None:
        # A forked child must not write into its parent's stream.
        if self._socket is not None and self._pid == os.getpid():
            return self._socket
        run_dir = self._environ.get("TFDIST_RUN_DIR")
        if not run_dir or not hasattr(socket, "AF_UNIX"):
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(TIMEOUT_S)
        hello = {
            "kind": "hello",
            "task": self._environ.get("TFDIST_LOCAL_INDEX", "0"),
            # What a task said last is not its successor's.
            "attempt": self._environ.get("TFDIST_ATTEMPT", "0"),
            "pid": os.getpid(),
        }
        try:
            connection.connect(os.path.join(run_dir, "control.sock"))
            connection.sendall(json.dumps(hello).encode() + b"\n")
        except OSError:
            connection.close()
            return None
        self._socket, self._pid = connection, os.getpid()
        return connection

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
