"""One of two workers that train with TensorFlow: `synchronous_keras.py WAY INDEX ADDRESS ADDRESS`.

An order is the name of a case; the answer is the seconds of its epochs. `synchronous.py` runs it, and says what the
ways (alone, tfdist, ring, synchronous, stock) are.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import synchronous_cases as cases
import teams

ARGUMENTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tfdist": {},
    "ring": {"communication": "ring"},
    "synchronous": {"kind": "synchronous"},
}


def main(way: str, index: int, addresses: list[str]) -> None:
    teams.end_with_parent()
    if way != "alone":
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if way == "stock":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        teams.serve(lambda name: stock_trainer(strategy, cases.CASES[name], index))
    else:
        import tfdist

        strategy = tfdist.create_strategy(**ARGUMENTS[way])
        teams.serve(lambda name: fit_trainer(strategy, cases.CASES[name], index if way == "alone" else None))


def build(case: cases.Mlp | cases.Digits) -> Any:
    import keras
    from keras import layers

    if isinstance(case, cases.Mlp):
        inner = [layers.Dense(case.units, activation="relu") for _ in range(case.layers)]
        return keras.Sequential([keras.Input((case.units,)), *inner, layers.Dense(1)])
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def compile_arguments(case: cases.Mlp | cases.Digits) -> tuple[Any, Any, list[Any]]:
    """Returns a new optimizer, loss and metrics."""
    import keras

    if isinstance(case, cases.Mlp):
        return keras.optimizers.SGD(), keras.losses.MeanSquaredError(), []
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.optimizers.Adam(), loss, [keras.metrics.SparseCategoricalAccuracy()]


def fit_trainer(strategy: Any, case: cases.Mlp | cases.Digits, index: int | None) -> Callable[[], float]:
    """Returns a function that trains with `fit`, on all data or on the half of the worker `index`, which is alone."""
    x, y = case.data() if index is None else cases.half(case.data(), index)
    batch_size = case.batch_size * (cases.WORKERS if index is None else 1)
    with strategy.scope():
        model = build(case)
        optimizer, loss, metrics = compile_arguments(case)
        model.compile(optimizer, loss, metrics=metrics)

    def train() -> float:
        start = time.perf_counter()
        history = model.fit(x, y, batch_size=batch_size, epochs=case.epochs, verbose=0)
        seconds = time.perf_counter() - start
        check_finite(history.history["loss"][-1])
        return seconds

    train()  # traces
    return train


def stock_trainer(strategy: Any, case: cases.Mlp | cases.Digits, index: int) -> Callable[[], float]:
    """Returns a function that trains in the loop of TensorFlow's guide, for Keras 3's fit refuses this strategy.

    It does less than fit: no callbacks, and the metrics are read once an epoch.
    """
    import keras
    import tensorflow as tf

    x, y = (tf.constant(array) for array in cases.half(case.data(), index))
    with strategy.scope():
        model = build(case)
        optimizer, loss, metrics = compile_arguments(case)
        optimizer.build(model.trainable_variables)
        loss_mean = keras.metrics.Mean()

    def step(rows: tf.Tensor) -> None:
        x_batch, y_batch = tf.gather(x, rows), tf.gather(y, rows)
        with tf.GradientTape() as tape:
            scores = model(x_batch, training=True)
            value = loss(y_batch, scores)
            share = value / cases.WORKERS
        gradients = tape.gradient(share, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # adds up over the workers
        loss_mean.update_state(value)
        for metric in metrics:
            metric.update_state(y_batch, scores)

    @tf.function(reduce_retracing=True)
    def train_step(iterator: Any) -> None:
        strategy.run(step, args=(next(iterator),))

    def dataset(context: Any) -> tf.data.Dataset:
        return tf.data.Dataset.range(len(x)).shuffle(len(x)).batch(case.batch_size).prefetch(2)

    data = strategy.distribute_datasets_from_function(dataset)
    steps = math.ceil(len(x) / case.batch_size)

    def train() -> float:
        start = time.perf_counter()
        for _ in range(case.epochs):
            iterator = iter(data)
            for _ in range(steps):
                train_step(iterator)
            last_loss = float(loss_mean.result())
            for metric in (loss_mean, *metrics):
                metric.result()
                metric.reset_state()
        seconds = time.perf_counter() - start
        check_finite(last_loss)
        return seconds

    train()
    return train


def check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss}; such numbers are no measure of speed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
