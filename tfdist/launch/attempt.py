"""One start of all tasks, watched to its end.

It is over when all tasks have ended. All are stopped when

    a task fails, unless the others can do without it (`losses`)
    the tasks do not meet in time
    a signal asks for it
    nobody reads our stdout any more
"""

from __future__ import annotations

import signal
import time
from typing import Any

from tfdist.cluster import Task
from tfdist.launch import lines, machine, report
from tfdist.launch.blame import Verdict, first_failure
from tfdist.launch.control import Message
from tfdist.launch.ending import Ending, Stop
from tfdist.launch.losses import Losses
from tfdist.launch.plan import Plan
from tfdist.launch.restarts import EXIT_PREEMPTED, EXIT_TIMEOUT, Restarts, is_retryable
from tfdist.launch.rundir import read_error_file
from tfdist.launch.starting import Starter
from tfdist.launch.switchboard import Switchboard
from tfdist.launch.task_process import TaskProcess

# A task says that it lost another: so long we wait to see that other's end.
SETTLE_S = 1.0
# The pump may be held up by who reads our output.
HEARING_S = 0.5
# Tasks have the same start time-out and say more when it is over.
START_MARGIN_S = 1.0
CLEAN_UP_S = 5.0


class Attempt:
    """The tasks of a plan, from their start to the end of the last.

    Args:
        plan: Which tasks.
        run_dir: The run's private folder.
        starter: Starts them.
        board: What they say, and what we say.
        restarts: Of which one is taken for each task that is started again.

    Attributes:
        tasks: In the order of their local indices; one that was started again stands in the place of the one before.
        verdict: Which task failed first; None where none did, or did not meet the others.
        meeting: What was known of the tasks' meeting when their end began.
        start_timeout_s: How long they had for it.
        was_out_of_memory: Whether the kernel killed something for want of memory before the failure.
    """

    def __init__(self, plan: Plan, run_dir: str, starter: Starter, board: Switchboard, restarts: Restarts) -> None:
        self.tasks: list[TaskProcess] = []
        self.verdict: Verdict | None = None
        self.meeting: list[str] = []
        self.start_timeout_s = plan.options.start_timeout_s
        self.was_out_of_memory = False
        self._plan = plan
        self._run_dir = run_dir
        self._starter = starter
        self._board = board
        self._ending = Ending(self.tasks, board.say)
        self._leaving: list[TaskProcess] = []
        self._settle_until: float | None = None
        self._losses = Losses(plan, self.tasks, starter, board, restarts)
        self._memory = machine.MemoryWatch()

    def run(self, number: int = 0, last_failure: str = "") -> None:
        """Starts the tasks and returns when nothing of them is left.

        Args:
            number: How many attempts there were before.
            last_failure: Why the one before ended.
        """
        try:
            for index in range(len(self._plan.tasks)):
                self.tasks.append(self._starter.start(index, number, last_failure))
            while any(task.is_alive for task in self.tasks) or self._leaving:
                self._round()
        finally:
            self._clean_up()

    # -- what became of it --------------------------------------------------------------------------------------------

    @property
    def stop(self) -> Stop | None:
        """Why the tasks were ended; None where they ended by themselves."""
        return self._ending.stop

    @property
    def code(self) -> int:
        """The exit code of a run that ends with this attempt."""
        if self.stop is None:
            return 0
        if self.stop.kind == "signal":
            # An evaluator has nothing to save.
            codes = {task.code for task in self.tasks if not task.spared and task.task.type != "evaluator"}
            has_saved_and_left = codes <= {0, EXIT_PREEMPTED} and EXIT_PREEMPTED in codes
            return EXIT_PREEMPTED if has_saved_and_left else self.stop.code
        if self.verdict is not None:
            first = self.task(self.verdict.task)
            # What it announced, unless it then ended by itself with another code.
            if not first.stopped and first.code:
                return report.exit_code(first.code)
        return self.stop.code

    @property
    def may_be_repeated(self) -> bool:
        """Whether it failed, and another may end well."""
        if self.stop is None or self.stop.interrupted or self._board.is_pipe_broken:
            return False
        if self.verdict is None:
            return self.stop.kind == "start time-out"
        return is_retryable(self.verdict, self.code, self.task(self.verdict.task).words)

    @property
    def failure(self) -> str:
        """What ended it, in one line."""
        if self.verdict is None:
            return lines.late(self.meeting, self.start_timeout_s)
        return lines.failure(self.verdict, self.tasks, out_of_memory=self.was_out_of_memory)

    def task(self, name: Task) -> TaskProcess:
        """Returns the last process of a task of this host."""
        return next(task for task in self.tasks if task.task == name)

    # -- one round ----------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        self._board.wait_until(self._next_moment())
        # Words first: a task speaks before it dies.
        while self._board.messages:
            self._take_message(*self._board.messages.popleft())
        while self._board.signals:
            self._take_signal(self._board.signals.popleft())
        self._reap()
        if self.stop is None and not any(map(self._is_hearing, self._leaving)):
            # In this order: what its workers and servers do when the chief is gone does not matter.
            self._ending.dismiss(self._losses.not_needed())
            self._losses.look()
            self._losses.replace(gone=lambda task: not task.is_alive and task not in self._leaving)
            self._look_for_failure()
        if self.stop is None:
            self._look_at_start()
        if self._board.is_pipe_broken and self.stop is None:
            self._begin_stop("broken pipe", 128 + signal.SIGPIPE)
        self._ending.press_on()

    def _next_moment(self) -> float:
        now = time.monotonic()
        moments = [now + 1.0, self._settle_until, self._ending.next_moment, now + 0.02 if self._leaving else None]
        return min(moment for moment in moments if moment is not None)

    def _reap(self) -> None:
        for task in self.tasks:
            if task.poll():
                self._leaving.append(task)
                self._board.send_after_words(task.plan.local_index, task.attempt, {"kind": "ended"})
                # Its control socket may have been full or gone.
                record = {} if task.words else read_error_file(self._run_dir, task.plan.local_index)
                if record:
                    task.hear_last_words(record)
        for task in list(self._leaving):
            if task.is_group_gone() and not self._is_hearing(task):
                self._leaving.remove(task)
                self._starter.forget(task)

    def _is_hearing(self, task: TaskProcess) -> bool:
        """Whether the words of a task that has ended are on their way."""
        return not task.is_heard and task.ended_at is not None and time.monotonic() < task.ended_at + HEARING_S

    def _take_message(self, index: int, attempt: int, message: Message) -> None:
        if not 0 <= index < len(self.tasks) or self.tasks[index].attempt != attempt:
            return
        task = self.tasks[index]
        task.hear(message)
        asked_s = message.get("start_timeout_s")
        if isinstance(asked_s, (int, float)):
            # A script may give its tasks more time than we were told.
            self.start_timeout_s = max(self.start_timeout_s, asked_s)
        if message.get("kind") == "lost" and task.task.type in ("chief", "worker", "ps"):
            # The chief tells of it, or the others where it waits for that task itself; all know of those they have met.
            for other in self.tasks:
                if str(other.task) == message.get("task") and other.phase == "connected" and other is not task:
                    other.give_up(str(message.get("why", "")) or f"{task.task} lost it")

    def _take_signal(self, number: int) -> None:
        if number == getattr(signal, "SIGWINCH", None):
            for task in self.tasks:
                task.resize()
        elif self.stop is not None:
            self._ending.take_another_signal(number)
        else:
            grace_s = self._plan.options.shutdown_timeout_s
            alive = sum(task.is_alive for task in self.tasks)
            hint = "; Ctrl-C again kills them at once" if number == signal.SIGINT else ""
            self._board.say(
                f"{report.signal_name(number)}: {alive} task(s) are asked to end within {grace_s:g} s{hint}"
            )
            passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._begin_stop("signal", 128 + number, number=passed_on, grace_s=grace_s)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _look_for_failure(self) -> None:
        seen = [task.seen for task in self.tasks]
        verdict = first_failure(seen) or self._left_before_start() or self._losses.of_all_workers()
        if verdict is None:
            self._settle_until = None
            return
        if verdict.kind == "hearsay" and any(task.is_alive for task in self.tasks):
            now = time.monotonic()
            self._settle_until = self._settle_until or now + SETTLE_S
            if now < self._settle_until:
                return
        self._settle_until = None
        self.verdict = verdict
        self.was_out_of_memory = self._memory.has_killed()
        first = self.task(verdict.by or verdict.task)
        code = first.words.code if first.words is not None else report.exit_code(first.code or 1)
        # A task that waited in vain for another knows no more; the stacks say where that one is.
        self._begin_stop(
            "failure",
            code,
            failing=self.task(verdict.task),
            speaks=verdict.kind == "own",
            dump=code == EXIT_TIMEOUT,
        )

    def _left_before_start(self) -> Verdict | None:
        """A task that ended with 0 and never asked for the cluster, where another waits for it."""
        if not any(task.is_meeting and not task.stands_in for task in self.tasks):
            return None
        ended = (task for task in self.tasks if task.code == 0 and not task.phase)
        return next((Verdict(task.task, "left") for task in ended if task.task.type != "evaluator"), None)

    def _look_at_start(self) -> None:
        limit = time.monotonic() - self.start_timeout_s - START_MARGIN_S
        for task in self.tasks:
            if task.stands_in and task.is_meeting and (task.asked_at or 0.0) <= limit:
                task.give_up(f"it did not come to the others within {self.start_timeout_s:g} s")
        asked = [task.asked_at for task in self.tasks if task.asked_at is not None and not task.stands_in]
        if any(task.is_meeting and not task.stands_in for task in self.tasks) and min(asked) <= limit:
            self._begin_stop("start time-out", EXIT_TIMEOUT, dump=True)

    def _begin_stop(self, kind: str, code: int, **how: Any) -> None:
        # As it is now, before our stopping changes it.
        self.meeting = report.meeting_lines(self.tasks)
        self._ending.begin(kind, code, **how)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        for task in self.tasks:
            task.kill()
        deadline = time.monotonic() + CLEAN_UP_S
        while any(task.is_alive for task in self.tasks) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)
