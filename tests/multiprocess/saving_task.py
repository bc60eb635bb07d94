"""Saving, loading and going on, on several tasks, one function a matter; each returns plain values.

`saving_task.py OUT KIND` runs all of them on this task and writes OUT/<index>.json: {name: value or {"error": text}}.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

CHECKS: dict[str, Callable[..., Any]] = {}
random = np.random.default_rng(0)
X = random.normal(size=(40, 6)).astype("float32")
Y = (X[:, :1] * X[:, 1:2]).astype("float32")


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


class Task:
    """This task, as the checks see it."""

    def __init__(self, out: Path, kind: str | None) -> None:
        self.out = out
        self.strategy = tfdist.create_strategy(kind)
        config = tfdist.resolve()
        self.index = 0 if config is None else config.training_index

    def model(self, units: int = 8, *, dropout: bool = False, optimizer: Any = "adam") -> keras.Model:
        layers = [keras.layers.Dense(units, activation="relu"), keras.layers.BatchNormalization(synchronized=True)]
        with self.strategy.scope():
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dropout(0.3 * dropout)])
            model.add(keras.layers.Dense(1))
            model.compile(optimizer, "mse", jit_compile=False)
        return model

    def fit(self, model: keras.Model, *callbacks: Any, epochs: int = 1, **kwargs: Any) -> keras.callbacks.History:
        return model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks), **kwargs)

    def same_everywhere(self, array: Any) -> bool:
        array = np.asarray(array, "float64")
        return bool(np.array_equal(tfdist.all_reduce(array, "max"), tfdist.all_reduce(array, "min")))


def state(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v) for v in (*model.weights, *model.optimizer.variables)]


def equal(first: keras.Model, second: keras.Model) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(state(first), state(second), strict=True))


def trained(task: Task) -> keras.Model:
    model = task.model()
    task.fit(model)
    return model


def goes_on_alike(task: Task, first: keras.Model, second: keras.Model) -> dict[str, bool]:
    """Whether two models are one now, and after a further epoch each: weights, statistics and the optimizer's state."""
    now = equal(first, second)
    for model in (first, second):
        task.fit(model, shuffle=False)
    return {"now": now, "after an epoch": equal(first, second), "same": task.same_everywhere(state(second)[0])}


# -- loading


@check
def every_kind_of_file(task: Task) -> Any:
    """Leaves the files that a fresh process reads without tfdist, and what it must get."""
    model = trained(task)
    for name in ("m.keras", "m.weights.h5", "m.h5", "exported"):
        tfdist.save(model, task.out / "files" / name)
    if tfdist.is_chief():
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(task.out / "files" / "tf" / "ckpt"))
        np.savez(task.out / "expected.npz", *state(model))
    predictions = model.predict(X, verbose=0)
    if tfdist.is_chief():
        np.save(task.out / "predictions.npy", predictions)
    tfdist.barrier("files are written")
    return sorted(p.name for p in (task.out / "files").iterdir())


@check
def load(task: Task) -> Any:
    model = trained(task)
    tfdist.save(model, task.out / "load.keras")
    tfdist.barrier("saved")
    loaded = tfdist.load(task.out / "load.keras")
    return goes_on_alike(task, model, loaded)


@check
def load_what_plain_keras_saved(task: Task) -> Any:
    path = task.out / "plain.keras"
    if tfdist.is_chief():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.save(path)
    tfdist.barrier("saved")
    loaded = tfdist.load(path)
    task.fit(loaded)
    return task.same_everywhere(loaded.get_weights()[0])


@check
def load_weights(task: Task) -> Any:
    model, other = trained(task), task.model()
    tfdist.save(model, task.out / "load.weights.h5")
    tfdist.barrier("saved")
    tfdist.load_weights(other, task.out / "load.weights.h5")
    return goes_on_alike(task, model, other)


@check
def tensorflows_checkpoint(task: Task) -> Any:
    model, other = trained(task), trained(task)
    path = str(task.out / "tf" / "ckpt")
    if tfdist.is_chief():
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    tfdist.barrier("written")
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
    restored.assert_existing_objects_matched()
    return goes_on_alike(task, model, other)


def _file_of_this_task(task: Task) -> Path:
    """As on hosts without a shared disk, onto which somebody has copied a file."""
    source, path = task.out / "source.keras", task.out / f"disk{task.index}" / "own.keras"
    if tfdist.is_chief():
        keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]).save(source)
    tfdist.barrier("source is there")
    path.parent.mkdir(exist_ok=True)
    shutil.copy(source, path)
    return path


@check
def load_where_one_task_lacks_the_file(task: Task) -> Any:
    path = _file_of_this_task(task)
    if task.index == 1:
        path.unlink()
    tfdist.load(path)


@check
def load_where_one_task_has_a_broken_file(task: Task) -> Any:
    path = _file_of_this_task(task)
    if task.index == 1:
        path.write_bytes(path.read_bytes()[:-50])
    tfdist.load(path)


@check
def load_copies_of_one_file(task: Task) -> Any:
    return task.same_everywhere(tfdist.load(_file_of_this_task(task)).get_weights()[0])


@check
def load_where_one_task_has_another_file(task: Task) -> Any:
    path = _file_of_this_task(task)
    if task.index == 1:
        keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]).save(path)
    tfdist.load(path)


@check
def load_where_a_layer_loads_other_values_on_one_task(task: Task) -> Any:
    class Odd(keras.layers.Dense):
        def load_own_variables(self, store: Any) -> None:
            super().load_own_variables(store)
            if task.index == 1:
                self.kernel.assign(self.kernel + 1)

    path = task.out / "odd.keras"
    if tfdist.is_chief():
        keras.Sequential([keras.Input((6,)), Odd(1)]).save(path)
    tfdist.barrier("saved")
    tfdist.load(path, custom_objects={"Odd": Odd})


# -- going on


class Crash(keras.callbacks.Callback):
    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.at, self.epoch = (epoch, batch), -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.at:
            raise KeyError("crash")


def _anew(task: Task) -> keras.Model:
    """The model as a new process would make it."""
    keras.utils.set_random_seed(5)
    return task.model(dropout=True)


@check
def checkpoints(task: Task) -> Any:
    """A run with a crash in the middle of an epoch, and one without; only the chief sees its folder."""
    folder = task.out / "checkpoints" / str(task.index)
    whole = _anew(task)
    expected = task.fit(whole, epochs=4).history["loss"]
    with contextlib.suppress(KeyError):
        task.fit(_anew(task), tfdist.callbacks.Checkpoint(folder), Crash(2, 1), epochs=4)
    before = sorted(p.name for p in folder.iterdir()) if folder.exists() else None
    resumed = _anew(task)
    history = task.fit(resumed, tfdist.callbacks.Checkpoint(folder), epochs=4)
    tfdist.barrier("ended")
    return {
        "epochs": history.epoch,
        "equal": equal(whole, resumed),
        "losses": history.history["loss"] == expected[2:],
        "same": task.same_everywhere(np.concatenate([a.ravel() for a in state(resumed)])),
        "before": before,
        "after": sorted(p.name for p in folder.iterdir()) if folder.exists() else None,
    }


@check
def checkpoint_of_another_model(task: Task) -> Any:
    folder = task.out / "checkpoints" / str(task.index)
    task.fit(task.model(units=9, dropout=True), tfdist.callbacks.Checkpoint(folder), epochs=4)


@check
def chief_only(task: Task) -> Any:
    calls: list[str] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(f"batch {batch}")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            calls.append(f"epoch {epoch}")
            self.model.stop_training = True

    history = task.fit(task.model(), tfdist.callbacks.ChiefOnly(Notes()), epochs=3)
    return {"calls": calls, "epochs": history.epoch}


@check
def load_on_the_chief_alone(task: Task) -> Any:
    """The last one: a group is at its end when its tasks part."""
    model = task.model()
    if tfdist.is_chief():
        model = tfdist.load(task.out / "load.keras")
    task.fit(model)


def main(out: Path, kind: str) -> None:
    task = Task(out, kind)
    results: dict[str, Any] = {}
    for name, function in CHECKS.items():
        try:
            results[name] = function(task)
        except Exception as error:
            results[name] = {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}
        (out / f"{task.index}.json").write_text(json.dumps(results))
        if name != list(CHECKS)[-1]:
            tfdist.barrier(f"after {name}")  # a check that fails on one task alone fails here, by its name


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
