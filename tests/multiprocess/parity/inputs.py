"""What `fit` takes."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case
def shuffled_arrays(run: Run) -> dict:
    """Arrays with `shuffle=True`, in the documented order: f(seed, fit, epoch).

    Reference: plain Keras on rows put in the documented order, f(seed, fit, epoch).
    """
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
    """A batched `tf.data.Dataset`, for training, validation and `predict`."""

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
    """`Dataset.repeat()` with `steps_per_epoch`."""
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    endless = tf.data.Dataset.from_tensor_slices(regression(40)).batch(12).repeat()
    return fitted(model, endless, steps_per_epoch=6, epochs=3)


@case
def dataset_of_unknown_length(run: Run) -> dict:
    """A dataset of unknown length.

    Plain Keras counts one iteration too many at each end it had not foreseen, so its steps are given to it.
    """
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(regression(40)).batch(12).filter(lambda *_: True)
    if run.is_plain:
        return fitted(model, data.repeat(), steps_per_epoch=4)
    return fitted(model, data)


@case(core=True)
def dataset_with_sample_weights(run: Run) -> dict:
    """A dataset with sample weights, and `weighted_metrics`."""
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


@case(core=True)
def py_dataset(run: Run) -> dict:
    """`keras.utils.PyDataset`."""
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return fitted(model, Batches(workers=2), validation_data=Batches())


@case
def py_dataset_shuffled(run: Run) -> dict:
    """`PyDataset` with `shuffle=True`, in the documented order: f(seed, fit, epoch).

    Reference: plain Keras on batches put in the documented order, f(seed, fit, epoch).
    """
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
    """A Python generator."""

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
    """A dataset of sparse tensors."""
    x, y = regression(40)
    x *= np.abs(x) > 0.7
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(12)
    with run.scope():
        model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, rows)


@case
def sparse_arrays(run: Run) -> dict:
    """Sparse tensors as arrays."""
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
    """A dataset of ragged tensors."""
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
    """Strings, with `StringLookup` in the model."""
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
    """`strategy.experimental_distribute_dataset`.

    Split by TensorFlow's own `experimental_distribute_dataset`, as its guides have it.
    """
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
    """`strategy.distribute_datasets_from_function`, other numbers of rows on each task.

    Each task brings rows of its own, not as many as the others; together they are all rows.
    """
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


@case(core=True)
def pipeline_of_arrays(run: Run) -> dict:
    """`tfdist.data.from_arrays`, shuffled, in the documented order: f(seed, epoch).

    Reference: plain Keras on rows put in the documented order, f(seed, epoch).
    """
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
    """`tfdist.data.from_files`: CSV files of unequal sizes.

    Three CSV files of unequal sizes, fewer than some clusters have tasks; in file order that is rows in order.
    """
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
    """`tfdist.data.from_function`: shares of other sizes, of which one ends early.

    Shares of other sizes, of which one ends early; the sum over tasks is one batch of all rows, then the rest.
    """
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
    """`train_on_batch`, `test_on_batch`, `predict_on_batch`."""
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
    """`steps_per_epoch` on arrays."""
    return trained(run, rows=48, batch_size=8, steps_per_epoch=3, epochs=2)


@case
def sample_weight(run: Run) -> dict:
    """`sample_weight`."""
    return trained(run, sample_weight=np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32"))


@case
def class_weight(run: Run) -> dict:
    """`class_weight`, and `weighted_metrics`."""
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
    """`validation_split`."""
    return trained(run, rows=41, batch_size=12, validation_split=0.2)


@case
def validation_every_second_epoch(run: Run) -> dict:
    """`validation_freq`, `validation_steps`."""
    return trained(run, epochs=4, validation_freq=2, validation_data=regression(9, 1), validation_steps=1)


class Changing(Batches):
    """A PyDataset that other numbers come from in each epoch, as its `on_epoch_end` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x, y + self.calls

    def on_epoch_end(self) -> None:
        self.calls += 1


@case
def py_dataset_that_changes_between_epochs(run: Run) -> dict:
    """A PyDataset whose `on_epoch_end` changes it."""
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, Changing(), validation_data=Changing())


@case
def validation_steps(run: Run) -> dict:
    """`validation_steps`: the same first batches in each epoch."""
    x, y = regression(60)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", jit_compile=False)
    validation = tf.data.Dataset.from_tensor_slices((x[40:], y[40:])).batch(4)
    return fitted(model, x[:40], y[:40], batch_size=13, validation_data=validation, validation_steps=2)


class Positives(keras.metrics.Metric):
    """How many targets are positive: a class of the user's own, which is tried on the first rows."""

    def __init__(self) -> None:
        super().__init__(name="positives")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0, "float32")))

    def result(self) -> Any:
        return self.count + 0.0


@case
def shuffled_dataset(run: Run) -> dict:
    """A `tf.data.Dataset` that shuffles anew in each pass, beside a metric of the user's own."""
    x, y = regression(40)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=[Positives()], jit_compile=False, steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=5).batch(13)
    return fitted(model, data, epochs=3, validation_data=data)


@case
def generator_beside_a_metric(run: Run) -> dict:
    """A Python generator, which can be read once, beside a metric of the user's own."""
    x, y = regression(80)

    def batches() -> Any:
        for first in range(0, 80, 8):
            yield x[first : first + 8], y[first : first + 8]

    with run.scope():
        model = dense()
        model.compile("sgd", "mse", metrics=[Positives()], jit_compile=False)
    return fitted(model, batches(), steps_per_epoch=5)
