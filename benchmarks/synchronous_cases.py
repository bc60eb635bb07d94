"""What `synchronous.py` trains: models, sizes and data, the same for every framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

WORKERS = 2
DIGITS = Path(__file__).parents[1] / "examples" / "data" / "digits.csv.gz"


@dataclass(frozen=True)
class Mlp:
    """Layers of so many units on as many inputs, then one output; mean squared error, SGD."""

    units: int
    layers: int
    batch_size: int  # of one worker
    steps: int  # of an epoch
    epochs: int = 1

    def __str__(self) -> str:
        return f"{self.layers} x Dense({self.units}), batch {self.batch_size} per worker, SGD"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rows = WORKERS * self.batch_size * self.steps
        x = np.random.default_rng(0).normal(size=(rows, self.units)).astype("float32")
        return x, x[:, :1].copy()


@dataclass(frozen=True)
class Digits:
    """The convolutional network of examples/digits.py on its 1,437 images; Adam, accuracy."""

    batch_size: int = 32
    epochs: int = 5

    def __str__(self) -> str:
        return f"convolutions on digits, batch {self.batch_size} per worker, Adam"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        table = np.loadtxt(DIGITS, delimiter=",", dtype="float32")[:1437]
        return table[:, :64].reshape(-1, 8, 8, 1) / 16, table[:, 64].astype("int64")


CASES = {
    "wide": Mlp(units=1024, layers=4, batch_size=256, steps=15),
    "wide-small-batch": Mlp(units=1024, layers=4, batch_size=64, steps=40),
    "narrow": Mlp(units=256, layers=4, batch_size=64, steps=300),
    "digits": Digits(),
    "quick": Mlp(units=8, layers=1, batch_size=8, steps=10),
}


def half(data: tuple[np.ndarray, np.ndarray], index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of one worker."""
    x, y = data
    return x[index::WORKERS].copy(), y[index::WORKERS].copy()
