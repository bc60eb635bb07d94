"""Layers with a state or random numbers."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


def batch_norm(synchronized: bool, epsilon: float = 1e-3) -> keras.Model:
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


@case(core=True)
def batch_norm_synchronized(run: Run) -> dict:
    """`BatchNormalization(synchronized=True)`."""
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: batch_norm(True),
        epochs=3,
        validation_data=regression(9, 3),
        predict=regression(9, 2)[0],
    )


@case
def batch_norm_synchronized_with_few_rows(run: Run) -> dict:
    """`BatchNormalization(synchronized=True)` with fewer rows than tasks."""
    # Two rows normalise to -1 and 1 whatever they were, and rounding is all that is left of the gradient: one process
    # in float32 then differs by 1e-4 from itself in float64. A large epsilon makes it a fair question.
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: batch_norm(True, epsilon=1.0),
        rows=5,
        batch_size=2,
        epochs=3,
    )


@case(differs="moving statistics are the share-weighted mean of the tasks' own; each task normalizes by its own rows")
def batch_norm_plain(run: Run) -> dict:
    """`BatchNormalization`."""
    return trained(run, optimizer=lambda: optimizers.SGD(0.05), model=lambda: batch_norm(False), rows=48, batch_size=24)


@case(differs="each task draws its own numbers, from one seed")
def dropout(run: Run) -> dict:
    """`Dropout`."""

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.5, seed=3), layers.Dense(1)])

    return trained(run, model=model, rows=48, batch_size=12)


@case(core=True)
def batch_norm_synchronized_behind_a_mask(run: Run) -> dict:
    """`BatchNormalization(synchronized=True)` behind a mask, also without scale, center, and renormalized."""
    random = np.random.default_rng(1)
    x = random.normal(2.0, 1.0, size=(29, 5, 3)).astype("float32")
    x[np.arange(5) >= random.integers(1, 6, (29, 1))] = 0
    x[3:6] = 0  # rows of nothing
    renorm = "renorm" in inspect.signature(layers.BatchNormalization).parameters  # since Keras 3.13
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((5, 3)),
                layers.Masking(),
                layers.BatchNormalization(synchronized=True, momentum=0.7, epsilon=0.1),
                layers.Dense(4, activation="tanh"),
                layers.BatchNormalization(synchronized=True, epsilon=0.1, scale=False, center=False),
                layers.Dense(3),
                layers.BatchNormalization(synchronized=True, epsilon=0.1, **({"renorm": True} if renorm else {})),
                layers.Dense(2),
            ]
        )
        model.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
    y = random.normal(size=(29, 5, 2)).astype("float32")
    return fitted(model, x, y, batch_size=9, validation_data=(x[:7], y[:7]))


@case
def batch_norm_synchronized_in_images_and_volumes(run: Run) -> dict:
    """Synchronized BatchNormalization of images and volumes, along another axis, in float64."""
    random = np.random.default_rng(2)
    x, y = random.normal(size=(22, 4, 4, 2)).astype("float32"), random.normal(size=(22, 1)).astype("float32")
    norm = {"synchronized": True, "epsilon": 0.5}
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((4, 4, 2)),
                layers.Conv2D(4, 3, padding="same"),
                layers.BatchNormalization(**norm),
                layers.Reshape((2, 2, 4, 4)),
                layers.BatchNormalization(axis=1, momentum=0.5, **norm),
                layers.BatchNormalization(dtype="float64", **norm),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(optimizers.SGD(0.01), "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=9, predict=x[:7])


@case
def batch_norm_shared_and_frozen(run: Run) -> dict:
    """Synchronized BatchNormalization in a nested model that is called twice, and a frozen one."""
    x, y = regression(25)
    with run.scope():
        inner = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(synchronized=True)])
        frozen = layers.BatchNormalization(trainable=False)
        inputs = keras.Input((6,))
        both = layers.Concatenate()([inner(inputs[:, :3]), inner(inputs[:, 3:])])
        model = keras.Model(inputs, layers.Dense(1)(frozen(both)))
        frozen.moving_mean.assign(np.linspace(-1, 1, 8))
        model.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=9, validation_data=regression(7, 1))


@case
def batch_norm_in_16_bits(run: Run) -> dict:
    """Moving statistics of synchronized BatchNormalization in mixed_float16 and mixed_bfloat16."""
    x, y = regression(25)
    with run.scope():
        inputs = keras.Input((6,))
        norms = [layers.BatchNormalization(synchronized=True, dtype=f"mixed_{d}") for d in ("float16", "bfloat16")]
        outputs = layers.Dense(1, dtype="float32")(layers.Concatenate(dtype="float32")([n(inputs) for n in norms]))
        model = keras.Model(inputs, outputs)
        model.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
    model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    return {f"{i} {v.name}": v.numpy() for i, norm in enumerate(norms) for v in norm.non_trainable_variables}


@case
def norms_without_a_batch(run: Run) -> dict:
    """`LayerNormalization`, `GroupNormalization`, `RMSNormalization`, `UnitNormalization`, `SpectralNormalization`."""

    def model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.SpectralNormalization(layers.Dense(8)),
                layers.LayerNormalization(),
                layers.Dense(8, activation="tanh"),
                layers.GroupNormalization(2),
                layers.RMSNormalization(),
                layers.UnitNormalization(),
                layers.Dense(1),
            ]
        )

    return trained(run, model=model, optimizer=lambda: optimizers.SGD(0.05), validation_data=regression(7, 1))


class OwnState(keras.Layer):
    """Counts its steps, keeps a mean of what it saw and a codebook, and adds a loss, as a vector quantizer does."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(name="steps", dtype="int32", initializer="zeros", trainable=False)
        self.seen = self.add_weight(name="seen", shape=(shape[-1],), initializer="zeros", trainable=False)
        self.codes = self.add_weight(name="codes", shape=(4, shape[-1]), initializer="glorot_uniform")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
            self.seen.assign(0.9 * self.seen + 0.1 * keras.ops.mean(x, axis=0))
        distances = keras.ops.sum((x[:, None] - self.codes[None]) ** 2, axis=-1)
        nearest = keras.ops.take(self.codes, keras.ops.argmin(distances, axis=-1), axis=0)
        self.add_loss(keras.ops.mean((keras.ops.stop_gradient(x) - nearest) ** 2))
        self.add_loss(0.25 * keras.ops.mean((x - keras.ops.stop_gradient(nearest)) ** 2))
        return x + keras.ops.stop_gradient(nearest - x)


@case
def state_of_a_layer_of_your_own(run: Run) -> dict:
    """A vector quantizer of your own: `add_loss`, a counter, a moving mean."""

    def model() -> keras.Model:
        hidden = layers.Dense(4, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2")
        return keras.Sequential([keras.Input((6,)), hidden, OwnState(), layers.Dense(1)])

    return trained(run, model=model, optimizer=lambda: optimizers.SGD(0.05), validation_data=regression(7, 1))


@case
def preprocessing_layers(run: Run) -> dict:
    """`adapt` of `Normalization`, `Discretization`, `StringLookup`, `IntegerLookup`, `TextVectorization`; `Hashing`."""
    random = np.random.default_rng(3)
    rows = 30
    words = np.array(["red", "green", "blue", "black"])[random.integers(0, 4, rows)]
    texts = np.array([" ".join(random.choice(["a", "b", "c", "d", "e"], 3)) for _ in range(rows)])
    numbers, ids = random.normal(3, 2, (rows, 2)).astype("float32"), random.integers(10, 15, rows)
    with run.scope():
        normal, bins = layers.Normalization(), layers.Discretization(num_bins=4)
        normal.adapt(tf.data.Dataset.from_tensor_slices(numbers).batch(7))
        bins.adapt(numbers[:, :1])
        word, id_ = layers.StringLookup(output_mode="one_hot"), layers.IntegerLookup(output_mode="one_hot")
        word.adapt(words)
        id_.adapt(ids)
        text = layers.TextVectorization(output_mode="tf_idf")
        text.adapt(tf.data.Dataset.from_tensor_slices(texts).batch(8))
        hashed = layers.Hashing(3, output_mode="one_hot")
        inputs = {
            "numbers": keras.Input((2,), name="numbers"),
            "word": keras.Input((1,), dtype="string", name="word"),
            "text": keras.Input((1,), dtype="string", name="text"),
            "id": keras.Input((1,), dtype="int64", name="id"),
        }
        features = [
            normal(inputs["numbers"]),
            keras.ops.cast(bins(inputs["numbers"][:, 1:]), "float32"),
            word(inputs["word"]),
        ]
        features += [hashed(inputs["word"]), text(inputs["text"]), id_(inputs["id"])]
        model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([layers.Flatten()(f) for f in features])))
        model.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
    x = {
        "numbers": numbers,
        "word": tf.constant(words[:, None]),
        "text": tf.constant(texts[:, None]),
        "id": ids[:, None],
    }
    data = tf.data.Dataset.from_tensor_slices((x, numbers[:, :1] - numbers[:, 1:])).batch(8)
    return fitted(model, data)


@case(differs="each task draws its own numbers, from one seed")
def random_layers(run: Run) -> dict:
    """Noise, dropouts and image augmentation."""
    x = np.random.default_rng(5).uniform(0, 1, (22, 6, 6, 3)).astype("float32")
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 3)),
                layers.RandomFlip(),
                layers.RandomRotation(0.2),
                layers.RandomBrightness(0.2, value_range=(0, 1)),
                layers.GaussianNoise(0.1),
                layers.Conv2D(4, 3),
                layers.SpatialDropout2D(0.3),
                layers.GaussianDropout(0.2),
                layers.Flatten(),
                layers.AlphaDropout(0.1),
                layers.Dense(1, kernel_initializer=keras.initializers.HeNormal(seed=3)),
            ]
        )
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, x[:, 0, 0, :1], batch_size=9)
