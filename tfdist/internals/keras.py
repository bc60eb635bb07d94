"""Private names of Keras: the only place that imports or overrides them.

Read in Keras 3.15.1; the oldest release this is tested with is 3.12.0. Each override is inert unless a step of ours is
being traced, so a plain model in the same process runs Keras' own code.

`missing()` names what a Keras release no longer has; `create_strategy` refuses to start then, and a test fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

READ_IN = "3.15.1"


@dataclass(frozen=True)
class Name:
    """One private name: where it lives and what breaks for us without it."""

    module: str
    path: str
    why: str

    def find(self) -> Any:
        found: Any = import_module(self.module)
        for part in self.path.split("."):
            found = getattr(found, part)
        return found

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


def _name(module: str, path: str, why: str) -> Name:
    return Name(f"keras.src.{module}", path, why)


# What our loop calls.
TRAINER = _name("backend.tensorflow.trainer", "TensorFlowTrainer", "fit, evaluate and predict of every Keras model")
MODEL = _name("models.model", "Model", "save, save_weights and export write on the chief alone")
GET_ADAPTER = _name("trainers.data_adapters", "get_data_adapter", "reads x, y, sample_weight as Keras does")
ARRAY_ADAPTER = _name("trainers.data_adapters.array_data_adapter", "ArrayDataAdapter", "tells arrays from datasets")
DATASET_ADAPTER = _name("trainers.data_adapters.tf_dataset_adapter", "TFDatasetAdapter", "tells datasets from the rest")
GENERATOR_ADAPTER = _name(
    "trainers.data_adapters.generator_data_adapter", "GeneratorDataAdapter", "reads Python generators as Keras does"
)
TO_SLICEABLE = _name("trainers.data_adapters.array_slicing", "convert_to_sliceable", "arrays as tf.data takes them")
SPARSE_WRAPPER = _name(
    "trainers.data_adapters.array_slicing", "TensorflowSparseWrapper", "a sparse tensor that can be indexed by row"
)
SLICE_SPARSE = _name("trainers.data_adapters.array_slicing", "slice_tensorflow_sparse_wrapper", "rows of such a tensor")
SPLIT = _name("trainers.data_adapters.array_slicing", "train_validation_split", "validation_split as Keras does it")
UNPACK = _name("trainers.data_adapters.data_adapter_utils", "unpack_x_y_sample_weight", "(x, y, sample_weight)")
CLASS_WEIGHTS = _name(
    "trainers.data_adapters.data_adapter_utils", "class_weight_to_sample_weights", "class_weight of train_on_batch"
)
PYTHONIFY = _name("utils.python_utils", "pythonify_logs", "logs as floats, nested ones flattened")
OUTPUT_SPEC = _name("backend", "compute_output_spec", "builds a model without running it")
GLOBAL_STATE = _name("backend.common.global_state", "set_global_attribute", "leaves a stateless scope for a moment")
GLOBAL_SEED_GENERATOR = _name("random.seed_generator", "global_seed_generator", "random numbers from a seed, again")
TRACEBACK = _name("utils.traceback_utils", "filter_traceback", "the same short tracebacks as Keras")
MAX_EPOCHS = _name("backend.config", "max_epochs", "the debugging caps of KERAS_MAX_EPOCHS")
MAX_STEPS = _name("backend.config", "max_steps_per_epoch", "the debugging caps of KERAS_MAX_STEPS_PER_EPOCH")
PRINT = _name("utils.io_utils", "print_msg", "the evaluator's progress goes where Keras' own does")
RANDOM_SEED = _name("utils.rng_utils", "get_random_seed", "whether the script set a seed")

# What our loop asks of a model: attributes, so only checked on the class.
MODEL_NAMES = tuple(
    _name("trainers.trainer", f"Trainer.{name}", why)
    for name, why in (
        ("_compute_loss", "jit_compile=True: the loss of Keras' own step"),
        ("_assert_compile_called", "the same error as Keras for a model that is not compiled"),
        ("_flatten_metrics_in_order", "evaluate returns a list in Keras' order"),
        ("_should_eval", "validation_freq"),
        ("_symbolic_build", "builds model, loss, metrics and optimizer before the first step"),
    )
)

# What we override while a step of ours is traced.
OPTIMIZER_APPLY = (
    _name("optimizers.base_optimizer", "BaseOptimizer.apply", "gradients are summed over tasks before all else"),
    _name("optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply", "the sum comes before the finite check"),
)
# Since Keras 3.15: applies the optimizers inside it, each to its variables.
MULTI_OPTIMIZER_APPLY = Name(
    "keras.src.optimizers.multi_optimizer", "MultiOptimizer.apply", "one sum for all optimizers inside it"
)
SCALE_LOSS = (
    _name("optimizers.base_optimizer", "BaseOptimizer.scale_loss", "the loss weighs by the task's share"),
    _name("optimizers.loss_scale_optimizer", "LossScaleOptimizer.scale_loss", "the same, with a loss scale"),
)
CLIP = _name(
    "optimizers.base_optimizer", "BaseOptimizer._clip_gradients", "accumulated gradients are summed once per k"
)
CHECK_FINITE = _name(
    "optimizers.loss_scale_optimizer", "LossScaleOptimizer.check_finite", "all tasks skip a step, or none"
)
LOSS_CALL = _name("losses.loss", "Loss.__call__", "losses of a batch as a whole see the rows of all tasks")
METRIC_WRAPPER_UPDATE = _name(
    "metrics.reduction_metrics", "MeanMetricWrapper.update_state", "the same for functions given as metrics"
)
REDUCE_VALUES = _name("losses.loss", "reduce_values", "losses that are no mean over rows")
APPLY_MASK = _name("losses.loss", "apply_mask", "a masked mean divides by the valid values of all tasks")
MEAN_UPDATE = _name("metrics.reduction_metrics", "Mean.update_state", "a scalar per batch weighs by the task's share")
SEED_NEXT = _name("random.seed_generator", "SeedGenerator.next", "each task draws its own numbers")
BATCH_NORM_MOMENTS = _name(
    "layers.normalization.batch_normalization",
    "BatchNormalization._moments",
    "synchronized=True behind a mask, which Keras does not synchronize",
)
MOMENTS_SYNC = _name("backend.tensorflow.nn", "_compute_moments_sync", "synchronized batch statistics")
OVERRIDDEN = (
    *OPTIMIZER_APPLY,
    *SCALE_LOSS,
    CLIP,
    CHECK_FINITE,
    LOSS_CALL,
    METRIC_WRAPPER_UPDATE,
    REDUCE_VALUES,
    APPLY_MASK,
    MEAN_UPDATE,
    SEED_NEXT,
    BATCH_NORM_MOMENTS,
    MOMENTS_SYNC,
)

MAY_BE_MISSING = (MULTI_OPTIMIZER_APPLY,)
CALLED = tuple(
    value
    for value in list(globals().values())
    if isinstance(value, Name) and value not in (*OVERRIDDEN, *MAY_BE_MISSING)
)
ALL = (*CALLED, *MODEL_NAMES, *OVERRIDDEN)


def trainer_method(method: str) -> Name:
    """Returns the public method of the class that every Keras model derives from."""
    return Name(TRAINER.module, f"{TRAINER.path}.{method}", TRAINER.why)


def model_method(method: str) -> Name:
    """Returns a public method of the class that every Keras model derives from."""
    return Name(MODEL.module, f"{MODEL.path}.{method}", MODEL.why)


def missing() -> list[Name]:
    """Returns the private names that the installed Keras does not have."""

    return [name for name in ALL if _lacks(name)]


def _lacks(name: Name) -> bool:
    try:
        name.find()
    except (ImportError, AttributeError):
        return True
    return False


def optimizer_apply() -> list[Name]:
    """Returns the methods with which optimizers of this Keras apply gradients."""
    return [name for name in (*OPTIMIZER_APPLY, MULTI_OPTIMIZER_APPLY) if not _lacks(name)]


def override(name: Name, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function or method by `make(the original)`."""
    owner_path, _, attribute = name.path.rpartition(".")
    owner = Name(name.module, owner_path, name.why).find() if owner_path else import_module(name.module)
    original = getattr(owner, attribute)
    setattr(owner, attribute, functools.wraps(original)(make(original)))


@contextmanager
def outside_stateless_scope() -> Iterator[None]:
    """Variables made inside really exist, also while a StatelessScope is open around."""
    from keras.src.backend.common import global_state

    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def in_stateless_scope() -> bool:
    """Whether values of variables are those of a StatelessScope."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("stateless_scope") is not None


def set_random_seed(seed: int) -> None:
    """As `keras.utils.set_random_seed`, also where unseeded numbers were drawn before.

    Until Keras 3.12 their generator goes on (random/seed_generator.py, `global_seed_generator`).
    """
    import keras
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("global_seed_generator", None)
    keras.utils.set_random_seed(seed)


def native(variable: Any) -> Any:
    """Returns the tf.Variable behind a keras.Variable, also inside a StatelessScope."""
    return variable._value


def assign_native(variable: Any, value: Any) -> None:
    """Assigns to a keras.Variable past any StatelessScope."""
    variable._direct_assign(value)


def strategy_of(model: Any) -> Any:
    """Returns the tf.distribute strategy in whose scope the model was made, or None."""
    return getattr(model, "_distribute_strategy", None)


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns an optimizer and those that it wraps (LossScaleOptimizer, MultiOptimizer)."""
    inner = getattr(optimizer, "inner_optimizer", None)
    wrapped = ([] if inner is None else [inner]) + list(getattr(optimizer, "optimizers", ()))
    return [optimizer, *(part for one in wrapped for part in optimizers_inside(one))]


def accumulates(optimizer: Any) -> bool:
    """Returns whether an optimizer, or one that it wraps, adds up gradients over several steps."""
    return any(part.gradient_accumulation_steps for part in optimizers_inside(optimizer))


def accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which an optimizer adds up gradients: each task's are its own until they are summed."""
    return [
        kept
        for part in optimizers_inside(optimizer)
        for kept, variable in zip(getattr(part, "_accumulated_gradients", ()), part._trainable_variables, strict=False)
        if kept is not None and not is_overwritten_by_gradient(variable)
    ]


def scales_loss(optimizer: Any) -> bool:
    """Returns whether an optimizer counts on every loss to have passed its `scale_loss`."""
    return hasattr(optimizer, "inner_optimizer") or optimizer.loss_scale_factor is not None


def is_overwritten_by_gradient(variable: Any) -> bool:
    """Returns whether a variable takes its "gradient" as its value, as the scales of float8 layers do."""
    return getattr(variable, "overwrite_with_gradient", False)


def initial_epoch(model: Any) -> int | None:
    """Returns the epoch that BackupAndRestore asks `fit` to begin with, and forgets it.

    Keras keeps it on the model, so that a later `fit(epochs=n)` silently runs no epoch.
    """
    epoch = getattr(model, "_initial_epoch", None)
    model._initial_epoch = None
    return epoch


@contextmanager
def keeping_optimizer(model: Any) -> Iterator[None]:
    """Undoes what `model.save("model.h5")` does to the model: a `.keras` file saved after it lacks the optimizer.

    Keras takes the optimizer out of the model's own record of its compile arguments (model_metadata).
    """
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    kept = dict(config)
    try:
        yield
    finally:
        config.update(kept)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Asks the `fit` that is beginning, ours or Keras' own, to begin with this epoch."""
    model._initial_epoch = epoch


def array_inputs(adapter: Any) -> tuple[Any, int, int]:
    """Returns (inputs, rows, batch size) of an ArrayDataAdapter."""
    return adapter._inputs, adapter._num_samples, adapter._batch_size


def optimizer_strategy(optimizer: Any) -> Any:
    """Returns the strategy in whose scope the optimizer was made."""
    return optimizer._distribution_strategy


def set_optimizer_strategy(optimizer: Any, strategy: Any) -> None:
    optimizer._distribution_strategy = strategy


def trainable_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return optimizer._trainable_variables


def compiled_loss(model: Any) -> Any:
    """Returns an object that is another one once the model has been compiled again."""
    return getattr(model, "_compile_loss", None)


def resets_metrics(method: str) -> bool:
    """Whether `train_on_batch` and `test_on_batch` log their batch alone, or, as in Keras 3.12, all since a reset."""
    function = inspect.unwrap(trainer_method(method).find())
    return "reset_metrics" in function.__code__.co_names


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds what is not built yet (layers, loss, metrics, optimizer) from a batch of KerasTensors."""
    model._symbolic_build(data_batch=batch)


def layers_of(model: Any) -> list[Any]:
    """Returns the model's layers, nested ones too."""
    return list(model._flatten_layers())


@functools.lru_cache(maxsize=1)
def activity_losses_are_sums() -> bool:
    """Returns whether an activity regularizer adds the sum over a batch's rows, as in Keras 3.13, or their mean."""
    import keras
    import numpy as np

    # Named and typed, or it would count as the script's first such layer, and fix the default dtype before the script.
    layer = keras.layers.Activation("linear", activity_regularizer=keras.ops.sum, name="asked", dtype="float32")
    layer(np.ones((2,), "float32"))
    return float(layer.losses[0]) > 1.5


def assert_compiled(model: Any, method: str) -> None:
    model._assert_compile_called(method)


def should_evaluate(model: Any, epoch: int, frequency: Any) -> bool:
    return model._should_eval(epoch, frequency)


def metrics_in_order(model: Any, logs: dict[str, Any]) -> Any:
    """Returns logs as `evaluate` returns them without `return_dict`."""
    return model._flatten_metrics_in_order(logs)


def metrics_inside(metric: Any) -> list[Any] | None:
    """Returns the metrics that one of Keras' own containers holds, or None for a metric proper."""
    return list(metric.metrics) if type(metric).__module__.endswith(".trainers.compile_utils") else None


def compiled_metrics(model: Any) -> Any:
    """Returns an object that is another one once the model has been compiled again."""
    return getattr(model, "_compile_metrics", None)


# What the compiled step asks of a model with Keras' own train_step.


def has_stock_train_step(model: Any) -> bool:
    return type(model).train_step is TRAINER.find().train_step and "train_step" not in model.__dict__


def has_stock_steps(model: Any) -> bool:
    """Whether training and test steps are Keras' own, whose logs are the metrics' results and nothing else."""
    return has_stock_train_step(model) and type(model).test_step is TRAINER.find().test_step


def call_for_training(model: Any, x: Any) -> Any:
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def loss_tracker(model: Any) -> Any:
    return model._loss_tracker


# Losses and metrics: what they call, and masks.


def function_of_loss(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function that a Loss wraps and its arguments; (None, {}) for a loss that wraps none."""
    return getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})


def function_of_metric(metric: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function that a MeanMetricWrapper wraps, and its arguments."""
    return metric._fn, metric._fn_kwargs


def mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    tensor._keras_mask = mask


def compiled_losses(model: Any) -> list[Any]:
    """Returns the Loss objects of a built and compiled model, one for each output that has a loss."""
    compiled = getattr(model, "_compile_loss", None)
    return [entry.loss for entry in getattr(compiled, "_flat_losses", None) or []]


def lookup_of(layer: Any) -> Any:
    """Returns the layer that holds a TextVectorization's vocabulary, or the layer itself."""
    return getattr(layer, "_lookup_layer", layer)


def metrics_of(metric: Any) -> list[Any]:
    """Returns the metrics that a metric holds as attributes; their variables are part of its own."""
    return list(metric._metrics)


def iterations_of(model: Any) -> list[Any]:
    """Returns the counters of steps of all optimizers that a model holds, also of those in its own attributes."""
    import keras

    held = [o for o in (model.optimizer, *vars(model).values()) if isinstance(o, keras.optimizers.Optimizer)]
    held += [o.inner_optimizer for o in held if hasattr(o, "inner_optimizer")]
    counters = {id(o._iterations): o._iterations for o in held if hasattr(o, "_iterations")}
    return list(counters.values())
