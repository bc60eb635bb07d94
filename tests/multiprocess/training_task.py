"""What a user's script does around `fit` on two tasks, one function a matter; each returns plain values.

`training_task.py OUT` runs all of them on this task and writes OUT/<index>.json: {name: value or {"error": text}}.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

sys.path.insert(0, str(Path(__file__).parent))
from parity.cases import dense, regression

CHECKS: dict[str, Callable[..., Any]] = {}
X, Y = regression(40)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


class Task:
    """This task, as the checks see it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.strategy = tfdist.create_strategy(expected_tasks=2)
        self.index = tfdist.resolve().training_index

    def model(self, optimizer: Any = "sgd", **compile_arguments: Any) -> keras.Model:
        with self.strategy.scope():
            model = dense()
            model.compile(optimizer, "mse", **{"jit_compile": False, **compile_arguments})
        return model

    def same_everywhere(self, array: Any) -> bool:
        array = np.asarray(array, "float64")
        return bool(np.array_equal(tfdist.all_reduce(array, "max"), tfdist.all_reduce(array, "min")))


# -- who and together


@check
def one_chief(task: Task) -> Any:
    return [tfdist.is_chief(), task.strategy.num_replicas_in_sync, type(task.strategy).__name__]


@check
def all_reduce(task: Task) -> Any:
    tfdist.barrier("before all_reduce")
    return [
        tfdist.all_reduce(task.index + 1),
        tfdist.all_reduce(float(task.index), "mean"),
        tfdist.all_reduce(np.full(3, task.index + 1), "max").tolist(),
        [a.tolist() for a in tfdist.all_reduce([np.ones(2), np.full((1, 1), task.index)])],
    ]


@check
def unseeded_script_has_one_seed(task: Task) -> Any:
    return task.same_everywhere(np.random.random(4)) and task.same_everywhere(keras.random.normal((4,)))


@check
def second_strategy(task: Task) -> Any:
    tfdist.create_strategy()


# -- data


@check
def shuffled_rows_are_each_seen_once(task: Task) -> Any:
    """Which rows this task trained on: the input is the row's own number, and the step notes it."""
    with task.strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    rows: list[int] = []
    original = model.train_step

    def train_step(data: Any) -> Any:
        x, _ = data
        tf.py_function(lambda ids: rows.extend(int(i) for i in ids.numpy().ravel()), [x], [])
        return original(data)

    model.train_step = train_step
    numbers = np.arange(37, dtype="float32")[:, None]
    orders = []
    for _ in range(2):
        rows.clear()
        model.fit(numbers, numbers * 0, batch_size=8, epochs=1, verbose=0)
        orders.append(list(rows))
    return orders


@check
def first_batches_that_differ(task: Task) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=task.index).batch(8)
    task.model().fit(data, verbose=0)


@check
def a_sharded_dataset(task: Task) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shard(2, task.index).batch(8)
    task.model().fit(data, verbose=0)


@check
def other_epochs(task: Task) -> Any:
    task.model().fit(X, Y, epochs=1 + task.index, verbose=0)


@check
def other_number_of_rows(task: Task) -> Any:
    rows = 40 - task.index
    task.model().fit(X[:rows], Y[:rows], verbose=0)


@check
def other_optimizer(task: Task) -> Any:
    task.model("adam" if task.index else "sgd").fit(X, Y, verbose=0)


@check
def other_trainable_layers(task: Task) -> Any:
    model = task.model()
    model.layers[0].trainable = task.index == 0
    model.fit(X, Y, verbose=0)


# -- what a script can not mean


@check
def other_batches_for_train_on_batch(task: Task) -> Any:
    task.model().train_on_batch(X[: 8 + task.index], Y[: 8 + task.index])


@check
def datasets_that_end_at_other_steps(task: Task) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(3 + task.index).filter(lambda *_: True)
    task.model().fit(data, verbose=0)


@check
def own_datasets_that_end_at_other_steps(task: Task) -> Any:
    """Rows of each task's own may end: the others go on, and the steps count as one process would count them."""

    def mine(context: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X[: 8 + 16 * task.index], Y[: 8 + 16 * task.index])).batch(8)

    model = task.model()
    history = model.fit(task.strategy.distribute_datasets_from_function(mine), epochs=2, verbose=0)
    return [int(model.optimizer.iterations), task.same_everywhere(history.history["loss"])]


@check
def dataset_without_batches(task: Task) -> Any:
    task.model().fit(tf.data.Dataset.from_tensor_slices((X[:, 0], Y[:, 0])), verbose=0)


@check
def unknown_kind_of_input(task: Task) -> Any:
    task.model().fit({1, 2, 3}, verbose=0)


@check
def other_rows_of_arrays(task: Task) -> Any:
    part = slice(0, 20) if task.index == 0 else slice(20, 40)
    task.model().fit(X[part], Y[part], verbose=0)


@check
def learning_rate_changed_on_the_chief_alone(task: Task) -> Any:
    model = task.model()

    def change(epoch: int, logs: Any) -> None:
        if tfdist.is_chief():
            model.optimizer.learning_rate = 0.5

    model.fit(X, Y, epochs=3, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=change)])


@check
def updates_past_the_optimizer(task: Task) -> Any:
    with task.strategy.scope():
        inner = dense()

    class ByHand(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, data: Any) -> dict:
            x, y = data
            variables = self.inner.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss}

    with task.strategy.scope():
        model = ByHand()
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)


class Noting(keras.layers.Layer):
    """Keeps the mean of the rows it saw in a variable that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = tf.Variable(0.0, trainable=False, name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(tf.reduce_mean(x))
        return x


@check
def a_variable_that_keras_does_not_know(task: Task) -> Any:
    with task.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Noting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=10, epochs=2, verbose=0)


@check
def part_of_a_batch_that_is_not_per_row(task: Task) -> Any:
    constant = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).map(lambda x, y: ({"x": x, "c": x[:1]}, y))
    with task.strategy.scope():
        inputs = {"x": keras.Input((6,)), "c": keras.Input((6,))}
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs["x"] + inputs["c"]))
        model.compile("sgd", "mse", jit_compile=False)
    try:
        model.fit(constant, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError("one entry per row" if "one entry per row" in str(error) else str(error)) from None


@check
def predicted_strings(task: Task) -> Any:
    with task.strategy.scope():
        inputs = keras.Input((6,))
        as_text = keras.layers.Lambda(lambda x: tf.strings.as_string(tf.round(x[:, :1])), output_shape=(1,))
        model = keras.Model(inputs, as_text(inputs))
    numbers = np.tile(np.arange(9.0)[:, None], (1, 6))
    return [v.decode() for v in np.ravel(model.predict(numbers, verbose=0))]


@check
def naive_save_by_all_tasks(task: Task) -> Any:
    model = task.model()
    path = task.out / "naive.keras"
    model.save(path)
    tfdist.barrier("saved by model.save")
    return [zipfile.ZipFile(path).testzip(), sorted(p.name for p in task.out.glob("naive*"))]


# -- random layers


@check
def dropout_masks(task: Task) -> Any:
    """Which of 64 values each of two steps dropped on this task, in a run and in the same run again."""

    def run() -> list[list[int]]:
        keras.utils.set_random_seed(3)
        with task.strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        dropped: list[list[int]] = []
        original = model.layers[0].call

        def call(x: Any, training: bool = False) -> Any:
            out = original(x, training=training)
            if training:
                tf.py_function(lambda v: dropped.append(np.flatnonzero(v.numpy()[0] == 0).tolist()), [out], [])
            return out

        model.layers[0].call = call
        model.fit(np.ones((4, 64), "float32"), np.ones((4, 1)), batch_size=2, verbose=0)
        return dropped

    return [run(), run()]


# -- callbacks


class Notes(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.numbers: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("train begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"batch {batch}")
        self.numbers.append(float(logs["loss"]))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"test batch {batch}")
        self.numbers.append(float(logs["loss"]))

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"predict batch {batch} of {len(logs['outputs'])} rows")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"end of epoch {epoch} {sorted(logs)}")
        self.numbers += [float(v) for v in logs.values()]

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("train end")


@check
def callbacks_run_on_every_task_with_global_logs(task: Task) -> Any:
    notes = Notes()
    model = task.model()
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[notes], validation_data=(X[:7], Y[:7]))
    model.predict(X[:7], batch_size=4, verbose=0, callbacks=[notes])
    return {"calls": notes.calls, "same numbers": task.same_everywhere(notes.numbers), "count": len(notes.numbers)}


@check
def callbacks_that_write_run_on_the_chief(task: Task) -> Any:
    out = task.out / "callbacks"
    out.mkdir(exist_ok=True)
    lambdas: list[int] = []
    model = task.model("adam")
    callbacks = [
        keras.callbacks.ModelCheckpoint(out / "model.keras", save_best_only=True, monitor="loss"),
        keras.callbacks.ModelCheckpoint(out / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(out / "log.csv"),
        keras.callbacks.BackupAndRestore(out / "backup", delete_checkpoint=False),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: lambdas.append(epoch)),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    ]
    model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    tfdist.barrier("files are written")
    return {
        "files": sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()),
        "rows of the log": len((out / "log.csv").read_text().splitlines()),
        "bad zip member": zipfile.ZipFile(out / "model.keras").testzip(),
        "lambda epochs": lambdas,
        "rate is the same": task.same_everywhere(model.optimizer.learning_rate),
        "rate": float(model.optimizer.learning_rate),
    }


@check
def backup_restores_all_tasks_from_the_chief(task: Task) -> Any:
    folder = task.out / "resume"

    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyError("crash")

    def fit(callbacks: list) -> list:
        keras.utils.set_random_seed(5)
        model = task.model("adam")
        backup = keras.callbacks.BackupAndRestore(folder)
        epochs: list[int] = []
        noted = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
        with contextlib.suppress(KeyError):
            model.fit(X, Y, epochs=4, verbose=0, shuffle=False, callbacks=[backup, noted, *callbacks])
        model.fit(X, Y, epochs=1, verbose=0, callbacks=[noted])  # Keras' own fit runs no epoch here
        return [epochs, int(model.optimizer.iterations), task.same_everywhere(model.get_weights()[0])]

    return [fit([Crash()]), fit([])]


# -- saving and loading


@check
def weights_loaded_on_the_chief_alone(task: Task) -> Any:
    model = task.model()
    if tfdist.is_chief():
        model.set_weights([w + 1 for w in model.get_weights()])
    before = task.same_everywhere(model.get_weights()[0])
    model.fit(X, Y, epochs=1, verbose=0)
    loss = model.evaluate(X, Y, verbose=0)
    return {"same before": before, "same after": task.same_everywhere([*model.get_weights()[0].ravel(), loss])}


@check
def save_by_all_tasks(task: Task) -> Any:
    model = task.model("adam")
    model.fit(X, Y, epochs=1, verbose=0)
    out = task.out / "saved"
    returned = [
        tfdist.save(model, out / "model.keras"),
        tfdist.save(model, out / "model.weights.h5"),
        tfdist.save(model, out / "exported"),
    ]
    tfdist.save(model, out / "model.keras")  # replaces
    tfdist.barrier("saved")
    expected = model.predict(X, verbose=0)
    loaded = keras.models.load_model(out / "model.keras")
    exported = tf.saved_model.load(str(out / "exported"))
    served = exported.serve(X)
    return {
        "returned": [Path(p).name for p in returned],
        "entries": sorted(p.name for p in out.iterdir()),
        "loads equal": bool(np.allclose(loaded.predict(X, verbose=0), expected, atol=1e-6)),
        "serves equal": bool(np.allclose(served, expected, atol=1e-6)),
        "steps are kept": int(loaded.optimizer.iterations),
    }


@check
def save_by_the_chief_alone(task: Task) -> Any:
    model = task.model()
    path = task.out / "chief.keras"
    if tfdist.is_chief():
        tfdist.save(model, path)
    tfdist.barrier("chief saved")
    return path.exists()


# -- a user's own loop under the same strategy


@check
def own_loop(task: Task) -> Any:
    with task.strategy.scope():
        model = dense()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    distributed = task.strategy.experimental_distribute_dataset(data.with_options(options))

    @tf.function
    def step(batch: Any) -> Any:
        def replica(inputs: Any) -> Any:
            x, y = inputs
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 8
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return task.strategy.reduce("SUM", task.strategy.run(replica, args=(batch,)), axis=None)

    losses = [float(step(batch)) for _ in range(3) for batch in distributed]
    return {"falls": losses[-1] < losses[0], "same": task.same_everywhere([*losses, *model.get_weights()[0].ravel()])}


def main(out: Path) -> None:
    task = Task(out)
    results: dict[str, Any] = {}
    for name, function in CHECKS.items():
        try:
            results[name] = function(task)
        except Exception as error:
            results[name] = {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}
        (out / f"{task.index}.json").write_text(json.dumps(results))
        tfdist.barrier(f"after {name}")  # a check that fails on one task alone fails here, by its name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
