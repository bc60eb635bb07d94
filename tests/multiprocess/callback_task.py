"""Callbacks in `fit`, `evaluate` and `predict`, one function a matter; each returns plain values.

`callback_task.py OUT plain` runs them in one process without tfdist, `callback_task.py OUT tasks` on this task of a
cluster. Either writes OUT/<index>.json: {name: value or {"error": text}}.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import itertools
import json
import random
import re
import sys
import threading
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

sys.path.insert(0, str(Path(__file__).parent))
from parity.cases import dense, regression

CHECKS: dict[str, Callable[..., Any]] = {}
ONLY_TASKS: set[str] = set()
X, Y = regression(40)
callbacks = keras.callbacks


def check(function: Callable[..., Any] | None = None, *, only_tasks: bool = False) -> Any:
    if function is None:
        return lambda function: check(function, only_tasks=only_tasks)
    CHECKS[function.__name__] = function
    if only_tasks:
        ONLY_TASKS.add(function.__name__)
    return function


class Task:
    """This task, or the one plain process, as the checks see it."""

    def __init__(self, out: Path, kind: str) -> None:
        self.out = out
        self.strategy = None if kind == "plain" else tfdist.create_strategy()
        config = None if self.strategy is None else tfdist.resolve()
        self.index, self.size = (0, 1) if config is None else (config.training_index, config.cluster.num_training_tasks)

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def scope(self) -> Any:
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def model(self, optimizer: Any = "sgd", **compile_arguments: Any) -> keras.Model:
        keras.utils.set_random_seed(3)
        with self.scope():
            model = dense()
            optimizer = optimizer() if callable(optimizer) else optimizer
            model.compile(optimizer, "mse", **{"jit_compile": False, **compile_arguments})
        return model

    def fit(self, model: keras.Model, *given: Any, **kwargs: Any) -> keras.callbacks.History:
        """40 rows in batches of 8: five steps an epoch."""
        arguments = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": list(given), **kwargs}
        return model.fit(X, Y, **arguments)

    def same_everywhere(self, *arrays: Any) -> bool:
        if self.size == 1:
            return True
        flat = np.concatenate([np.ravel(np.asarray(array, "float64")) for array in arrays])
        return bool(np.array_equal(tfdist.all_reduce(flat, "max"), tfdist.all_reduce(flat, "min")))

    def together(self, name: str) -> None:
        if self.size > 1:
            tfdist.barrier(name)

    def files(self, folder: str) -> list[str]:
        self.together(f"files of {folder}")
        path = self.out / folder
        return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def weights(model: keras.Model) -> list[float]:
    return np.concatenate([w.ravel() for w in model.get_weights()]).astype("float64").tolist()


def at(hook: str, do: Callable[..., Any]) -> keras.callbacks.Callback:
    """A user's callback with one hook; `do` gets the model and what the hook gets."""

    class Theirs(keras.callbacks.Callback):
        pass

    # Keras gives `logs` by name or by position.
    setattr(Theirs, hook, lambda self, *args, **named: do(self.model, *args, *named.values()))
    return Theirs()


# -- Keras' own that write, send and draw


@check
def csv_logger(task: Task) -> Any:
    path = task.out / "log.csv"
    for epochs in (2, 1):
        task.fit(task.model(), callbacks.CSVLogger(path, append=True), epochs=epochs, validation_data=(X[:9], Y[:9]))
    task.together("log is written")
    head, *rows = path.read_text().splitlines()
    return [head, [[float(v) for v in row.split(",")] for row in rows]]


@check
def model_checkpoint_of_one_name(task: Task) -> Any:
    model = task.model("adam")
    task.fit(model, callbacks.ModelCheckpoint(task.out / "one" / "deep" / "x.keras"), epochs=3)
    found = task.files("one")
    loaded = keras.models.load_model(task.out / "one" / "deep" / "x.keras")
    return [found, weights(loaded), int(loaded.optimizer.iterations), weights(model)]


@check
def model_checkpoint_with_names(task: Task) -> Any:
    folder = task.out / "named"
    best = callbacks.ModelCheckpoint(folder / "{epoch:02d}-{val_loss:.2f}.keras", save_best_only=True)
    model = task.model(lambda: keras.optimizers.SGD(0.35))  # too fast, so that not every epoch is the best
    task.fit(model, best, epochs=5, validation_data=(X[:9], Y[:9]))
    return [task.files("named"), weights(model)]


@check
def model_checkpoint_every_few_batches(task: Task) -> Any:
    saves = callbacks.ModelCheckpoint(
        task.out / "batches" / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3
    )
    task.fit(task.model(), saves)
    found = task.files("batches")
    loaded = task.model()
    loaded.load_weights(task.out / "batches" / found[-1])
    return [found, weights(loaded)]


@check
def model_checkpoint_without_its_number(task: Task) -> Any:
    path = task.out / "unmonitored" / "x.keras"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task.fit(task.model(), callbacks.ModelCheckpoint(path, save_best_only=True, monitor="nothing", mode="min"))
    said = sum("Can save best model only with nothing" in str(w.message) for w in caught)
    return {"files": task.files("unmonitored"), "said": said}


@check
def model_checkpoint_on_the_chief_alone(task: Task) -> Any:
    """As scripts for other systems have it."""
    mine = [callbacks.ModelCheckpoint(task.out / "alone" / "x.keras", save_freq=2)] if task.index == 0 else []
    model = task.model()
    task.fit(model, *mine)
    return [task.files("alone"), weights(model)]


class Crash(Exception):
    pass


def crash(*_: Any) -> None:
    raise Crash


@check
def backup_and_restore(task: Task) -> Any:
    """Stops in the midst of an epoch; Keras goes on at the epoch's start, with the weights of its last backup."""
    result = []
    for number in range(2):
        model = task.model("adam")
        epochs: list[int] = []
        backup = callbacks.BackupAndRestore(task.out / "backup", save_freq=2)
        noted = callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs, e=epochs: e.append(epoch))
        stop = at("on_train_batch_end", lambda m, batch, logs: crash() if int(m.optimizer.iterations) == 8 else None)
        with contextlib.suppress(Crash):
            task.fit(model, backup, noted, *([stop] if number == 0 else []), epochs=3)
        kept = task.files("backup")
        result += [epochs, int(model.optimizer.iterations), task.same_everywhere(weights(model)), weights(model), kept]
    return result


@check
def remote_monitor(task: Task) -> Any:
    """Each task has a server of its own, so that a message of any task would be seen."""
    posts: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            posts.append([self.path, json.loads(urllib.parse.parse_qs(body)["data"][0])])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        task.fit(task.model(), callbacks.RemoteMonitor(f"http://127.0.0.1:{server.server_address[1]}"))
        server.shutdown()
        thread.join()
    return posts


@check
def tensorboard(task: Task) -> Any:
    logs = task.out / "tensorboard"
    board = callbacks.TensorBoard(
        logs,
        histogram_freq=1,
        write_graph=True,
        write_steps_per_second=True,
        update_freq="batch",
        profile_batch=(2, 3),
    )
    task.fit(task.model("adam"), board, validation_data=(X[:9], Y[:9]))
    found = [name for name in task.files("tensorboard") if "events.out.tfevents" in name and "profile" not in name]
    values: dict[str, Any] = {}
    for name in found:
        for record in tf.data.TFRecordDataset(str(logs / name)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                is_number = value.tensor.dtype == tf.float32.as_datatype_enum and "per_second" not in value.tag
                # Names of layers count how many there were before.
                tag = re.sub(r"(sequential|dense)(_\d+)?", r"\1", f"{Path(name).parent} {value.tag}")
                number = float(tf.make_ndarray(value.tensor)) if is_number and not value.tensor.tensor_shape.dim else 0
                values.setdefault(tag, []).append([event.step, number])
    profiled = any("profile" in name for name in task.files("tensorboard"))
    return {"folders": sorted({str(Path(n).parent) for n in found}), "values": values, "profiled": profiled}


@check
def progress_bar(task: Task) -> Any:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        task.fit(task.model(), callbacks.ProgbarLogger(), verbose=2)
    return re.findall(r"Epoch \d/\d|loss: \d", out.getvalue())


# -- Keras' own that decide


class Everything(keras.callbacks.Callback):
    """Notes every call and every number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.numbers: list[float] = []


for hook in (name for name in dir(keras.callbacks.Callback) if name.startswith("on_")):

    def note(self: Everything, *args: Any, hook: str = hook, logs: Any = None, **_: Any) -> None:
        *rest, logs = args if logs is None and args and isinstance(args[-1], dict) else (*args, logs)
        self.calls.append(f"{hook} {rest} {sorted(logs or ())}")
        self.numbers += [float(n) for name in sorted(logs or ()) for n in np.ravel(logs[name])]

    setattr(Everything, hook, note)


@check
def every_hook(task: Task) -> Any:
    noted = Everything()
    model = task.model()
    history = task.fit(model, noted, validation_data=(X[:9], Y[:9]), initial_epoch=1, epochs=3)
    model.evaluate(X[:11], Y[:11], batch_size=4, verbose=0, callbacks=[noted])
    model.predict(X[:11], batch_size=4, verbose=0, callbacks=[noted])
    numbers = [n for values in history.history.values() for n in values]
    same = task.same_everywhere(noted.numbers, numbers)
    return {"calls": noted.calls, "numbers": noted.numbers, "history": history.history, "same bits": same}


@check
def learning_rates(task: Task) -> Any:
    """A function with a state of its own, and a plateau that halves what it gave."""
    rates = itertools.cycle([0.2, 0.1, 0.05])
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: next(rates) if epoch % 2 == 0 else rate)
    plateau = callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.3)
    model = task.model()
    history = task.fit(model, scheduler, plateau, epochs=6)
    return [history.history["learning_rate"], history.history["loss"], weights(model)]


@check
def early_stopping(task: Task) -> Any:
    stopping = callbacks.EarlyStopping("loss", min_delta=0.5, patience=2, restore_best_weights=True, start_from_epoch=1)
    model = task.model()
    history = task.fit(model, stopping, epochs=12)
    return [history.epoch, stopping.best_epoch, stopping.stopped_epoch, weights(model)]


@check
def terminate_on_nan(task: Task) -> Any:
    x = X.copy()
    x[23] = np.nan  # the last row of the third batch: of the last task
    model = task.model()
    model.fit(x, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[callbacks.TerminateOnNaN()])
    return int(model.optimizer.iterations)


@check
def swap_ema_weights(task: Task) -> Any:
    model = task.model(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=None))
    path = task.out / "ema" / "x.weights.h5"
    saves = callbacks.ModelCheckpoint(path, save_weights_only=True)
    swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
    history = task.fit(model, swap, saves, validation_data=(X[:9], Y[:9]))
    task.together("EMA weights are saved")
    saved = task.model()
    saved.load_weights(path, skip_mismatch=True)
    during = model.evaluate(X, Y, verbose=0, callbacks=[callbacks.SwapEMAWeights()])
    return [history.history["val_loss"], weights(saved), weights(model), during]


# -- the user's own


@check
def calls_inside_callbacks(task: Task) -> Any:
    numbers: list[float] = []
    other = task.model()

    def inside(model: keras.Model, batch: int, logs: Any) -> None:
        if batch == 1:
            numbers.append(model.evaluate(X[:9], Y[:9], verbose=0))
            numbers.extend(np.ravel(model.predict(X[:3], verbose=0)).astype(float).tolist())
            numbers.append(other.fit(X[:9], Y[:9], verbose=0, shuffle=False).history["loss"][-1])

    model = task.model()
    task.fit(model, at("on_train_batch_end", inside), at("on_epoch_end", lambda m, e, logs: inside(m, 1, logs)))
    return [numbers, weights(model), weights(other)]


class LargestTarget(keras.metrics.Metric):
    """A state that does not add up over tasks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_true))))

    def merge_states(self, states: Any) -> Any:
        return [keras.ops.max(keras.ops.stack([value for (value,) in states]))]

    def result(self) -> Any:
        return self.value


@check
def metrics_read_in_a_callback(task: Task) -> Any:
    seen: list[float] = []

    def read(model: keras.Model, *_: Any) -> None:
        seen.extend(float(value) for value in model.get_metrics_result().values())
        seen.append(float(model.metrics[0].result()))

    model = task.model(metrics=["mae", LargestTarget(name="largest")])
    task.fit(model, at("on_epoch_end", read), at("on_train_batch_end", read))
    read(model)
    return seen


@check(only_tasks=True)
def state_tree_read_by_the_chief_alone(task: Task) -> Any:
    """As OrbaxCheckpoint does."""
    trees: list[Any] = []
    read = at("on_epoch_end", lambda model, *_: trees.append(model.get_state_tree("numpy_array")))
    model = task.model()
    task.fit(model, tfdist.callbacks.ChiefOnly(read))
    return [sorted(trees[-1]), float(trees[-1]["metrics_variables"]["loss"]["count"])] if task.index == 0 else trees


@check
def a_callback_list(task: Task) -> Any:
    model = task.model()
    noted = Everything()
    path = task.out / "list" / "x.keras"
    given = callbacks.CallbackList([noted, callbacks.ModelCheckpoint(path, save_freq=2)], add_history=True, model=model)
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=given)
    return [task.files("list"), history.history, len(noted.calls), len(given.callbacks)]


@check
def params_and_model(task: Task) -> Any:
    seen: list[Any] = []
    model = task.model()
    task.fit(model, at("on_train_begin", lambda m, logs: seen.append(m is model)), epochs=1)
    noted = Everything()
    task.fit(model, noted, epochs=1)
    return [seen, {name: noted.params[name] for name in ("epochs", "steps", "verbose")}]


STOPS = {
    "on_train_begin": lambda *_: True,
    "on_epoch_begin": lambda epoch, *_: epoch == 1,
    "on_train_batch_begin": lambda batch, *_: batch == 2,
    "on_train_batch_end": lambda batch, *_: batch == 2,
    "on_test_batch_end": lambda batch, *_: batch == 1,
    "on_epoch_end": lambda epoch, *_: epoch == 1,
}


@check
def training_stopped_by_one_task(task: Task) -> Any:
    result = {}
    for hook, when in STOPS.items():

        def stop(model: keras.Model, *args: Any, when: Any = when) -> None:
            if when(*args):
                model.stop_training = True

        model = task.model()
        mine = [at(hook, stop)] if task.is_last else []
        history = task.fit(model, *mine, epochs=4, validation_data=(X[:9], Y[:9]), validation_batch_size=4)
        result[hook] = [int(model.optimizer.iterations), history.epoch]
    return result


@check
def evaluation_and_prediction_stopped_by_one_task(task: Task) -> Any:
    model = task.model()
    batches: list[str] = []

    def stop(flag: str) -> Any:
        return lambda m, batch, logs: setattr(m, flag, True) if batch == 1 else None

    counted = [at(f"on_{kind}_batch_end", lambda m, b, logs: batches.append(b)) for kind in ("test", "predict")]
    mine = [at("on_test_batch_end", stop("stop_evaluating"))] if task.is_last else []
    loss = model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[*mine, *counted])
    mine = [at("on_predict_batch_end", stop("stop_predicting"))] if task.is_last else []
    rows = len(model.predict(X, batch_size=8, verbose=0, callbacks=[*mine, *counted]))
    return [loss, rows, batches]


@check(only_tasks=True)
def who_runs_subclasses_and_own_callbacks(task: Task) -> Any:
    ran: list[str] = []

    class Mine(callbacks.CSVLogger):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ran.append("subclass of CSVLogger")
            super().on_epoch_end(epoch, logs)

    own = at("on_epoch_end", lambda *_: ran.append("own"))
    chief = tfdist.callbacks.ChiefOnly(at("on_epoch_end", lambda *_: ran.append("own in ChiefOnly")))
    task.fit(task.model(), Mine(task.out / "subclass.csv"), own, chief, epochs=1)
    return ran


# -- what one task alone does


def after_error(task: Task, model: keras.Model, *given: Any, **kwargs: Any) -> Any:
    try:
        task.fit(model, *given, **kwargs)
    except tfdist.errors.MismatchError as error:
        return [str(error), int(model.optimizer.iterations)]
    return "nothing was raised"


def only(task: Task, do: Callable[..., Any]) -> Any:
    return lambda *args, **named: do(*args, *named.values()) if task.is_last else None


def set_rate(model: keras.Model, *_: Any) -> None:
    model.optimizer.learning_rate = 0.5


@check(only_tasks=True)
def learning_rate_set_by_one_task_after_a_step(task: Task) -> Any:
    change = only(task, lambda model, batch, logs: set_rate(model) if batch == 2 else None)
    return after_error(task, task.model(), at("on_train_batch_end", change))


@check(only_tasks=True)
def learning_rate_set_by_one_task_in_a_lambda(task: Task) -> Any:
    model = task.model()
    change = only(task, lambda batch, logs: set_rate(model) if batch == 1 else None)
    return after_error(task, model, callbacks.LambdaCallback(on_train_batch_begin=change))


@check(only_tasks=True)
def learning_rate_set_by_one_task_before_an_epoch(task: Task) -> Any:
    change = only(task, lambda model, epoch, logs: set_rate(model) if epoch == 1 else None)
    return after_error(task, task.model(), at("on_epoch_begin", change))


@check(only_tasks=True)
def learning_rate_set_by_one_task_before_training(task: Task) -> Any:
    model = task.model()
    task.fit(model, at("on_train_begin", only(task, set_rate)))
    return float(model.optimizer.learning_rate)


@check(only_tasks=True)
def learning_rates_drawn_at_random(task: Task) -> Any:
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: random.SystemRandom().random())
    return after_error(task, task.model(), scheduler)


@check(only_tasks=True)
def learning_rate_scheduler_on_the_chief_alone(task: Task) -> Any:
    mine = [callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)] if task.index == 0 else []
    return after_error(task, task.model(), *mine)


def add_one(model: keras.Model, *_: Any) -> None:
    model.layers[1].bias.assign_add([1.0])


@check(only_tasks=True)
def weights_set_by_one_task(task: Task) -> Any:
    change = only(task, lambda model, batch, logs: add_one(model) if batch == 2 else None)
    return after_error(task, task.model(), at("on_train_batch_end", change))


@check(only_tasks=True)
def weights_set_by_one_task_are_found_at_the_step(task: Task) -> Any:
    change = only(task, lambda model, batch, logs: add_one(model) if int(model.optimizer.iterations) == 8 else None)
    result = {}
    for trainable_only in (False, True):
        same = tfdist.callbacks.CheckSame(1, trainable_only=trainable_only)
        result[str(trainable_only)] = after_error(task, task.model(), at("on_train_batch_end", change), same)
    change = only(task, lambda model, batch, logs: add_one(model) if int(model.optimizer.iterations) == 9 else None)
    model = task.model("adam", steps_per_execution=2)
    result["executions of 2"] = after_error(
        task, model, at("on_train_batch_end", change), tfdist.callbacks.CheckSame(3)
    )
    return result


@check(only_tasks=True)
def variables_that_are_the_same_are_not_found(task: Task) -> Any:
    model = task.model("adam")
    with task.scope():
        variable = tf.Variable([1.0, 2.0])
    task.fit(model, tfdist.callbacks.CheckSame(2))
    tfdist.check_same(model)
    tfdist.check_same(model.optimizer)
    tfdist.check_same([variable])
    task.same_everywhere(weights(model))


@check(only_tasks=True)
def check_same_names_what_differs(task: Task) -> Any:
    model = task.model()
    if task.is_last:
        add_one(model)
    tfdist.check_same(model, "after making the model")


def checks(task: Task) -> Iterator[tuple[str, Callable[..., Any]]]:
    return ((n, f) for n, f in CHECKS.items() if task.strategy is not None or n not in ONLY_TASKS)


def main(out: Path, kind: str, names: list[str]) -> None:
    task = Task(out, kind)
    results: dict[str, Any] = {}
    for name, function in checks(task):
        if names and name not in names:
            continue
        try:
            results[name] = function(task)
        except Exception as error:
            results[name] = {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}
        (out / f"{task.index}.json").write_text(json.dumps(results))
        task.together(f"after {name}")  # a check that fails on one task alone fails here, by its name


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
