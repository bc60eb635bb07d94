"""The synchronous engine: every task runs Keras' own step on its rows, and only sums cross tasks.

The step runs outside `strategy.run`, on each task's own variables, so that Keras behaves as in one process: no
merge_call, no scaling by 1/N, control flow around updates works. What a sum over tasks must mend is in
`step.py`. With one task the engine calls Keras' step as it is.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import process
from tfdist.cluster import Task
from tfdist.collectives import Group
from tfdist.errors import MismatchError, PeerLostError, UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component, outside_strategy
from tfdist.trainer import adapted
from tfdist.trainer.agreement import Agreement, shared_variables
from tfdist.trainer.building import build, build_by_calling, without_optionals
from tfdist.trainer.function import StepFunction, Steps
from tfdist.trainer.inputs import Input, seed_of_fit
from tfdist.trainer.metrics import States, all_equal, as_tensors, cannot_be_merged, results_by_name, same_structure
from tfdist.trainer.passes import Pass
from tfdist.trainer.reduction import Alone, Reduction, ThroughGroup
from tfdist.trainer.refusals import refuse
from tfdist.trainer.sources import slice_batch, stand_in
from tfdist.trainer.step import CaptureScope, Step
from tfdist.trainer.stepping import Predicting, run_pass
from tfdist.trainer.trying import Trial
from tfdist.trainer.whole_batch import mark
from tfdist.trainer.xla import UntilNotCompilable, can_split, split_step

logger = logging.getLogger(__name__)

HINT = (
    "Call fit, evaluate, predict and get_metrics_result on every task, not on the chief alone, also in callbacks; "
    "and give every task data of the same length"
)


class SynchronousEngine:
    """What the loop needs of N tasks that train as one.

    Args:
        strategy: The strategy whose scope makes the variables.
        group: The tasks, connected; None for one task.
        reduction: How gradients cross tasks; by default through the group.
        seed: The agreed seed, for scripts that set none: the order of shuffled arrays follows from it.
        step_timeout_s: A task whose step does not end in this time ends itself.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        group: Group | None = None,
        reduction: Reduction | None = None,
        *,
        seed: int = 0,
        step_timeout_s: float = process.DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        self.strategy, self.group, self._seed, self.step_timeout_s = strategy, group, seed, step_timeout_s
        self.reduction: Reduction = reduction or (Alone() if group is None else ThroughGroup(group))
        # Metric states and flags live on the host, whatever way gradients take.
        self._host: Reduction = Alone() if group is None else ThroughGroup(group)
        self.agreement = Agreement(group)
        self.size, self.index = self.reduction.size, self.reduction.index
        self.is_chief = self.index == 0
        self._reported_first_step = False
        self._steps_done = 0
        self.has_said_that_input_repeats = False
        self._activity_losses_are_sums = self.size > 1 and internals.activity_losses_are_sums()

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (Task("worker", 0),) if self.group is None else tuple(self.group.tasks)

    # -- agreement

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raises what the group said where TensorFlow only says that an op failed; no strategy is seen inside."""
        through_group = [r for r in (self.reduction, self._host) if isinstance(r, ThroughGroup)]
        before = [reduction.is_quiet for reduction in through_group]  # a callback may call evaluate inside fit
        try:
            for reduction in through_group:
                reduction.is_quiet = True
            with outside_strategy():
                yield
        except tf.errors.OpError as error:
            for reduction in through_group:
                if reduction.failure is not None:
                    raise _with_hint(reduction.failure) from None
            if isinstance(error, tf.errors.UnimplementedError) and "determinis" in str(error).lower():
                raise UnsupportedError(
                    f"an op of the model has no deterministic kernel here: {error.message.splitlines()[0]} Use another "
                    "op, CPUs, or create_strategy(deterministic=False)"
                ) from error
            raise error
        except (MismatchError, PeerLostError) as error:
            raise _with_hint(error) from None
        finally:
            for reduction, was_quiet in zip(through_group, before, strict=True):
                reduction.is_quiet = was_quiet

    def summary(self, model: Any) -> dict[str, Any]:
        """What of a model must be the same on every task, known before its optimizer's variables are made.

        Making variables waits for all tasks, and a task that makes another number of them would wait for ever.
        """
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        shapes = json.dumps([[list(v.shape), str(v.dtype)] for v in model.variables])
        return {
            "optimizer": type(inner).__name__,
            **adapted.summary(model),
            "number of variables": len(model.variables),
            "shapes of variables (checksum)": zlib.crc32(shapes.encode()),
            "number of trainable variables": len(model.trainable_variables),
        }

    def shared_variables(self, model: Any) -> list[Any]:
        """The variables that are the same on every task between two steps."""
        return shared_variables(model)

    def small_variables(self, model: Any) -> list[Any]:
        """The optimizer's single numbers, such as the learning rate, that are the same on every task."""
        mine = {id(variable) for variable in ([] if model.optimizer is None else model.optimizer.variables)}
        return [v for v in shared_variables(model) if id(v) in mine and tuple(v.shape) == ()]

    def progress(self, steps: int) -> None:
        """Notes that so many more steps have ended, for messages and the launcher."""
        self._steps_done += steps
        if self.group is not None:
            self.group.progress(self._steps_done)
        if not self._reported_first_step:
            self._reported_first_step = True
            process.report("phase", phase="first_step")
        process.report("step", step=self._steps_done)

    # -- building

    def input(self, x: Any, y: Any = None, sample_weight: Any = None, *, model: Any = None, **kwargs: Any) -> Input:
        """Returns this task's rows of the batches; `model` is given where they may be shuffled."""
        seed = seed_of_fit(model, self._seed)
        return Input(x, y, sample_weight, index=self.index, size=self.size, seed=seed, **kwargs)

    def element_of_batch(self, batch: Any) -> Any:
        """Returns this task's rows of a batch that all tasks hold, as (data, rows, total, checksum).

        Raises:
            DataError: Tasks hold different batches.
        """
        data = tuple(part for part in batch if part is not None)
        arrays = internals.TO_SLICEABLE.find()(data, target_backend="tensorflow")
        tensors = keras.tree.map_structure(tf.convert_to_tensor, keras.tree.lists_to_tuples(arrays))
        part, rows, total, checksum = slice_batch(tensors, self.index, self.size)
        self.agreement.check_same_batch(int(checksum), "batch")
        return part, rows, total, checksum

    def prepare_for_batches(self, model: Any, data: Any, *, training: bool) -> None:
        """Builds the model for `train_on_batch` and its siblings, once for each compile."""
        state = (internals.compiled_loss(model), model.optimizer, training)
        prepared = model.__dict__.get("_tfdist_prepared", (None, None, None))
        if all(a is b for a, b in zip(prepared, state, strict=True)):
            return
        spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, data)
        self.agreement.require_same("the batch", self.summary(model))
        self.prepare(model, spec, training=training)
        self.agreement.share_variables(model, optimizer=training)
        self.try_functions(model, lambda: data)
        self.warn(model)
        object.__setattr__(model, "_tfdist_prepared", state)

    def next_element(self, data: Input, iterator: Any, step: int) -> Any:
        """Returns the next element with the rows of all tasks known, or None where all tasks' data has ended.

        A task whose own rows have ended goes on with a stand-in while others have some.
        """
        own = data.source.split == "own"
        while True:
            element = data.next(iterator)
            rows = None if element is None or (own and int(element[2]) == 0) else int(element[1])
            total = self.agreement.rows_of_step(rows, step, own=own)
            if total is None:
                return None
            if total == 0:
                continue  # a batch of no rows on any task
            if element is None:  # no stand-in came with the end
                last = data.last if data.last is not None else stand_in(data.source.element_spec)
                return last, tf.constant(0), tf.constant(total), tf.constant(0, tf.int64)
            data.last = element[0]
            return element[0], element[1], tf.constant(total), element[3]

    def build_by_calling(self, model: Any, data: Input) -> None:
        """Builds a model that was never compiled, from the shapes of x."""
        build_by_calling(model, data.source.element_spec, self.strategy)

    def prepare(self, model: Any, element_spec: Any, *, training: bool) -> None:
        """Builds the model, its loss, metrics and optimizer in the scope, before anything is traced."""
        if self.size > 1:
            refuse(model)  # what is known before; an older Keras can't build a stateful RNN for any number of rows
        build(model, element_spec, self.strategy)
        if self.size > 1:
            refuse(model)

    def try_functions(self, model: Any, first_rows: Callable[[], Any]) -> None:
        """Finds losses and metrics whose parts do not add up, once for each compile.

        Functions see the whole batch from then on.

        Args:
            first_rows: Returns this task's rows of a batch; called only where there is something to try.

        Raises:
            UnsupportedError: A metric's state can't be merged; on every task, if it is so on any.
        """
        compiled = internals.compiled_metrics(model), internals.compiled_loss(model)
        tried = model.__dict__.get("_tfdist_tried", (None, None))
        if self.size == 1 or all(a is b for a, b in zip(tried, compiled, strict=True)):
            return
        trial = Trial(model, lambda: without_optionals(first_rows()))
        if trial:
            for function, is_whole in zip(trial.functions, trial.need_the_whole_batch(), strict=True):
                if self.agreement.any(is_whole, f"loss {function.name}"):
                    self._have_it_see_the_whole_batch(function)
            wrong = trial.what_is_wrong()
            if self.agreement.any(bool(wrong), "metrics"):
                raise UnsupportedError(cannot_be_merged(wrong))
            object.__setattr__(model, "_tfdist_starts", trial.starts())
        object.__setattr__(model, "_tfdist_tried", compiled)

    def _have_it_see_the_whole_batch(self, function: Any) -> None:
        mark(function)
        if self.is_chief:
            logger.info(
                "%s looks at a batch as a whole, so every task gathers the rows of all tasks for it", function.name
            )

    def _states_of(self, model: Any) -> States:
        return States(model.metrics, self.index, self.size, model.__dict__.get("_tfdist_starts", ()))

    def warn(self, model: Any) -> None:
        """Says once, on the chief, what differs from one process by design."""
        if self.size == 1 or not self.is_chief:
            return
        plain = [
            layer.name
            for layer in internals.layers_of(model)
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable
        ]
        if plain and not getattr(model, "_tfdist_warned", False):
            object.__setattr__(model, "_tfdist_warned", True)
            logger.warning(
                "BatchNormalization (%s) normalises each task's rows by their own statistics; "
                "BatchNormalization(synchronized=True) gives what one process gives",
                ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else ""),
            )

    def log_plan(self, data: Input) -> None:
        """Says on the chief which task gets what."""
        if not self.is_chief or self.size == 1:
            return
        batch, n = data.source.global_batch_size, self.size
        split = "its rows split over the tasks"
        if batch:
            split = " + ".join(str(batch * (i + 1) // n - batch * i // n) for i in range(min(n, 8))) + (
                " + ..." if n > 8 else ""
            )
        if data.source.split == "sliced" and not self.has_said_that_input_repeats:
            self.has_said_that_input_repeats = True
            logger.info(
                "every task reads the whole input and keeps its rows of each batch; tfdist.data shares the reading as "
                "well"
            )
        logger.info(
            "training on %d tasks (%s); global batch %s = %s rows; %s steps per epoch%s",
            n,
            ", ".join(str(task) for task in self.tasks[:8]) + (", ..." if n > 8 else ""),
            batch or "of the dataset",
            split,
            data.steps or "an unknown number of",
            f" over {data.source.rows:,} rows" if data.source.rows else "",
        )

    # -- passes over the data

    def run_steps(self, model: Any, kind: str, the_pass: Pass) -> dict[str, Any]:
        """Runs one pass of "train" or "test" steps; returns the logs of its last step."""
        return run_pass(self, model, self.function(model, kind), the_pass)

    def predict(self, model: Any, the_pass: Pass) -> list[Any]:
        """Returns the outputs of each execution, in order, the same on every task."""
        batches: list[Any] = []
        run_pass(self, model, Predicting(self, self.predict_function(model), batches), the_pass)
        return batches

    # -- functions

    def function(self, model: Any, kind: str) -> Steps:
        """Returns the "train" or "test" function, traced once and kept with the model until it is compiled again."""
        state = (model.optimizer, internals.compiled_loss(model), model.run_eagerly, model.jit_compile)
        kept = model.__dict__.setdefault("_tfdist_functions", {})
        if kind not in kept or any(a is not b and a != b for a, b in zip(kept[kind][0], state, strict=True)):
            kept[kind] = (state, self._make_function(model, kind))
        return kept[kind][1]

    def _make_function(self, model: Any, kind: str) -> Steps:
        jit_compile = bool(model.jit_compile)
        if jit_compile and self.size > 1:
            if kind == "train" and can_split(model):
                return UntilNotCompilable(
                    self._function_of(model, kind, split_step(model)),
                    lambda: self._function_of(model, kind, model.train_step),
                    lambda: self._say_no_xla(model),
                )
            if kind == "train":
                self._say_no_xla(model)
            jit_compile = False
        step_function = model.train_step if kind == "train" else model.test_step
        return self._function_of(model, kind, step_function, jit_compile=jit_compile)

    def _say_no_xla(self, model: Any) -> None:
        if self.is_chief:
            logger.warning(
                "jit_compile=True: %s trains without XLA, since its step needs sums over tasks where XLA can't leave "
                "the program; jit_compile=False says the same",
                model.name,
            )

    def _function_of(
        self, model: Any, kind: str, step_function: Callable[[Any], Any], *, jit_compile: bool = False
    ) -> StepFunction:
        def step(data: Any, rows: tf.Tensor, total: tf.Tensor, checksum: tf.Tensor) -> tuple[Any, tf.Tensor]:
            # Nothing may run when get_next() finds the end of the data: in plain Keras `iterations += 1` does.
            with tf.control_dependencies([tf.identity(total)]):
                logs = self._step(model, step_function, kind == "train", without_optionals(data), rows, total)
            return logs, checksum

        return StepFunction(step, eager=model.run_eagerly, jit_compile=jit_compile)

    def _step(
        self, model: Any, function: Callable[[Any], Any], training: bool, data: Any, rows: tf.Tensor, total: tf.Tensor
    ) -> Any:
        if self.size == 1:
            return function(data)
        states = self._states_of(model)
        moving = [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)] if training else []
        scales_loss = internals.has_stock_train_step(model)
        step = Step(self.reduction, self._host, rows, total, scales_loss=scales_loss)
        with _whole_activity_losses(model, step) if self._activity_losses_are_sums else nullcontext():
            logs, values = step.run(function, data, states.variables, moving)
        return _global_logs(step, model, states, values, logs or {})

    # -- metrics

    def reset_metrics(self, model: Any) -> None:
        """Resets this task's part of every metric; `reset_state()` of an on-read variable is a hidden collective."""
        if self.size == 1:
            model.reset_metrics()
            return
        variables = self._states_of(model).variables
        natives = [local_component(internals.native(v)) for v in variables]
        with CaptureScope([(v, tf.convert_to_tensor(n)) for v, n in zip(variables, natives, strict=True)]) as scope:
            model.reset_metrics()
        for variable, native in zip(variables, natives, strict=True):
            native.assign(scope.get_current_value(variable))

    def results(self, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns the logs of an epoch: metrics over all its rows, other numbers from the last step."""
        result = model.get_metrics_result() if self.size == 1 else self.metrics_result(model, "epoch logs")
        if set(result) != set(logs):  # a custom step's own logs, as in Keras: those of its last step
            result = logs
        return internals.PYTHONIFY.find()(result)

    def metrics_result(self, model: Any, tag: str = "get_metrics_result") -> dict[str, Any]:
        """Returns `model.get_metrics_result()` over the rows of all tasks, on every task."""
        states = self._states_of(model)
        own = states.to_sum([tf.identity(local_component(internals.native(v))) for v in states.variables])
        whole = states.merged(self._host.sum(own, tag) if own else [])
        with CaptureScope(list(zip(states.variables, whole, strict=True))):
            return as_tensors(model.get_metrics_result())

    def sum_of_states(self, mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the sum over tasks of a metric's state that code outside a step reads, on every task."""
        assert self.group is not None
        with self.errors():
            return self.group.all_reduce([mine], op="sum", tag="a metric's state (metric.result)")[0]

    def with_own_states(self, model: Any) -> keras.StatelessScope:
        """Code inside sees this task's part of every metric's state, which needs no other task."""
        variables = model.metrics_variables
        own = [tf.convert_to_tensor(local_component(internals.native(v))) for v in variables]
        return keras.StatelessScope(list(zip(variables, own, strict=True)), initialize_variables=False)

    # -- predictions

    def predict_function(self, model: Any) -> Steps:
        """Returns a function of the same kind whose logs are the outputs for this task's rows."""
        state = (model.run_eagerly, model.jit_compile)
        kept = model.__dict__.setdefault("_tfdist_functions", {})
        if "predict" not in kept or kept["predict"][0] != state:

            def step(data: Any, rows: tf.Tensor, total: tf.Tensor, checksum: tf.Tensor) -> tuple[Any, tf.Tensor]:
                return model.predict_step(without_optionals(data)), checksum

            jit_compile = bool(model.jit_compile)
            kept["predict"] = (state, StepFunction(step, eager=model.run_eagerly, jit_compile=jit_compile))
        return kept["predict"][1]

    def whole(self, outputs: Any, rows: int) -> Any:
        """Returns the outputs of the whole batch on every task, rows in order, as NumPy arrays."""

        def gather(output: Any) -> Any:
            if isinstance(output, tf.RaggedTensor):
                if self.size > 1:
                    raise UnsupportedError(
                        "predict: a ragged output can not be gathered from the tasks; return output.to_tensor()"
                    )
                return output
            array = np.asarray(keras.ops.convert_to_numpy(output))
            if self.group is None:
                return array
            if array.ndim == 0 or len(array) != max(rows, 1):
                raise UnsupportedError(
                    f"predict: an output of shape {array.shape} for {max(rows, 1)} rows is not one result per row, so "
                    "the tasks' parts can't be put together; return one per row"
                )
            if array.dtype == object:
                return self._whole_strings(array[:rows])
            return np.concatenate(self.group.all_gather(array[:rows], tag="predictions"))

        return keras.tree.map_structure(gather, outputs)

    def _whole_strings(self, mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Bytes of any length, in order; the group itself carries numbers."""
        assert self.group is not None
        text = json.dumps([[item.decode("latin-1") for item in mine.reshape(-1)], list(mine.shape[1:])])
        every = [json.loads(part) for part in self.group.all_gather_bytes(text.encode(), tag="predicted strings")]
        items = [item.encode("latin-1") for part, _ in every for item in part]
        return np.array(items, dtype=object).reshape(-1, *mine.shape[1:])


def _with_hint(error: Exception) -> Exception:
    """Says what a user most likely did where tasks were found in different calls, or one had left before a call."""
    if HINT in str(error):
        return error
    if isinstance(error, MismatchError) and " called " in str(error):
        return MismatchError(f"{error}. {HINT}")
    if isinstance(error, PeerLostError) and " left " in str(error) and " arguments'" in str(error):
        return PeerLostError(f"{error}. {HINT}", task=error.task)
    return error


def _global_logs(
    step: Step, model: Any, states: States, values: Sequence[tf.Tensor], logs: dict[str, Any]
) -> dict[str, Any]:
    """Logs of the whole batch: metric states are merged; any other number is the mean weighted by rows.

    A step of the user's own may log a number of its own under a metric's name ("loss"), so what is no metric's value
    on some task counts as a number.
    """
    with CaptureScope(list(zip(states.variables, values, strict=True))):
        local = as_tensors(model.get_metrics_result())
        # A step of the user's own may log its loss where no metric has seen it.
        sure = set(logs) == set(local) and internals.has_stock_steps(model)
        local = local if sure else results_by_name(model)
    keys = sorted(logs)
    flat = {key: [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(logs[key])] for key in keys}
    named = [key for key in keys if key in local and same_structure(local[key], logs[key])]
    questions = [] if sure else [all_equal(flat[key], tf.nest.flatten(local[key])) | ~step.live for key in named]
    numbers = [leaf for key in keys if key not in named or not sure for leaf in flat[key]]
    weighted = [step.weigh(leaf) for leaf in map(_floating, numbers)]
    answers = [tf.cast(question, tf.float32) for question in questions]
    sums = iter(step.sum_on_host([*states.to_sum(values), *answers, *weighted], "logs"))
    with CaptureScope(list(zip(states.variables, states.merged([next(sums) for _ in states.variables]), strict=True))):
        whole = as_tensors(model.get_metrics_result()) if sure else results_by_name(model)
    is_metric = {key: next(sums) == step.size for key, _ in zip(named, questions, strict=False)}
    result: dict[str, Any] = {}
    for key in keys:
        if key in named and sure:
            result[key] = whole[key]
            continue
        means = [next(sums) for _ in flat[key]]
        if key in named:
            merged = tf.nest.flatten(whole[key])
            means = [tf.where(is_metric[key], tf.cast(m, n.dtype), n) for m, n in zip(merged, means, strict=True)]
        result[key] = tf.nest.pack_sequence_as(logs[key], means)
    return result


def _floating(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)


@contextmanager
def _whole_activity_losses(model: Any, step: Step) -> Iterator[None]:
    """A task's activity losses are part of a sum over all rows: its share must not weigh them again."""
    whole: dict[int, tuple[Any, Any]] = {
        id(layer): (layer, layer.activity_regularizer)
        for layer in internals.layers_of(model)
        if layer.activity_regularizer is not None
    }

    def unweighted(regularizer: Any) -> Callable[[Any], Any]:
        def loss(output: Any) -> Any:
            value = regularizer(output)
            return tf.math.divide_no_nan(value, step.share(value.dtype))

        return loss

    try:
        for layer, regularizer in whole.values():
            layer.activity_regularizer = unweighted(regularizer)
        yield
    finally:
        for layer, regularizer in whole.values():
            layer.activity_regularizer = regularizer
