"""The asynchronous engine: the coordinator hands steps to workers, each of which trains on whole batches of its own.

A step is Keras' own on one batch; workers read and write variables that live on the parameter servers, each at its own
pace. Two things would be lost if they were updated there: metrics and the optimizer's count of iterations, which Keras
reads and writes in two operations. So each closure starts its metric states at zero and returns what they became, and
the coordinator merges them; iterations grow by one atomic addition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import process
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import outside_strategy
from tfdist.trainer.coordination import Closure, Coordination
from tfdist.trainer.inputs import Input
from tfdist.trainer.step import CaptureScope
from tfdist.trainer.worker_input import Reading, WorkerInput

logger = logging.getLogger(__name__)


class AsynchronousEngine:
    """What the loop needs of workers that train through parameter servers.

    Args:
        strategy: The strategy whose scope makes the variables.
        seed: For scripts that set none: the order of shuffled arrays follows from it.
        step_timeout_s: If no step ends in this time, the run ends with an error.
        silent: Returns the names of the tasks that are not heard of, for messages.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        *,
        seed: int = 0,
        step_timeout_s: float = process.DEFAULT_STEP_TIMEOUT_S,
        silent: Callable[[], str] = str,
    ) -> None:
        self.strategy, self._seed, self.step_timeout_s = strategy, seed, step_timeout_s
        self.coordination = Coordination(strategy, step_timeout_s=step_timeout_s, silent=silent)

    # -- an epoch

    def run_epoch(
        self,
        model: Any,
        kind: str,
        data: Input,
        epoch: int,
        begin: Callable[[int], None],
        end: Callable[[int, Any], None],
        stopped: Callable[[], bool],
    ) -> dict[str, Any]:
        """Runs one pass; returns the logs of its last step, and leaves the epoch's metrics in the model's own."""
        function = self._function(model, kind)
        totals, logs, done = function.states.zeros(), {}, 0
        read = self._on_workers if isinstance(data, WorkerInput) else self._on_batches
        for steps, states, own in read(function, data, epoch, model.steps_per_execution, begin, stopped):
            if steps == 0:
                continue
            totals = [total + state for total, state in zip(totals, states, strict=True)]
            logs = own or function.states.results(totals)
            # Steps end in any order, and are counted as they do.
            done += steps
            end(done - 1, logs)
        if not stopped() and (data.steps is None or done < data.steps):
            data.ran_out(done)
        function.states.assign(totals)
        return logs

    def _on_batches(
        self,
        function: StepsOnWorker,
        data: Any,
        epoch: int,
        steps_per_execution: int,
        begin: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> Iterator[tuple[int, list[Any], dict[str, Any]]]:
        """Yields (steps, metric states, own logs) of closures that carry batches which the coordinator reads."""
        closures = _closures(function.traced, data, epoch, steps_per_execution, begin)
        for closure, vector in self.coordination.run(closures, stopped):
            yield closure.steps, *function.unpack(vector)

    def _on_workers(
        self,
        function: StepsOnWorker,
        data: Any,
        epoch: int,
        steps_per_execution: int,
        begin: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> Iterator[tuple[int, list[Any], dict[str, Any]]]:
        """Yields the same of closures that read from the iterator of the worker which runs them."""
        per_worker = data.iterators(epoch, self.coordination)
        reading = Reading(data.wanted_steps, self.coordination.workers)

        def closures() -> Iterator[Closure | None]:
            while (count := reading.next_count(steps_per_execution)) is not None:
                if count == 0:
                    yield None
                    continue
                begin(reading.begun)
                arguments = (per_worker.iterators, per_worker.indices, tf.constant(count))
                closure = Closure(function.traced_on_iterator, arguments, reading.begun, count)
                reading.begin(count)
                yield closure

        for closure, vector in self.coordination.run(closures(), stopped):
            worker, goes_on, steps = (int(number) for number in vector[: StepsOnWorker.HEAD])
            reading.end(worker, closure.steps, steps, goes_on=bool(goes_on))
            yield steps, *function.unpack(vector[StepsOnWorker.HEAD :])

    def predict(
        self,
        model: Any,
        data: Input,
        begin: Callable[[int], None],
        end: Callable[[int, Any], None],
        stopped: Callable[[], bool],
    ) -> list[Any]:
        """Returns the outputs of each batch, as NumPy arrays, in the order of the batches."""

        def outputs_of(*batches: Any) -> Any:
            with outside_strategy():
                return [model.predict_step(_without_optionals(batch)) for batch in batches]

        kept = model.__dict__.setdefault("_tfdist_functions", {})
        function = kept.setdefault("predict", tf.function(outputs_of, autograph=False, reduce_retracing=True))
        outputs: dict[int, Any] = {}
        done = 0
        for closure, result in self.coordination.run(
            _closures(function, data, 0, model.steps_per_execution, begin), stopped
        ):
            for number, batch in enumerate(result):
                outputs[closure.first + number] = batch
            done += closure.steps
            end(done - 1, {"outputs": result[-1]})
        return [outputs[step] for step in sorted(outputs)]

    def _function(self, model: Any, kind: str) -> StepsOnWorker:
        state = (model.optimizer, internals.compiled_loss(model))
        kept = model.__dict__.setdefault("_tfdist_functions", {})
        if kind not in kept or any(a is not b for a, b in zip(kept[kind][0], state, strict=True)):
            kept[kind] = (state, StepsOnWorker(model, kind))
        return kept[kind][1]


def _closures(
    function: Any, data: Input, epoch: int, steps_per_execution: int, begin: Callable[[int], None]
) -> Iterator[Closure]:
    """Batches that the coordinator reads: each goes to one worker, once."""
    for step, count, iterator in data.epoch(epoch, steps_per_execution):
        begin(step)
        batches = []
        for _ in range(count):
            element = next(iterator, None)
            if element is None:
                break
            batches.append(element[0])
        if batches:
            yield Closure(function, tuple(batches), step, len(batches))
        if len(batches) < count:
            return


class MetricStates:
    """The states of a model's metrics as tensors: where they start, and what they show."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.variables = [variable for metric in model.metrics for variable in metric.variables]
        self._results = tf.function(self._results_of, autograph=False)

    def zeros(self) -> list[np.ndarray[Any, Any]]:
        return [np.zeros(v.shape, v.dtype) for v in self.variables]

    def _results_of(self, states: Sequence[tf.Tensor]) -> dict[str, Any]:
        with CaptureScope(list(zip(self.variables, states, strict=True))):
            return dict(self._model.get_metrics_result())

    def results(self, states: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns what the metrics show in these states."""
        return internals.PYTHONIFY.find()(self._results([tf.constant(s) for s in states]))

    def assign(self, states: Sequence[np.ndarray[Any, Any]]) -> None:
        for variable, state in zip(self.variables, states, strict=True):
            internals.assign_native(variable, state)


class StepsOnWorker:
    """A Keras step, run on one or several batches, as a function that a worker runs.

    Attributes:
        traced: Batches -> one vector of float64 with all metric states and what else the last step logged. (Each
            tensor that a closure returns costs a message of its own; float64 holds every float32 and every int32.)
    """

    HEAD = 3  # numbers before the states where a worker reads: its index, whether its data goes on, steps done

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self.kind = model, kind
        self._step = {"train": model.train_step, "test": model.test_step}[kind]
        self.states = MetricStates(model)
        self._own: list[tuple[str, tuple[int, ...]]] = []
        self.traced = tf.function(self._run, autograph=False, reduce_retracing=True)
        self.traced_on_iterator = tf.function(self._run_on_iterator, autograph=False, reduce_retracing=True)
        # Traced once, however many steps a closure has.
        self._traced_step = tf.function(self._one, autograph=False, reduce_retracing=True)

    def _run(self, *batches: Any) -> tf.Tensor:
        with outside_strategy():
            states = [tf.zeros(v.shape, v.dtype) for v in self.states.variables]
            logs: dict[str, Any] = {}
            for batch in batches:
                logs, states = self._traced_step(batch, states)
            results = set(self._model.get_metrics_result())
            own = {} if set(logs) <= results else {name: logs[name] for name in sorted(logs)}
            self._own = [(name, tuple(tf.convert_to_tensor(value).shape)) for name, value in own.items()]
            parts = [tf.reshape(tf.cast(part, tf.float64), [-1]) for part in (*states, *own.values())]
            return tf.concat([tf.zeros([0], tf.float64), *parts], 0)

    def _run_on_iterator(self, iterator: Any, worker: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """At most `steps` steps on what the worker's own iterator yields."""

        def go_on(has_value: tf.Tensor, done: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return has_value & (done < steps)

        def next_step(_: tf.Tensor, done: tf.Tensor, *states: tf.Tensor) -> Any:
            element = iterator.get_next_as_optional()

            def step() -> Any:
                _, after = self._traced_step(element.get_value()[0], states)
                return (tf.constant(True), done + 1, *after)

            return tf.cond(element.has_value(), step, lambda: (tf.constant(False), done, *states))

        with outside_strategy():
            states = [tf.zeros(v.shape, v.dtype) for v in self.states.variables]
            start = (tf.constant(True), tf.constant(0), *states)
            has_value, done, *states = tf.while_loop(go_on, next_step, start, parallel_iterations=1)
            # As many numbers as HEAD says.
            head = tf.cast(tf.stack([worker, tf.cast(has_value, tf.int32), done]), tf.float64)
            return tf.concat([head, *(tf.reshape(tf.cast(state, tf.float64), [-1]) for state in states)], 0)

    def _one(self, batch: Any, states: Sequence[tf.Tensor]) -> tuple[dict[str, Any], list[tf.Tensor]]:
        counters = internals.iterations_of(self._model) if self.kind == "train" else []
        before = [tf.identity(internals.native(counter)) for counter in counters]
        captured = [*zip(self.states.variables, states, strict=True), *zip(counters, before, strict=True)]
        with CaptureScope(captured) as scope:
            logs = self._step(_without_optionals(batch))
            states = [tf.convert_to_tensor(scope.get_current_value(v)) for v in self.states.variables]
            grown = [scope.get_current_value(c) - old for c, old in zip(counters, before, strict=True)]
        for counter, more in zip(counters, grown, strict=True):
            internals.native(counter).assign_add(more)
        return logs or {}, states

    def unpack(self, vector: np.ndarray[Any, Any]) -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
        """Returns (metric states, what else was logged) of what the traced function returned."""
        position = 0

        def take(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
            nonlocal position
            size = int(np.prod(shape))
            part = vector[position : position + size].reshape(shape).astype(dtype)
            position += size
            return part

        states = [take(v.shape, v.dtype) for v in self.states.variables]
        return states, {name: take(shape, "float64") for name, shape in self._own}


def _without_optionals(data: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
