"""Trains through parameter servers in this process, and writes what came out: `asynchronous_task.py OUT WORKERS`.

One cluster runs all cases; each writes OUT/<case>.npz: what plain Keras gives under "plain ...", what we give under
"ours ...".
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from counting import TwoCounts

import tfdist
from tfdist.testing import servers

CASES: dict[str, Callable[..., dict[str, Any]]] = {}
ROWS = 200
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = (X @ np.linspace(-1, 1, 6)[:, None] + 0.3 * np.sin(3 * X[:, :1])).astype("float32")


def case(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def model_of() -> keras.Model:
    keras.utils.set_random_seed(3)
    inner = [keras.layers.Dense(16, activation="tanh"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((6,)), *inner, keras.layers.Dense(1)])


class BatchLogs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(batch)
        self.losses.append(logs["loss"])


def trained(strategy: Any, *, fit: dict[str, Any] | None = None, **compile: Any) -> dict[str, Any]:
    """A fit, an evaluation and predictions; in plain Keras where there is no strategy."""
    arguments = {"optimizer": "adam", "loss": "mse", "metrics": ["mae", keras.metrics.R2Score()], "jit_compile": False}
    arguments.update(compile)
    if strategy is None:
        arguments.pop("steps_per_execution", None)  # plain Keras counts batches another way then
        model = model_of()
        model.compile(**arguments)
    else:
        with strategy.scope():
            model = model_of()
            model.compile(**arguments)
    batches = BatchLogs()
    settings = {"epochs": 3, "shuffle": False, "verbose": 0, "batch_size": 24, "validation_data": (X[:70], Y[:70])}
    settings.update(fit or {})
    history = model.fit(X, Y, callbacks=[batches], **settings)
    evaluated = model.evaluate(X, Y, batch_size=32, verbose=0)
    return {
        **{f"log {name}": values for name, values in history.history.items()},
        **{f"weight {i}": weight for i, weight in enumerate(model.get_weights())},
        "evaluate": evaluated,
        "predict": model.predict(X, batch_size=32, verbose=0),
        "targets": Y,
        "iterations": int(model.optimizer.iterations),
        "steps": batches.steps,
        "last batch's loss": batches.losses[-1],
    }


def both(strategy: Any, **arguments: Any) -> dict[str, Any]:
    plain, ours = (
        trained(where, **{k: v() if callable(v) else v for k, v in arguments.items()}) for where in (None, strategy)
    )
    return {**{f"plain {k}": v for k, v in plain.items()}, **{f"ours {k}": v for k, v in ours.items()}}


@case
def adam(strategy: Any) -> dict:
    return both(strategy)


@case
def loss_scale(strategy: Any) -> dict:
    """The update is inside a tf.cond."""
    return both(strategy, optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))


@case
def several_steps_per_execution(strategy: Any) -> dict:
    return both(strategy, steps_per_execution=4)


@case
def schedule_clipping_and_average(strategy: Any) -> dict:
    def optimizer() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.7)
        return keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=4)

    return both(strategy, optimizer=optimizer)


@case
def shuffled_arrays_read_every_row_once(strategy: Any) -> dict:
    """The metric counts the rows of an epoch, and sums what they hold."""
    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse", metrics=[TwoCounts()], jit_compile=False, steps_per_execution=3)
    history = model.fit(X, np.arange(ROWS, dtype="float32")[:, None], batch_size=24, epochs=3, shuffle=True, verbose=0)
    return {"two counts": history.history["two_counts"], "iterations": int(model.optimizer.iterations)}


class Largest(keras.metrics.Metric):
    """The largest target: no sum, but it says how it is merged."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer=keras.initializers.Constant(-1e9))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def merge_states(self, states: Any) -> list:
        return [keras.ops.max(keras.ops.stack([value for (value,) in states]))]

    def result(self) -> Any:
        return self.value + 0.0


@case
def a_metric_that_says_how_it_merges(strategy: Any) -> dict:
    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse", metrics=[Largest()], jit_compile=False)
    history = model.fit(X, Y, batch_size=24, epochs=1, verbose=0)
    return {"largest": history.history["largest"][0], "expected": Y.max()}


@case
def each_worker_reads_its_own_share(strategy: Any) -> dict:
    targets = np.arange(ROWS, dtype="float32")[:, None]

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((X, targets))
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(9)

    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse", metrics=[TwoCounts()], jit_compile=False, steps_per_execution=2)
    pipeline = tfdist.data.from_function(share)
    history = model.fit(pipeline, epochs=2, verbose=0)
    return {"two counts": history.history["two_counts"], "evaluate": model.evaluate(pipeline, verbose=0)}


@case
def shares_that_are_empty(strategy: Any) -> dict:
    """All rows are the last worker's; then nobody has any."""
    targets = np.arange(ROWS, dtype="float32")[:, None]

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        has_rows = context.input_pipeline_id == context.num_input_pipelines - 1
        return tf.data.Dataset.from_tensor_slices((X, targets)).take(ROWS if has_rows else 0).batch(9)

    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse", metrics=[TwoCounts()], jit_compile=False)
    history = model.fit(tfdist.data.from_function(share), epochs=1, verbose=0)
    try:
        model.fit(lambda context: share(context).take(0), epochs=1, verbose=0)
        told = "nothing"
    except ValueError as error:
        told = str(error)
    return {"two counts": history.history["two_counts"], "none": told}


@case
def a_function_of_an_input_context(strategy: Any) -> dict:
    seen = []

    def dataset_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
        seen.append((context.input_pipeline_id, context.num_input_pipelines))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.repeat().batch(context.get_per_replica_batch_size(10))

    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse", metrics=[TwoCounts()], jit_compile=False)
    model.fit(dataset_of, steps_per_epoch=13, epochs=2, verbose=0)
    return {"contexts": sorted(set(seen)), "iterations": int(model.optimizer.iterations)}


class StopAfter(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.ended = step, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended = batch + 1
        if batch + 1 == self.step:
            self.model.stop_training = True


@case
def stopped_within_an_epoch(strategy: Any) -> dict:
    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse", metrics=[TwoCounts()], jit_compile=False)
    stop = StopAfter(5)
    history = model.fit(X, np.zeros_like(Y), batch_size=2, epochs=9, verbose=0, callbacks=[stop])
    rows = history.history["two_counts"]
    return {"rows": rows, "iterations": int(model.optimizer.iterations), "ended": stop.ended}


class OwnStep(keras.Model):
    """A step of the user's own, with logs of its own and a metric that it tracks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.tracker = keras.layers.Dense(1), keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    @property
    def metrics(self) -> list:
        return [self.tracker]

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "two": tf.constant(2.0)}


class CountsInside(OwnStep):
    """Updates its metric in a tf.cond."""

    def train_step(self, data: Any) -> dict:
        loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)

        def update() -> tf.Tensor:
            self.tracker.update_state(loss)
            return loss

        tf.cond(loss > 0, update, lambda: loss)
        return {"loss": self.tracker.result()}


@case
def a_train_step_of_its_own(strategy: Any) -> dict:
    """With a learning rate of 0, the loss of every epoch is that of the weights it began with, over all rows."""
    with strategy.scope():
        model = OwnStep()
        model.compile(optimizer=keras.optimizers.SGD(0.0), jit_compile=False)
    history = model.fit(X, Y, batch_size=50, epochs=2, verbose=0)
    return {
        "expected": np.mean((model.predict(X, verbose=0) - Y) ** 2),
        "two": history.history["two"],
        "losses": history.history["loss"],
        "iterations": int(model.optimizer.iterations),
    }


@case
def saved_and_loaded(strategy: Any) -> dict:
    with strategy.scope():
        model = model_of()
        model.compile("adam", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=50, epochs=1, verbose=0)
    folder = Path(tempfile.mkdtemp())
    tfdist.save(model, folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    in_plain_keras = keras.models.load_model(folder / "model.keras")
    with strategy.scope():
        again = model_of()
        again.load_weights(folder / "model.weights.h5")
    shutil.rmtree(folder)
    return {
        "model": model.predict(X, verbose=0),
        "in plain Keras": in_plain_keras.predict(X, verbose=0),
        "again": again.predict(X, verbose=0),
    }


@case
def goes_on_from_a_checkpoint(strategy: Any) -> dict:
    """Two epochs, and in a new model on the same folder two more: as four in one go, where one worker trains."""
    folder = Path(tempfile.mkdtemp())

    def run(epochs: int, callbacks: list) -> keras.Model:
        with strategy.scope():
            model = model_of()
            model.compile("adam", "mse", jit_compile=False)
        history = model.fit(X, Y, batch_size=50, epochs=epochs, verbose=0, callbacks=callbacks)
        ran.append(history.epoch)
        return model

    ran: list[list[int]] = []
    run(2, [tfdist.callbacks.Checkpoint(folder)])
    resumed = run(4, [tfdist.callbacks.Checkpoint(folder)])
    whole = run(4, [])
    shutil.rmtree(folder)
    return {
        "epochs": ran[1],
        "iterations": int(resumed.optimizer.iterations),
        **{f"ours {i}": w for i, w in enumerate(resumed.get_weights())},
        **{f"plain {i}": w for i, w in enumerate(whole.get_weights())},
    }


@case
def keras_callbacks(strategy: Any) -> dict:
    """What Keras' own callbacks see and do."""
    folder = Path(tempfile.mkdtemp())
    rates: dict[str, list[float]] = {}

    def fit(name: str, callback: Any, y: np.ndarray = Y, rate: float = 0.05, epochs: int = 4) -> Any:
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=False)
        callbacks = [callback, keras.callbacks.LambdaCallback(on_epoch_end=note(name, model))]
        return model, model.fit(X, y, batch_size=20, epochs=epochs, verbose=0, callbacks=callbacks)

    def note(name: str, model: Any) -> Any:
        rates[name] = []
        return lambda epoch, logs: rates[name].append(float(model.optimizer.learning_rate))

    _, scheduled = fit("scheduler", keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 if epoch < 2 else 0.0))
    _, reduced = fit("plateau", keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9))
    _, stopped = fit("early", keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e-3), rate=0.0, epochs=9)
    saved, _ = fit("saved", keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True))
    _, logged = fit("csv", keras.callbacks.CSVLogger(str(folder / "log.csv")))
    nan, _ = fit("nan", keras.callbacks.TerminateOnNaN(), y=np.full_like(Y, np.nan), epochs=5)
    last = saved.get_weights()
    saved.load_weights(folder / "4.weights.h5")
    rows = (folder / "log.csv").read_text().splitlines()
    result = {
        "scheduled losses": scheduled.history["loss"],
        "scheduler": rates["scheduler"],
        "plateau": rates["plateau"],
        "plateau epochs": reduced.epoch,
        "early epochs": stopped.epoch,
        "saved files": sorted(path.name for path in folder.glob("*.h5")),
        "saved is last": all(np.array_equal(a, b) for a, b in zip(last, saved.get_weights(), strict=True)),
        "csv": [float(row.split(",")[1]) for row in rows[1:]],
        "csv expected": logged.history["loss"],
        "nan iterations": int(nan.optimizer.iterations),
    }
    shutil.rmtree(folder)
    return result


@case
def python_in_a_workers_dataset(strategy: Any) -> dict:
    def generated(context: tf.distribute.InputContext) -> tf.data.Dataset:
        spec = (tf.TensorSpec([6], tf.float32), tf.TensorSpec([1], tf.float32))
        return tf.data.Dataset.from_generator(lambda: zip(X, Y, strict=True), output_signature=spec).batch(20)

    def plain(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x + 0, y)).batch(20)

    said = {}
    for name, function in {"generated": generated, "plain": plain}.items():
        with strategy.scope():
            model = model_of()
            model.compile("sgd", "mse", jit_compile=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(function, epochs=2, verbose=0)
        said[name] = [str(warning.message) for warning in caught if "Python" in str(warning.message)]
    return said


@case
def what_is_refused(strategy: Any) -> dict:
    told = {}
    for name, arguments in {
        "jit_compile": {"jit_compile": True},
        "run_eagerly": {"run_eagerly": True},
        "accumulation": {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)},
    }.items():
        with strategy.scope():
            model = model_of()
            model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
        told[name] = refusal_of(model)
    with strategy.scope():
        model = CountsInside()
        model.compile("sgd", jit_compile=False)
    told["metric in tf.cond"] = refusal_of(model)
    return told


def refusal_of(model: keras.Model) -> str:
    try:
        model.fit(X, Y, verbose=0)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return "nothing"


@case
def converges_to_the_least_squares_solution(strategy: Any) -> dict:
    targets = X @ np.arange(1.0, 7.0)[:, None].astype("float32") + 0.5
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False, steps_per_execution=8)
    model.fit(X, targets, batch_size=10, epochs=15, verbose=0)
    return {"kernel": model.get_weights()[0], "bias": model.get_weights()[1]}


class TwoSlots(keras.optimizers.Optimizer):
    """Adds one to a slot, computes for a while, adds one to another; the variable gets what they ever differed by."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.first, self.second = self.add_optimizer_variables(variables, ["first", "second"])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        first, second = self.first[index], self.second[index]
        self.assign_add(first, tf.ones_like(gradient))
        with tf.control_dependencies([tf.convert_to_tensor(first)]):
            product = tf.random.uniform([200, 200])
        for _ in range(3):
            product = product @ product / 200
        self.assign_add(second, tf.ones_like(gradient) + 0 * tf.reduce_mean(product))
        self.assign_add(variable, tf.abs(tf.convert_to_tensor(first) - tf.convert_to_tensor(second)))


@case
def slots_of_one_variable(strategy: Any) -> dict:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(TwoSlots(0.1), "mse", jit_compile=False)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0)

    @tf.function
    def update() -> None:
        model.optimizer.apply([tf.ones(variable.shape) for variable in model.trainable_variables])

    operations = update.get_concrete_function().graph.get_operations()
    releases = [operation for operation in operations if operation.type == "ConsumeMutexLock"]
    waits = [other for release in releases for other in release.control_inputs if other in releases]
    return {
        "apart": model.get_weights()[0],
        "first": model.optimizer.first[0].numpy(),
        "locks": len(releases),
        "waits": len(waits),
    }


@case
def where_variables_are(strategy: Any) -> dict:
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(500), keras.layers.Dense(7), keras.layers.Dense(1)]
        )
    sizes: dict[str, int] = {}
    for variable in model.variables:
        device = tf.DeviceSpec.from_string(variable.value.device)
        sizes[f"ps {device.task}"] = sizes.get(f"ps {device.task}", 0) + 4 * int(np.prod(variable.shape))
    return sizes


def main(out: Path, workers: int, names: list[str]) -> None:
    strategy = servers.start(workers, ps=2, seed=1, step_timeout_s=60)
    for name in names or CASES:
        try:
            result = CASES[name](strategy)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(name, flush=True)
        np.savez(out / f"{name}.npz", **{key: np.array(value) for key, value in result.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
