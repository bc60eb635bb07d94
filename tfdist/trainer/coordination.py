"""Closures that any worker may run -> their results, in the order in which they end.

TensorFlow's `ClusterCoordinator` hands closures to workers and runs those of a lost worker again. What it leaves open
is here: no more than a few closures wait per worker, results come out of order, and a worker that dies while its result
is read costs a retry, not the training.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfdist.errors import PeerLostError, WaitError
from tfdist.internals import parameter_server as internals

logger = logging.getLogger(__name__)

# One runs, and the next lies ready, so that no worker waits for the coordinator's Python.
CLOSURES_PER_WORKER = 2
SAY_AFTER_S = 5.0
SAY_EVERY_S = 10.0
# A worker that died while its result was read: the closure is run again, and this is how often we look.
RETRY_S = 0.05
_END = object()


@dataclass(frozen=True)
class Closure:
    """Some steps that one worker runs.

    Attributes:
        function: A `tf.function`.
        args: What it gets; tensors travel with it.
        first: The number of the first step.
        steps: How many steps.
    """

    function: Any
    args: tuple[Any, ...]
    first: int
    steps: int


@dataclass(frozen=True)
class PerWorker:
    """An iterator on every worker.

    Attributes:
        iterators: As an argument of a closure: the iterator of the worker that runs it.
        indices: As an argument of a closure: the index of that worker.
    """

    iterators: Any
    indices: Any


class Attendance(Protocol):
    """What the coordinator knows of the other tasks."""

    def missing_workers(self) -> set[int]:
        """Returns the indices of the workers that are gone or silent now; each may come back."""


class Coordination:
    """Runs closures on the workers of a parameter-server strategy.

    Args:
        strategy: The strategy in whose scope the variables were made.
        step_timeout_s: If no closure ends in this time, the run ends with an error.

    Attributes:
        workers: The number of workers.
        attendance: Who of the tasks is there; None where they are servers of this very process.
    """

    attendance: Attendance | None = None

    def __init__(self, strategy: Any, *, step_timeout_s: float) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.workers = internals.num_workers(strategy)
        self._step_timeout_s = step_timeout_s
        self.in_flight = CLOSURES_PER_WORKER * self.workers
        self._scheduled: queue.SimpleQueue[tuple[Closure, Any, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._waiters: list[threading.Thread] = []

    def run(
        self, closures: Iterable[Closure | None], stopped: Callable[[], bool] = bool
    ) -> Iterator[tuple[Closure, Any]]:
        """Yields (closure, its result as NumPy arrays) as they end; after `stopped()` no further one is begun.

        Args:
            closures: What to run. None in between: what follows depends on the results of those that run.
            stopped: Asked before each.

        Raises:
            PeerLostError: A parameter server is gone, and its variables with it.
            WaitError: No closure ended within the step time-out.
            tf.errors.OpError: A closure failed.
        """
        self._start_waiters()
        finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        feed, open_closures, ended = iter(closures), 0, False
        while True:
            while not ended and open_closures < self.in_flight:
                closure = _END if stopped() else next(feed, _END)
                if closure is _END:
                    ended = True
                if not isinstance(closure, Closure):
                    break
                value = self._coordinator.schedule(closure.function, args=closure.args)
                self._scheduled.put((closure, value, finished))
                open_closures += 1
            if open_closures == 0:
                break
            closure, result, error = self._next(finished, open_closures)
            open_closures -= 1
            if error is not None:
                self._raise(error)
            yield closure, result
        self._coordinator.join()  # the workers' own bookkeeping of what has ended

    def per_worker(self, make: Callable[[int, int], tf.data.Dataset]) -> PerWorker:
        """Returns an iterator on every worker, over `make(the worker's index, number of workers)`.

        A worker that is started anew makes its iterator anew, from the beginning.
        """
        return PerWorker(*internals.per_worker_iterators(self._coordinator, make))

    def missing_workers(self) -> set[int]:
        """Returns the indices of the workers that are gone or silent now; each may come back."""
        return set() if self.attendance is None else self.attendance.missing_workers()

    # -- waiting

    def _start_waiters(self) -> None:
        """One thread for each closure in flight. They are daemons: a worker that hangs must not keep this process."""
        while len(self._waiters) < self.in_flight:
            thread = threading.Thread(target=self._wait_for_results, name="tfdist results", daemon=True)
            self._waiters.append(thread)
            thread.start()

    def _wait_for_results(self) -> None:
        while True:
            closure, value, finished = self._scheduled.get()
            try:
                finished.put((closure, self._fetch(value), None))
            except Exception as error:
                finished.put((closure, None, error))

    def _fetch(self, value: Any) -> Any:
        """Returns a closure's result, also where its worker dies between telling that it is ready and sending it.

        TensorFlow sets the ready flag before it copies the result under its own guard (cluster_coordinator.py,
        `_process_closure`), so such a death shows here, and the closure is run again on another worker.
        """
        while True:
            try:
                return value.fetch()
            except tf.errors.OpError as error:
                if not internals.is_worker_failure(error):
                    raise
                time.sleep(RETRY_S)

    def _next(self, finished: queue.SimpleQueue[Any], open_closures: int) -> Any:
        begun = time.monotonic()
        pause = min(SAY_AFTER_S, self._step_timeout_s)
        while True:
            try:
                return finished.get(timeout=pause)
            except queue.Empty:
                waited = time.monotonic() - begun
                what = f"{open_closures} closures of {self.workers} workers are open, and none ended for {waited:.0f} s"
                if waited >= self._step_timeout_s:
                    raise WaitError(
                        f"{what}; longer than the step time-out of {self._step_timeout_s:g} s "
                        "(create_strategy(step_timeout_s=...), or --step-timeout of the launcher)"
                    ) from None
                logger.warning("%s (of %.0f s)", what, self._step_timeout_s)
                pause = min(SAY_EVERY_S, max(0.1, self._step_timeout_s - waited))

    def _raise(self, error: Exception) -> None:
        """Raises what went wrong first: an error that ends everything cancels all other closures."""
        try:
            self._coordinator.join()
        except Exception as first:
            error = first
        if internals.is_ps_failure(error):
            tasks = internals.failed_ps(error)
            raise PeerLostError(
                f"{' and '.join(f'ps {index}' for index in tasks) or 'a parameter server'} is gone, and the variables "
                "on it with it; start the run again, and a Checkpoint callback goes on from the last saved epoch"
            ) from error
        raise error
