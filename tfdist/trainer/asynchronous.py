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
import time
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
from tfdist.trainer.coordination import Closure, Coordination, PerWorker
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
from tfdist.trainer.passes import Pass, Watched
from tfdist.trainer.refusals import refuse_under_parameter_servers
from tfdist.trainer.shares import Reading
from tfdist.trainer.step import CaptureScope
from tfdist.trainer.trying import Trial
from tfdist.trainer.worker_input import WorkerInput, of_function, of_pipeline

logger = logging.getLogger(__name__)
# Steps of one closure at most, all in one graph: with more, a closure's own costs no longer count.
MOST_STEPS = 16
# Where the workers that are there found no data, and the one that has some is not known to be lost.
PROBE_S, LONGEST_PROBE_S = 0.02, 1.0
# How often a progress bar gets new numbers.
DRAW_S = 0.1
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
        self._said_lost: list[int] = []

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
        totals, done = function.states.starts(), 0
        own: dict[str, tuple[bool, Any]] = {}
        logs: dict[str, Any] = {}
        watch = Watch(the_pass.watched)
        read = self._on_workers if isinstance(the_pass.data, WorkerInput) else self._on_batches
        for steps, states, own in read(function, model.steps_per_execution, the_pass):
            totals = function.states.merged(totals, states)
            # Steps end in any order, and are counted as they do.
            done += steps
            if watch.wants_logs():
                logs = function.states.logs(totals, own)
            the_pass.end(done - 1, logs)
        if not the_pass.stopped() and (the_pass.data.steps is None or done < the_pass.data.steps):
            the_pass.data.ran_out(done)
        function.states.assign(totals)
        return function.states.logs(totals, own) if done else {}

    def _on_batches(self, function: StepsOnWorker, steps_per_execution: int, the_pass: Pass) -> Iterator[Counted]:
        """Closures that carry batches which the coordinator reads."""
        closures = _closures(function.on_batches, min(steps_per_execution, MOST_STEPS), the_pass)
        for closure, vector in self.coordination.run(closures, the_pass.stopped):
            yield closure.steps, *function.unpack(vector)

    def _on_workers(self, function: StepsOnWorker, steps_per_execution: int, the_pass: Pass) -> Iterator[Counted]:
        """Closures that read from the iterator of the worker which runs them; then what nobody has read."""
        per_worker = the_pass.data.iterators(the_pass.epoch, self.coordination)
        reading = Reading(the_pass.data.shares, the_pass.data.wanted_steps, self.coordination.in_flight)
        most = min(steps_per_execution, MOST_STEPS)

        def closures() -> Iterator[Closure | None]:
            pause = PROBE_S
            while not reading.is_over(self.coordination.missing_workers()):
                if reading.found_nothing:
                    # The worker that still has data is lost or busy, and the others have none.
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PROBE_S)
                    reading.try_again()
                count = reading.next_count(most)
                if count == 0:
                    yield None
                    continue
                the_pass.begin(reading.begun)
                # One worker may get all closures that are open; twice as many, for what a lost connection cost.
                far = the_pass.data.reaches(2 * self.coordination.in_flight * most)
                traced = function.on_iterator(count, per_worker, goes_on=far)
                closure = Closure(traced, (per_worker.iterators, per_worker.indices), reading.begun, count)
                reading.begin(count)
                yield closure

        for closure, vector in self.coordination.run(closures(), the_pass.stopped):
            worker, first, steps, goes_on = (int(number) for number in vector[: StepsOnWorker.HEAD])
            if reading.end(worker, closure.steps, first, steps, goes_on=bool(goes_on)):
                yield steps, *function.unpack(vector[StepsOnWorker.HEAD :], with_own=False)
        if not the_pass.stopped():
            yield from self._on_rest(function, most, the_pass, reading.steps_left())

    def _on_rest(self, function: StepsOnWorker, most: int, the_pass: Pass, steps: int | None) -> Iterator[Counted]:
        """Closures that carry what is left of the shares of lost workers, read by this process."""
        data: WorkerInput = the_pass.data
        left = [worker for worker, share in enumerate(data.shares) if not share.is_whole]
        if not left or steps == 0:
            return
        if left != self._said_lost:
            self._said_lost = left
            logger.warning(
                "%s lost: this process reads the rest of %s of the data",
                " and ".join(f"worker {worker}" for worker in left) + (" is" if len(left) == 1 else " are"),
                "its share" if len(left) == 1 else "their shares",
            )
        batches = itertools.islice(itertools.chain.from_iterable(map(data.rest_of, left)), steps)

        def closures() -> Iterator[Closure]:
            begun = 0
            while several := tuple(itertools.islice(batches, most)):
                the_pass.begin(begun)
                traced = function.on_batches(len(several), data.source.element_spec)
                yield Closure(traced, (several,), begun, len(several))
                begun += len(several)

        for closure, vector in self.coordination.run(closures(), the_pass.stopped):
            yield closure.steps, *function.unpack(vector)

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
        closures = _closures(function, min(model.steps_per_execution, MOST_STEPS), the_pass)
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


def _packed(parts: Sequence[Any]) -> tf.Tensor:
    nothing = tf.zeros([0], tf.float64)
    return tf.concat([nothing, *(tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts)], 0)


class Watch:
    """How often somebody sees the logs of an epoch that is under way: forming them costs as much as a small step.

    Args:
        watched: Whether a callback gets them; a progress bar alone draws no oftener than a person can see.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched, self._next = watched, 0.0

    def wants_logs(self) -> bool:
        """Whether to form them now."""
        if self._watched is not Watched.SOMETIMES:
            return self._watched is Watched.ALWAYS
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + DRAW_S
        return True


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


class WorkersScope(CaptureScope):
    """Where one worker counts metrics and steps for itself while others do the same.

    Args:
        states: The metrics' variables and what they are now.
        counters: The optimizers' `iterations`: what a step adds to them is added to the variable in one assignment.
    """

    def __init__(self, states: Sequence[tuple[Any, tf.Tensor]], counters: Sequence[Any]) -> None:
        self._counters = [(counter, tf.identity(internals.native(counter))) for counter in counters]
        super().__init__([*states, *self._counters])

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) not in self._captured or not self._is_inside():
            super().add_update(update)
            return
        for counter, before in self._counters:
            if counter is variable:
                internals.native(counter).assign_add(tf.cast(value, counter.dtype) - before)
                return
        raise UnsupportedError(
            f"the step updates {variable.path}, the state of a metric, inside a tf.cond, a tf.while_loop or a "
            "tf.function of its own, which can't be counted through parameter servers; update the metric outside, "
            "with sample_weight=0 where a row shall not count"
        )

    def count(self) -> None:
        """Adds what the step added to the counters outside any tf.cond."""
        for counter, before in self._counters:
            internals.native(counter).assign_add(self.get_current_value(counter) - before)


class StepsOnWorker:
    """A Keras step, run on one or several batches, as functions that a worker runs.

    They return one vector of float64 with all metric states and what else the last step logged: each tensor that a
    closure returns costs a message of its own, and float64 holds every float32 and every int32.
    """

    # Numbers before the states where a worker reads: its index, the position of what it read first in its share, how
    # many steps it did, whether its data goes on.
    HEAD = 4

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self.kind = model, kind
        self._step = {"train": model.train_step, "test": model.test_step}[kind]
        self.states = MetricStates(model)
        self._own: list[tuple[str, Any]] = []  # names of the user's own logs, and their specs
        self._on_batches: dict[str, Any] = {}
        self._on_iterator: dict[str, Any] = {}
        # Traced once, however many steps a closure has.
        self._traced_step = tf.function(self._one, autograph=False, reduce_retracing=True)

    def on_batches(self, count: int, spec: Any) -> Any:
        """Returns a function of a tuple of so many batches."""
        return with_signature(self._on_batches, self._run, count, spec)

    def on_iterator(self, count: int, per_worker: PerWorker, *, goes_on: bool) -> Any:
        """Returns a function of (iterator, index of the worker) of so many steps, or fewer at the end of the data."""
        key = f"{count} {goes_on} {per_worker.spec}"
        if key not in self._on_iterator:
            run = functools.partial(self._run_on_iterator, count, goes_on)
            self._on_iterator[key] = tf.function(run, autograph=False).get_concrete_function(*per_worker.spec)
        return self._on_iterator[key]

    def _run(self, batches: Any) -> tf.Tensor:
        with outside_strategy():
            logs, states = self._steps(batches, self._start())
            parts = list(states)
            if not internals.has_stock_steps(self._model):
                parts += self._own_logs(logs, states)
            return _packed(parts)

    def _start(self) -> list[tf.Tensor]:
        return [tf.constant(start) for start in self.states.starts()]

    def _steps(self, batches: Any, states: list[tf.Tensor]) -> tuple[dict[str, Any], list[tf.Tensor]]:
        """Steps one after the other, without a loop: TensorFlow tells every server of each turn of a loop."""
        logs: dict[str, Any] = {}
        for batch in batches:
            logs, states = self._traced_step(batch, states)
        return logs, states

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

    def _run_on_iterator(self, count: int, is_sure: bool, iterator: Any, worker: tf.Tensor) -> tf.Tensor:
        """Steps on what the worker's own iterator yields: (position, element)."""
        with outside_strategy():
            if is_sure:  # the data goes on for so long: a condition costs as much as the steps
                elements = [iterator.get_next() for _ in range(count)]
                first, done, goes_on = elements[0][0], count, True
                _, states = self._steps([element[0] for _, element in elements], self._start())
            else:
                optionals = [iterator.get_next_as_optional() for _ in range(count)]
                there = tf.stack([optional.has_value() for optional in optionals])
                first = tf.cond(there[0], lambda: optionals[0].get_value()[0], lambda: tf.constant(-1, tf.int64))
                done, goes_on = tf.math.count_nonzero(there), there[-1]
                states = self._as_far_as_there_is(optionals, there)
            head = [tf.cast(number, tf.float64) for number in (worker, first, done, goes_on)]
            return _packed([tf.stack(head), *states])

    def _as_far_as_there_is(self, optionals: Sequence[Any], there: tf.Tensor) -> list[tf.Tensor]:
        """One condition where all have a value, which is so but for the end of the data: each costs a message."""

        def batch(optional: Any) -> Any:
            return optional.get_value()[1][0]

        def fewer() -> list[tf.Tensor]:
            states = self._start()
            for i, optional in enumerate(optionals[:-1]):
                states = tf.cond(
                    there[i],
                    lambda optional=optional, states=states: self._steps([batch(optional)], states)[1],
                    lambda states=states: states,
                )
            return states

        return tf.cond(there[-1], lambda: self._steps([batch(o) for o in optionals], self._start())[1], fewer)

    def _one(self, batch: Any, states: Sequence[tf.Tensor]) -> tuple[dict[str, Any], list[tf.Tensor]]:
        counters = internals.iterations_of(self._model) if self.kind == "train" else []
        with WorkersScope(list(zip(self.states.variables, states, strict=True)), counters) as scope:
            logs = self._step(without_optionals(batch))
            states = [tf.convert_to_tensor(scope.get_current_value(v)) for v in self.states.variables]
        scope.count()
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
