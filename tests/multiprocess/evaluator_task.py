"""A training beside an evaluator, as tests of it run it on every task; OUT and CASE stand in the environment.

Each task writes OUT/<task>.json: [epochs, history] of every `fit`. Any other file there is a word to another task.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist

OUT, CASE = Path(os.environ["OUT"]), os.environ["CASE"]
WAIT_S = 60.0

config = tfdist.resolve()
assert config is not None
ME = str(config.task)
random = np.random.default_rng(0)
X = random.normal(size=(50, 6)).astype("float32")
Y = (X[:, :1] * X[:, 1:2]).astype("float32")
X_VALIDATION, Y_VALIDATION = X[:23], Y[:23]
histories: list[Any] = []


def say(word: str, text: str = "") -> None:
    (OUT / f"{word}.part").write_text(text)
    (OUT / f"{word}.part").rename(OUT / word)


def wait_for(word: str) -> str:
    deadline = time.monotonic() + WAIT_S
    while not (OUT / word).exists():
        assert time.monotonic() < deadline, f"{ME} waited in vain for {word!r}"
        time.sleep(0.02)
    return (OUT / word).read_text()


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"{ME} waited in vain for the end of {pid}"
        time.sleep(0.02)


class Do(keras.callbacks.Callback):
    """Does something on one task, at a hook of one epoch; before the first it is -1."""

    def __init__(self, task: str, hook: str, epoch: int, do: Any) -> None:
        super().__init__()
        self.epoch = -1
        if task == ME:
            setattr(self, hook, lambda *args, **kwargs: do() if self.epoch == epoch else None)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch


def fit(strategy: Any, folder: str, epochs: int, *callbacks: Any, timeout_s: float = WAIT_S) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(
        X,
        Y,
        batch_size=10,
        epochs=epochs,
        verbose=2,
        shuffle=False,
        validation_data=(X_VALIDATION, Y_VALIDATION),
        callbacks=[*callbacks, tfdist.callbacks.Checkpoint(OUT / folder, keep=None, evaluator_timeout_s=timeout_s)],
    )
    histories.append([history.epoch, history.history])
    return model


def killed_chief() -> None:
    """The chief dies in its third epoch, which is not saved yet, once the evaluator has evaluated the second."""
    strategy = tfdist.create_strategy()

    def die() -> None:
        wait_for("two are evaluated")
        os.kill(os.getpid(), signal.SIGKILL)

    chief = Do("worker 0", "on_epoch_end", 2, die)
    seen = Do("evaluator 0", "on_epoch_end", 1, lambda: say("two are evaluated", str(os.getpid())))
    fit(strategy, "first", 4, chief, seen, timeout_s=float(os.environ.get("EVALUATOR_TIMEOUT_S", WAIT_S)))


def two_fits() -> None:
    """Goes on with the first, then stops a second early."""
    strategy = tfdist.create_strategy("synchronous", expected_tasks=2)
    fit(strategy, "first", 4)
    model = fit(strategy, "second", 20, keras.callbacks.EarlyStopping("val_loss", min_delta=100, patience=2))
    tfdist.save(model, OUT / "model.keras")
    histories.append(model.evaluate(X, Y, verbose=0))


def parameter_servers() -> None:
    """The evaluator begins with the last checkpoint when chief and workers have ended."""
    strategy = tfdist.create_strategy()
    if tfdist.is_chief():
        say("pid of the chief", str(os.getpid()))
    late = Do("evaluator 0", "on_test_begin", 2, lambda: wait_for_end_of(int(wait_for("pid of the chief"))))
    fit(strategy, "first", 3, late)


def to_the_end() -> None:
    """The evaluator is there before training ends."""
    begins = Do("evaluator 0", "on_train_begin", -1, lambda: say("evaluator begins"))
    waits = Do("worker 0", "on_epoch_end", 0, lambda: wait_for("evaluator begins"))
    fit(tfdist.create_strategy(), "first", 2, begins, waits)


{f.__name__: f for f in (killed_chief, two_fits, parameter_servers, to_the_end)}[CASE]()
say(f"{ME.replace(' ', '-')}.json", json.dumps(histories))
