"""The asynchronous engine: the coordinator hands steps to workers, each of which trains on whole batches of its own.

A step is Keras' own on one batch; workers read and write variables that live on the parameter servers, each at its own
pace. Two things would be lost if they were updated there: metrics and the optimizer's count of iterations, which Keras
reads and writes in two operations. So each closure starts its metric states at zero and returns what they became, and
the coordinator merges them; iterations grow by one atomic addition.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import process
from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import outside_strategy
from tfdist.placement import Placement
from tfdist.trainer import sources
from tfdist.trainer.agreement import Agreement
from tfdist.trainer.building import build, build_by_calling, without_optionals
from tfdist.trainer.coordination import Closure, Coordination
from tfdist.trainer.inputs import Input, seed_of_fit
from tfdist.trainer.metrics import (
    all_equal,
    as_tensors,
    cannot_be_merged,
    merge,
    results_by_name,
    same_structure,
    separate_groups,
)
from tfdist.trainer.passes import Pass
from tfdist.trainer.refusals import refuse_under_parameter_servers
from tfdist.trainer.step import CaptureScope
from tfdist.trainer.trying import Trial
from tfdist.trainer.worker_input import Reading, WorkerInput, of_function, of_pipeline

logger = logging.getLogger(__name__)
# Of a closure: steps done, states of the metrics, what else the last step logged.
Counted = tuple[int, list[np.ndarray[Any, Any]], dict[str, tuple[bool, Any]]]


class AsynchronousEngine:
    """What the loop needs of workers that train through parameter servers.

    Args:
        strategy: The strategy whose scope makes the variables.
        placement: Where they are.
        seed: For scripts that set none: the order of shuffled arrays follows from it.
        step_timeout_s: If no step ends in this time, the run ends with an error.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        placement: Placement,
        *,
        seed: int = 0,
        step_timeout_s: float = process.DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        self.strategy, self._placement, self._seed, self.step_timeout_s = strategy, placement, seed, step_timeout_s
        self.coordination = Coordination(strategy, step_timeout_s=step_timeout_s)
        self.agreement = Agreement(None)
        self.size, self.index, self.is_chief = 1, 0, True
        self._has_said_the_plan = False

    # -- what the loop asks of any engine; here one process decides, and nobody has to agree with it

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Code inside sees no strategy, so that Keras behaves as in one process, and is told which task is lost."""
        with outside_strategy(), self.coordination.errors():
            yield

    def summary(self, model: Any) -> dict[str, Any]:
        return {}

    def shared_variables(self, model: Any) -> list[Any]:
        return []

    def small_variables(self, model: Any) -> list[Any]:
        return []

    # -- building

    def input(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        model: Any = None,
        steps: int | None = None,
        **kwargs: Any,
    ) -> Input | WorkerInput:
        """Returns the batches: read by the workers where x says how, else by this process."""
        if sources.is_pipeline(x) and x.has_own_batches:
            return of_pipeline(x, self.coordination.workers, steps)
        if inspect.isfunction(x) or inspect.ismethod(x) or isinstance(x, functools.partial):
            return of_function(x, self.coordination.workers, steps)
        seed = seed_of_fit(model, self._seed)
        return Input(x, y, sample_weight, index=0, size=1, seed=seed, steps=steps, **kwargs)

    def prepare(self, model: Any, element_spec: Any, *, training: bool) -> None:
        """Builds the model, its loss, metrics and optimizer in the scope, before anything is traced."""
        refuse_under_parameter_servers(model, self.coordination.workers if training else 1)
        build(model, element_spec, self.strategy)

    def build_by_calling(self, model: Any, data: Input | WorkerInput) -> None:
        """Builds a model that was never compiled, from the shapes of x."""
        build_by_calling(model, data.source.element_spec, self.strategy)

    def try_functions(self, model: Any, first_rows: Callable[[], Any]) -> None:
        """Finds metrics whose states can't be merged over closures, once for each compile.

        Raises:
            UnsupportedError: There is one.
        """
        compiled = internals.compiled_metrics(model)
        if model.__dict__.get("_tfdist_tried") is compiled:
            return
        trial = Trial(model, lambda: without_optionals(first_rows()))
        if trial and (wrong := trial.what_is_wrong()):
            raise UnsupportedError(cannot_be_merged(wrong))
        object.__setattr__(model, "_tfdist_tried", compiled)

    def warn(self, model: Any) -> None:
        """Nothing differs by design that the plan does not say."""

    def log_plan(self, data: Input | WorkerInput) -> None:
        """Says who reads the data."""
        if self._has_said_the_plan:
            return
        self._has_said_the_plan = True
        logger.info(
            "training on %d workers, each on batches of its own at its own pace; %s",
            self.coordination.workers,
            "each reads its share of the data itself"
            if isinstance(data, WorkerInput)
            else "this process reads the data and hands out the batches (tfdist.data.from_function lets workers read)",
        )
        for line in str(self._placement).splitlines():
            logger.info("%s", line)

    # -- metrics

    def reset_metrics(self, model: Any) -> None:
        model.reset_metrics()

    def results(self, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns the logs of an epoch: metrics over all its rows, other numbers from the last step."""
        result = model.get_metrics_result()
        return internals.PYTHONIFY.find()(result if set(result) == set(logs) else logs)

    # -- an epoch

    def run_steps(self, model: Any, kind: str, the_pass: Pass) -> dict[str, Any]:
        """Runs one pass of "train" or "test" steps; returns the logs of its last step.

        The epoch's metrics are left in the model's own.
        """
        function = self._function(model, kind)
        totals, logs, done = function.states.starts(), {}, 0
        read = self._on_workers if isinstance(the_pass.data, WorkerInput) else self._on_batches
        for steps, states, own in read(function, model.steps_per_execution, the_pass):
            if steps == 0:
                continue
            totals = function.states.merged(totals, states)
            logs = function.states.logs(totals, own)
            # Steps end in any order, and are counted as they do.
            done += steps
            the_pass.end(done - 1, logs)
        if not the_pass.stopped() and (the_pass.data.steps is None or done < the_pass.data.steps):
            the_pass.data.ran_out(done)
        function.states.assign(totals)
        return logs

    def _on_batches(self, function: StepsOnWorker, steps_per_execution: int, the_pass: Pass) -> Iterator[Counted]:
        """Closures that carry batches which the coordinator reads."""
        closures = _closures(function.on_batches, steps_per_execution, the_pass)
        for closure, vector in self.coordination.run(closures, the_pass.stopped):
            yield closure.steps, *function.unpack(vector)

    def _on_workers(self, function: StepsOnWorker, steps_per_execution: int, the_pass: Pass) -> Iterator[Counted]:
        """Closures that read from the iterator of the worker which runs them."""
        per_worker = the_pass.data.iterators(the_pass.epoch, self.coordination)
        reading = Reading(the_pass.data.wanted_steps, self.coordination.workers)

        def closures() -> Iterator[Closure | None]:
            while (count := reading.next_count(steps_per_execution)) is not None:
                if count == 0:
                    yield None
                    continue
                the_pass.begin(reading.begun)
                arguments = (per_worker.iterators, per_worker.indices, tf.constant(count))
                closure = Closure(function.traced_on_iterator, arguments, reading.begun, count)
                reading.begin(count)
                yield closure

        for closure, vector in self.coordination.run(closures(), the_pass.stopped):
            worker, goes_on, steps = (int(number) for number in vector[: StepsOnWorker.HEAD])
            reading.end(worker, closure.steps, steps, goes_on=bool(goes_on))
            yield steps, *function.unpack(vector[StepsOnWorker.HEAD :], with_own=False)

    def predict(self, model: Any, the_pass: Pass) -> list[Any]:
        """Returns the outputs of each batch, as NumPy arrays, in the order of the batches.

        Raises:
            UnsupportedError: The workers read the data, and their rows have no order among each other.
        """
        if isinstance(the_pass.data, WorkerInput):
            raise UnsupportedError(
                "predict: workers that read their own shares give rows in no order; pass arrays, a tf.data.Dataset or "
                "another pipeline, which this process reads"
            )

        def outputs_of(batches: Any) -> Any:
            with outside_strategy():
                return [model.predict_step(without_optionals(batch)) for batch in batches]

        kept = model.__dict__.setdefault("_tfdist_functions", {}).setdefault("predict", {})

        def function(count: int, spec: Any) -> Any:
            return with_signature(kept, outputs_of, count, spec)

        outputs: dict[int, Any] = {}
        done = 0
        closures = _closures(function, model.steps_per_execution, the_pass)
        for closure, result in self.coordination.run(closures, the_pass.stopped):
            outputs.update(enumerate(result, closure.first))
            done += closure.steps
            the_pass.end(done - 1, {"outputs": result[-1]})
        return [outputs[step] for step in sorted(outputs)]

    def _function(self, model: Any, kind: str) -> StepsOnWorker:
        state = (model.optimizer, internals.compiled_loss(model))
        kept = model.__dict__.setdefault("_tfdist_functions", {})
        if kind not in kept or any(a is not b for a, b in zip(kept[kind][0], state, strict=True)):
            kept[kind] = (state, StepsOnWorker(model, kind))
        return kept[kind][1]


def _closures(function: Callable[[int, Any], Any], steps_per_execution: int, the_pass: Pass) -> Iterator[Closure]:
    """Batches that the coordinator reads: each goes to one worker, once; `function` is of (count, element_spec)."""
    spec = the_pass.data.source.element_spec
    for step, count, iterator in the_pass.data.epoch(the_pass.epoch, steps_per_execution):
        the_pass.begin(step)
        elements = iter(functools.partial(the_pass.data.next, iterator), None)
        batches = tuple(element[0] for element in itertools.islice(elements, count))
        if batches:
            yield Closure(function(len(batches), spec), (batches,), step, len(batches))
        if len(batches) < count:
            return


def with_signature(kept: dict[str, Any], function: Callable[[Any], Any], count: int, spec: Any) -> Any:
    """Returns `function` traced for a tuple of so many batches, whose number of rows is left open.

    TensorFlow would take that of the first batch for fixed, and then divides by it in another way than Keras' own
    functions do: another rounding.
    """
    key = f"{count} {spec}"
    if key not in kept:
        kept[key] = tf.function(function, autograph=False, input_signature=[(spec,) * count])
    return kept[key]


class MetricStates:
    """The states of a model's metrics: where they start, how those of closures are merged, what they show."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._groups = separate_groups(model.metrics)
        self.variables = [variable for _, variables in self._groups for variable in variables]
        # Most start at zero, but only a reset tells.
        model.reset_metrics()
        self._starts = [np.asarray(keras.ops.convert_to_numpy(v)) for v in self.variables]
        self._results = tf.function(functools.partial(self._results_of, by_name=False), autograph=False)
        self._results_by_name = tf.function(functools.partial(self._results_of, by_name=True), autograph=False)

    def starts(self) -> list[np.ndarray[Any, Any]]:
        """Returns the states after a reset."""
        return list(self._starts)

    def merged(self, states: Sequence[Any], more: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Returns the states of the rows of both, each of which was counted up from a reset."""
        rest = iter(zip(states, more, self._starts, strict=True))
        result: list[np.ndarray[Any, Any]] = []
        for metric, variables in self._groups:
            mine = [next(rest) for _ in variables]
            if metric is None:
                result += [one + other - start for one, other, start in mine]
            else:
                both = [[tf.constant(part[i]) for part in mine] for i in (0, 1)]
                result += [np.asarray(value) for value in merge(metric, both)]
        return result

    def _results_of(self, states: Sequence[tf.Tensor], *, by_name: bool) -> dict[str, Any]:
        with CaptureScope(list(zip(self.variables, states, strict=True))):
            return results_by_name(self._model) if by_name else as_tensors(dict(self._model.get_metrics_result()))

    def logs(self, states: Sequence[np.ndarray[Any, Any]], own: dict[str, tuple[bool, Any]]) -> dict[str, Any]:
        """Returns what the metrics show in these states, or what a step of the user's own logs in their place.

        Args:
            states: Of all rows so far.
            own: name -> (whether it is what a metric of that name showed in the closure, the value); empty for Keras'
                own steps.
        """
        tensors = [tf.constant(state) for state in states]
        if not own:
            return internals.PYTHONIFY.find()(self._results(tensors))
        shown = self._results_by_name(tensors)
        return internals.PYTHONIFY.find()({name: shown[name] if own[name][0] else own[name][1] for name in own})

    def assign(self, states: Sequence[np.ndarray[Any, Any]]) -> None:
        for variable, state in zip(self.variables, states, strict=True):
            internals.assign_native(variable, state)


class StepsOnWorker:
    """A Keras step, run on one or several batches, as functions that a worker runs.

    They return one vector of float64 with all metric states and what else the last step logged: each tensor that a
    closure returns costs a message of its own, and float64 holds every float32 and every int32.

    Attributes:
        traced_on_iterator: A function of (iterator, index of the worker, steps); its vector begins with HEAD numbers.
    """

    HEAD = 3  # numbers before the states where a worker reads: its index, whether its data goes on, steps done

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self.kind = model, kind
        self._step = {"train": model.train_step, "test": model.test_step}[kind]
        self.states = MetricStates(model)
        self._own: list[tuple[str, Any]] = []  # names of the user's own logs, and their specs
        self._on_batches: dict[str, Any] = {}
        self.traced_on_iterator = tf.function(self._run_on_iterator, autograph=False, reduce_retracing=True)
        # Traced once, however many steps a closure has.
        self._traced_step = tf.function(self._one, autograph=False, reduce_retracing=True)

    def on_batches(self, count: int, spec: Any) -> Any:
        """Returns a function of a tuple of so many batches."""
        return with_signature(self._on_batches, self._run, count, spec)

    def _run(self, batches: Any) -> tf.Tensor:
        with outside_strategy():
            states = [tf.constant(start) for start in self.states.starts()]
            logs: dict[str, Any] = {}
            for batch in batches:
                logs, states = self._traced_step(batch, states)
            parts = list(states)
            if not internals.has_stock_steps(self._model):
                parts += self._own_logs(logs, states)
            return tf.concat([tf.zeros([0], tf.float64), *(tf.reshape(tf.cast(p, tf.float64), [-1]) for p in parts)], 0)

    def _own_logs(self, logs: dict[str, Any], states: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns, for each name, whether it is a metric's value, and the values."""
        with CaptureScope(list(zip(self.states.variables, states, strict=True))):
            shown = results_by_name(self._model)
        self._own, parts = [], []
        for name in sorted(logs):
            values = tf.nest.map_structure(tf.convert_to_tensor, logs[name])
            flat = tf.nest.flatten(values)
            known = name in shown and same_structure(shown[name], values)
            parts += [all_equal(flat, tf.nest.flatten(shown[name])) if known else tf.constant(False), *flat]
            self._own.append(
                (name, tf.nest.map_structure(lambda value: tf.TensorSpec(value.shape, value.dtype), values))
            )
        return parts

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
            states = [tf.constant(start) for start in self.states.starts()]
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
            logs = self._step(without_optionals(batch))
            states = [tf.convert_to_tensor(scope.get_current_value(v)) for v in self.states.variables]
            grown = [scope.get_current_value(c) - old for c, old in zip(counters, before, strict=True)]
        for counter, more in zip(counters, grown, strict=True):
            internals.native(counter).assign_add(more)
        return logs or {}, states

    def unpack(
        self, vector: np.ndarray[Any, Any], *, with_own: bool = True
    ) -> tuple[list[np.ndarray[Any, Any]], dict[str, tuple[bool, Any]]]:
        """Returns (metric states, the user's own logs as of `MetricStates.logs`) of what a traced function returned."""
        position = 0

        def take(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
            nonlocal position
            size = int(np.prod(shape))
            part = vector[position : position + size].reshape(shape).astype(dtype)
            position += size
            return part

        states = [take(v.shape, v.dtype) for v in self.states.variables]
        own: dict[str, tuple[bool, Any]] = {}
        for name, specs in self._own if with_own else ():
            is_metric = bool(take((), "float64"))
            own[name] = is_metric, tf.nest.map_structure(lambda spec: take(spec.shape, "float64"), specs)
        return states, own
