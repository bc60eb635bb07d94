"""A training loop of your own, as TensorFlow's guides write one: `strategy.run` for a step, `strategy.reduce` for sums.

    python examples/custom_loop.py
    python -m tfdist.run --workers 2 examples/custom_loop.py

Shows how a `tfdist.data` pipeline feeds such a loop: `batches(epoch)` are this task's rows of each global batch. The
loss of a step is the sum over its rows divided by the rows of the *global* batch, so the gradients, which the optimizer
adds up over the tasks, are those of one process. The metric adds up over the tasks by itself. Every task prints the
same numbers; so one is enough.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

DATA = Path(__file__).parent / "data" / "digits.csv.gz"


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits in a loop of one's own.")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the images (4)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all workers (64)")
    options = parser.parse_args()

    keras.utils.set_random_seed(3)
    strategy = tfdist.create_strategy()  # before anything else of TensorFlow
    table = np.loadtxt(DATA, delimiter=",", dtype="float32")  # 64 pixels, 0 to 16, and the digit
    x, y = table[:, :64] / 16, table[:, 64].astype("int32")
    pipeline = tfdist.data.from_arrays((x, y), options.batch_size, shuffle=True, seed=3, drop_remainder=True)

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = tf.reduce_sum(loss_of(y, scores)) / options.batch_size
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, scores)
        return loss

    @tf.function(reduce_retracing=True)
    def train_step(x, y):
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    for epoch in range(options.epochs):
        accuracy.reset_state()
        losses = [train_step(x, y) for x, y in pipeline.batches(epoch)]
        loss, right = float(np.mean(losses)), float(accuracy.result())
        if tfdist.is_chief():
            print(f"epoch {epoch + 1}: loss: {loss:.4f} - accuracy: {right:.4f}", flush=True)


if __name__ == "__main__":
    main()
