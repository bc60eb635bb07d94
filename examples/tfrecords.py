"""TFRecord files, written once by the chief, and a training that reads them exactly, whatever their number and sizes.

    python examples/tfrecords.py
    python -m tfdist.run --workers 2 examples/tfrecords.py

Shows `tfdist.is_chief` and `tfdist.barrier` around what only one task may do, `tfdist.data.from_files`, whose parsing
the tasks share, and `tfdist.data.audit`, which prints how many examples each of two tasks gets in each step, and that
none comes twice or never. The three files hold 1,000, 700 and 97 of the 1,797 digits (data/README.md says whose), and
yet every batch is that of one process. With workers on several hosts, give a folder that all of them see.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
FILES = {"a": slice(0, 1000), "b": slice(1000, 1700), "c": slice(1700, None)}


def main():
    parser = argparse.ArgumentParser(description="Write TFRecord files and train from them.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images (3)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all workers (64)")
    parser.add_argument("--out", default="digits-tfrecords", help="folder of the files (digits-tfrecords, in this one)")
    options = parser.parse_args()
    out = Path(options.out)

    keras.utils.set_random_seed(4)
    strategy = tfdist.create_strategy()  # before anything else of TensorFlow
    if tfdist.is_chief():
        write(out)
    tfdist.barrier("the files are written")

    train = tfdist.data.from_files(
        out / "digits-*.tfrecord",
        tf.data.TFRecordDataset,
        parse,
        global_batch_size=options.batch_size,
        shuffle=True,
        seed=4,
    )
    if tfdist.is_chief():
        print(tfdist.data.audit(train, tasks=2), flush=True)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(train, epochs=options.epochs, verbose=2)


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    table = np.loadtxt(DATA, delimiter=",", dtype="uint8")  # 64 pixels, 0 to 16, and the digit
    for name, rows in FILES.items():
        with tf.io.TFRecordWriter(str(folder / f"digits-{name}.tfrecord")) as file:
            for row in table[rows]:
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[row[:64].tobytes()])),
                    "digit": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(row[64])])),
                }
                file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def parse(record):
    features = {"image": tf.io.FixedLenFeature([], tf.string), "digit": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(record, features)
    image = tf.reshape(tf.io.decode_raw(example["image"], tf.uint8), (8, 8, 1))
    return tf.cast(image, tf.float32) / 16, example["digit"]


if __name__ == "__main__":
    main()
