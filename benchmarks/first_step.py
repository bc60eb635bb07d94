"""Makes one step of a small model and says how long ago BENCHMARK_START was: `first_step.py plain|default|synchronous`.

`launch.py` runs it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext

import keras
import numpy as np


def main(kind: str) -> None:
    scope, is_chief = nullcontext(), True
    if kind != "plain":
        import tfdist

        scope = tfdist.create_strategy(None if kind == "default" else kind).scope()
        is_chief = tfdist.is_chief()
    with scope:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((8, 8), "float32"), np.ones((8, 1), "float32"), batch_size=8, verbose=0)
    if is_chief:
        print(f"first step after {time.time() - float(os.environ['BENCHMARK_START']):.3f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
