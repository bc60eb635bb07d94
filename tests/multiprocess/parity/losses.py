"""Losses and metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case
def loss_sum(run: Run) -> dict:
    """A loss with `reduction="sum"`."""
    return trained(run, optimizer=lambda: optimizers.SGD(1e-3), loss=losses.MeanSquaredError(reduction="sum"))


@case
def loss_mean_with_sample_weight(run: Run) -> dict:
    """A loss with `reduction="mean_with_sample_weight"`."""
    return trained(
        run,
        loss=losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        sample_weight=np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32"),
    )


@case
def loss_scalar(run: Run) -> dict:
    """A loss function of your own that returns one number, a mean."""
    # Not Adam: it blows up the rounding of a gradient that is nearly zero.
    return trained(run, optimizer=lambda: optimizers.SGD(0.05), loss=lambda t, p: tf.reduce_mean(tf.abs(t - p) ** 1.5))


class MeanSquareLoss(keras.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x * x))
        return x


@case
def regularizers(run: Run) -> dict:
    """Kernel and activity regularizers; `add_loss` of a mean."""

    def model() -> keras.Model:
        hidden = layers.Dense(
            16,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.01),
            activity_regularizer=keras.regularizers.L2(0.02),
        )
        return keras.Sequential([keras.Input((6,)), hidden, MeanSquareLoss(), layers.Dense(1)])

    return trained(run, model=model)


@case(core=True)
def masked(run: Run) -> dict:
    """Masks (`Embedding(mask_zero=True)`) in loss and metrics."""
    ids = np.random.default_rng(0).integers(0, 9, (40, 7))
    ids[:, 4:] *= np.random.default_rng(1).integers(0, 2, (40, 3))
    y = np.random.default_rng(2).normal(size=(40, 7, 2)).astype("float32")
    with run.scope():
        model = keras.Sequential(
            [keras.Input((7,), dtype="int32"), layers.Embedding(9, 5, mask_zero=True), layers.Dense(2)]
        )
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return fitted(model, ids.astype("int32"), y, batch_size=13)


# -- every loss of Keras, each on a head of its own

_BINARY, _CLASSES = (np.arange(40) % 3 == 0).astype("float32")[:, None], np.arange(40) % 4
_ONE_HOT = np.eye(4, dtype="float32")[_CLASSES]
_POSITIVE = np.abs(regression(40, 3)[1]) + 0.5
# name -> (loss, outputs, activation, targets)
OF_ROWS: dict[str, tuple[Any, int, str | None, np.ndarray]] = {
    "BinaryCrossentropy": (losses.BinaryCrossentropy(label_smoothing=0.1), 1, "sigmoid", _BINARY),
    "BinaryFocalCrossentropy": (losses.BinaryFocalCrossentropy(apply_class_balancing=True), 1, "sigmoid", _BINARY),
    "CategoricalCrossentropy": (losses.CategoricalCrossentropy(from_logits=True), 4, None, _ONE_HOT),
    "CategoricalFocalCrossentropy": (losses.CategoricalFocalCrossentropy(), 4, "softmax", _ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": (losses.CategoricalGeneralizedCrossEntropy(), 4, "softmax", _CLASSES),
    "CategoricalHinge": (losses.CategoricalHinge(), 4, "softmax", _ONE_HOT),
    "CosineSimilarity": (losses.CosineSimilarity(), 4, None, _ONE_HOT),
    "Hinge": (losses.Hinge(), 1, "tanh", 2 * _BINARY - 1),
    "Huber": (losses.Huber(0.5), 1, None, _POSITIVE),
    "KLDivergence": (losses.KLDivergence(), 4, "softmax", _ONE_HOT),
    "LogCosh": (losses.LogCosh(), 1, None, _POSITIVE),
    "MeanAbsoluteError": (losses.MeanAbsoluteError(), 1, None, _POSITIVE),
    "MeanAbsolutePercentageError": (losses.MeanAbsolutePercentageError(), 1, None, _POSITIVE),
    "MeanSquaredError": (losses.MeanSquaredError(dtype="float64"), 1, None, _POSITIVE),
    "MeanSquaredLogarithmicError": (losses.MeanSquaredLogarithmicError(), 1, "softplus", _POSITIVE),
    "Poisson": (losses.Poisson(), 1, "softplus", _POSITIVE),
    "SparseCategoricalCrossentropy": (losses.SparseCategoricalCrossentropy(ignore_class=2), 4, "softmax", _CLASSES),
    "SquaredHinge": (losses.SquaredHinge(), 1, "tanh", 2 * _BINARY - 1),
}
OF_THE_WHOLE_BATCH: dict[str, tuple[Any, int, str | None, np.ndarray]] = {
    "Circle": (losses.Circle(), 4, None, _CLASSES),
    "Dice": (losses.Dice(), 4, "softmax", _ONE_HOT),
    "Dice of each class": (losses.Dice(axis=0), 4, "softmax", _ONE_HOT),
    "Tversky": (losses.Tversky(0.3, 0.7, reduction="sum"), 4, "softmax", _ONE_HOT),
    "dice": ("dice", 4, "softmax", _ONE_HOT),
    "CosineSimilarity along rows": (losses.CosineSimilarity(axis=0), 4, None, _ONE_HOT),
    "CosineSimilarity of numbers": (losses.CosineSimilarity(), 0, None, _POSITIVE[:, 0]),
}


def _heads(run: Run, heads: dict[str, Any], compile_arguments: dict[str, Any] | None = None, **fit: Any) -> dict:
    keys = {name: name.replace(" ", "_") for name in heads}
    with run.scope():
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        outputs = {
            keys[name]: (
                layers.Dense(size, activation=activation, name=keys[name])(hidden)
                if size
                else layers.Reshape((), name=keys[name])(layers.Dense(1)(hidden))  # y_pred: [rows]
            )
            for name, (_, size, activation, _) in heads.items()
        }
        model = keras.Model(inputs, outputs)
        model.compile(
            optimizers.SGD(0.05),
            {keys[name]: loss for name, (loss, *_) in heads.items()},
            **{"jit_compile": False, **(compile_arguments or {})},
        )
    targets = {keys[name]: target for name, (*_, target) in heads.items()}
    return fitted(model, regression(40)[0], targets, batch_size=13, **fit)


# The hidden layer's bias sums the gradients of all heads, which cancel in part: 1.4e-5 on a CPU without AVX-512.
@case(tolerance=5e-5)
def every_loss_of_keras(run: Run) -> dict:
    """Every loss of Keras, with sample weights."""
    weight = np.random.default_rng(5).uniform(0.1, 3, 40).astype("float32")
    return _heads(run, OF_ROWS, sample_weight=weight)


@case(core=True)
def losses_of_a_whole_batch(run: Run) -> dict:
    """Losses of a whole batch at once: `Circle`, `Dice`, `Tversky`, similarities along the rows."""
    return _heads(run, OF_THE_WHOLE_BATCH)


@case
def ctc(run: Run) -> dict:
    """`keras.losses.CTC`."""
    labels = np.random.default_rng(6).integers(1, 4, (26, 3)).astype("int32")
    x = np.random.default_rng(7).normal(size=(26, 8, 5)).astype("float32")
    with run.scope():
        model = keras.Sequential([keras.Input((8, 5)), layers.Dense(4)])
        model.compile(optimizers.SGD(0.05), losses.CTC(), jit_compile=False)
    return fitted(model, x, labels, batch_size=7)


def _in_batch_negatives(queries: Any, keys: Any) -> Any:
    """Each row's query against the keys of all rows; one value per row."""
    unit = [v / keras.ops.sqrt(keras.ops.sum(v * v, axis=-1, keepdims=True)) for v in (queries, keys)]
    scores = keras.ops.matmul(unit[0], keras.ops.transpose(unit[1])) / 0.2
    labels = keras.ops.arange(keras.ops.shape(scores)[0])
    return keras.ops.sparse_categorical_crossentropy(labels, scores, from_logits=True)


def contrast(y_true: Any, y_pred: Any) -> Any:
    """y_pred: [rows, 2, features], the two towers."""
    return _in_batch_negatives(y_pred[:, 0], y_pred[:, 1])


def two_towers() -> keras.Model:
    inputs = keras.Input((6,))
    left = layers.Dense(5, activation="tanh")(inputs[:, :3])
    right = layers.Dense(5, activation="tanh")(inputs[:, 3:])
    return keras.Model(inputs, keras.ops.stack([left, right], axis=1))


@case(core=True)
def in_batch_negatives(run: Run) -> dict:
    """A loss of your own that contrasts the rows of a batch (InfoNCE, in-batch negatives)."""
    weight = np.random.default_rng(5).uniform(0.1, 3, 41).astype("float32")
    with run.scope():
        model = two_towers()
        model.compile(optimizers.SGD(0.1), contrast, metrics=[contrast], jit_compile=True)
    x, y = regression(41)
    return fitted(model, x, y, batch_size=20, epochs=2, sample_weight=weight, validation_data=(x[:7], y[:7]))


def _whole(loss: Any, run: Run) -> Any:
    if run.is_plain:
        return loss
    import tfdist

    return tfdist.whole_batch(loss)


class TwoTowers(keras.Model):
    """A step of its own: a contrast, a Dice score, and a layer's loss that is no mean."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.left, self.right, self.head = (layers.Dense(5, activation=a) for a in ("tanh", "tanh", "sigmoid"))
        self.contrast, self.dice = _whole(_in_batch_negatives, run), _whole(keras.losses.dice, run)
        self.spread = _whole(lambda v: keras.ops.sqrt(keras.ops.sum(v * v)), run)
        self.log = keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        left, right = self.left(x[:, :3]), self.right(x[:, 3:])
        self.add_loss(0.01 * self.spread(left))
        return left, right, self.head(left)

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            left, right, head = self(x, training=True)
            loss = tf.reduce_mean(self.contrast(left, right)) + self.dice(tf.cast(y > 0, tf.float32), head[:, :1])
            loss += sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.log.update_state(loss)
        return {"loss": self.log.result(), "last": loss}


@case(name="whole_batch_in_a_step_of_your_own")
def whole_batch_in_own_step(run: Run) -> dict:
    """`tfdist.whole_batch` around losses that a `train_step` and a layer call."""
    x, y = regression(41)
    with run.scope():
        model = TwoTowers(run)
        model(x[:1])
        model.compile(optimizers.SGD(0.1), jit_compile=False)
    return fitted(model, x, y, batch_size=20)


def own_dice(y_true: Any, y_pred: Any) -> Any:
    return 1 - 2 * keras.ops.sum(y_true * y_pred) / (keras.ops.sum(y_true) + keras.ops.sum(y_pred))


def root_of_mean(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2))


class OwnSum(losses.Loss):
    """A scalar that is a sum over rows."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sum((y_true - y_pred) ** 2)


@case
def losses_of_your_own_that_are_no_means(run: Run) -> dict:
    """Losses and metric functions of your own that are ratios, roots or sums over the batch."""
    heads = {
        "ratio": (own_dice, 1, "sigmoid", _BINARY),
        "root": (root_of_mean, 1, None, _POSITIVE),
        "sum": (OwnSum(), 1, None, _POSITIVE),
        "rows": (lambda t, p: keras.ops.mean((t - p) ** 2, axis=-1), 1, None, _POSITIVE),
    }
    metrics = {"ratio": [own_dice, keras.losses.Dice()], "root": [root_of_mean, "mae"]}
    weights = {"ratio": 1.0, "root": 0.3, "sum": 0.02, "rows": 0.5}
    return _heads(run, heads, {"metrics": metrics, "loss_weights": weights, "run_eagerly": True}, epochs=1)


@case
def loss_without_reduction(run: Run) -> dict:
    """A compiled loss with `reduction=None`: its gradient is the sum over rows."""
    heads = {
        "mse": (losses.MeanSquaredError(reduction=None), 1, None, _POSITIVE),
        "mae": (losses.MeanAbsoluteError(reduction="none"), 1, None, _POSITIVE),
        "mean": (losses.MeanAbsoluteError(), 1, None, _POSITIVE),
        "circle": (losses.Circle(reduction=None), 4, None, _CLASSES),
    }
    weights = {"mse": 0.01, "mae": 0.02, "mean": 0.01, "circle": 0.001}
    return _heads(run, heads, {"loss_weights": weights})


@case
def on_batch_with_class_weights(run: Run) -> dict:
    """`train_on_batch` with `class_weight`, `test_on_batch` with `sample_weight`, `return_dict`."""
    x, _ = regression(26)
    classes = np.arange(26) % 3
    with run.scope():
        model = dense(3, "softmax")
        model.compile(
            "adam",
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
            jit_compile=False,
        )
    weights = {0: 1.0, 1: 4.0, 2: 0.5}
    logs = [
        model.train_on_batch(x[:13], classes[:13], class_weight=weights, return_dict=True),
        model.train_on_batch(x[13:], classes[13:], class_weight=weights, return_dict=True),
        model.test_on_batch(x[:7], classes[:7], sample_weight=np.linspace(0, 2, 7), return_dict=True),
        model.test_on_batch(x[:1], classes[:1], return_dict=True),
    ]
    return {
        **{f"logs {i}": np.array([log[name] for name in sorted(log)]) for i, log in enumerate(logs)},
        "predictions": np.ravel(model.predict_on_batch(x[:5])),
    }
