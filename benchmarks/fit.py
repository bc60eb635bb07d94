"""Prints how fast `fit` steps with one task of ours, as a share of plain Keras' steps per second.

    python benchmarks/fit.py [--repeats 5]

Both models live in one process and train in turns: ours was made in the strategy's scope, the other outside of it, so
that it runs Keras' own code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import keras
import numpy as np
import ratios

import tfdist


@dataclass(frozen=True)
class Size:
    """A model and how much of it is one measurement."""

    units: int
    layers: int
    batch_size: int
    steps: int

    def __str__(self) -> str:
        return f"{self.layers} x Dense({self.units}), batch {self.batch_size}, {self.steps} steps"


SIZES = (Size(8, 1, 8, 1000), Size(256, 3, 64, 300), Size(1024, 4, 256, 30))
QUICK = (Size(8, 1, 8, 20),)


def main() -> None:
    options = ratios.options("Compare fit of one task with plain Keras' fit.")
    strategy = tfdist.create_strategy()
    print(f"fit with one task / plain Keras, steps per second: median of {options.repeats} (least to most)", flush=True)
    for size in QUICK if options.quick else SIZES:
        ours, plain = trainer(size, strategy.scope()), trainer(size, nullcontext())
        ratios.show(str(size), [1 / ratio for ratio in ratios.compare(ours, plain, options.repeats)])


def trainer(size: Size, scope: object) -> Callable[[], float]:
    """Returns a function that trains for some steps and returns the seconds; it has been traced and is warm."""
    random = np.random.default_rng(0)
    x = random.normal(size=(size.batch_size * size.steps, size.units)).astype("float32")
    y = random.normal(size=(len(x), 1)).astype("float32")
    with scope:  # type: ignore[attr-defined]
        layers = [keras.layers.Dense(size.units, activation="relu") for _ in range(size.layers)]
        model = keras.Sequential([keras.Input((size.units,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")

    def train() -> float:
        start = time.perf_counter()
        model.fit(x, y, batch_size=size.batch_size, verbose=0)
        return time.perf_counter() - start

    train()
    return train


if __name__ == "__main__":
    main()
