"""Input that every worker of a parameter-server cluster reads for itself, each its own share."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.trainer.coordination import Coordination, PerWorker
from tfdist.trainer.shares import Share
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
        shares: What was counted of each worker's data since its iterator began.
    """

    def __init__(
        self, make: Callable[[int, int, int], tf.data.Dataset], workers: int, element_spec: Any, steps: int | None
    ) -> None:
        self._make, self._workers = make, workers
        self.source = Source(element_spec, lambda number: iter(make(0, workers, number)), "workers")
        self.wanted_steps = self.steps = steps
        self._kept: PerWorker | None = None
        self._epoch = 0
        self._has_looked = False
        self.shares: list[Share] = []

    def summary(self, prefix: str) -> dict[str, Any]:
        return {}

    def peek(self, epoch: int) -> Any:
        """Returns the first element of the first worker that has one.

        Raises:
            ValueError: There is none.
        """
        for worker in range(self._workers):
            for element in self._make(worker, self._workers, epoch):
                return element
        raise self._empty()

    def _empty(self) -> ValueError:
        return ValueError(f"there is no data: none of the datasets of {self._workers} workers holds a batch")

    def reset(self) -> None:
        """Begins anew: what follows reads the data from its beginning."""
        self._kept = None

    def iterators(self, epoch: int, coordination: Coordination) -> PerWorker:
        """Returns the workers' iterators: new ones for each epoch, unless epochs are cut out of longer data."""
        if self._kept is None or self.wanted_steps is None:
            self._epoch = epoch
            self.__dict__.pop("_lengths", None)
            self.shares = shares = [Share() for _ in range(self._workers)]

            def make(worker: int, count: int, skip: tf.Tensor) -> tf.data.Dataset:
                return self._make(worker, count, epoch).skip(skip).enumerate(skip)

            self._kept = coordination.per_worker(make, lambda worker: shares[worker].next)
            self._say_once_where_python_runs(self._kept)
        return self._kept

    def _say_once_where_python_runs(self, per_worker: PerWorker) -> None:
        if not self._has_looked and per_worker.runs_python:
            warnings.warn(
                "the function of an InputContext makes a dataset that calls Python (from_generator, py_function, "
                "numpy_function), which runs in this process, not on the workers, and for all of them; read with "
                "operations of TensorFlow there, or pass the generator itself to fit",
                stacklevel=3,
            )
        self._has_looked = True

    @functools.cached_property
    def _lengths(self) -> list[float]:
        """How many elements each worker's data has at least, as far as TensorFlow knows."""
        datasets = (self._make(worker, self._workers, self._epoch) for worker in range(self._workers))
        known = [int(dataset.cardinality()) for dataset in datasets]
        return [math.inf if size == tf.data.INFINITE_CARDINALITY else max(0, size) for size in known]

    def reaches(self, steps: int) -> bool:
        """Whether every worker's data surely goes on for so many steps behind what was counted."""
        return all(length - share.end >= steps for length, share in zip(self._lengths, self.shares, strict=True))

    def rest_of(self, worker: int) -> Iterator[Any]:
        """Yields the batches of a worker's share that were not counted, as this process reads them; then they are."""
        share = self.shares[worker]
        begin = share.next
        dataset = self._make(worker, self._workers, self._epoch).skip(begin)
        wanted = share.missing()
        position = next(wanted, None)
        for element, at in zip(dataset, itertools.count(begin), strict=False):
            if position is None:
                break
            if at == position:
                yield element[0]
                share.count(at, 1)
                position = next(wanted, None)
        share.ended = True

    def ran_out(self, steps: int) -> None:
        """Notes that all workers' data ended after so many steps.

        Raises:
            ValueError: After none.
        """
        if steps == 0:
            raise self._empty()
        if self.wanted_steps is None:
            self.steps = steps
            return
        self._kept = None
        warnings.warn(
            f"the workers' datasets ended after {steps} of {self.wanted_steps} steps of this epoch; repeat() them, or "
            "leave steps_per_epoch out",
            stacklevel=3,
        )


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
