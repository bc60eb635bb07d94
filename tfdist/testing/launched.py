"""Launcher options -> a launcher that runs beside the test, what it wrote, and its end, which leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster import Task
from tfdist.control import QUIET_MARK
from tfdist.launch import report
from tfdist.launch.noise import NoiseFilter
from tfdist.launch.plan import Options
from tfdist.testing import child

# From the request to end until the tasks are killed; what a test gives up has nothing left to save.
SHUTDOWN_TIMEOUT_S = 1.0
# The launcher's own way from SIGTERM to its end, and then some: it waits for what is left of process groups.
STOP_TIMEOUT_S = SHUTDOWN_TIMEOUT_S + 8.0
LONGEST_LOG = 100  # lines of each task in an error
# Launcher's lines that an error needs not: which tasks there are, where logs were, and what its own first line says.
_IS_KNOWN = re.compile(
    r"tfdist: \d+ tasks? on this host: |tfdist: each task computes on |  log  : |.* failed: .*first$|-+$"
)


class Launched:
    """One run of the launcher in a process of its own, with everything it writes in `folder`.

    Should this process die, all processes end, and the folder around `folder` is removed: the cluster's.

    Attributes:
        options: What it runs.
        log_dir: Where the tasks' logs are.
    """

    def __init__(self, options: Options, folder: str, environ: Mapping[str, str]) -> None:
        self.log_dir = os.path.join(folder, "logs")
        self.options = dataclasses.replace(
            options, log_dir=self.log_dir, pty=False, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S
        )
        self._folder = folder
        self._marks: dict[Task, int] = {}
        command = [sys.executable, "-m", child.__name__, json.dumps(dataclasses.asdict(self.options))]
        with open(self._path("out"), "wb") as out, open(self._path("err"), "wb") as err:
            self._process = subprocess.Popen(
                [*command, os.path.dirname(folder)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=dict(environ),
                # A Ctrl-C is the test's: it asks us to stop.
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code of the launcher; None while it runs."""
        return self._process.poll()

    @property
    def out(self) -> str:
        """What all tasks wrote to stdout, each line with its task's name."""
        return _read(self._path("out"))

    @property
    def words(self) -> str:
        """The launcher's own lines."""
        return "\n".join(line for line in _read(self._path("err")).splitlines() if not line.startswith("["))

    @property
    def summary(self) -> dict[str, Any]:
        """The launcher's summary; empty where it has written none."""
        try:
            with open(os.path.join(self.log_dir, "summary.json"), encoding="utf-8") as file:
                values: dict[str, Any] = json.load(file)
        except (OSError, ValueError):
            return {}
        return values

    def log(self, task: Task) -> str:
        """Returns what a task wrote, both streams in their order, since `mark_logs`."""
        return _read(report.log_path(self.log_dir, task), self._marks.get(task, 0)).replace(QUIET_MARK + "\n", "")

    def mark_logs(self) -> None:
        """Makes `log` begin here."""
        for task in self.options.tasks:
            with contextlib.suppress(OSError):
                self._marks[task] = os.path.getsize(report.log_path(self.log_dir, task))

    def wait(self, deadline: float) -> bool:
        """Returns whether the launcher has ended before `deadline` (of time.monotonic)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return self.code is not None

    def stop(self) -> None:
        """Ends the launcher and with it all tasks, if they still run."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)
            if not self.wait(time.monotonic() + STOP_TIMEOUT_S):
                # Its guard kills the tasks then.
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def describe(self, first: str | None) -> str:
        """Returns what launcher and tasks wrote, for an error; the log of the task that failed first stands last."""
        words = "\n".join(line for line in self.words.strip("\n").splitlines() if not _IS_KNOWN.match(line))
        shown = [words] if words else []
        for task in sorted(self.options.tasks, key=lambda task: str(task) == first):
            text = _without_noise(self.log(task))
            if str(task) == first:
                text = _without_traceback_of(words, text)
            lines = text.rstrip().splitlines()
            left_out = [f"({len(lines) - LONGEST_LOG} lines before)"] if len(lines) > LONGEST_LOG else []
            shown += [f"--- {task} wrote{'' if lines else ' nothing'}", *left_out, *lines[-LONGEST_LOG:]]
        return "\n".join(shown)

    def _path(self, what: str) -> str:
        return os.path.join(self._folder, f"launcher.{what}")


def _read(path: str, offset: int = 0) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read().decode(errors="backslashreplace")
    except OSError:
        return ""


def _without_noise(text: str) -> str:
    is_noise = NoiseFilter()
    return "\n".join(line for line in text.splitlines() if not is_noise(line.encode()))


def _without_traceback_of(words: str, text: str) -> str:
    """The launcher's report ends with the traceback that the task itself has written as well."""
    trace = "\n".join(words.rpartition("\n\n")[2].splitlines()[:-1])
    if not trace.startswith("Traceback"):
        return text
    return text.replace(trace, "(the traceback above)")
