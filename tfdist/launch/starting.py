"""A task of a plan -> its running process, at the first start of the run and at each after it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import BinaryIO

from tfdist.errors import LaunchError
from tfdist.launch import report
from tfdist.launch.guarding import Guard
from tfdist.launch.noise import NoiseFilter
from tfdist.launch.plan import Plan
from tfdist.launch.rundir import forget_error_file
from tfdist.launch.streams import TaskOutput
from tfdist.launch.switchboard import Switchboard
from tfdist.launch.task_process import TaskProcess


class Starter:
    """Starts a plan's tasks; a task that is started again goes on in the log file of the one before.

    Args:
        plan: What is to run.
        run_dir: The run's private folder.
        board: Takes what the tasks write.
        guard: Kills them should this launcher be killed.
        environ: The launcher's environment, which says what of TensorFlow's lines the user wants to see.

    Raises:
        LaunchError: A log file can not be written.
    """

    def __init__(self, plan: Plan, run_dir: str, board: Switchboard, guard: Guard, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._options = plan.options
        self._run_dir = run_dir
        self._board = board
        self._guard = guard
        self._keeps_info = environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        self._open_logs = contextlib.ExitStack()
        self._logs: list[BinaryIO] = []
        if self._options.log_dir is not None:
            try:
                for task in plan.tasks:
                    log = _log_file(report.log_path(self._options.log_dir, task.task))
                    self._logs.append(self._open_logs.enter_context(log))
            except OSError as error:
                self.close()
                raise LaunchError(f"--log-dir {self._options.log_dir}: {error}") from error

    def start(self, index: int, attempt: int = 0, last_failure: str = "", *, alone: bool = False) -> TaskProcess:
        """Returns the started task of that local index.

        Args:
            index: Which task.
            attempt: How often it was started before.
            last_failure: One line on why it is started again.
            alone: Whether the others go on meanwhile.

        Raises:
            LaunchError: It can not be started.
        """
        plan = self._plan.tasks[index]
        log = self._logs[index] if self._logs else None
        if attempt:
            plan = plan.again(attempt, last_failure)
            forget_error_file(self._run_dir, index)
        is_noise = (lambda line: False) if self._options.raw else NoiseFilter(keep_info=self._keeps_info)
        output = TaskOutput(str(plan.task), self._board.console, log, is_noise)
        if attempt:
            line = f"--- tfdist: started again: {last_failure}\n".encode(errors="replace")
            self._board.pump.call(lambda: output.log(line))
        task = TaskProcess(plan, output, attempt, stands_in=alone)
        try:
            has_pty = plan.task == self._plan.chief and self._options.pty
            task.start(self._options.command, self._board.pump, self._board.console, pty=has_pty)
        except OSError as error:
            raise LaunchError(f"{task.task} could not be started: {error}") from error
        self._guard.watch(task.pid)
        return task

    def forget(self, task: TaskProcess) -> None:
        """Says that nothing of an ended task's process group is left."""
        self._guard.forget(task.pid)

    def close(self) -> None:
        """Closes the log files."""
        with contextlib.suppress(OSError):
            self._open_logs.close()


def _log_file(path: str) -> BinaryIO:
    return open(path, "wb")
