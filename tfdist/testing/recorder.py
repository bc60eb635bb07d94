"""A model, its data, one training -> a record of every step: what `verify` compares.

It runs in the processes of a cluster. A record holds plain values and arrays. Each variable is a few hundred numbers in
it: small ones as they are, larger ones folded (`fold`).
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import process
from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component
from tfdist.testing import functions

GROUPS = ("weights", "optimizer", "state")
WHOLE = 512  # values up to which a variable is kept as it is
FOLDED = 256  # values that are kept of a larger one
PREDICTED_BATCHES = 2

Change = Callable[[Any, "Data"], "Data | None"]


def record(strategy: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of one training, and in one process of plain Keras those of its controls as well.

    Args:
        strategy: In whose scope the model is made.
        job: What `verifying.job` describes.
    """
    controls: dict[str, Change | None] = {"": None}
    if job["is_reference"]:
        controls.update(reversed=_reversed, rounded=_rounded)
    records = {}
    for name, change in controls.items():
        keras.utils.set_random_seed(job["seed"])
        done = _train(strategy, job, change)
        if done is not None:
            records[name] = done
    return records


def fold(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a few numbers for an array, such that the fold of a difference is the difference of the folds.

    Each value is added, with a sign drawn once for its place, to one of FOLDED sums: a difference in any value shows,
    and the folds of two arrays are about as far apart as the arrays (this is known as a count sketch).
    """
    flat = np.ravel(array).astype("float64")
    if flat.size <= WHOLE:
        return flat
    flat *= _signs(flat.size)
    whole = flat.size // FOLDED * FOLDED
    folded: np.ndarray[Any, Any] = flat[:whole].reshape(-1, FOLDED).sum(0)
    folded[: flat.size - whole] += flat[whole:]
    return folded


@functools.lru_cache(maxsize=256)
def _signs(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size).integers(0, 2, size, dtype=np.int8) * 2 - 1


# -- the data


@dataclass(frozen=True)
class Data:
    """What `fit` is given: arrays, or a dataset of batches in `x` alone."""

    x: Any
    y: Any = None
    sample_weight: Any = None
    rows: int | None = None  # of arrays
    batch_size: int = 0
    steps: int = 0  # of an epoch, at most

    @property
    def is_arrays(self) -> bool:
        return self.rows is not None

    @property
    def fit(self) -> dict[str, Any]:
        """The arguments of `fit` and `evaluate`."""
        if self.is_arrays:
            named = {"x": self.x, "y": self.y, "sample_weight": self.sample_weight}
            return {**{k: v for k, v in named.items() if v is not None}, "batch_size": self.batch_size}
        return {"x": self.x}

    def map(self, function: Callable[[Any], Any]) -> Data:
        """The same of every array."""
        x, y, weight = (_map(function, part) for part in (self.x, self.y, self.sample_weight))
        return Data(x, y, weight, self.rows, self.batch_size, self.steps)


def read(given: Any, *, batch_size: int, steps: int) -> Data:
    """Returns the first `steps` batches of what a user's function returned.

    Of arrays the last batch is made smaller than the others, of an odd size where they are even: shares are uneven.
    """
    x, y, weight = (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
    if isinstance(x, tf.data.Dataset):
        return Data(x.take(steps), steps=steps)
    if isinstance(x, keras.utils.PyDataset):
        return Data(x, steps=min(steps, x.num_batches or steps))
    if hasattr(x, "__next__"):
        raise UnsupportedError(
            "verify reads the data several times, and a generator gives it once; return arrays, a tf.data.Dataset "
            "(Dataset.from_generator(...).batch(...)) or a keras.utils.PyDataset"
        )
    data = Data(x, y, weight, rows=_rows(x), batch_size=batch_size, steps=steps).map(_array)
    rows = min(_rows(x), steps * batch_size)
    if rows > batch_size and rows % batch_size == 0:
        rows -= (batch_size // 3) | 1
    cut = data.map(lambda leaf: _take(leaf, np.arange(rows)))
    return Data(cut.x, cut.y, cut.sample_weight, rows, batch_size, steps)


def _first_row(data: Data) -> Any:
    """Something to build a model with."""
    if data.is_arrays:
        return _map(lambda leaf: _take(leaf, np.arange(1)), data.x)
    batch = next(iter(data.x)) if isinstance(data.x, tf.data.Dataset) else data.x[0]
    return internals.UNPACK.find()(batch)[0]


def checksum(data: Data) -> int:
    """Returns a number that another value in any batch changes."""
    total = 0
    batches: Any = [(data.x, data.y, data.sample_weight)] if data.is_arrays else data.x
    if isinstance(data.x, keras.utils.PyDataset):
        batches = (data.x[i] for i in range(data.steps))
    for batch in batches:
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            if leaf is not None:
                array = np.asarray(leaf)
                text = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
                total = zlib.crc32(text, zlib.crc32(repr(array.shape).encode(), total))
    return total


def _rows(x: Any) -> int:
    leaf = tf.nest.flatten(x)[0]
    if isinstance(leaf, tf.RaggedTensor):
        return int(leaf.nrows())
    if not hasattr(leaf, "shape") or not len(leaf.shape):
        raise UnsupportedError(
            f"the data is a {type(leaf).__name__}; return what fit takes: arrays (x, y) or (x, y, sample_weight), a "
            "tf.data.Dataset of batches, or a keras.utils.PyDataset"
        )
    return int(leaf.shape[0])


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.SparseTensor) or tf.is_tensor(leaf) else np.asarray(leaf)


def _take(leaf: Any, ids: np.ndarray[Any, Any]) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        dense = tf.sparse.reorder(leaf)
        return tf.sparse.slice(dense, [0] * dense.shape.rank, [len(ids), *dense.shape[1:]])
    return tf.gather(leaf, ids) if tf.is_tensor(leaf) else leaf[ids]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), value)


# -- controls: the same training but for rounding


def _reversed(model: Any, data: Data) -> Data | None:
    """The rows of each batch the other way round: the same sums, added up in another order."""
    if data.rows is not None:
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(data.x)):
            return None
        order = np.arange(data.rows)
        for first in range(0, len(order), data.batch_size):
            order[first : first + data.batch_size] = order[first : first + data.batch_size][::-1]
        return data.map(lambda leaf: _take(leaf, order))
    specs = tf.nest.flatten(data.x.element_spec) if isinstance(data.x, tf.data.Dataset) else []
    if not specs or not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return None
    return Data(data.x.map(lambda *batch: tf.nest.map_structure(lambda t: tf.reverse(t, [0]), batch)), steps=data.steps)


def _rounded(model: Any, data: Data) -> Data:
    """Each initial weight one rounding away from itself, in the precision that its model computes in."""
    random = np.random.default_rng(0)
    coarsest = max((_eps_of(layer.compute_dtype) for layer in internals.layers_of(model)), default=0.0)
    for variable in model.trainable_variables:
        native = internals.native(variable)
        value = np.asarray(native)
        if value.dtype in (np.float32, np.float64):
            signs = np.where(random.random(value.shape) < 0.5, -1, 1)
            moved = np.nextafter(value, signs * np.inf, dtype=value.dtype)
            if coarsest > _eps(variable):
                moved = (value * (1 + signs * coarsest / 2)).astype(value.dtype)
            native.assign(moved)
    return data


# -- the training


def _train(strategy: Any, job: Mapping[str, Any], change: Change | None) -> dict[str, Any] | None:
    """Returns the record of one training; None where the change can not be made."""
    with strategy.scope():
        made = functions.find(job["model"])()
    model, *given = made if isinstance(made, (tuple, list)) else (made,)
    if not isinstance(model, keras.Model):
        raise UnsupportedError(
            f"{job['model']['name']}() returned a {type(model).__name__}; let it return a compiled keras.Model, or a "
            "tuple of it and what fit takes: (model, x, y), (model, dataset)"
        )
    if not given and job["data"] is None:
        raise UnsupportedError(
            f"{job['model']['name']}() returned a model and no data; let it return (model, x, y) or (model, dataset), "
            "or name a function of the data as well"
        )
    if not given:
        source = job["data"]
        given = functions.find(source["function"])() if "function" in source else source["arrays"]
    data = read(tuple(given) if isinstance(given, list) else given, batch_size=job["batch_size"], steps=job["steps"])
    silenced = _silence(model)
    number = checksum(data)
    if process.all_reduce(int(number != job.get("checksum", number)), "max"):
        return {"data": number}  # on any task: there is nothing to compare
    recorder = Recorder(change, data)
    changed = data
    if job["is_reference"] and not model.built:
        _build(model, data)  # as tfdist does it before the first step, whose weights are compared
    if change is not None:
        found = change(model, data)
        if found is None:
            return None
        changed = found
    limited = {} if isinstance(data.x, tf.data.Dataset) or data.is_arrays else {"steps_per_epoch": data.steps}
    history = model.fit(**changed.fit, **limited, epochs=job["epochs"], shuffle=False, verbose=0, callbacks=[recorder])
    evaluated, predicted = job.get("evaluated", True), job.get("predicted", True)
    if evaluated:
        steps = {"steps": data.steps} if limited else {}
        try:
            evaluated = model.evaluate(**changed.fit, **steps, verbose=0, return_dict=True)
        except NotImplementedError:  # a model of other models, such as a GAN, has no call()
            if not job["is_reference"]:
                raise
            evaluated = None
    outputs = _predict(model, data) if predicted else None
    return {
        "data": number,
        "epochs": {name: np.asarray(values, "float64") for name, values in history.history.items()},
        "evaluate": {name: np.asarray(value, "float64") for name, value in (evaluated or {}).items()},
        "predictions": None if outputs is None else [fold(output) for output in outputs],
        **recorder.result(),
        "facts": {
            **_facts(model),
            "silenced": silenced,
            "sizes": [int(np.prod(variable.shape)) for variable in model.trainable_variables],
        },
    }


def _build(model: Any, data: Data) -> None:
    with contextlib.suppress(NotImplementedError):  # a model of other models, such as a GAN, has no call()
        model(_first_row(data))


def _predict(model: Any, data: Data) -> list[np.ndarray[Any, Any]] | None:
    """The outputs for the first batches; None where the model has none, or only texts."""
    try:
        if data.is_arrays:
            few = min(data.rows or 0, PREDICTED_BATCHES * data.batch_size - 1)
            outputs = model.predict(
                _map(lambda leaf: _take(leaf, np.arange(few)), data.x), batch_size=data.batch_size, verbose=0
            )
        elif isinstance(data.x, tf.data.Dataset):
            outputs = model.predict(data.x.take(PREDICTED_BATCHES), verbose=0)
        else:
            return None
    except (NotImplementedError, AttributeError):
        return None  # a model of other models, such as a GAN, has no call()
    arrays = [np.asarray(output) for output in keras.tree.flatten(outputs)]
    return [array for array in arrays if array.dtype.kind in "fiub"]


@dataclass
class _Rows:
    steps: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[str, list[np.ndarray[Any, Any]]] = field(default_factory=lambda: {group: [] for group in GROUPS})


class Recorder(keras.callbacks.Callback):
    """Keeps the logs and all variables of every step."""

    def __init__(self, change: Change | None, data: Data) -> None:
        super().__init__()
        self._kept = _Rows()
        self._epoch = 0
        self._variables: dict[str, list[Any]] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._kept.steps and not self._variables:
            self._keep(("weights", "state"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        values = {name: np.asarray(value, "float64") for name, value in (logs or {}).items()}
        self._kept.steps.append({"epoch": self._epoch, "batch": batch, "logs": values})
        self._keep(GROUPS)

    def result(self) -> dict[str, Any]:
        """Returns the steps; per group a matrix [step, values], and what variable each value is of."""
        groups = {}
        for group in GROUPS:
            rows = self._kept.groups[group]
            most = max(map(len, rows), default=0)
            rows = [row if len(row) == most else np.zeros(most) for row in rows]  # built in the first step
            variables = self._variables.get(group, [])
            groups[group] = {
                "values": np.stack(rows) if rows and len(rows[0]) else np.zeros((len(rows), 0)),
                "names": [_name(variable) for variable in variables],
                "sizes": [len(fold(_value(variable))) for variable in variables],
                "eps": [_eps(variable) for variable in variables],
            }
        return {"steps": self._kept.steps, "groups": groups}

    def _keep(self, groups: Sequence[str]) -> None:
        self._variables = _variables(self.model)
        for group in groups:
            values = [fold(_value(variable)) for variable in self._variables[group]]
            self._kept.groups[group].append(np.concatenate(values) if values else np.zeros(0))


def _variables(model: Any) -> dict[str, list[Any]]:
    """The variables of a model by group, in the order of its layers."""
    apart = {id(variable) for metric in model.metrics for variable in metric.variables}
    optimizer = model.optimizer
    slots = []
    if optimizer is not None:
        # What an optimizer still adds up is each task's own.
        own = {id(variable) for variable in internals.accumulators(optimizer)}
        slots = [variable for variable in optimizer.variables if id(variable) not in own]
    return {
        "weights": [v for v in model.trainable_variables if id(v) not in apart],
        "optimizer": slots,
        "state": [v for v in model.non_trainable_variables if id(v) not in apart and v.dtype != "string"],
    }


def _value(variable: Any) -> np.ndarray[Any, Any]:
    return np.asarray(local_component(internals.native(variable)))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def _eps(variable: Any) -> float:
    return _eps_of(keras.backend.standardize_dtype(variable.dtype))


def _eps_of(dtype: str) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0.0)


# -- what differs by design

_WITH_RATE = (
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.GaussianDropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
)


def _silence(model: Any) -> list[str]:
    """Switches dropout and noise off, which draw other numbers on each task by design; returns those layers' names."""
    names = []
    for layer in internals.layers_of(model):
        if isinstance(layer, _WITH_RATE) and layer.rate:
            layer.rate = 0.0
            names.append(layer.name)
        elif isinstance(layer, keras.layers.GaussianNoise) and layer.stddev:
            layer.stddev = 0.0
            names.append(layer.name)
        elif isinstance(layer, keras.layers.RNN) and sum(map(_silence_cell, _cells(layer))):
            names.append(layer.name)
    return names


def _cells(layer: Any) -> list[Any]:
    return list(getattr(layer.cell, "cells", [layer.cell]))


def _silence_cell(cell: Any) -> bool:
    """Returns whether the cell of a recurrent layer dropped anything."""
    found = [name for name in ("dropout", "recurrent_dropout") if getattr(cell, name, 0.0)]
    for name in found:
        setattr(cell, name, 0.0)
    return bool(found)


def _facts(model: Any) -> dict[str, Any]:
    layers = internals.layers_of(model)
    generators = [
        layer.name
        for layer in layers
        if any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
        and not isinstance(layer, (*_WITH_RATE, keras.layers.GaussianNoise, keras.layers.RNN))
    ]
    return {
        "random": [name for name in generators if not _is_attention(layers, name)],
        "batch_norm": [
            layer.name
            for layer in layers
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        ],
        "loss": _loss_names(model),
    }


def _is_attention(layers: Sequence[Any], name: str) -> bool:
    """Whether the layer draws nothing but for its dropout."""
    return any(layer.name == name and type(layer).__name__.endswith(("Attention", "Cell")) for layer in layers)


def _loss_names(model: Any) -> list[str]:
    """The losses that are not Keras' own."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    own = [loss for loss in losses if callable(loss) and not type(loss).__module__.startswith("keras.")]
    return [
        getattr(loss, "__name__", type(loss).__name__)
        for loss in own
        if not getattr(loss, "__module__", "").startswith("keras.")
    ]
