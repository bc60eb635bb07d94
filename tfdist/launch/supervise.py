"""Runs a plan's tasks, again where a failure may pass, and returns the run's exit code.

One thread (this one, the main thread) starts, signals and reaps; a second one (`pump`) reads what tasks write and say.

    an attempt ends well                      -> 0
    a task fails                              -> again while restarts are left and it may help; else its code
    a signal                                  -> 128+n, or 42 where all tasks saved and left
    the tasks do not meet in time             -> again while restarts are left; else 75
    nobody reads our stdout any more          -> 141
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from tfdist.launch import lines, report
from tfdist.launch.attempt import Attempt
from tfdist.launch.blame import Verdict
from tfdist.launch.guarding import Guard
from tfdist.launch.plan import Plan
from tfdist.launch.restarts import Restarts
from tfdist.launch.rundir import read_error_file
from tfdist.launch.starting import Starter
from tfdist.launch.switchboard import Switchboard

LAST_OUTPUT_S = 3.0


class Supervisor:
    """The attempts of one run."""

    def __init__(self, plan: Plan, run_dir: str, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._options = plan.options
        self._run_dir = run_dir
        self._environ = environ
        self._board = Switchboard(run_dir)
        self._restarts = Restarts(plan.options.max_restarts)

    def run(self) -> int:
        """Runs the tasks to their end and returns the exit code of the run."""
        started_at, clock = time.time(), time.monotonic()
        with self._board:
            guard = Guard(self._run_dir)
            attempt = None
            try:
                starter = Starter(self._plan, self._run_dir, self._board, guard, self._environ)
                try:
                    self._board.say(lines.plan(self._plan), *self._plan.notes)
                    attempt, code = self._repeat(starter)
                finally:
                    self._finish_output(attempt)
                    starter.close()
            finally:
                guard.end()
            self._last_words(attempt, code)
            self._write_summary(attempt, code, started_at, time.monotonic() - clock)
            return code

    def _repeat(self, starter: Starter) -> tuple[Attempt, int]:
        """Runs attempts until one ends well or for good; returns the last, and the exit code."""
        number, last_failure = 0, ""
        while True:
            attempt = Attempt(self._plan, self._run_dir, starter, self._board, self._restarts)
            attempt.run(number, last_failure)
            if not (attempt.may_be_repeated and self._restarts.are_left):
                return attempt, attempt.code
            number, last_failure = max(task.attempt for task in attempt.tasks) + 1, attempt.failure
            for task in attempt.tasks:
                self._board.pump.finish(task.streams)
            pause_s = self._restarts.pause_s
            which = self._restarts.take(None, last_failure)
            self._board.say(f"{last_failure}; {lines.restart_of_all(len(attempt.tasks), pause_s, which)}")
            code = self._pause(pause_s)
            if code is not None:
                return attempt, code

    def _pause(self, seconds: float) -> int | None:
        """Waits; returns an exit code where the run is to end instead."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._board.wait_until(until)
            while self._board.signals:
                number = self._board.signals.popleft()
                if number != getattr(signal, "SIGWINCH", None):
                    self._board.say(f"{report.signal_name(number)}: no task runs, and none is started again")
                    return 128 + number
            if self._board.is_pipe_broken:
                return 128 + signal.SIGPIPE
        return None

    # -- end ----------------------------------------------------------------------------------------------------------

    def _finish_output(self, attempt: Attempt | None) -> None:
        in_haste = attempt is None or attempt.stop is not None
        deadline = time.monotonic() + LAST_OUTPUT_S
        # A slow reader is waited for, but not against a Ctrl-C.
        self._board.finish(lambda: not (self._board.signals or (in_haste and time.monotonic() > deadline)))

    def _last_words(self, attempt: Attempt, code: int) -> None:
        name, verdict = self._options.name, attempt.verdict
        if self._is_interrupted(attempt, code):
            return
        if verdict is not None and verdict.elsewhere is not None:
            self._board.write(self._lost_block(attempt, verdict))
        elif verdict is not None:
            block = report.failure_block(
                name,
                verdict,
                attempt.tasks,
                self._record(attempt, verdict),
                attempt.meeting,
                log_dir=self._options.log_dir,
                out_of_memory=attempt.was_out_of_memory,
                restarts=self._words_on_restarts(attempt),
            )
            self._board.write(block)
        elif attempt.stop is not None and attempt.stop.kind == "start time-out":
            restarts = self._words_on_restarts(attempt)
            self._board.write(report.timeout_block(name, attempt.meeting, attempt.start_timeout_s, restarts=restarts))
        elif code == 0 and len(self._plan.trains) > 1 and not any(task.phase for task in attempt.tasks):
            self._board.write(report.copies_warning(name, len(self._plan.trains)), b"tfdist: ")

    def _is_interrupted(self, attempt: Attempt, code: int) -> bool:
        """Whether the run ended while no task ran."""
        return attempt.may_be_repeated and code != attempt.code

    def _record(self, attempt: Attempt, verdict: Verdict) -> dict[str, Any]:
        """The error file of the first task, or of one that lost it."""
        first = attempt.task(verdict.by or verdict.task)
        record = read_error_file(self._run_dir, first.plan.local_index)
        if verdict.kind == "own":
            return record
        if verdict.by is not None:
            return {**record, "by": str(verdict.by)}
        for task in sorted(attempt.tasks, key=lambda task: task.words.at if task.words else float("inf")):
            if task.words is not None:
                return {**read_error_file(self._run_dir, task.plan.local_index), "by": str(task.task)}
        return record

    def _lost_block(self, attempt: Attempt, verdict: Verdict) -> list[str]:
        cluster = self._plan.cluster
        address = next((cluster.address(task) for task in cluster.tasks if str(task) == verdict.elsewhere), "")
        return report.lost_block(
            self._options.name,
            verdict,
            address,
            attempt.tasks,
            self._record(attempt, verdict),
            restarts=self._words_on_restarts(attempt),
        )

    def _words_on_restarts(self, attempt: Attempt) -> str:
        made, limit = len(self._restarts.made), self._restarts.limit
        if not limit:
            return ""
        if made == limit:
            return f"{made} made, as many as --max-restarts allows"
        why = "the run was asked to end" if attempt.stop and attempt.stop.interrupted else "it would fail the same way"
        return f"{made} of {limit} made, and none now: {why}"

    def _write_summary(self, attempt: Attempt, code: int, started_at: float, duration_s: float) -> None:
        if self._options.log_dir is None:
            return
        values = report.summary(
            self._options.command,
            attempt.tasks,
            code=code,
            first_failure=attempt.verdict,
            restarts=self._restarts.made,
            started_at=started_at,
            duration_s=duration_s,
        )
        try:
            report.write_summary(self._options.log_dir, values)
        except OSError as error:
            self._board.write([f"summary.json could not be written: {error}"], b"tfdist: ")
