"""Small trainings that must give the same numbers in one plain Keras process and on N tasks.

Each case is a function of a `Run` and returns named arrays: epoch logs, batch logs, weights, predictions. It is
ordinary Keras code; only the scope is entered, which is no strategy at all in the plain process.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@dataclass(frozen=True)
class Run:
    """Where a case runs: `strategy` is None in the plain process, else what create_strategy returned."""

    strategy: Any = None
    index: int = 0
    size: int = 1
    seed: int = 7

    def scope(self) -> Any:
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    @property
    def is_plain(self) -> bool:
        return self.strategy is None

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


Function = Callable[[Run], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """One feature, and whether it gives what one process gives.

    Attributes:
        name: Of the function.
        area: What kind of feature it is: the module's name.
        feature: What users call it, for the support matrix: the docstring's first sentence, or the name.
        run: Trains, and returns the numbers that came out.
        differs: Right by a rule of its own, which this states, and not equal to one process; else empty.
        is_core: Also run with four tasks.
        tolerance: The largest error that counts as equal, with its reason beside it; None is what float32 allows.
    """

    name: str
    area: str
    feature: str
    run: Function
    differs: str = ""
    is_core: bool = False
    tolerance: float | None = None

    @property
    def seed(self) -> int:
        """The seed of Python, NumPy and Keras, whatever cases stand before this one."""
        return zlib.crc32(self.name.encode()) % 10_000


CASES: dict[str, Case] = {}


def case(
    function: Function | None = None,
    *,
    differs: str = "",
    core: bool = False,
    name: str = "",
    tolerance: float | None = None,
) -> Any:
    """Makes a function one of CASES; as a decorator, alone or with arguments."""
    if function is None:
        return lambda function: case(function, differs=differs, core=core, name=name, tolerance=tolerance)
    name = name or function.__name__
    feature = (function.__doc__ or name.replace("_", " ")).strip().partition("\n")[0].rstrip(".")
    assert name not in CASES, f"two cases are called {name}"
    CASES[name] = Case(name, function.__module__.rpartition(".")[2], feature, function, differs, core, tolerance)
    return function


def regression(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 6)).astype("float32")
    return x, (x @ np.linspace(-1, 1, 6)[:, None] + 0.3 * np.sin(3 * x[:, :1])).astype("float32")


def dense(outputs: int = 1, activation: str | None = None) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(outputs, activation=activation)]
    )


class BatchLogs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[np.ndarray] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rows.append(np.concatenate([np.ravel(logs[name]) for name in sorted(logs)]))


def fitted(model: keras.Model, x: Any, y: Any = None, *, predict: Any = None, batch_size: int = 12, **fit: Any) -> dict:
    """Fits, evaluates, predicts; returns all numbers that came out."""
    batches = BatchLogs()
    fit.setdefault("epochs", 2)
    fit.setdefault("shuffle", False)
    if y is not None:
        fit["batch_size"] = batch_size
    history = model.fit(x, y, verbose=0, callbacks=[batches, *fit.pop("callbacks", [])], **fit)
    result = {f"log {name}": np.array(values) for name, values in history.history.items()}
    result["batch logs"] = np.array(batches.rows, "float64")
    result.update({f"weight {i}": weight for i, weight in enumerate(model.get_weights())})
    if "validation_data" in fit and isinstance(fit["validation_data"], tuple):
        value = model.evaluate(*fit["validation_data"], batch_size=5, verbose=0)
        result["evaluate"] = np.concatenate([np.ravel(v) for v in keras.tree.flatten(value)])
    if predict is not None:
        outputs = model.predict(
            predict, verbose=0, **({} if isinstance(predict, tf.data.Dataset) else {"batch_size": 5})
        )
        result["predictions"] = np.concatenate([np.ravel(o) for o in keras.tree.flatten(outputs)])
    return result


def trained(
    run: Run,
    *,
    optimizer: Callable[[], Any] = lambda: "adam",
    loss: Any = "mse",
    rows: int = 40,
    batch_size: int = 13,
    metrics: Any = None,
    model: Callable[[], keras.Model] = dense,
    compile_arguments: dict | None = None,
    **fit: Any,
) -> dict:
    """The common shape: a regression by a small model."""
    x, y = regression(rows)
    with run.scope():
        made = model()
        made.compile(optimizer(), loss, metrics=metrics, **(compile_arguments or {"jit_compile": False}))
    return fitted(made, x, y, batch_size=batch_size, **fit)
