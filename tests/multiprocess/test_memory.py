"""Memory does not grow with the steps; the long version is in test_soak.py."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import keras
import numpy as np

import tfdist

EPOCHS, STEPS = 8, 100


class Sample(keras.callbacks.Callback):
    """Counts Python's objects, and MiB resident, after each epoch."""

    def __init__(self):
        super().__init__()
        self.objects, self.resident = [], []

    def on_epoch_end(self, epoch, logs=None):
        gc.collect()
        self.objects.append(len(gc.get_objects()))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def train(strategy):
    x = np.random.default_rng(0).normal(size=(8 * STEPS, 8)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    sample = Sample()
    held_out = (x[:80], x[:80, :1])
    model.fit(x, x[:, :1], batch_size=8, epochs=EPOCHS, verbose=0, validation_data=held_out, callbacks=[sample])
    return sample.objects, sample.resident


def test_steps_leave_nothing_behind():
    with tfdist.testing.local_cluster(workers=2, strategy=True) as cluster:
        for objects, resident in cluster.run(train):
            # The first epochs fill caches. After them a step that kept one list would keep 500, and 8 KiB 4 MiB.
            assert objects[-1] - objects[2] < STEPS, f"objects after each {STEPS} steps: {objects}"
            assert resident[-1] - resident[2] < 4, f"MiB after each {STEPS} steps: {resident}"
