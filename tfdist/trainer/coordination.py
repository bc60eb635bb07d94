"""Closures that any worker may run -> their results, in the order in which they end.

TensorFlow's `ClusterCoordinator` hands closures to workers and runs those of a lost worker again. What it leaves open
is here: no more than a few closures wait per worker, results come out of order, and a worker that dies while its result
is read costs a retry, not the training.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfdist import process
from tfdist.attendance import START_AGAIN
from tfdist.cluster import Task
from tfdist.errors import PeerLostError, WaitError
from tfdist.internals import parameter_server as internals

logger = logging.getLogger(__name__)

# One runs, and the next lies ready, so that no worker waits for the coordinator's Python.
CLOSURES_PER_WORKER = 2
SAY_AFTER_S = 5.0
SAY_EVERY_S = 10.0
# A worker that died while its result was read: the closure is run again, and this is how often we look.
RETRY_S = 0.05
# How often the attendance is asked where nothing ends.
ASK_EVERY_S = 0.5
EXPLAIN_S = 2.0
# What TensorFlow raises where another task is gone.
_OF_PEERS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)
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
        first: The function that makes the first worker's dataset.
    """

    iterators: Any
    indices: Any
    first: Any

    @property
    def runs_python(self) -> bool:
        """Whether reading calls Python, which runs in this process and not where the iterator is."""
        return internals.runs_python(self.first)

    @property
    def spec(self) -> tuple[Any, Any]:
        """What a function of both is traced for."""
        return internals.spec_of(self.iterators), internals.spec_of(self.indices)


class Attendance(Protocol):
    """What the coordinator knows of the other tasks."""

    def missing_workers(self) -> set[int]:
        """Returns the indices of the workers that are gone or silent now; each may come back."""

    def check(self) -> None:
        """Raises PeerLostError, which names the task, where the run can not go on."""

    def needed(self) -> AbstractContextManager[None]:
        """Code inside can not go on without the other tasks."""


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
        # A function that waits in TensorFlow, what it is for, and where its result goes.
        self._waits: queue.SimpleQueue[tuple[Callable[[], Any], Any, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._waiters: list[threading.Thread] = []
        self._steps_begun = 0

    def run(
        self, closures: Iterable[Closure | None], stopped: Callable[[], bool] = bool
    ) -> Iterator[tuple[Closure, Any]]:
        """Yields (closure, its result as NumPy arrays) as they end; after `stopped()` no further one is begun.

        Args:
            closures: What to run. None in between: what follows depends on the results of those that run.
            stopped: Asked before each.

        Raises:
            PeerLostError: A parameter server is gone, and its variables with it; or the workers are.
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
                self._waits.put((functools.partial(_fetch, value), closure, finished))
                open_closures += 1
            if open_closures == 0:
                break
            what = f"{open_closures} closures of {self.workers} workers are open, and none ended"
            closure, result, error = self._next(finished, what)
            open_closures -= 1
            if error is not None:
                self._raise(error)
            self._progress(closure.steps)
            yield closure, result
        # The workers' own bookkeeping of what has ended.
        if (error := self._join("all closures have ended, and the coordinator did not")) is not None:
            self._raise(error)

    def per_worker(
        self, make: Callable[[int, int, tf.Tensor], tf.data.Dataset], skip: Callable[[int], int]
    ) -> PerWorker:
        """Returns an iterator on every worker.

        A worker that is started anew makes its iterator anew.

        Args:
            make: (the worker's index, number of workers, elements to leave out) -> a dataset.
            skip: The worker's index -> how many elements its iterator leaves out if it is made now.
        """
        return PerWorker(*internals.per_worker_iterators(self._coordinator, make, skip))

    def missing_workers(self) -> set[int]:
        """Returns the indices of the workers that are gone or silent now; each may come back."""
        return set() if self.attendance is None else self.attendance.missing_workers()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Around all that reads or writes variables: the loss of a parameter server is a PeerLostError inside.

        Raises:
            PeerLostError: A parameter server is gone, and its variables with it.
        """
        with nullcontext() if self.attendance is None else self.attendance.needed():
            try:
                yield
            except tf.errors.OpError as error:
                self._explain(error)
                raise

    def _progress(self, steps: int) -> None:
        if self._steps_begun == 0:
            process.report("phase", phase="first_step")
        self._steps_begun += steps
        process.report("step", step=self._steps_begun)

    # -- waiting

    def _start_waiters(self) -> None:
        """One thread for each closure in flight. They are daemons: a worker that hangs must not keep this process."""
        while len(self._waiters) < self.in_flight:
            thread = threading.Thread(target=self._wait, name="tfdist results", daemon=True)
            self._waiters.append(thread)
            thread.start()

    def _wait(self) -> None:
        while True:
            wait, subject, finished = self._waits.get()
            try:
                finished.put((subject, wait(), None))
            except Exception as error:
                finished.put((subject, None, error))

    def _join(self, what: str) -> Exception | None:
        """Returns the error that ended everything, if one did, once no closure is open."""
        finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waits.put((self._coordinator.join, None, finished))
        return self._next(finished, what)[2]

    def _next(self, finished: queue.SimpleQueue[Any], what: str) -> Any:
        begun = time.monotonic()
        say_after_s = SAY_AFTER_S
        while True:
            self._check()  # also where the other workers go on
            with suppress(queue.Empty):
                return finished.get(timeout=min(ASK_EVERY_S, self._step_timeout_s))
            now = time.monotonic()
            if len(self.missing_workers()) == self.workers:
                begun = now  # how long that may last is said, and ended, by the attendance
            waited = now - begun
            if waited >= self._step_timeout_s:
                raise WaitError(
                    f"{what} for {waited:.0f} s; longer than the step time-out of {self._step_timeout_s:g} s "
                    "(create_strategy(step_timeout_s=...), or --step-timeout of the launcher)"
                )
            if waited >= say_after_s:
                say_after_s = waited + SAY_EVERY_S
                logger.warning("%s for %.0f s (of %.0f s)", what, waited, self._step_timeout_s)

    def _check(self) -> None:
        if self.attendance is not None:
            self.attendance.check()

    def _raise(self, error: Exception) -> None:
        """Raises what went wrong first: an error that ends everything cancels all other closures."""
        error = self._join("a closure has failed, and the others did not end") or error
        self._explain(error)
        raise error

    def _explain(self, error: Exception) -> None:
        """Raises PeerLostError where an error comes of a task that is gone."""
        is_ps_failure = internals.is_ps_failure(error)
        # TensorFlow may tell of the consequences only, and before the task's end is known here.
        give_up = time.monotonic() + EXPLAIN_S
        while self.attendance is not None and (is_ps_failure or isinstance(error, _OF_PEERS)):
            self._check()
            if time.monotonic() > give_up:
                break
            time.sleep(RETRY_S)
        if is_ps_failure:
            tasks = internals.failed_ps(error)
            raise PeerLostError(
                f"{' and '.join(f'ps {index}' for index in tasks) or 'a parameter server'} is gone, and training can "
                f"not go on without the variables on it; {START_AGAIN}",
                task=Task("ps", tasks[0]) if tasks else None,
            ) from error


def _fetch(value: Any) -> Any:
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
