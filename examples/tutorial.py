"""TensorFlow's tutorial "Multi-worker training with Keras" as a script: what it needs on top is in fewer lines here.

    python examples/tutorial.py
    python -m tfdist.run --workers 2 examples/tutorial.py

Shows a `tf.data` pipeline whose batches are global, a model compiled in the strategy's scope, `fit` with
`steps_per_epoch`, a checkpoint after each epoch, and the model saved by the chief. Stopped at any moment and started
again, it goes on after the last whole epoch; `--epochs` counts them all.

The tutorial's batch grows with the number of workers (64 rows for each). That changes what is learned, so here the
global batch is given, and each worker takes its part of it: one worker and two learn the same. Handwritten digits of
8 x 8 (data/README.md says whose) stand in for the tutorial's MNIST, which it downloads.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

DATA = Path(__file__).parent / "data" / "digits.csv.gz"


def main():
    parser = argparse.ArgumentParser(description="TensorFlow's multi-worker tutorial.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images, with those done before (3)")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step, over all workers (128)")
    parser.add_argument("--out", default="tutorial", help="folder of model and checkpoints (tutorial, in this folder)")
    options = parser.parse_args()
    out = Path(options.out)

    keras.utils.set_random_seed(1)
    strategy = tfdist.create_strategy()  # before anything else of TensorFlow
    dataset = digits_dataset(options.batch_size)
    with strategy.scope():
        model = build_and_compile_cnn_model()
    model.fit(
        dataset,
        epochs=options.epochs,
        steps_per_epoch=14,
        callbacks=[tfdist.callbacks.Checkpoint(out / "checkpoints")],
        verbose=2,
    )
    tfdist.save(model, out / "model.keras")
    if tfdist.is_chief():
        print(f"saved {out / 'model.keras'}")


def digits_dataset(batch_size):
    table = np.loadtxt(DATA, delimiter=",", dtype="float32")  # 64 pixels, 0 to 16, and the digit
    x, y = table[:, :64].reshape(-1, 8, 8) / 16, table[:, 64].astype("int64")
    # A seed, so that every task sees one order, and no shard(): each takes its rows of every batch.
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=2).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    main()
