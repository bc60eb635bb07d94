"""Input that every worker of a parameter-server cluster reads for itself, each its own share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.trainer.coordination import Coordination, PerWorker
from tfdist.trainer.sources import Source


class WorkerInput:
    """The batches of one call, read by the workers.

    Args:
        make: (worker, number of workers, epoch) -> a dataset whose elements begin with the data.
        workers: The number of workers.
        element_spec: The structure of data, rows unknown.
        steps: Steps of one epoch over all workers, or None for all that the workers' datasets hold.

    Attributes:
        source: What is known of the data.
        wanted_steps: `steps` as given.
        steps: The same; known after the first epoch where it was not given.
    """

    def __init__(
        self, make: Callable[[int, int, int], tf.data.Dataset], workers: int, element_spec: Any, steps: int | None
    ) -> None:
        self._make = make
        self.source = Source(element_spec, lambda number: iter(make(0, workers, number)), "workers")
        self.wanted_steps = self.steps = steps
        self._kept: PerWorker | None = None

    def summary(self, prefix: str) -> dict[str, Any]:
        return {}

    def peek(self, epoch: int) -> Any:
        """Returns the first element of the first worker."""
        return next(self.source.start(epoch))

    def reset(self) -> None:
        """Begins anew: what follows reads the data from its beginning."""
        self._kept = None

    def iterators(self, epoch: int, coordination: Coordination) -> PerWorker:
        """Returns the workers' iterators: new ones for each epoch, unless epochs are cut out of longer data."""
        if self._kept is None or self.wanted_steps is None:
            self._kept = coordination.per_worker(lambda worker, count: self._make(worker, count, epoch))
        return self._kept

    def ran_out(self, steps: int) -> None:
        """Notes that all workers' data ended after so many steps."""
        if self.wanted_steps is None:
            self.steps = steps or None
            return
        self._kept = None
        warnings.warn(
            f"the workers' datasets ended after {steps} of {self.wanted_steps} steps of this epoch; repeat() them, or "
            "leave steps_per_epoch out",
            stacklevel=3,
        )


class Reading:
    """How far the workers have read in an epoch.

    Args:
        steps: Steps to run, or None until all workers' data has ended.
        workers: The number of workers.

    Attributes:
        begun: Steps that closures were asked for, less those that they did not find.
    """

    def __init__(self, steps: int | None, workers: int) -> None:
        self._steps, self._workers = steps, workers
        self._ended: set[int] = set()
        self.begun = 0
        self._open = 0

    def next_count(self, steps_per_execution: int) -> int | None:
        """Returns how many steps the next closure is asked for.

        0: none now, but those that run may find fewer than they were asked for. None: the epoch is over.
        """
        if len(self._ended) == self._workers:
            return None
        if self._steps is None:
            return steps_per_execution
        missing = self._steps - self.begun
        return min(steps_per_execution, missing) if missing > 0 or self._open else None

    def begin(self, count: int) -> None:
        self.begun += count
        self._open += 1

    def end(self, worker: int, asked: int, done: int, *, goes_on: bool) -> None:
        """Notes what a closure found on its worker."""
        self.begun -= asked - done
        self._open -= 1
        if goes_on:
            self._ended.discard(worker)  # it was started anew, and reads its share again
        else:
            self._ended.add(worker)


def of_pipeline(pipeline: Any, workers: int, steps: int | None) -> WorkerInput:
    """A pipeline that gives each worker batches of its own; see `tfdist.data.from_function`."""

    def make(worker: int, count: int, epoch: int) -> tf.data.Dataset:
        return _as_elements(pipeline.own_batches(worker, count, epoch))

    if steps is None and pipeline.steps_per_epoch is not None:
        steps = pipeline.steps_per_epoch * workers  # its steps take a batch of every task
    return WorkerInput(make, workers, pipeline.element_spec, steps)


def _as_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    @tf.autograph.experimental.do_not_convert
    def element(*batch: Any) -> Any:
        return (batch if len(batch) > 1 else batch[0],)

    return dataset.map(element)


def of_function(function: Callable[[tf.distribute.InputContext], Any], workers: int, steps: int | None) -> WorkerInput:
    """A function of a `tf.distribute.InputContext`, which says which worker of how many asks.

    Raises:
        TypeError: It returns something else than a dataset.
    """

    def make(worker: int, count: int, epoch: int) -> tf.data.Dataset:
        dataset = function(tf.distribute.InputContext(count, worker, 1))
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"{getattr(function, '__qualname__', function)!s} must return a tf.data.Dataset for the InputContext "
                f"that it gets, not {type(dataset).__name__}"
            )
        return _as_elements(dataset)

    return WorkerInput(make, workers, make(0, workers, 0).element_spec[0], steps)
