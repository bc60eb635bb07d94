"""Optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses

Optimizers = Mapping[str, Callable[[], Any]]


def of_keras() -> list[str]:
    """Returns the names of all optimizers that this Keras has."""
    classes = {name: getattr(optimizers, name) for name in dir(optimizers)}
    return [
        name
        for name, made in classes.items()
        if isinstance(made, type) and issubclass(made, optimizers.Optimizer) and made is not optimizers.Optimizer
    ]


def schedules_of_keras() -> list[str]:
    """Returns the names of all learning-rate schedules that this Keras has."""
    base = optimizers.schedules.LearningRateSchedule
    classes = {name: getattr(optimizers.schedules, name) for name in dir(optimizers.schedules)}
    return [n for n, made in classes.items() if isinstance(made, type) and issubclass(made, base) and made is not base]


# By class name, or class name and arguments. One that this Keras lacks is left out below.
EVERY: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: o.SGD(0.05),
    "SGD momentum": lambda o: o.SGD(0.05, momentum=0.9),
    "SGD nesterov": lambda o: o.SGD(0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda o: o.RMSprop(1e-2),
    "RMSprop centered": lambda o: o.RMSprop(1e-2, centered=True, momentum=0.5),
    "Adagrad": lambda o: o.Adagrad(0.1),
    "Adadelta": lambda o: o.Adadelta(1.0),
    "Adam": lambda o: o.Adam(1e-2),
    "Adam amsgrad": lambda o: o.Adam(1e-2, amsgrad=True),
    "AdamW": lambda o: o.AdamW(1e-2, weight_decay=0.1),
    "Adamax": lambda o: o.Adamax(1e-2),
    "Nadam": lambda o: o.Nadam(1e-2),
    "Ftrl": lambda o: o.Ftrl(0.1, l1_regularization_strength=1e-3, l2_regularization_strength=1e-3),
    "Lion": lambda o: o.Lion(1e-3),
    "Lamb": lambda o: o.Lamb(1e-2),
    "Adafactor": lambda o: o.Adafactor(1e-2),
    "Muon": lambda o: o.Muon(1e-2),
    "ScheduleFreeAdamW": lambda o: o.ScheduleFreeAdamW(1e-2),
    "LossScaleOptimizer": lambda o: o.LossScaleOptimizer(o.Adam(1e-2), initial_scale=1024.0, dynamic_growth_steps=3),
    "MultiOptimizer": lambda o: o.MultiOptimizer(
        o.OptimizerMap(o.Adam(1e-2, clipnorm=0.1), {".*kernel": o.SGD(0.05, momentum=0.9, global_clipnorm=0.2)})
    ),
}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "CosineDecay": lambda s: s.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2),
    "CosineDecayRestarts": lambda s: s.CosineDecayRestarts(0.1, 3, t_mul=1.5),
    "ExponentialDecay": lambda s: s.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    "InverseTimeDecay": lambda s: s.InverseTimeDecay(0.1, 2, 0.7),
    "PiecewiseConstantDecay": lambda s: s.PiecewiseConstantDecay([2, 5], [0.1, 0.03, 0.01]),
    "PolynomialDecay": lambda s: s.PolynomialDecay(0.1, 5, 0.01, power=2.0, cycle=True),
}


# Muon of Keras 3.12 asks TensorFlow's variables for their path, which they don't have: it fails in one process, too.
FAILS = {"Muon"} if keras.version().startswith("3.12.") else set()


def _existing(table: Mapping[str, Callable[[Any], Any]], module: Any) -> dict[str, Callable[[], Any]]:
    classes = {name: name.partition(" ")[0] for name in table}
    names = [name for name, made in classes.items() if hasattr(module, made) and made not in FAILS]
    return {name: lambda make=table[name]: make(module) for name in names}


class Several(keras.Model):
    """Small models, each with an optimizer of its own, trained on the same rows in one step.

    One trace for many optimizers; all arrays carry the optimizer's name.
    """

    def __init__(self, made: Optimizers, model: Callable[[], keras.Model]) -> None:
        super().__init__()
        self.parts = {name: model() for name in made}
        self.made = {name: make() for name, make in made.items()}

    def train_step(self, data: Any) -> dict:
        x, y = data
        for name, model in self.parts.items():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                scaled = self.made[name].scale_loss(loss)
            weights = model.trainable_weights
            self.made[name].apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return {"loss": loss, "scaled": scaled}

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights and the optimizers' variables; sums that each task keeps until they are full are its own."""
        result = {}
        for name, model in self.parts.items():
            result.update({f"{name}: weight {i}": w for i, w in enumerate(model.get_weights())})
            kept = [v for v in self.made[name].variables if "gradient_accumulator" not in v.path]
            result.update({f"{name}: state {i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(kept)})
            result[f"{name}: iterations"] = np.array(self.made[name].iterations)
        return result


def several(
    run: Run, made: Optimizers, *, model: Callable[[], keras.Model], x: Any, y: Any, eager: bool = False, **fit: Any
) -> dict:
    with run.scope():
        whole = Several(made, model)
        whole.compile(jit_compile=False, run_eagerly=eager)
    for part in whole.parts.values():
        part.build((None, *x.shape[1:]))
    whole.built = True
    whole.fit(x, y, verbose=0, shuffle=False, **{"batch_size": 13, "epochs": 2, **fit})
    return whole.arrays()


def of_ids() -> keras.Model:
    """Its embedding has sparse gradients."""
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(12, 3),
            layers.Flatten(),
            layers.Dense(1, activation="tanh"),
        ]
    )


def tiny() -> keras.Model:
    """Three variables: each costs every optimizer its part of a trace."""
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, use_bias=False, activation="tanh"), layers.Dense(1)])


def ids_and_targets() -> tuple[np.ndarray, np.ndarray]:
    """40 rows of 4 ids of 12: the same id often and twice in a row, some ids late only; 40 = 3 x 13 + 1."""
    generator = np.random.default_rng(3)
    ids = generator.integers(0, 7, (40, 4))
    ids[20:, 1] = generator.integers(7, 11, 20)  # id 11 never comes
    ids[::3, 2] = ids[::3, 0]
    return ids.astype("int32"), (ids.sum(1, keepdims=True) / 20 + generator.normal(size=(40, 1))).astype("float32")


# Tracing twenty optimizers takes ten times as long as running them as Python; single ones are traced below.


@case
def every_optimizer(run: Run) -> dict:
    """Every optimizer of Keras, with its variables"""
    x, y = regression(40)
    return several(run, _existing(EVERY, optimizers), model=tiny, x=x, y=y, eager=True)


@case(core=True)
def every_optimizer_with_sparse_gradients(run: Run) -> dict:
    """Every optimizer with sparse gradients (an Embedding), where tasks touch other rows, or none"""
    x, y = ids_and_targets()
    classes = {name: make for name, make in _existing(EVERY, optimizers).items() if " " not in name}
    return several(run, classes, model=of_ids, x=x, y=y, eager=True)


@case
def every_learning_rate_schedule(run: Run) -> dict:
    """Every learning-rate schedule of Keras, one of the user's own, and a function"""

    class Own(optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.1 / (1 + keras.ops.cast(step, "float32"))

        def get_config(self) -> dict:
            return {}

    made = {name: make() for name, make in _existing(SCHEDULES, optimizers.schedules).items()}
    made |= {"own": Own(), "function": lambda: tf.constant(0.05)}
    x, y = regression(40)
    return several(
        run, {n: lambda m=m: optimizers.SGD(m, momentum=0.5) for n, m in made.items()}, model=tiny, x=x, y=y, eager=True
    )


@case
def clipping_and_weight_decay(run: Run) -> dict:
    """Clipping with weight decay; variables excluded from weight decay"""

    def excluding() -> Any:
        optimizer = optimizers.AdamW(1e-2, weight_decay=0.5, clipvalue=0.01)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    made = {
        "clipnorm": lambda: optimizers.AdamW(1e-2, weight_decay=0.5, clipnorm=0.1),
        "global_clipnorm": lambda: optimizers.SGD(0.1, weight_decay=0.1, momentum=0.9, global_clipnorm=0.05),
        "clipvalue": excluding,
    }
    x, y = regression(40)
    return several(run, made, model=tiny, x=x, y=y, eager=True)


@case(core=True)
def clipping_of_sparse_gradients(run: Run) -> dict:
    """Clipping of sparse gradients: clipnorm, global_clipnorm, clipvalue"""
    made = {
        "clipnorm": lambda: optimizers.Adam(1e-2, clipnorm=0.1),
        "global_clipnorm": lambda: optimizers.SGD(0.5, momentum=0.5, global_clipnorm=0.05),
        "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.002),
        "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(1e-2, clipnorm=0.1), initial_scale=64.0),
    }
    x, y = ids_and_targets()
    return several(run, made, model=of_ids, x=x, y=y, eager=True)


@case
def moving_averages_of_weights(run: Run) -> dict:
    """use_ema: never overwriting, at each step, at every third; with a loss scale, with accumulation"""

    def average(every: int | None, **arguments: Any) -> Any:
        return optimizers.SGD(0.05, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=every, **arguments)

    made = {
        "never": lambda: average(None),
        "each": lambda: average(1),
        "third": lambda: average(3, clipnorm=0.1),
        "loss scale": lambda: optimizers.LossScaleOptimizer(average(2), initial_scale=64.0),
        "accumulation": lambda: average(2, gradient_accumulation_steps=2),
    }
    x, y = regression(40)
    return several(run, made, model=tiny, x=x, y=y)


def _swapping(run: Run, on_epoch: bool, **arguments: Any) -> dict:
    x, y = regression(40)
    with run.scope():
        model = tiny()
        optimizer = optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.8, **arguments)
        model.compile(optimizer, "mse", jit_compile=False)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
    validation = regression(9, 1)
    result = fitted(model, x, y, batch_size=13, epochs=3, callbacks=[swap], validation_data=validation)
    return {**result, **{f"state {i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(optimizer.variables)}}


@case
def swap_ema_weights(run: Run) -> dict:
    """SwapEMAWeights: validation with the averages"""
    return _swapping(run, on_epoch=False, ema_overwrite_frequency=3)


@case
def swap_ema_weights_on_epoch(run: Run) -> dict:
    """SwapEMAWeights(swap_on_epoch=True)"""
    return _swapping(run, on_epoch=True)


@case(core=True)
def accumulation_of_sparse_gradients(run: Run) -> dict:
    """Accumulation of sparse gradients, clipped, with a loss scale; an epoch ends between two updates"""
    made = {
        "SGD": lambda: optimizers.SGD(0.3, momentum=0.9, gradient_accumulation_steps=3),
        "clipnorm": lambda: optimizers.Adam(1e-2, clipnorm=0.01, gradient_accumulation_steps=3),
        "loss scale": lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.3, gradient_accumulation_steps=2, global_clipnorm=0.05),
            initial_scale=64.0,
            dynamic_growth_steps=3,
        ),
    }
    x, y = ids_and_targets()
    return several(run, made, model=of_ids, x=x, y=y)


@case
def accumulation_is_a_larger_batch(run: Run) -> dict:
    """gradient_accumulation_steps=3 over batches of 8 is a batch of 24"""
    x, y = regression(48)
    accumulates = run.strategy is not None
    with run.scope():
        model = tiny()
        optimizer = optimizers.Adam(1e-2, clipnorm=0.1, gradient_accumulation_steps=3 if accumulates else None)
        model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, y, batch_size=8 if accumulates else 24, epochs=3, verbose=0, shuffle=False)
    return {f"weight {i}": w for i, w in enumerate(model.get_weights())}


@case
def accumulation_across_fits(run: Run) -> dict:
    """An update whose gradients come from two epochs, and from two calls of fit"""
    x, y = regression(40)
    with run.scope():
        model = tiny()
        model.compile(optimizers.Adam(1e-2, gradient_accumulation_steps=3), "mse", jit_compile=False)
    first = fitted(model, x, y, batch_size=13, epochs=1)
    second = fitted(model, x, y, batch_size=7, epochs=2)
    result = {**{f"first {k}": v for k, v in first.items()}, **second}
    return {**result, "iterations": np.array(model.optimizer.iterations)}


if hasattr(optimizers, "MultiOptimizer"):

    @case
    def multi_optimizer(run: Run) -> dict:
        """MultiOptimizer, one of its optimizers accumulating, inside a LossScaleOptimizer"""

        def mixed() -> Any:
            slow = optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.1)
            fast = optimizers.Adam(1e-2, clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3)
            chosen = optimizers.OptimizerMap(fast, {".*kernel": slow})
            return optimizers.LossScaleOptimizer(optimizers.MultiOptimizer(chosen), initial_scale=64.0)

        x, y = ids_and_targets()
        with run.scope():
            model = of_ids()
        model.compile(mixed(), "mse", jit_compile=False)  # outside the scope
        return fitted(model, x, y, batch_size=13, epochs=3)


# -- variables that have no gradient, or several


@case
def frozen_layers(run: Run) -> dict:
    """Frozen layers: before compile, thawed and compiled again between two fits"""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.layers[0].trainable = False
        model.compile(optimizers.Adam(1e-2, clipnorm=0.1), "mse", jit_compile=False)
    frozen = fitted(model, x, y, batch_size=13)
    model.layers[0].trainable = True
    model.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
    thawed = fitted(model, x, y, batch_size=13)
    model.layers[1].trainable = False
    model.compile(model.optimizer, "mse", jit_compile=False)  # built for more variables than it gets
    again = fitted(model, x, y, batch_size=13)
    return {f"{n} {k}": v for n, r in (("frozen", frozen), ("thawed", thawed), ("again", again)) for k, v in r.items()}


class Unused(keras.Model):
    """One of its layers gives nothing to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers.Dense(1, name="used"), layers.Dense(3, name="unused")

    def call(self, x: Any) -> Any:
        self.unused(x)
        return self.used(x)


@case
def unused_variables(run: Run) -> dict:
    """Variables without a gradient, and Keras' warning; with accumulation, too"""
    x, y = regression(40)
    result = {}
    for name, steps in (("plain", None), ("accumulation", 2)):
        with run.scope():
            model = Unused()
            model.compile(optimizers.SGD(0.05, gradient_accumulation_steps=steps), "mse", jit_compile=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result |= {f"{name} {key}": value for key, value in fitted(model, x, y, batch_size=13).items()}
        texts = {str(w.message).partition("[")[0] for w in caught if "Gradients do not exist" in str(w.message)}
        result[f"{name} warnings"] = np.array(sorted(texts))
    return result


@case
def shared_layers(run: Run) -> dict:
    """A layer used twice, and an embedding whose transpose makes the output"""
    ids, _ = ids_and_targets()
    with run.scope():
        inputs = keras.Input((4,), dtype="int32")
        embedding, hidden = layers.Embedding(12, 6), layers.Dense(6, activation="tanh")
        states = hidden(hidden(embedding(inputs)))
        logits = keras.ops.matmul(states, keras.ops.transpose(embedding.embeddings))
        model = keras.Model(inputs, logits)
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.Adam(1e-2, global_clipnorm=0.1), loss, jit_compile=False)
    return fitted(model, ids, np.roll(ids, 1, 1), batch_size=13)


# -- where the optimizer comes from, and what is done to it


@case
def optimizer_made_outside_the_scope(run: Run) -> dict:
    """An optimizer made, and a model compiled, outside the scope; learning rate set by hand; iterations"""
    x, y = regression(40)
    optimizer = optimizers.LossScaleOptimizer(optimizers.Adam(1e-2, clipnorm=0.1), initial_scale=64.0)
    with run.scope():
        model = tiny()
    model.compile(optimizer, "mse", jit_compile=False)
    first = fitted(model, x, y, batch_size=13)
    optimizer.learning_rate = 3e-3
    second = fitted(model, x, y, batch_size=13)
    result = {**{f"first {k}": v for k, v in first.items()}, **second}
    result["rate"] = np.array(float(optimizer.learning_rate))
    return {**result, "iterations": np.array(optimizer.iterations)}


class ClippedBackward(layers.Layer):
    """What flows back through it is cut off, so it must be as large as in one process."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def cut(x: tf.Tensor) -> Any:
            return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.02, 0.02)

        return cut(x)


@case
def gradient_cut_off_inside_the_model(run: Run) -> dict:
    """A layer that clips what flows back through it"""

    def model() -> keras.Model:
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="tanh"), ClippedBackward(), layers.Dense(1)]
        )

    return trained(run, optimizer=lambda: optimizers.SGD(0.1), model=model)


# -- one optimizer, traced


def _optimizer_cases() -> None:
    o = optimizers
    made: dict[str, Callable[[], Any]] = {
        "adamw": lambda: o.AdamW(1e-2, weight_decay=0.1),
        "clipnorm": lambda: o.Adam(1e-2, clipnorm=0.1),
        "global_clipnorm": lambda: o.SGD(0.1, global_clipnorm=0.05),
        "clipvalue": lambda: o.SGD(0.1, clipvalue=0.01),
        "accumulation": lambda: o.Adam(1e-2, gradient_accumulation_steps=3),
        "accumulation_and_clipping": lambda: o.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.05
        ),
        "ema": lambda: o.Adam(1e-2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        "lion": lambda: o.Lion(1e-3),
        "adafactor": lambda: o.Adafactor(1e-2),
        "loss_scale": lambda: o.LossScaleOptimizer(
            o.Adam(1e-2, clipnorm=0.1), initial_scale=1024.0, dynamic_growth_steps=3
        ),
        "loss_scale_and_accumulation": lambda: o.LossScaleOptimizer(
            o.Adam(1e-2, gradient_accumulation_steps=2), initial_scale=1024.0, dynamic_growth_steps=3
        ),
    }
    for name, make in made.items():
        case(
            lambda run, make=make: trained(run, optimizer=make, epochs=3), name=f"optimizer_{name}", core="clip" in name
        )


_optimizer_cases()


@case(core=True)
def overflow_on_one_task(run: Run) -> dict:
    """`LossScaleOptimizer`: an overflow in one task makes all skip the step, with one scale.

    Row 22 overflows float32 in one task only: all must skip that step, with one scale.
    """
    x, y = regression(36)
    x[22] = 1e25
    with run.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        scaled = optimizers.LossScaleOptimizer(optimizers.Adam(1e-2), initial_scale=1024.0, dynamic_growth_steps=3)
        model.compile(scaled, "mse", jit_compile=False)
    result = fitted(model, x, y)
    del result["log loss"], result["batch logs"]  # inf and NaN
    return {**result, "scale": np.array(scaled.dynamic_scale), "iterations": np.array(scaled.iterations)}
