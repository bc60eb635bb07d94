"""Ends of single tasks that do not end the run.

A worker of a parameter-server cluster trains on batches of its own: when it dies another takes its place while restarts
are left, or the others go on without it. So it is with an evaluator, except that a run does not go on without one. And
what workers and ps do does not matter when their chief is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tfdist.launch import lines, machine
from tfdist.launch.blame import Verdict
from tfdist.launch.plan import Plan
from tfdist.launch.restarts import Restarts, is_retryable_end
from tfdist.launch.starting import Starter
from tfdist.launch.switchboard import Switchboard
from tfdist.launch.task_process import TaskProcess


class Losses:
    """What becomes of lost tasks in one attempt.

    Args:
        plan: Of the run.
        tasks: All tasks; one that is replaced gives its place in the list to its successor.
        starter: Starts that.
        board: Where we say so.
        restarts: Of which it takes one.
    """

    def __init__(
        self, plan: Plan, tasks: list[TaskProcess], starter: Starter, board: Switchboard, restarts: Restarts
    ) -> None:
        self._plan = plan
        self._tasks = tasks
        self._starter = starter
        self._board = board
        self._restarts = restarts
        self._memory = machine.MemoryWatch()

    def not_needed(self) -> list[TaskProcess]:
        """Returns the workers and ps that still run though their chief has ended well."""
        if not self._is_chief_done():
            return []
        for task in self._servers():
            task.spared = True
        if any(task.is_alive for task in self._tasks if task.task == self._plan.chief):
            return []  # it waits for their goodbyes
        return [task for task in self._servers() if task.is_alive and not task.stopped]

    def look(self) -> None:
        """Spares the tasks that have been lost and that the run survives, and says so."""
        for task in self._tasks:
            code = task.words.code if task.code is None and task.words is not None else task.code
            if code in (None, 0) or task.spared or task.stopped:
                continue
            is_retried = is_retryable_end(code, task.words) and self._restarts.are_left
            if self._is_lost_worker(task) or (is_retried and task.task.type == "evaluator"):
                self._spare(task, is_retried)

    def replace(self, gone: Callable[[TaskProcess], bool]) -> None:
        """Starts a task in the place of each that is to return.

        Args:
            gone: Says whether nothing is left of a task: its ports are free, and nothing writes among its successor's
                words.
        """
        for task in list(self._tasks):
            if not task.returns or not gone(task) or (task in self._servers() and self._is_chief_done()):
                continue
            self._board.pump.finish(task.streams)
            index = task.plan.local_index
            self._tasks[index] = self._starter.start(index, task.attempt + 1, task.returns, alone=True)

    def of_all_workers(self) -> Verdict | None:
        """Returns the first loss, where none of this host's workers is left or returns."""
        workers = [task for task in self._servers() if task.task.type == "worker"]
        if not workers or self._is_chief_done() or any(not task.spared or task.returns for task in workers):
            return None
        return Verdict(min(workers, key=lambda task: task.ended_at or time.monotonic()).task, "own")

    def _spare(self, task: TaskProcess, is_retried: bool) -> None:
        why = lines.end(task, out_of_memory=self._memory.has_killed())
        task.spared = True
        if is_retried:
            task.returns = why
            which = self._restarts.take(str(task.task), why)
            self._board.say(f"{why}; it is started again (restart {which})")
            return
        left = sum(not other.spared or other.returns != "" for other in self._tasks if other.task.type == "worker")
        if left:
            self._board.say(f"{why}; {lines.remaining(left)}")

    def _is_lost_worker(self, task: TaskProcess) -> bool:
        """Whether the chief can do without it: it has met the others, and does not tell of the chief's own end."""
        if task.task.type != "worker" or task not in self._servers():
            return False
        if task.phase != "connected" and not task.stands_in:
            return False
        lost = task.words.lost if task.words is not None and task.words.consequence else None
        return lost is None or lost.startswith("worker ")

    def _is_chief_done(self) -> bool:
        """Whether the chief of the workers and ps has ended well, or is about to."""
        chief = next((task for task in self._tasks if task.task == self._plan.chief), None)
        if chief is None or not self._plan.cluster.has_ps:
            return False
        return chief.code == 0 or (chief.is_alive and chief.has_left)

    def _servers(self) -> list[TaskProcess]:
        """The workers and ps of a parameter-server cluster."""
        if not self._plan.cluster.has_ps:
            return []
        return [task for task in self._tasks if task.task.type in ("worker", "ps")]
