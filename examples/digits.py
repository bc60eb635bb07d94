"""Trains a small network to read handwritten digits, alone or on several workers: the same losses either way.

    python examples/digits.py
    python -m tfdist.run --workers 2 examples/digits.py

Of the 1,797 images (data/README.md says whose), shuffled by a fixed seed, 1,437 are trained on and 360 are the test
set. The model is saved once, by the chief. A fresh process then loads it, with plain Keras, and prints last:

    test accuracy 0.9944
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
TEST_IMAGES = 360


def main():
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images (12)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all workers (64)")
    parser.add_argument("--out", default="digits.keras", help="where the model goes (digits.keras, in this folder)")
    parser.add_argument("--evaluate", metavar="FILE", help="train nothing: print the test accuracy of this model")
    options = parser.parse_args()
    if options.evaluate:
        evaluate(options.evaluate)
    else:
        train(options.epochs, options.batch_size, options.out)


def train(epochs, batch_size, out):
    keras.utils.set_random_seed(7)
    strategy = tfdist.create_strategy()  # before anything else of TensorFlow
    (x, y), _ = load_digits()
    with strategy.scope():
        model = build_model()
        steps = epochs * -(-len(x) // batch_size)
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, steps)),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    # A live bar for a terminal, a line per epoch for a file.
    model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=1 if sys.stdout.isatty() else 2)

    tfdist.save(model, out)
    if tfdist.is_chief():
        print(f"saved {out}", flush=True)
        # The new process is no task of the cluster.
        environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG" and not k.startswith("TFDIST_")}
        subprocess.run([sys.executable, __file__, "--evaluate", out], env=environ, check=True)


def build_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def evaluate(path):
    _, (x, y) = load_digits()
    _, accuracy = keras.saving.load_model(path).evaluate(x, y, verbose=0)
    print(f"test accuracy {accuracy:.4f}")


def load_digits():
    """Returns (images, digits) to train on and (images, digits) to test with."""
    table = np.loadtxt(DATA, delimiter=",", dtype="float32")  # 64 pixels, 0 to 16, and the digit
    table = np.random.default_rng(0).permutation(table)
    x, y = table[:, :64].reshape(-1, 8, 8, 1) / 16, table[:, 64].astype("int32")
    return (x[:-TEST_IMAGES], y[:-TEST_IMAGES]), (x[-TEST_IMAGES:], y[-TEST_IMAGES:])


if __name__ == "__main__":
    main()
