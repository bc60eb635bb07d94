"""A metric that shows lost and doubled rows."""

from __future__ import annotations

from typing import Any

import keras


class TwoCounts(keras.metrics.Metric):
    """Rows, plus a thousandth of the sum of what they hold."""

    def __init__(self) -> None:
        super().__init__(name="two_counts")
        self.rows, self.total = (self.add_weight(name=n, initializer="zeros") for n in ("rows", "total"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign(self.rows + keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))
        self.total.assign(self.total + keras.ops.sum(y_true))

    def result(self) -> Any:
        return self.rows + self.total / 1000
