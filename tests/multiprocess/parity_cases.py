"""Small trainings that must give the same numbers in one plain Keras process and on N tasks.

Each case is a function of a `Run` and returns named arrays: epoch logs, batch logs, weights, predictions. It is
ordinary Keras code; only the scope is entered, which is no strategy at all in the plain process.
"""

from __future__ import annotations

import contextlib
import tempfile
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


Case = Callable[[Run], dict[str, np.ndarray]]
CASES: dict[str, Case] = {}
# Right by a rule of their own, not equal to one process: their tests say what holds.
DIFFERENT_BY_DESIGN = {"dropout", "batch_norm_plain"}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
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


# -- sizes


@case
def even(run: Run) -> dict:
    return trained(
        run, rows=48, batch_size=12, validation_data=regression(20, 1), predict=regression(13, 2)[0], metrics=["mae"]
    )


@case
def uneven(run: Run) -> dict:
    return trained(run, validation_data=regression(7, 1), predict=regression(7, 2)[0], metrics=["mae"])


@case
def one_batch_of_13(run: Run) -> dict:
    return trained(run, rows=13, epochs=3)


@case
def fewer_rows_than_tasks(run: Run) -> dict:
    return trained(
        run, rows=5, batch_size=2, epochs=3, validation_data=regression(1, 1), predict=regression(1)[0], metrics=["mae"]
    )


@case
def batches_of_one(run: Run) -> dict:
    return trained(run, rows=4, batch_size=1, metrics=["mae"])


# -- models


@case
def functional_with_names(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
        hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([left, right]))
        model = keras.Model(
            {"left": left, "right": right},
            {"one": layers.Dense(1, name="one")(hidden), "two": layers.Dense(2, name="two")(hidden)},
        )
        model.compile(
            "adam",
            {"one": "mse", "two": "mae"},
            loss_weights={"one": 1.0, "two": 0.5},
            metrics={"one": ["mae"]},
            jit_compile=False,
        )
    inputs = {"left": x[:, :3], "right": x[:, 3:]}
    return fitted(
        model,
        inputs,
        {"one": y, "two": np.concatenate([y, -y], 1)},
        batch_size=13,
        predict={name: value[:7] for name, value in inputs.items()},
    )


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


@case
def subclassed_unbuilt(run: Run) -> dict:
    return trained(run, model=Subclassed, validation_data=regression(7, 1), predict=regression(7, 2)[0])


@case
def convolution(run: Run) -> dict:
    random = np.random.default_rng(3)
    x, y = random.normal(size=(26, 8, 8, 1)).astype("float32"), random.integers(0, 4, 26)
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(4, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return fitted(model, x, y, batch_size=10, predict=x[:7])


@case
def recurrent(run: Run) -> dict:
    x, y = np.random.default_rng(4).normal(size=(25, 5, 3)).astype("float32"), regression(25)[1]
    with run.scope():
        model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(6), layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=10, predict=x[:7])


@case
def embedding(run: Run) -> dict:
    ids = np.random.default_rng(0).integers(0, 50, (40, 4)).astype("int32")
    with run.scope():
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(1)]
        )
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, ids, regression(40)[1], batch_size=13)


@case
def inside_the_scope(run: Run) -> dict:
    """`fit` called inside `with strategy.scope()`, as many tutorials do."""
    with run.scope():
        return trained(run, metrics=["mae"], validation_data=regression(7, 1), predict=regression(7, 2)[0])


@case
def compiled_outside_the_scope(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = dense()
    model.compile(optimizers.Adam(0.01), "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=13)


# -- inputs


@case
def shuffled_arrays(run: Run) -> dict:
    """Reference: plain Keras on rows put in the documented order, f(seed, fit, epoch)."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    if not run.is_plain:
        return fitted(model, x, y, shuffle=True)
    orders = [np.random.default_rng((run.seed, 0, epoch)).permutation(40) for epoch in range(2)]
    parts = [fitted(model, x[order], y[order], epochs=1) for order in orders]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in ("log loss", "batch logs")}
    return {**parts[-1], **joined}


@case
def dataset(run: Run) -> dict:
    def batches(rows: int, seed: int, size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(regression(rows, seed)).batch(size)

    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    training = (
        tf.data.Dataset.from_tensor_slices(regression(40)).shuffle(40, 3, reshuffle_each_iteration=False).batch(12)
    )
    return fitted(model, training, validation_data=batches(9, 1, 4), predict=batches(9, 1, 4).map(lambda x, y: x))


@case
def dataset_repeated(run: Run) -> dict:
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    endless = tf.data.Dataset.from_tensor_slices(regression(40)).batch(12).repeat()
    return fitted(model, endless, steps_per_epoch=6, epochs=3)


@case
def dataset_of_unknown_length(run: Run) -> dict:
    """Plain Keras counts one iteration too many at each end it had not foreseen, so its steps are given to it."""
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(regression(40)).batch(12).filter(lambda *_: True)
    if run.is_plain:
        return fitted(model, data.repeat(), steps_per_epoch=4)
    return fitted(model, data)


@case
def dataset_with_sample_weights(run: Run) -> dict:
    weights = np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32")
    with run.scope():
        model = dense()
        model.compile("adam", "mse", weighted_metrics=["mae"], jit_compile=False)
    return fitted(model, tf.data.Dataset.from_tensor_slices((*regression(40), weights)).batch(13))


class Batches(keras.utils.PyDataset):
    """Batches of 12 of 40 rows."""

    def __init__(self, order: Any = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.order = order

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        x, y = regression(40)
        index = index if self.order is None else self.order[index]
        return x[12 * index : 12 * index + 12], y[12 * index : 12 * index + 12]


@case
def py_dataset(run: Run) -> dict:
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return fitted(model, Batches(workers=2), validation_data=Batches())


@case
def py_dataset_shuffled(run: Run) -> dict:
    """Reference: plain Keras on batches put in the documented order, f(seed, fit, epoch)."""
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    if not run.is_plain:
        return fitted(model, Batches(), shuffle=True)
    orders = [np.random.default_rng((run.seed, 0, epoch)).permutation(4) for epoch in range(2)]
    parts = [fitted(model, Batches(order), epochs=1) for order in orders]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in ("log loss", "batch logs")}
    return {**parts[-1], **joined}


@case
def generator(run: Run) -> dict:
    def batches() -> Any:
        x, y = regression(40)
        while True:
            for first in range(0, 40, 12):
                yield x[first : first + 12], y[first : first + 12]

    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, batches(), steps_per_epoch=6)


@case
def sparse_dataset(run: Run) -> dict:
    x, y = regression(40)
    x *= np.abs(x) > 0.7
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(12)
    with run.scope():
        model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, rows)


@case
def sparse_arrays(run: Run) -> dict:
    x, y = regression(40)
    x *= np.abs(x) > 0.7
    with run.scope():
        model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, tf.sparse.from_dense(x), y)


class Padding(keras.Model):
    """Sums embeddings of rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(9, 4), layers.Dense(1)

    def call(self, ids: Any) -> Any:
        padded = ids.to_tensor(shape=(None, 5)) if isinstance(ids, tf.RaggedTensor) else ids
        return self.dense(keras.ops.sum(self.embedding(padded), axis=1))


@case
def ragged_dataset(run: Run) -> dict:
    random = np.random.default_rng(8)
    ids = tf.ragged.constant([random.integers(1, 9, length).tolist() for length in random.integers(1, 6, 40)])
    with run.scope():
        model = Padding()
        model(np.ones((1, 5), "int32"))
        model.compile("adam", "mse", jit_compile=False)
    rows = tf.data.Dataset.from_tensor_slices((tf.cast(ids, tf.int32), regression(40)[1])).batch(12)
    return fitted(model, rows)


@case
def strings(run: Run) -> dict:
    words = np.array(["one", "two", "three", "four", "five"], dtype=object)
    x = words[np.random.default_rng(6).integers(0, 5, 40)]
    with run.scope():
        lookup = layers.StringLookup(vocabulary=words[:4].tolist())
        inputs = keras.Input((), dtype="string")
        outputs = layers.Dense(1)(layers.Embedding(5, 4)(lookup(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, tf.constant(x.tolist()), regression(40)[1], predict=tf.constant(x[:7].tolist()))


@case
def distributed_dataset(run: Run) -> dict:
    """Split by TensorFlow's own `experimental_distribute_dataset`, as its guides have it."""
    data = tf.data.Dataset.from_tensor_slices(regression(40)).batch(12)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = data.with_options(options)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    if run.is_plain:
        return fitted(model, data)
    return fitted(model, run.strategy.experimental_distribute_dataset(data))


@case
def datasets_from_function(run: Run) -> dict:
    """Each task brings rows of its own, not as many as the others; together they are all rows."""
    x, y = regression(41)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)

    def mine(context: tf.distribute.InputContext) -> tf.data.Dataset:
        # The first task has all batches of one row less; the last one all of the rest.
        first, last = context.input_pipeline_id, context.input_pipeline_id + 1
        if context.input_pipeline_id == context.num_input_pipelines - 1:
            last = 41
        return tf.data.Dataset.from_tensors((x[first:last], y[first:last]))

    if run.is_plain:
        return fitted(model, tf.data.Dataset.from_tensors((x, y)), epochs=3)
    return fitted(model, run.strategy.distribute_datasets_from_function(mine), epochs=3)


@case
def pipeline_of_arrays(run: Run) -> dict:
    """Reference: plain Keras on rows put in the documented order, f(seed, epoch)."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    if run.is_plain:
        orders = [np.random.default_rng((5, epoch)).permutation(40) for epoch in range(2)]
        parts = [fitted(model, x[o], y[o], epochs=1, validation_data=regression(9, 1)) for o in orders]
        names = [name for name in parts[0] if name.startswith("log ") or name == "batch logs"]
        joined = {name: np.concatenate([p[name] for p in parts]) for name in names}
        result = {**parts[-1], **joined}
        del result["evaluate"]
        return {**result, "predictions": np.ravel(model.predict(x[:7], verbose=0))}
    from tfdist import data

    training = data.from_arrays((x, y), 12, shuffle=True, seed=5)
    validation = data.from_arrays(regression(9, 1), 4)
    return fitted(model, training, validation_data=validation, predict=data.from_arrays(x[:7], 5))


@case
def pipeline_of_files(run: Run) -> dict:
    """Three CSV files of unequal sizes, fewer than some clusters have tasks; in file order that is rows in order."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    if run.is_plain:
        return fitted(model, x, y, batch_size=12)
    from tfdist.data import from_files

    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("a", slice(0, 3)), ("b", slice(3, 36)), ("c", slice(36, 40))):
            np.savetxt(f"{folder}/{name}.csv", np.concatenate([x[rows], y[rows]], 1), delimiter=",", fmt="%.9e")

        def parse(line: Any) -> Any:
            numbers = tf.io.decode_csv(line, [0.0] * 7)
            return tf.stack(numbers[:6]), tf.stack(numbers[6:])

        files = from_files(f"{folder}/*.csv", tf.data.TextLineDataset, parse, global_batch_size=12)
        return fitted(model, files)


@case
def pipeline_of_a_function(run: Run) -> dict:
    """Shares of other sizes, of which one ends early; the sum over tasks is one batch of all rows, then the rest."""
    x, y = regression(41)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    if run.is_plain:

        def batches() -> Any:
            yield from [(x[:33], y[:33]), (x[33:], y[33:])]

        signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1)))
        return fitted(
            model, tf.data.Dataset.from_generator(batches, output_signature=signature).repeat(), steps_per_epoch=2
        )
    from tfdist.data import from_function

    def mine(context: Any) -> tf.data.Dataset:
        # First step: 33 rows shared out; second step: the other 8, all on the last task.
        i, n = context.input_pipeline_id, context.num_input_pipelines
        first, last = 33 * i // n, 33 * (i + 1) // n
        parts = tf.data.Dataset.from_tensors((x[first:last], y[first:last]))
        return parts.concatenate(tf.data.Dataset.from_tensors((x[33:], y[33:]))) if i == n - 1 else parts

    return fitted(model, from_function(mine))


@case
def on_batch(run: Run) -> dict:
    x, y = regression(26)
    weight = np.random.default_rng(5).uniform(0.1, 3, 13).astype("float32")
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    logs = [model.train_on_batch(x[:13], y[:13]), model.train_on_batch(x[13:], y[13:], sample_weight=weight)]
    logs += [model.test_on_batch(x[:7], y[:7]), model.train_on_batch(x[:1], y[:1])]
    return {
        "logs": np.array(logs, "float64"),
        "predictions": np.ravel(model.predict_on_batch(x[:7])),
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
    }


@case
def steps_per_epoch_on_arrays(run: Run) -> dict:
    return trained(run, rows=48, batch_size=8, steps_per_epoch=3, epochs=2)


@case
def sample_weight(run: Run) -> dict:
    return trained(run, sample_weight=np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32"))


@case
def class_weight(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = dense(2, "softmax")
        model.compile(
            "adam",
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
            jit_compile=False,
        )
    return fitted(model, x, (y[:, 0] > 0).astype("int32"), batch_size=13, class_weight={0: 1.0, 1: 4.0})


@case
def validation_split(run: Run) -> dict:
    return trained(run, rows=41, batch_size=12, validation_split=0.2)


@case
def validation_every_second_epoch(run: Run) -> dict:
    return trained(run, epochs=4, validation_freq=2, validation_data=regression(9, 1), validation_steps=1)


# -- losses and metrics


@case
def loss_sum(run: Run) -> dict:
    return trained(run, optimizer=lambda: optimizers.SGD(1e-3), loss=losses.MeanSquaredError(reduction="sum"))


@case
def loss_mean_with_sample_weight(run: Run) -> dict:
    return trained(
        run,
        loss=losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        sample_weight=np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32"),
    )


@case
def loss_scalar(run: Run) -> dict:
    # Not Adam: it blows up the rounding of a gradient that is nearly zero.
    return trained(run, optimizer=lambda: optimizers.SGD(0.05), loss=lambda t, p: tf.reduce_mean(tf.abs(t - p) ** 1.5))


class MeanSquareLoss(keras.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x * x))
        return x


@case
def regularizers(run: Run) -> dict:
    def model() -> keras.Model:
        hidden = layers.Dense(
            16,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.01),
            activity_regularizer=keras.regularizers.L2(0.02),
        )
        return keras.Sequential([keras.Input((6,)), hidden, MeanSquareLoss(), layers.Dense(1)])

    return trained(run, model=model)


@case
def masked(run: Run) -> dict:
    ids = np.random.default_rng(0).integers(0, 9, (40, 7))
    ids[:, 4:] *= np.random.default_rng(1).integers(0, 2, (40, 3))
    y = np.random.default_rng(2).normal(size=(40, 7, 2)).astype("float32")
    with run.scope():
        model = keras.Sequential(
            [keras.Input((7,), dtype="int32"), layers.Embedding(9, 5, mask_zero=True), layers.Dense(2)]
        )
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return fitted(model, ids.astype("int32"), y, batch_size=13)


@case
def additive_metrics(run: Run) -> dict:
    x, y = regression(41)
    labels = np.eye(3, dtype="float32")[np.digitize(y[:, 0], [-0.5, 0.5])]
    m = keras.metrics
    with run.scope():
        model = dense(3, "softmax")
        model.compile(
            "adam",
            "categorical_crossentropy",
            metrics=[
                m.AUC(),
                m.F1Score(),
                m.Precision(),
                m.Recall(),
                m.OneHotMeanIoU(3),
                m.CategoricalAccuracy(),
                m.TopKCategoricalAccuracy(2),
                m.R2Score(),
            ],
            jit_compile=False,
        )
    return fitted(model, x, labels, batch_size=13, validation_data=(x[:9], labels[:9]))


class WithinHalf(keras.metrics.Metric):
    """A metric of the user's own: a share of all values, kept as two counts and a histogram."""

    def __init__(self) -> None:
        super().__init__(name="within_half")
        self.near = self.add_weight(name="near", initializer="zeros")
        self.all = self.add_weight(name="all", initializer="zeros")
        self.histogram = self.add_weight(name="histogram", shape=(4,), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.abs(y_true - y_pred)
        self.near.assign_add(keras.ops.sum(keras.ops.cast(error < 0.5, "float32")))
        self.all.assign_add(keras.ops.cast(keras.ops.size(error), "float32"))
        bins = keras.ops.cast(keras.ops.minimum(error, 3.0), "int32")
        self.histogram.assign_add(keras.ops.sum(keras.ops.one_hot(keras.ops.reshape(bins, (-1,)), 4), axis=0))

    def result(self) -> Any:
        return self.near / self.all + keras.ops.max(self.histogram) / 1000


@case
def custom_metric(run: Run) -> dict:
    return trained(run, metrics=[WithinHalf(), "mae"], validation_data=regression(7, 1), rows=41)


# -- optimizers


def _optimizer_cases() -> None:
    o = optimizers
    made: dict[str, Callable[[], Any]] = {
        "sgd_momentum": lambda: o.SGD(0.05, momentum=0.9),
        "adamw": lambda: o.AdamW(1e-2, weight_decay=0.1),
        "schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.01, 3, 0.5)),
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
        CASES[f"optimizer_{name}"] = lambda run, make=make: trained(run, optimizer=make, epochs=3)


_optimizer_cases()


@case
def overflow_on_one_task(run: Run) -> dict:
    """Row 22 overflows float32 in one task only: all must skip that step, with one scale."""
    x, y = regression(36)
    x[22] = 1e25
    with run.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        scaled = optimizers.LossScaleOptimizer(optimizers.Adam(1e-2), initial_scale=1024.0, dynamic_growth_steps=3)
        model.compile(scaled, "mse", jit_compile=False)
    result = fitted(model, x, y)
    del result["log loss"], result["batch logs"]  # inf and NaN
    return {**result, "scale": np.array(scaled.dynamic_scale), "iterations": np.array(scaled.iterations)}


class TwoOptimizers(keras.Model):
    """A small GAN: two optimizers in a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(6), dense(1)
        self.generator_loss = keras.metrics.Mean(name="generator")
        self.critic_loss = keras.metrics.Mean(name="critic")

    def compile(self) -> None:
        super().compile(jit_compile=False)
        self.generator_optimizer = optimizers.Adam(1e-2, clipnorm=0.1)
        self.critic_optimizer = optimizers.SGD(0.05, momentum=0.9)
        self.crossentropy = losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self) -> list:
        return [self.generator_loss, self.critic_loss]

    def train_step(self, data: Any) -> dict:
        x, y = data
        ones, zeros = tf.ones((tf.shape(x)[0], 1)), tf.zeros((tf.shape(x)[0], 1))
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([x, self.generator(x)], 0))
            critic_loss = self.crossentropy(tf.concat([ones, zeros], 0), judged)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made = self.generator(x)
            loss = self.crossentropy(ones, self.critic(made)) + tf.reduce_mean((made[:, :1] - y) ** 2)
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.generator_loss.update_state(loss)
        self.critic_loss.update_state(critic_loss)
        return {"generator": self.generator_loss.result(), "critic": self.critic_loss.result(), "raw": critic_loss}


@case
def two_optimizers(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = TwoOptimizers()
        model.compile()
        model.built = True
    return fitted(model, x, y, batch_size=13)


class GuideStep(keras.Model):
    """The train_step of Keras' own guide: it logs every metric under its name, the compiled ones as one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = dense()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@case
def train_step_of_the_guide(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = GuideStep()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    history = model.fit(x, y, batch_size=13, epochs=2, verbose=0, shuffle=False)
    logs = {f"log {name}": np.array([_numbers(v) for v in values]) for name, values in history.history.items()}
    return {**logs, **{f"weight {i}": w for i, w in enumerate(model.get_weights())}}


def _numbers(value: Any) -> list[float]:
    return [float(v) for v in keras.tree.flatten(value)]


class OwnLogs(GuideStep):
    """Logs numbers of its own, one of them under the name of a metric that it never updates."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "twice": 2 * loss}


@case
def train_step_with_logs_of_its_own(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = OwnLogs()
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=13)


class Counting(GuideStep):
    """Counts its steps in a variable that it updates inside tf.cond."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict:
        tf.cond(self.optimizer.iterations >= 0, lambda: self.count.assign_add(1.0), lambda: self.count.assign(0.0))
        return super().train_step(data)


@case
def variable_updated_inside_a_cond(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = Counting()
        model.build((None, 6))
        model.compile("adam", "mse", jit_compile=False)
    model.fit(x, y, batch_size=13, epochs=2, verbose=0, shuffle=False)
    return {f"weight {i}": w for i, w in enumerate(model.get_weights())}


@case
def unknown_length_and_several_steps_per_execution(run: Run) -> dict:
    """9 rows in batches of 2 are 5 steps, which 3 does not divide: none may be lost in later epochs."""
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False, steps_per_execution=1 if run.is_plain else 3)
    data = tf.data.Dataset.from_tensor_slices(regression(9)).batch(2).filter(lambda *_: True)
    if run.is_plain:
        result = fitted(model, data.repeat(), steps_per_epoch=5, epochs=3)
    else:
        result = fitted(model, data, epochs=3)
    result["iterations"] = np.array(model.optimizer.iterations)
    del result["batch logs"]  # one per execution
    return result


# -- state


def _batch_norm(synchronized: bool, epsilon: float = 1e-3) -> keras.Model:
    norm = {"momentum": 0.8, "synchronized": synchronized, "epsilon": epsilon}
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(**norm),
            layers.Activation("tanh"),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(**norm),
            layers.Dense(1),
        ]
    )


@case
def batch_norm_synchronized(run: Run) -> dict:
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: _batch_norm(True),
        epochs=3,
        validation_data=regression(9, 3),
        predict=regression(9, 2)[0],
    )


@case
def batch_norm_synchronized_with_few_rows(run: Run) -> dict:
    # Two rows normalise to -1 and 1 whatever they were, and rounding is all that is left of the gradient: one process
    # in float32 then differs by 1e-4 from itself in float64. A large epsilon makes it a fair question.
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: _batch_norm(True, epsilon=1.0),
        rows=5,
        batch_size=2,
        epochs=3,
    )


@case
def batch_norm_plain(run: Run) -> dict:
    return trained(
        run, optimizer=lambda: optimizers.SGD(0.05), model=lambda: _batch_norm(False), rows=48, batch_size=24
    )


@case
def dropout(run: Run) -> dict:
    def model() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.5, seed=3), layers.Dense(1)])

    return trained(run, model=model, rows=48, batch_size=12)


# -- loops of the user's own, as TensorFlow's guides have them


def _own_loop(run: Run, distribute: Callable[[Any], Any]) -> dict:
    """A training and a test loop: `strategy.run`, `strategy.reduce`, a Keras optimizer, Keras metrics."""
    strategy = run.strategy or tf.distribute.get_strategy()
    with run.scope():
        model = dense()
        optimizer = optimizers.Adam(0.01)
        error = keras.metrics.MeanAbsoluteError()
        per_row = losses.MeanSquaredError(reduction=None)
        optimizer.build(model.trainable_variables)

    def average(y: Any, y_pred: Any) -> Any:
        return tf.nn.compute_average_loss(per_row(y, y_pred), global_batch_size=12)

    @tf.function
    def train(batch: Any) -> Any:
        def replica(data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True)
                loss = average(y, y_pred)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            error.update_state(y, y_pred)
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=(batch,)), axis=None)

    @tf.function
    def test(batch: Any) -> Any:
        def replica(data: Any) -> Any:
            x, y = data
            return average(y, model(x, training=False))

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=(batch,)), axis=None)

    training, testing = distribute(regression(48)), distribute(regression(24, 1))
    logs = []
    for _ in range(2):
        trained_losses = [float(train(batch)) for batch in training]
        logs.append([sum(trained_losses) / 4, float(error.result()), sum(float(test(batch)) for batch in testing) / 2])
        error.reset_state()
    return {"logs": np.array(logs), **{f"weight {i}": w for i, w in enumerate(model.get_weights())}}


@case
def own_loop_over_a_distributed_dataset(run: Run) -> dict:
    def distribute(arrays: Any) -> Any:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        data = tf.data.Dataset.from_tensor_slices(arrays).batch(12).with_options(options)
        return (run.strategy or tf.distribute.get_strategy()).experimental_distribute_dataset(data)

    return _own_loop(run, distribute)


@case
def own_loop_over_datasets_from_a_function(run: Run) -> dict:
    def distribute(arrays: Any) -> Any:
        def mine(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Rows of one global batch stay together, whatever the number of tasks.
            size = context.get_per_replica_batch_size(12)
            data = tf.data.Dataset.from_tensor_slices(arrays).batch(size)
            return data.shard(context.num_input_pipelines, context.input_pipeline_id)

        return (run.strategy or tf.distribute.get_strategy()).distribute_datasets_from_function(mine)

    return _own_loop(run, distribute)


# -- ways to run


@case
def several_steps_per_execution(run: Run) -> dict:
    return trained(
        run,
        batch_size=6,
        validation_data=regression(11, 1),
        compile_arguments={"steps_per_execution": 3, "jit_compile": False},
    )


@case
def compiled_by_xla(run: Run) -> dict:
    return trained(
        run,
        metrics=["mae", "r2_score"],
        optimizer=lambda: optimizers.Adam(1e-2, clipnorm=0.1),
        validation_data=regression(7, 1),
        predict=regression(7, 2)[0],
        compile_arguments={"jit_compile": True},
    )


@case
def compiled_where_xla_can_not(run: Run) -> dict:
    """Synchronized batch statistics are sums over tasks in the middle of the step."""
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: _batch_norm(True, epsilon=1.0),
        compile_arguments={"jit_compile": True},
    )


@case
def eagerly(run: Run) -> dict:
    return trained(run, epochs=1, metrics=["mae"], compile_arguments={"run_eagerly": True})


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            self.model.stop_training = True


@case
def stopped_by_one_task(run: Run) -> dict:
    """A callback stops on the last task alone: all stop at the same step."""
    x, y = regression(48)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    callbacks = [StopAt(2)] if run.is_plain or run.is_last else []
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    return {"iterations": np.array(model.optimizer.iterations), "loss": np.array(history.history["loss"])}


@case
def terminated_on_nan(run: Run) -> dict:
    x, y = regression(48)
    x[20] = np.nan
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    callbacks = [keras.callbacks.TerminateOnNaN()]
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    return {"iterations": np.array(model.optimizer.iterations)}


@case
def early_stopping_and_plateau(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile(optimizers.SGD(0.2), "mse", jit_compile=False)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.3, min_delta=0.01),
        keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
    ]
    validation = regression(9, 1)
    result = fitted(model, x, y, batch_size=13, epochs=12, callbacks=callbacks, validation_data=validation)
    return {**result, "learning rate": np.array(model.optimizer.learning_rate)}


@case
def fit_twice(run: Run) -> dict:
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    first = fitted(model, x, y, batch_size=13)
    model.compile(optimizers.SGD(0.01), "mae", jit_compile=False)
    second = fitted(model, x, y, batch_size=7)
    return {**{f"first {k}": v for k, v in first.items()}, **second}
