"""Goes on from checkpoints of other clusters: `restoring_task.py FOLDER WORKERS PS read,read,... [write]`.

Without workers it is one plain process. FOLDER/<name> are the checkpoints, FOLDER/<name> by <workers> and <ps>.npz the
values.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tfdist
from tfdist.testing import servers

X = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
EPOCHS = 2


def fitted(scope: Any, folder: Path) -> dict[str, np.ndarray]:
    """Returns all values of a model that trained for the epochs which the folder lacks."""
    with scope:
        layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    history = model.fit(X, Y, epochs=EPOCHS, verbose=0, callbacks=[tfdist.callbacks.Checkpoint(folder)])
    # The names of layers count on within a process.
    values = {f"model {i}": variable for i, variable in enumerate(model.variables)}
    values |= {f"{v.name.rpartition('_')[2]} {i}": v for i, v in enumerate(model.optimizer.variables)}
    values = {name: keras.ops.convert_to_numpy(variable) for name, variable in values.items()}
    return {"epochs": np.array(len(history.epoch)), **values}


def main(folder: Path, workers: int, ps: int, read: str, write: str = "") -> None:
    strategy = servers.start(workers, ps, seed=1, step_timeout_s=60) if workers else None
    for name in filter(None, [*read.split(","), write]):
        values = fitted(strategy.scope() if strategy is not None else nullcontext(), folder / name)
        np.savez(folder / f"{name} by {workers} and {ps}.npz", **values)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
