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
from tfdist.errors import DataError, MismatchError, UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component, outside_strategy
from tfdist.trainer.inputs import Input
from tfdist.trainer.metrics import not_additive
from tfdist.trainer.reduction import Alone, Reduction, ThroughGroup
from tfdist.trainer.step import CaptureScope, Step

logger = logging.getLogger(__name__)


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
        self.size, self.index = self.reduction.size, self.reduction.index
        self.is_chief = self.index == 0
        self._reported_first_step = False
        self._activity_losses_are_sums = self.size > 1 and internals.activity_losses_are_sums()

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (Task("worker", 0),) if self.group is None else tuple(self.group.tasks)

    # -- agreement

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raises what the group said where TensorFlow only says that an op failed; no strategy is seen inside."""
        through_group = [r for r in (self.reduction, self._host) if isinstance(r, ThroughGroup)]
        try:
            for reduction in through_group:
                reduction.is_quiet = True
            with outside_strategy():
                yield
        except tf.errors.OpError as error:
            for reduction in through_group:
                if reduction.failure is not None:
                    raise reduction.failure from None
            raise error
        finally:
            for reduction in through_group:
                reduction.is_quiet = False

    def any(self, flag: bool, tag: str) -> bool:
        """Returns whether the flag is set on any task."""
        if self.group is None:
            return flag
        return bool(self.group.all_reduce([np.array(flag)], op="max", tag=tag)[0])

    def require_same(self, call: str, arguments: dict[str, Any]) -> None:
        """Raises on every task where tasks would not do the same thing.

        Raises:
            MismatchError: Tasks call `fit` with other epochs, steps, batch sizes; the message names task and value.
        """
        if self.group is None:
            return
        mine = json.dumps(arguments, default=str)
        every = [json.loads(text) for text in self.group.all_gather_bytes(mine.encode(), tag=f"{call} arguments")]
        for task, theirs in zip(self.group.tasks, every, strict=True):
            for name, value in every[0].items():
                if theirs.get(name) != value:
                    raise MismatchError(
                        f"{call}: {name} is {value!r} on {self.group.tasks[0]} and {theirs.get(name)!r} on {task}; "
                        "every task must run the same script with the same arguments and data"
                    )

    def summary(self, model: Any) -> dict[str, Any]:
        """What of a model must be the same on every task, known before its optimizer's variables are made.

        Making variables waits for all tasks, and a task that makes another number of them would wait for ever.
        """
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        shapes = json.dumps([[list(v.shape), str(v.dtype)] for v in model.variables])
        return {
            "optimizer": type(inner).__name__,
            "number of variables": len(model.variables),
            "shapes of variables (checksum)": zlib.crc32(shapes.encode()),
            "number of trainable variables": len(model.trainable_variables),
        }

    def share_variables(self, model: Any, *, optimizer: bool) -> None:
        """Gives every task the chief's variables where they differ (weights loaded or changed on one task only)."""
        if self.group is None:
            return
        variables = list(model.variables)
        if optimizer and model.optimizer is not None:
            variables += list(model.optimizer.variables)
        arrays = [np.asarray(local_component(internals.native(v)).numpy()) for v in variables]
        shapes = [(v.path, list(a.shape), str(a.dtype)) for v, a in zip(variables, arrays, strict=True)]
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, checksum)
        mine = json.dumps([len(shapes), zlib.crc32(json.dumps([s[1:] for s in shapes]).encode()), checksum])
        every = [json.loads(text) for text in self.group.all_gather_bytes(mine.encode(), tag="variables")]
        for task, theirs in zip(self.group.tasks, every, strict=True):
            if theirs[:2] != every[0][:2]:
                raise MismatchError(
                    f"the model on {task} has other variables ({theirs[0]} of them) than on {self.group.tasks[0]} "
                    f"({every[0][0]}); every task must build the same model and optimizer, in the scope"
                )
        different = [str(t) for t, theirs in zip(self.group.tasks, every, strict=True) if theirs != every[0]]
        if not different:
            return
        if self.is_chief:
            logger.warning(
                "%s held other values of the model's variables than %s (loaded or changed on some tasks only?); "
                "all tasks now use those of %s",
                ", ".join(different),
                self.group.tasks[0],
                self.group.tasks[0],
            )
        received = self.group.broadcast(arrays, root=0, tag="variables")
        for variable, array in zip(variables, received, strict=True):
            local_component(internals.native(variable)).assign(array)

    def from_chief(self, number: int, tag: str) -> int:
        """Returns the chief's number on every task."""
        if self.group is None:
            return number
        return int(self.group.broadcast([np.array(number, np.int64)], root=0, tag=tag)[0])

    def progress(self, step: int) -> None:
        """Notes that a step has ended, for messages and the launcher."""
        if self.group is not None:
            self.group.progress(step)
        if not self._reported_first_step:
            self._reported_first_step = True
            process.report("phase", phase="first_step")
        process.report("step", step=step)

    def check_first_batch(self, data: Input, checksum: int) -> None:
        """Raises where tasks read different data: a shuffle without a common seed would lose and double rows."""
        if self.group is None or not data.is_sliced:
            return
        every = self.group.all_gather(np.array(checksum, np.int64), tag="first batch")
        different = [str(task) for task, value in zip(self.group.tasks, every, strict=True) if value != every[0]]
        if different:
            raise DataError(
                f"{' and '.join(different)} read another first batch than {self.group.tasks[0]}; every task must read "
                "the same global batches, of which it takes its rows: give shuffle() a seed, don't shard the dataset"
            )

    # -- building

    def input(self, x: Any, y: Any = None, sample_weight: Any = None, *, model: Any = None, **kwargs: Any) -> Input:
        """Returns this task's rows of the batches; `model` is given where they may be shuffled."""
        seed: tuple[int, ...] = ()
        if model is not None:
            # Another order in each fit of a model, the same on every task and in every run of the script.
            fits = model.__dict__.get("_tfdist_fits", 0)
            object.__setattr__(model, "_tfdist_fits", fits + 1)
            script_seed = internals.RANDOM_SEED.find()()
            seed = (self._seed if script_seed is None else script_seed, fits)
        return Input(x, y, sample_weight, index=self.index, size=self.size, seed=seed, **kwargs)

    def build_by_calling(self, model: Any, data: Input) -> None:
        """Builds a model that was never compiled, from the shapes of x."""
        x, _, _ = internals.UNPACK.find()(_symbolic(data.element_spec))
        with self.strategy.scope():
            internals.OUTPUT_SPEC.find()(model, x, training=False)

    def prepare(self, model: Any, data: Input, *, training: bool) -> None:
        """Builds the model, its loss, metrics and optimizer in the scope, before anything is traced."""
        self._refuse(model)
        batch = _symbolic(data.element_spec)
        optimizer = model.optimizer
        with self.strategy.scope():
            if optimizer is not None and not optimizer.built:
                for part in {id(o): o for o in (optimizer, getattr(optimizer, "inner_optimizer", optimizer))}.values():
                    internals.set_optimizer_strategy(part, self.strategy)  # compiled outside the scope
            internals.symbolic_build(model, batch)

    def _refuse(self, model: Any) -> None:
        if self.size == 1:
            return
        if model.jit_compile:
            raise UnsupportedError(
                "jit_compile=True: XLA can not compile a step whose sums cross tasks; "
                "use model.compile(..., jit_compile=False)"
            )

    def check_metrics(self, model: Any, data: Input) -> None:
        """Refuses metrics whose states can't be summed over tasks; tried once for each compile.

        Raises:
            UnsupportedError: On every task, if it is so on any.
        """
        compiled = internals.compiled_metrics(model)
        if self.size == 1 or compiled is None or model.__dict__.get("_tfdist_checked") is compiled:
            return
        wrong = not_additive(model, lambda: _without_optionals(next(iter(data.dataset))[0]))
        if self.any(bool(wrong), "metrics"):
            raise UnsupportedError(
                f"the metric {' and '.join(wrong) or '(of another task)'} keeps a state that is no sum over rows, so "
                "the tasks' states can't be added up; keep sums and counts that start at zero and form the number in "
                "result(), or compute it from predict() in a callback"
            )
        object.__setattr__(model, "_tfdist_checked", compiled)

    def warn(self, model: Any) -> None:
        """Says once, on the chief, what differs from one process by design."""
        if self.size == 1 or not self.is_chief:
            return
        plain = [
            layer.name
            for layer in internals.layers_of(model)
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        ]
        if plain and not getattr(model, "_tfdist_warned", False):
            object.__setattr__(model, "_tfdist_warned", True)
            logger.warning(
                "BatchNormalization (%s) normalises each task's rows by their own statistics; "
                "BatchNormalization(synchronized=True) gives what one process gives",
                ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else ""),
            )

    # -- functions

    def function(self, model: Any, kind: str) -> Callable[[Any, int], tuple[dict[str, Any], tf.Tensor]]:
        """Returns a function (iterator, steps) -> (logs of the last step, checksum of its batch).

        It is traced once and kept with the model until the model is compiled again.
        """
        state = (model.optimizer, internals.compiled_loss(model), model.run_eagerly, model.steps_per_execution)
        kept = model.__dict__.setdefault("_tfdist_functions", {})
        if kind in kept and all(a is b or a == b for a, b in zip(kept[kind][0], state, strict=True)):
            return kept[kind][1]
        made = self._make_function(model, kind)
        kept[kind] = (state, made)
        return made

    def _make_function(self, model: Any, kind: str) -> Callable[..., Any]:
        step_function = model.train_step if kind == "train" else model.test_step

        def one(data: Any, rows: tf.Tensor, total: tf.Tensor, checksum: tf.Tensor) -> tuple[Any, tf.Tensor]:
            # Nothing may run when get_next() finds the end of the data: in plain Keras `iterations += 1` does.
            with tf.control_dependencies([tf.identity(total)]):
                return self._step(
                    model, step_function, kind == "train", _without_optionals(data), rows, total
                ), checksum

        if model.run_eagerly:

            def eagerly(iterator: Any, steps: int) -> Any:
                return [one(*next(iterator)) for _ in range(steps)][-1]

            return eagerly

        jit = bool(model.jit_compile)
        body = tf.function(one, autograph=False, reduce_retracing=True, jit_compile=True) if jit else one

        def single(iterator: Any) -> Any:
            return body(*iterator.get_next())

        def several(iterator: Any, steps: tf.Tensor) -> Any:
            def next_step(number: tf.Tensor) -> tf.Tensor:
                logs, _ = body(*iterator.get_next())
                with tf.control_dependencies(tf.nest.flatten(logs)):
                    return number + 1

            tf.while_loop(lambda n: n < steps - 1, next_step, [tf.constant(0)], parallel_iterations=1)
            return body(*iterator.get_next())

        traced_single = tf.function(single, autograph=False, reduce_retracing=True)
        traced_several = tf.function(several, autograph=False, reduce_retracing=True)

        def call(iterator: Any, steps: int) -> Any:
            return traced_single(iterator) if steps == 1 else traced_several(iterator, tf.constant(steps))

        return call

    def _step(
        self, model: Any, function: Callable[[Any], Any], training: bool, data: Any, rows: tf.Tensor, total: tf.Tensor
    ) -> Any:
        if self.size == 1:
            return function(data)
        metrics = _metric_variables(model)
        moving = [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)] if training else []
        step = Step(self.reduction, self._host, rows, total)
        with _whole_activity_losses(model, step) if self._activity_losses_are_sums else nullcontext():
            logs, states = step.run(function, data, metrics, moving)
        return _global_logs(step, model, metrics, states, logs or {})

    # -- metrics

    def reset_metrics(self, model: Any) -> None:
        """Resets this task's part of every metric; `reset_state()` of an on-read variable is a hidden collective."""
        if self.size == 1:
            model.reset_metrics()
            return
        variables = _metric_variables(model)
        with CaptureScope([(v, tf.zeros(v.shape, v.dtype)) for v in variables]) as scope:
            model.reset_metrics()
        for variable in variables:
            local_component(internals.native(variable)).assign(scope.get_current_value(variable))

    def results(self, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns the logs of an epoch: metrics over all its rows, other numbers from the last step."""
        if self.size == 1:
            result = model.get_metrics_result()
        else:
            variables = _metric_variables(model)
            states = [tf.identity(local_component(internals.native(v))) for v in variables]
            sums = self._host.sum(states, "epoch logs") if states else []
            with CaptureScope(list(zip(variables, sums, strict=True))):
                result = model.get_metrics_result()
        if set(result) != set(logs):  # a custom step's own logs, as in Keras
            result = {key: result.get(key, value) for key, value in logs.items()}
        return internals.PYTHONIFY.find()(result)

    # -- predictions

    def predict_function(self, model: Any) -> Callable[[Any], Any]:
        """Returns a function (data) -> outputs for this task's rows."""
        state = (model.run_eagerly, model.jit_compile)
        kept = model.__dict__.setdefault("_tfdist_functions", {})
        if "predict" not in kept or kept["predict"][0] != state:

            def predict(data: Any) -> Any:
                return model.predict_step(_without_optionals(data))

            if not model.run_eagerly:
                predict = tf.function(
                    predict, autograph=False, reduce_retracing=True, jit_compile=bool(model.jit_compile)
                )
            kept["predict"] = (state, predict)
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
            array = keras.ops.convert_to_numpy(output)
            if self.group is None:
                return array
            return np.concatenate(self.group.all_gather(array[:rows], tag="predictions"))

        return keras.tree.map_structure(gather, outputs)


def _global_logs(
    step: Step, model: Any, metrics: Sequence[Any], states: Sequence[tf.Tensor], logs: dict[str, Any]
) -> dict[str, Any]:
    """Logs of the whole batch: metric states are sums; any other number is the mean weighted by rows."""
    with CaptureScope(list(zip(metrics, states, strict=True))):
        extra = sorted(set(logs) - set(model.get_metrics_result()))
    values = [tf.convert_to_tensor(leaf) for key in extra for leaf in tf.nest.flatten(logs[key])]
    weighted = [value * step.share(value.dtype) if value.dtype.is_floating else value for value in values]
    sums = step.sum_on_host([*states, *weighted], "logs")
    with CaptureScope(list(zip(metrics, sums, strict=False))):
        result = model.get_metrics_result()
    merged = tf.nest.pack_sequence_as([logs[key] for key in extra], sums[len(states) :])
    result.update(zip(extra, merged, strict=True))
    return {key: result[key] for key in logs}


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


def _metric_variables(model: Any) -> list[Any]:
    return [variable for metric in model.metrics for variable in metric.variables]


def _symbolic(specs: Any) -> Any:
    """tf.data's specs as KerasTensors, None where the data holds None."""

    def symbolic(spec: Any) -> Any:
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            return None
        return keras.KerasTensor((None, *spec.shape[1:]), spec.dtype.name)

    return keras.tree.map_structure(symbolic, specs)


def _without_optionals(data: Any) -> Any:
    """tf.data stands an Optional where Keras expects None."""
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
