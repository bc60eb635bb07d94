"""What the chief of a parameter-server cluster knows of its workers and ps: who is there, and whether it can go on.

A worker may go and come back: that is said, and training goes on with the others. The run can not go on without a ps,
without any worker for long, or with a worker that hangs and that nobody ends, since TensorFlow waits for it without
end. The error that says so is raised in whatever asks (`check`); where nothing asks, because it waits in TensorFlow,
this process ends with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator

from tfdist import process
from tfdist.cluster import Task
from tfdist.collectives import Group
from tfdist.collectives.monitor import BROKEN, SILENT, Trouble
from tfdist.errors import PeerLostError

logger = logging.getLogger(__name__)

TICK_S = 0.25
SAY_EVERY_S = 10.0
START_AGAIN = "start the run again, and a Checkpoint callback goes on from the last saved epoch"
# A hung process that the launcher was told of is killed at once; else nobody can (it runs on another host).
KILL_S = 15.0
# Where a task is lost, TensorFlow's operations mostly fail by themselves; some never end.
ASK_S = 10.0
STUCK_S = 60.0
# TensorFlow holds the GIL while it tells every server of a function, also one that hangs: so long after no Python code
# has run, a thread without Python ends this process.
ALARM_S, ALARM_EVERY_S = 1800.0, 5.0


class Attendance:
    """Watches from a thread until the group is left.

    Args:
        group: All tasks of the cluster; this one is the chief.
        has_launcher: Whether there is a launcher, which ends processes that hang.
        start_timeout_s: How long to wait for a worker where none is left.
    """

    def __init__(self, group: Group, *, has_launcher: bool, start_timeout_s: float) -> None:
        self._group, self._has_launcher, self._start_timeout_s = group, has_launcher, start_timeout_s
        self._workers = [task for task in group.tasks if task.type == "worker"]
        self._lock = threading.Lock()
        self._missing: dict[Task, tuple[Trouble, float]] = {}  # and since when
        self._reported: dict[Task, float] = {}  # hung workers that the launcher was told of, and when
        self._error: PeerLostError | None = None
        self._place: object = None  # where the main thread waits in TensorFlow
        self._stuck_since = 0.0  # there, or in `needed`, with the error known
        self._needed = 0
        self._raised = False
        self._say_at = 0.0
        threading.Thread(target=self._watch, name="tfdist attendance", daemon=True).start()

    def missing_workers(self) -> set[int]:
        """Returns the indices of the workers that are gone or silent now; each may come back."""
        with self._lock:
            return {task.index for task in self._missing if task.type == "worker"}

    def check(self) -> None:
        """Raises PeerLostError, which names the task, where the run can not go on."""
        with self._lock:
            error = self._error
            self._raised = self._raised or error is not None
        if error is not None:
            raise PeerLostError(str(error), task=error.task)

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Code inside can not go on without the other tasks: if it does not ask in time, this process ends."""
        with self._lock:
            self._needed += 1
        try:
            yield
        finally:
            with self._lock:
                self._needed -= 1

    # -- in the thread

    def _watch(self) -> None:
        changes = self._group.changes()
        alarm_at = 0.0
        try:
            while True:
                if time.monotonic() >= alarm_at:
                    alarm_at = time.monotonic() + ALARM_EVERY_S
                    faulthandler.dump_traceback_later(ALARM_S, exit=True)
                with contextlib.suppress(queue.Empty):
                    change = changes.get(timeout=TICK_S)
                    if change is None:
                        return
                    self._take(self._group.tasks[change[0]], change[1])
                with self._lock:
                    now = time.monotonic()
                    self._judge(now)
                    error = self._error if self._is_stuck(now) else None
                if error is not None:
                    process.fail(error)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _take(self, task: Task, trouble: Trouble | None) -> None:
        if trouble is not None and (trouble.kind == BROKEN or trouble.clean):
            return  # it is alive, or leaves because this task has said goodbye
        with self._lock:
            was_missing = self._missing.pop(task, None) is not None
            if trouble is not None:
                self._missing[task] = trouble, time.monotonic()
            self._reported.pop(task, None)
            alive = sum(worker not in self._missing for worker in self._workers)
        workers = f"{alive} worker{'s' * (alive != 1)}"
        if trouble is None:
            if was_missing:
                logger.warning("%s is back%s", task, f": {workers}" if task.type == "worker" else "")
        elif task.type == "ps":
            logger.warning("%s; training can not go on without the variables on it", trouble.text)
        elif trouble.kind == SILENT:
            logger.warning("%s", trouble.text)
        elif alive:
            logger.warning("%s; training goes on with %s", trouble.text, workers)
        else:
            logger.warning("%s; no worker is left", trouble.text)

    def _judge(self, now: float) -> None:
        """Decides whether the run can go on."""
        error = self._without_ps() or self._with_a_hung_worker(now) or self._without_workers(now)
        if not self._raised:
            self._error = error

    def _is_stuck(self, now: float) -> bool:
        """Returns whether this process waits in vain, and nothing will raise the error."""
        place = None
        if self._error is not None and not self._raised:
            place = "needed" if self._needed else _place_in_tensorflow()
        if place is None or place != self._place:
            self._place, self._stuck_since = place, now
        return now - self._stuck_since > (ASK_S if self._needed else STUCK_S)

    def _without_ps(self) -> PeerLostError | None:
        for task, (trouble, _) in self._missing.items():
            if task.type == "ps":
                return PeerLostError(
                    f"{trouble.text}, and training can not go on without the variables on it; {START_AGAIN}", task=task
                )
        return None

    def _with_a_hung_worker(self, now: float) -> PeerLostError | None:
        for task, (trouble, _) in self._missing.items():
            if trouble.kind != SILENT or task.type != "worker":
                continue
            if self._has_launcher and task not in self._reported:
                self._reported[task] = now
                process.report("lost", task=str(task), why=trouble.text)
            if not self._has_launcher or now - self._reported[task] > KILL_S:
                return PeerLostError(
                    f"{trouble.text}, and TensorFlow waits for it without end: end that process, so that training can "
                    "go on without it, and start the run again",
                    task=task,
                )
        return None

    def _without_workers(self, now: float) -> PeerLostError | None:
        since = [self._missing[task][1] for task in self._workers if task in self._missing]
        if len(since) < len(self._workers):
            self._say_at = 0.0
            return None
        waited_s = now - max(since)
        if waited_s > self._start_timeout_s:
            last = max(self._workers, key=lambda task: self._missing[task][1])
            return PeerLostError(
                f"no worker is left, and none came back within {self._start_timeout_s:g} s; the last one: "
                f"{self._missing[last][0].text}",
                task=last,
            )
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            logger.warning(
                "waiting for a worker to come back (%.0f s of %g s): none is left", waited_s, self._start_timeout_s
            )
        return None


def _place_in_tensorflow() -> object:
    """Returns what stays the same as long as the main thread waits in one call of TensorFlow's; None elsewhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    place = None if frame is None else (id(frame), frame.f_lasti)
    while frame is not None:
        if f"{os.sep}tensorflow{os.sep}" in frame.f_code.co_filename:
            return place
        frame = frame.f_back
    return None
