"""One start of a cluster's tasks: they meet the test, run its calls and end; what goes wrong is raised as itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tfdist.errors import TaskFailedError, TaskTimeoutError
from tfdist.launch.plan import Options
from tfdist.launch.report import describe_end
from tfdist.testing import failures, task, values
from tfdist.testing.channels import Channels
from tfdist.testing.failures import Failure
from tfdist.testing.launched import Launched

# Tasks that have returned end at once, unless their functions left something that does not.
END_TIMEOUT_S = 10.0
STACK_DUMP_S = 0.5
LOOK_S = 0.1


class Deadline:
    """A time-out that runs from now on."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


class Started:
    """Started tasks, which wait for calls.

    Args:
        options: Which tasks. With ps the chief's result is the only one: the others serve until the chief ends.
        setup: What each task reads before its first call.
        folder: A new folder of theirs.
        environ: Their environment.
    """

    def __init__(self, options: Options, setup: Mapping[str, Any], folder: str, environ: Mapping[str, str]) -> None:
        self.launched: Launched
        self._folder = folder
        self._tasks = options.tasks
        self._answering = 1 if options.ps else len(self._tasks)
        self._calls = 0
        with open(os.path.join(folder, task.SETUP), "w", encoding="utf-8") as file:
            json.dump(setup, file)
        self._channels = Channels(folder)
        try:
            self.launched = Launched(options, folder, environ)
        except BaseException:
            self._channels.close()
            raise

    def call(self, request: Mapping[str, Any], deadline: Deadline) -> list[Any]:
        """Returns what the function that `request` describes returns on each task that answers."""
        name = f"{request['function']['name']}()"
        self._calls += 1
        values.write(task.call_path(self._folder, self._calls), request)
        # What is sent before all have connected reaches nobody.
        self._wait_until(lambda: len(self._channels.pids) == len(self._tasks), name, deadline)
        self.launched.mark_logs()
        self._channels.send({"call": self._calls})
        self._wait_until(lambda: all(map(self._has_returned, range(self._answering))), name, deadline)
        paths = [task.result_path(self._folder, self._calls, index) for index in range(self._answering)]
        results = [values.read(path) for path in paths]
        if self._answering == len(self._tasks):  # else one of the others may still have to read it
            paths.append(task.call_path(self._folder, self._calls))
        for path in paths:
            os.unlink(path)
        return results

    def finish(self, name: str) -> None:
        """Lets the tasks end as a script does, with what they registered for that; an end in failure is one."""
        self._channels.close()
        if not self.launched.wait(time.monotonic() + END_TIMEOUT_S):
            raise timed_out(self.launched, f"the end of the tasks after {name}", END_TIMEOUT_S)
        if self.launched.code != 0:
            self._raise_failure(name)
        self.stop()

    def stop(self, *, wait_s: float = 0.0) -> None:
        """Ends the tasks; within `wait_s` they may do so by themselves."""
        try:
            self._channels.close()
            self.launched.wait(time.monotonic() + wait_s)
        finally:
            self.launched.stop()

    def _has_returned(self, index: int) -> bool:
        return self._channels.returned.get(index) == self._calls

    def _wait_until(self, is_done: Callable[[], bool], name: str, deadline: Deadline) -> None:
        while not is_done():
            if self.launched.code is not None:
                self._raise_failure(name)
            if deadline.is_over:
                self._raise_timeout(name, deadline)
            self._channels.wait(LOOK_S)

    def _raise_failure(self, name: str) -> NoReturn:
        """Raises the exception of the task that failed first, as itself where that can be."""
        report = failed(self.launched, name)
        failure = self._first_failure(self.launched.summary)
        error = None if failure is None else failures.rebuild(failure)
        if error is not None:
            raise error from report
        if failure is not None:
            report = TaskFailedError(f"{failure.name}: {failure.text}\n{report}", task=report.task, code=report.code)
        raise report

    def _first_failure(self, summary: Mapping[str, Any]) -> Failure | None:
        known = {}
        for index, entry in enumerate(summary.get("tasks", [])):
            path = task.failure_path(self._folder, index)
            if os.path.exists(path):
                known[entry["task"]] = failures.read(path)
        first = summary.get("first_failure")
        if first in known or not known:
            return known.get(first)
        stopped = {entry["task"]: entry["stopped"] for entry in summary["tasks"]}
        # One that died without a word is what happened; one that was stopped was so because of what another says.
        return min(known.values(), key=lambda failure: failure.at) if stopped.get(first, True) else None

    def _raise_timeout(self, name: str, deadline: Deadline) -> NoReturn:
        states = []
        for index, pid in self._channels.pids.items():
            if index < self._answering:
                states.append(f"{self._tasks[index]} {'returned' if self._has_returned(index) else 'did not'}")
            if not self._has_returned(index) and index not in self._channels.gone:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)
        # Meanwhile each writes where its threads are, into the log that is read next.
        self.launched.wait(time.monotonic() + STACK_DUMP_S)
        raise timed_out(self.launched, name, deadline.timeout_s, ": " + ", ".join(sorted(states)))


def failed(launched: Launched, name: str) -> TaskFailedError:
    """Returns the error that says how a run failed, with what its tasks wrote."""
    summary = launched.summary
    first = summary.get("first_failure")
    codes = {entry["task"]: entry["code"] for entry in summary.get("tasks", [])}
    how = f"{first} was first ({describe_end(codes.get(first))})" if first else f"exit code {launched.code}"
    if launched.code == 0:
        how = "its tasks ended with exit code 0 before it returned (os._exit?)"
    return TaskFailedError(f"{name} failed: {how}\n{launched.describe(first)}", task=first, code=launched.code)


def timed_out(launched: Launched, name: str, timeout_s: float, states: str = "") -> TaskTimeoutError:
    """Returns the error that says what took too long, with what its tasks wrote."""
    return TaskTimeoutError(f"{name} took longer than {timeout_s:g} s{states}\n{launched.describe(None)}")
