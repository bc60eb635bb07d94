"""`plain_loading.py OUT` reads what `saving_task` left, first in plain Keras, and prints one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

out = Path(sys.argv[1])
sys.path.insert(0, str(Path(__file__).parent))
sys.modules["tfdist"] = None  # type: ignore[assignment]  # whoever imports it fails

files = out / "files"
expected = list(np.load(out / "expected.npz").values())
predictions = np.load(out / "predictions.npy")
rows = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
results: dict[str, Any] = {}


def is_same(model: keras.Model) -> list[bool]:
    """Whether predictions, weights and the optimizer's state are what was saved."""
    state = [np.asarray(v) for v in (*model.weights, *model.optimizer.variables)]
    weights = len(model.weights)
    return [
        bool(np.allclose(model.predict(rows, verbose=0), predictions, atol=1e-6)),
        all(np.array_equal(a, b) for a, b in zip(state[:weights], expected[:weights], strict=True)),
        len(state) == len(expected)
        and all(np.array_equal(a, b) for a, b in zip(state[weights:], expected[weights:], strict=True)),
    ]


def fresh() -> keras.Model:
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(synchronized=True)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dropout(0.0), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


results["m.keras"] = is_same(keras.models.load_model(files / "m.keras"))
objects = {"mse": keras.losses.MeanSquaredError}
results["m.h5"] = is_same(keras.models.load_model(files / "m.h5", custom_objects=objects))
model = fresh()
model.load_weights(files / "m.weights.h5")
results["m.weights.h5"] = is_same(model)
model = fresh()
tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(files / "tf" / "ckpt")).expect_partial()
results["tf"] = is_same(model)
exported = tf.saved_model.load(str(files / "exported"))
results["exported"] = bool(np.allclose(exported.serve(rows), predictions, atol=1e-6))
results["without tfdist"] = "tfdist" not in {name for name, module in sys.modules.items() if module is not None}

# One task goes on where several were.
del sys.modules["tfdist"]
from saving_task import Task  # noqa: E402

import tfdist  # noqa: E402

task = Task(out, None)
model = task.model(dropout=True)
history = task.fit(model, tfdist.callbacks.Checkpoint(out / "checkpoints" / "0"), epochs=5)
results["one task goes on"] = [history.epoch, int(model.optimizer.iterations)]
print(json.dumps(results))
