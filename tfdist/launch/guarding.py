"""The launcher's side of the guard, which sees to it that nothing stays when the launcher itself is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys

from tfdist.launch import guard


class Guard:
    """A started guard process; where it can not be started, Linux' parent-death signal is all there is."""

    def __init__(self, run_dir: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, run_dir],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def watch(self, pid: int) -> None:
        """Puts a process group under its guard."""
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Says that nothing of the group is left: the number may soon be another's."""
        self._tell(f"-{pid}")

    def end(self) -> None:
        """Ends the guard."""
        self._tell("done")
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(2.0)

    def _tell(self, word: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(word.encode() + b"\n")
                self._process.stdin.flush()
