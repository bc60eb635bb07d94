"""Starts the tasks of a plan, watches them to their end, and returns the run's exit code.

One thread (this one, the main thread) starts, signals and reaps; it never blocks but in its own select. A second one
(`pump`) reads what tasks write and say. What the second hears reaches the first through a queue and a wake-up byte.

    all tasks end with 0                      -> 0
    a task fails                              -> the others are stopped; its code
    the chief of a ps cluster ends with 0     -> the others are stopped, when the evaluator has ended; 0
    a signal                                  -> passed on; 128+n, or 42 where all tasks saved and left
    the tasks do not meet in time             -> all are stopped; 75
    nobody reads our stdout any more          -> all are stopped; 141
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from tfdist.cluster import Task
from tfdist.errors import LaunchError
from tfdist.launch import machine, report
from tfdist.launch.blame import Verdict, Words, first_failure
from tfdist.launch.console import Console
from tfdist.launch.control import ControlServer, Message
from tfdist.launch.guarding import Guard
from tfdist.launch.noise import NoiseFilter
from tfdist.launch.plan import Plan
from tfdist.launch.pump import Pump
from tfdist.launch.rundir import read_error_file
from tfdist.launch.signals import signals_queued
from tfdist.launch.streams import TaskOutput
from tfdist.launch.task_process import TaskProcess

# The others are doomed once one has failed, and an MWMS worker ignores SIGTERM.
FAILURE_GRACE_S = 2.0
# A task that fails lets its atexit functions run for up to 3 s.
FAILING_TASK_GRACE_S = 5.0
# A task says that it lost another: so long we wait to see that other's end.
SETTLE_S = 1.0
STACK_DUMP_S = 0.5
# Tasks have the same start time-out and say more when it is over.
START_MARGIN_S = 1.0
# Some tools pass a Ctrl-C on that the terminal has sent as well.
SAME_SIGNAL_S = 0.3
EXIT_PREEMPTED = 42
MEETING = ("strategy", "waiting")


@dataclass
class Stop:
    """Why and by when all tasks end.

    Attributes:
        kind: "failure", "signal", "start time-out", "broken pipe" or "chief is done".
        number: The signal that asks the tasks to end.
        ask_at: When it is sent.
        kill_at: When SIGKILL is.
        code: The exit code of the run.
        began_at: When it was decided.
    """

    kind: str
    number: int
    ask_at: float
    kill_at: float
    code: int
    began_at: float
    asked: bool = False
    killed: bool = False


class Supervisor:
    """The tasks of one run."""

    def __init__(self, plan: Plan, run_dir: str, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._options = plan.options
        self._run_dir = run_dir
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._pump = Pump()
        self._console = Console(1, 2, on_broken=self._on_broken_pipe)
        self._messages: deque[tuple[int, Message]] = deque()
        self._signals: deque[int] = deque()
        self._is_pipe_broken = False
        self._tasks = [TaskProcess(task, self._output(task.task, environ)) for task in plan.tasks]
        self._ended: list[TaskProcess] = []
        self._stop: Stop | None = None
        self._verdict: Verdict | None = None
        self._settle_until: float | None = None
        self._start_timeout_s = self._options.start_timeout_s
        self._met_first_at: float | None = None
        self._meeting: list[str] = []
        self._guard: Guard | None = None
        self._kills_before = machine.out_of_memory_kills()

    def run(self) -> int:
        """Runs the tasks to their end and returns the exit code of the run."""
        started_at, clock = time.time(), time.monotonic()
        self._pump.add(ControlServer(self._run_dir, self._pump, self._on_message))
        self._pump.start()
        try:
            with signals_queued(self._signals, self._wake_write.fileno()):
                try:
                    self._start()
                    while not self._is_over():
                        self._round()
                finally:
                    self._clean_up()
                code = self._exit_code()
                self._last_words(code)
                self._write_summary(code, started_at, time.monotonic() - clock)
                return code
        finally:
            self._wake_read.close()
            self._wake_write.close()

    # -- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._say(self._plan_line(), *self._plan.notes)
        self._guard = Guard(self._run_dir)
        for task in self._tasks:
            try:
                is_chief = task.task == self._plan.chief
                task.start(self._options.command, self._pump, self._console, pty=is_chief and self._options.pty)
            except OSError as error:
                raise LaunchError(f"{task.task} could not be started: {error}") from error
            self._guard.watch(task.pid)

    def _plan_line(self) -> str:
        tasks = self._plan.tasks
        listed = ", ".join(map(str, tasks[:8]))
        more = f" and {len(tasks) - 8} more" if len(tasks) > 8 else ""
        logs = f"; logs in {self._options.log_dir}" if self._options.log_dir else ""
        cluster = self._plan.cluster.tasks
        is_share = len(cluster) > len(tasks) and any(task.task in cluster for task in tasks)
        of_all = f" of the cluster's {len(cluster)}" if is_share else ""
        return f"{len(tasks)}{of_all} task{'s' * (len(tasks) > 1 or bool(of_all))} on this host: {listed}{more}{logs}"

    def _log_file(self, task: object) -> BinaryIO | None:
        if self._options.log_dir is None:
            return None
        try:
            return open(report.log_path(self._options.log_dir, task), "wb")
        except OSError as error:
            raise LaunchError(f"--log-dir {self._options.log_dir}: {error}") from error

    def _output(self, task: Task, environ: Mapping[str, str]) -> TaskOutput:
        is_noise = NoiseFilter(keep_info=environ.get("TF_CPP_MIN_LOG_LEVEL") == "0")
        return TaskOutput(
            str(task), self._console, self._log_file(task), (lambda line: False) if self._options.raw else is_noise
        )

    # -- one round ----------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        self._sleep()
        # Words first: a task speaks before it dies.
        while self._messages:
            self._take_message(*self._messages.popleft())
        while self._signals:
            self._take_signal(self._signals.popleft())
        self._reap()
        # In this order: what its workers and servers do when the chief is done does not matter.
        self._look_for_end_of_chief()
        self._look_for_failure()
        self._look_at_start()
        if self._is_pipe_broken and self._stop is None:
            self._begin_stop("broken pipe", signal.SIGTERM, FAILURE_GRACE_S, 128 + signal.SIGPIPE)
        self._press_on()

    def _sleep(self) -> None:
        now = time.monotonic()
        moments = [now + 1.0]
        if self._ended:
            moments.append(now + 0.02)
        if self._settle_until is not None:
            moments.append(self._settle_until)
        if self._stop is not None:
            moments.extend([self._stop.kill_at] if self._stop.asked else [self._stop.ask_at])
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.select(max(0.001, min(moments) - now))
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _is_over(self) -> bool:
        return not any(task.is_alive for task in self._tasks) and not self._ended

    def _reap(self) -> None:
        for task in self._tasks:
            if task.poll():
                self._ended.append(task)
                self._read_last_words(task)
        for task in list(self._ended):
            if task.is_group_gone():
                self._ended.remove(task)
                if self._guard is not None:
                    self._guard.forget(task.pid)

    def _read_last_words(self, task: TaskProcess) -> None:
        # Its control socket may have been full or gone.
        if task.words is None:
            record = read_error_file(self._run_dir, task.plan.local_index)
            if record:
                task.words = _words(record)

    def _look_for_failure(self) -> None:
        if self._stop is not None:
            return
        served = ("worker", "ps") if self._is_chief_done() else ()
        judged = [task.seen for task in self._tasks if task.task.type not in served]
        verdict = first_failure(judged) or self._left_before_start()
        if verdict is None:
            return
        if verdict.kind == "hearsay" and any(task.is_alive for task in self._tasks):
            now = time.monotonic()
            self._settle_until = self._settle_until or now + SETTLE_S
            if now < self._settle_until:
                return
        self._settle_until = None
        self._verdict = verdict
        first = self._task(verdict.by or verdict.task)
        code = first.words.code if first.words is not None else report.exit_code(first.code or 1)
        # A task that waited in vain for another knows no more; the stacks say where that one is.
        self._begin_stop("failure", signal.SIGTERM, FAILURE_GRACE_S, code, dump=code == report.EXIT_TIMEOUT)

    def _left_before_start(self) -> Verdict | None:
        """A task that ended with 0 and never asked for the cluster, where another waits for it."""
        if not any(task.is_alive and task.phase in MEETING for task in self._tasks):
            return None
        ended = (task for task in self._tasks if task.code == 0 and not task.phase)
        return next((Verdict(task.task, "left") for task in ended if task.task.type != "evaluator"), None)

    def _is_chief_done(self) -> bool:
        """Whether the coordinator of a parameter-server cluster has ended well."""
        chief = next((task for task in self._tasks if task.task == self._plan.chief), None)
        return self._plan.cluster.has_ps and chief is not None and chief.code == 0

    def _look_for_end_of_chief(self) -> None:
        if not self._is_chief_done() or self._stop is not None:
            return
        alive = {task.task.type for task in self._tasks if task.is_alive}
        if alive and "evaluator" not in alive:  # else it still evaluates the last checkpoint
            self._begin_stop("chief is done", signal.SIGTERM, FAILURE_GRACE_S, 0)

    def _look_at_start(self) -> None:
        if self._met_first_at is None or self._stop is not None:
            return
        if not any(task.is_alive and task.phase in MEETING for task in self._tasks):
            return
        if time.monotonic() >= self._met_first_at + self._start_timeout_s + START_MARGIN_S:
            self._begin_stop("start time-out", signal.SIGTERM, FAILURE_GRACE_S, report.EXIT_TIMEOUT, dump=True)

    # -- stopping -----------------------------------------------------------------------------------------------------

    def _begin_stop(self, kind: str, number: int, grace_s: float, code: int, *, dump: bool = False) -> None:
        now = time.monotonic()
        # As it is now, before our stopping changes it.
        self._meeting = report.meeting_lines(self._tasks)
        ask_at = now + STACK_DUMP_S if dump else now
        self._stop = Stop(kind, number, ask_at, ask_at + grace_s, code, now)
        if dump:
            for task in self._tasks:
                if task.greeted:
                    task.send(signal.SIGUSR1)

    def _press_on(self) -> None:
        stop = self._stop
        now = time.monotonic()
        if stop is None or now < stop.ask_at:
            return
        failing = None if self._verdict is None else self._task(self._verdict.task)
        if not stop.asked:
            stop.asked = True
            if stop.kind != "signal":
                # What they say now comes of the failure, or of our asking.
                self._mute([task for task in self._tasks if task is not failing or self._verdict_is_about_others()])
            for task in self._tasks:
                if task is not failing or failing.words is None:
                    # Before its script runs, an interrupt would only show Python's own insides.
                    task.ask_to_end(stop.number if task.greeted else signal.SIGTERM)
        if now < stop.kill_at:
            return
        for task in self._tasks:
            is_failing = task is failing and task.words is not None and now < stop.began_at + FAILING_TASK_GRACE_S
            if task.is_alive and not is_failing:
                if stop.kind == "signal" and not stop.killed:
                    waited = stop.kill_at - stop.ask_at
                    self._say(f"{task.task} (pid {task.pid}) did not end within {waited:g} s and is killed")
                task.kill()
        stop.killed = True
        stop.kill_at = now + 0.5

    def _verdict_is_about_others(self) -> bool:
        return self._verdict is not None and self._verdict.kind != "own"

    def _take_signal(self, number: int) -> None:
        if number == getattr(signal, "SIGWINCH", None):
            for task in self._tasks:
                task.resize()
            return
        now = time.monotonic()
        if self._stop is not None and self._stop.kind != "chief is done":
            # The second Ctrl-C is for one who will not wait.
            if number == signal.SIGINT and now > self._stop.began_at + SAME_SIGNAL_S:
                self._stop.ask_at = min(self._stop.ask_at, now)
                self._stop.kill_at = now
            return
        grace_s = self._options.shutdown_timeout_s
        alive = sum(task.is_alive for task in self._tasks)
        hint = "; Ctrl-C again kills them at once" if number == signal.SIGINT else ""
        self._say(f"{report.signal_name(number)}: {alive} task(s) are asked to end within {grace_s:g} s{hint}")
        passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self._begin_stop("signal", passed_on, grace_s, 128 + number)

    def _exit_code(self) -> int:
        stop = self._stop
        if stop is None:
            return 0
        if stop.kind == "signal":
            codes = {task.code for task in self._tasks if task.task.type != "evaluator"}  # which has nothing to save
            has_saved_and_left = codes <= {0, EXIT_PREEMPTED} and EXIT_PREEMPTED in codes
            return EXIT_PREEMPTED if has_saved_and_left else stop.code
        if self._verdict is not None:
            first = self._task(self._verdict.task)
            # What it announced, unless it then ended by itself with another code.
            if not first.stopped and first.code:
                return report.exit_code(first.code)
        return stop.code

    # -- words from tasks ---------------------------------------------------------------------------------------------

    def _on_message(self, index: int, message: Message) -> None:
        """In the pump's thread."""
        if not 0 <= index < len(self._tasks):
            return
        self._messages.append((index, message))
        self._wake()

    def _take_message(self, index: int, message: Message) -> None:
        task = self._tasks[index]
        kind = message.get("kind")
        if isinstance(message.get("step"), int):
            task.step = message["step"]
        if kind == "hello":
            task.greeted = True
        elif kind == "phase":
            task.phase = str(message.get("phase"))
            task.waiting_for = str(message.get("for", task.waiting_for))
            if task.phase in MEETING and self._met_first_at is None:
                self._met_first_at = time.monotonic()
            asked_s = message.get("start_timeout_s")
            if isinstance(asked_s, (int, float)):
                # A script may give its tasks more time than we were told.
                self._start_timeout_s = max(self._start_timeout_s, asked_s)
        elif kind == "bye":
            task.has_left = message.get("code") == 0
        elif kind == "error":
            task.words = task.words or _words(message)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        for task in self._tasks:
            task.kill()
        deadline = time.monotonic() + 5.0
        while any(task.is_alive for task in self._tasks) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)
        self._drain_output()
        for task in self._tasks:
            task.output.close()
        if self._guard is not None:
            self._guard.end()

    def _drain_output(self) -> None:
        self._pump.begin_finish()
        in_haste = self._stop is not None and self._stop.kind != "chief is done"
        deadline = time.monotonic() + 3.0
        # A reader that takes its time with our output (`| less`) is waited for, but not against a Ctrl-C.
        while not self._pump.is_finished(0.2):
            if self._signals or (in_haste and time.monotonic() > deadline):
                break

    def _last_words(self, code: int) -> None:
        if self._verdict is not None and self._verdict.elsewhere is not None:
            self._write(self._lost_block(self._verdict))
        elif self._verdict is not None:
            lines = report.failure_block(
                self._options.name,
                self._verdict,
                self._tasks,
                self._record(self._verdict),
                self._meeting,
                log_dir=self._options.log_dir,
                out_of_memory=self._was_out_of_memory(),
            )
            self._write(lines)
        elif self._stop is not None and self._stop.kind == "start time-out":
            lines = report.timeout_block(self._options.name, self._meeting, self._start_timeout_s)
            self._write(lines)
        elif code == 0 and len(self._plan.trains) > 1 and not any(task.phase for task in self._tasks):
            self._write(report.copies_warning(self._options.name, len(self._plan.trains)), b"tfdist: ")

    def _record(self, verdict: Verdict) -> dict[str, Any]:
        """The error file of the first task, or of one that lost it."""
        first = self._task(verdict.by or verdict.task)
        record = read_error_file(self._run_dir, first.plan.local_index)
        if verdict.kind == "own":
            return record
        if verdict.by is not None:
            return {**record, "by": str(verdict.by)}
        for task in sorted(self._tasks, key=lambda task: task.words.at if task.words else float("inf")):
            if task.words is not None:
                return {**read_error_file(self._run_dir, task.plan.local_index), "by": str(task.task)}
        return record

    def _lost_block(self, verdict: Verdict) -> list[str]:
        cluster = self._plan.cluster
        address = next((cluster.address(task) for task in cluster.tasks if str(task) == verdict.elsewhere), "")
        return report.lost_block(self._options.name, verdict, address, self._tasks, self._record(verdict))

    def _was_out_of_memory(self) -> bool:
        kills = machine.out_of_memory_kills()
        return kills is not None and self._kills_before is not None and kills > self._kills_before

    def _write_summary(self, code: int, started_at: float, duration_s: float) -> None:
        if self._options.log_dir is None:
            return
        values = report.summary(
            self._options.command,
            self._tasks,
            code=code,
            first_failure=self._verdict,
            started_at=started_at,
            duration_s=duration_s,
        )
        try:
            report.write_summary(self._options.log_dir, values)
        except OSError as error:
            self._write([f"summary.json could not be written: {error}"], b"tfdist: ")

    def _write(self, lines: Sequence[str], prefix: bytes = b"") -> None:
        """Only when the pump has ended."""
        self._console.write_lines("stderr", prefix, [line.encode(errors="replace") for line in lines])

    # -- small things -------------------------------------------------------------------------------------------------

    def _task(self, name: Task) -> TaskProcess:
        return next(task for task in self._tasks if task.task == name)

    def _say(self, *lines: str) -> None:
        encoded = [line.encode(errors="replace") for line in lines]
        self._pump.call(lambda: self._console.write_lines("stderr", b"tfdist: ", encoded))

    def _mute(self, tasks: Sequence[TaskProcess]) -> None:
        for task in tasks:
            task.output.muted = True

    def _on_broken_pipe(self) -> None:
        """In the pump's thread."""
        self._is_pipe_broken = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")


def _words(record: Mapping[str, Any]) -> Words:
    code = record.get("code")
    lost = record.get("lost")
    return Words(
        at=time.monotonic(),
        code=code if isinstance(code, int) and 0 < code < 256 else 1,
        consequence=bool(record.get("consequence")),
        lost=lost if isinstance(lost, str) else None,
    )
