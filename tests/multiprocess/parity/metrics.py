"""Metrics: all of Keras, in evaluate with weights and masks, and those of the user's own with any state.

`tests/unit/trainer/test_every_metric.py` fails where Keras has a metric or a loss that stands in no table here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from parity.cases import Run, case, dense, fitted, regression, trained

layers, m = keras.layers, keras.metrics

ROWS = 23
_RANDOM = np.random.default_rng(4)
BINARY = (_RANDOM.uniform(size=(ROWS, 2)) < 0.4).astype("float32")
CLASSES = _RANDOM.integers(0, 3, ROWS)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
NUMBERS = np.abs(_RANDOM.normal(size=(ROWS, 3))).astype("float32") + 0.1
WEIGHT = _RANDOM.uniform(0.1, 3, ROWS).astype("float32")

# Each table goes with one kind of output; its metrics are made anew for each model.
OF_PROBABILITIES: dict[str, Callable[[], Any]] = {
    "AUC": lambda: m.AUC(num_thresholds=50),
    "AUC of logits": lambda: m.AUC(num_thresholds=20, from_logits=True, name="logits"),
    "BinaryAccuracy": m.BinaryAccuracy,
    "BinaryCrossentropy": m.BinaryCrossentropy,
    "BinaryIoU": m.BinaryIoU,
    "FalseNegatives": m.FalseNegatives,
    "FalsePositives": lambda: m.FalsePositives(thresholds=[0.3, 0.6]),
    "Precision": m.Precision,
    "PrecisionAtRecall": lambda: m.PrecisionAtRecall(0.5, num_thresholds=50),
    "Recall": lambda: m.Recall(top_k=1),
    "RecallAtPrecision": lambda: m.RecallAtPrecision(0.4, num_thresholds=50),
    "SensitivityAtSpecificity": lambda: m.SensitivityAtSpecificity(0.5, num_thresholds=50),
    "SpecificityAtSensitivity": lambda: m.SpecificityAtSensitivity(0.5, num_thresholds=50),
    "TrueNegatives": m.TrueNegatives,
    "TruePositives": m.TruePositives,
}
OF_ONE_HOT: dict[str, Callable[[], Any]] = {
    "CategoricalAccuracy": m.CategoricalAccuracy,
    "CategoricalCrossentropy": m.CategoricalCrossentropy,
    "CategoricalHinge": m.CategoricalHinge,
    "F1Score": m.F1Score,
    "FBetaScore": lambda: m.FBetaScore("weighted", beta=2.0, threshold=0.3),
    "KLDivergence": m.KLDivergence,
    "OneHotIoU": lambda: m.OneHotIoU(3, target_class_ids=[0, 2]),
    "OneHotMeanIoU": lambda: m.OneHotMeanIoU(3),
    "TopKCategoricalAccuracy": lambda: m.TopKCategoricalAccuracy(2),
}
OF_CLASSES: dict[str, Callable[[], Any]] = {
    "IoU": lambda: m.IoU(3, [0, 2], sparse_y_pred=False),
    "MeanIoU": lambda: m.MeanIoU(3, sparse_y_pred=False),
    "SparseCategoricalAccuracy": m.SparseCategoricalAccuracy,
    "SparseCategoricalCrossentropy": m.SparseCategoricalCrossentropy,
    "SparseTopKCategoricalAccuracy": lambda: m.SparseTopKCategoricalAccuracy(2),
}
OF_NUMBERS: dict[str, Callable[[], Any]] = {
    "Accuracy": m.Accuracy,
    "ConcordanceCorrelation": m.ConcordanceCorrelation,
    "ConcordanceCorrelation along rows": lambda: m.ConcordanceCorrelation(axis=0, name="concordance_0"),
    "CosineSimilarity": m.CosineSimilarity,
    "Hinge": m.Hinge,
    "LogCoshError": m.LogCoshError,
    "MeanAbsoluteError": m.MeanAbsoluteError,
    "MeanAbsolutePercentageError": m.MeanAbsolutePercentageError,
    "MeanMetricWrapper": lambda: m.MeanMetricWrapper(lambda t, p: keras.ops.mean(abs(t - p), axis=-1), name="wrapped"),
    "MeanSquaredError": m.MeanSquaredError,
    "MeanSquaredLogarithmicError": m.MeanSquaredLogarithmicError,
    "PearsonCorrelation": m.PearsonCorrelation,
    "PearsonCorrelation along rows": lambda: m.PearsonCorrelation(axis=0, name="pearson_0"),
    "Poisson": m.Poisson,
    "R2Score": lambda: m.R2Score(class_aggregation=None),
    "RootMeanSquaredError": m.RootMeanSquaredError,
    "SquaredHinge": m.SquaredHinge,
}
# Updated by a step of the user's own, since they take values and no y_true: `values_in_a_step_of_your_own`.
OF_VALUES = ["Mean", "Sum"]
TABLES = {"probabilities": OF_PROBABILITIES, "one_hot": OF_ONE_HOT, "classes": OF_CLASSES, "numbers": OF_NUMBERS}


class BatchLogs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[np.ndarray] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rows.append(np.concatenate([np.ravel(logs[name]) for name in sorted(logs)]))


@case
def every_metric_of_keras(run: Run) -> dict:
    """Every metric of Keras, in epoch and batch logs, without and with sample weights."""
    targets = {"probabilities": BINARY, "one_hot": ONE_HOT, "classes": CLASSES, "numbers": NUMBERS}
    sizes = {"probabilities": (2, "sigmoid"), "one_hot": (3, "softmax"), "classes": (3, "softmax")}
    x, _ = regression(ROWS, 3)
    with run.scope():
        inputs = keras.Input((6,))
        outputs = {}
        for name in targets:
            size, activation = sizes.get(name, (3, "softplus"))
            outputs[name] = layers.Dense(size, activation=activation, name=name)(inputs)
        model = keras.Model(inputs, outputs)
        model.compile(
            loss={**dict.fromkeys(targets, "mse"), "classes": "sparse_categorical_crossentropy"},
            metrics={name: [make() for make in table.values()] for name, table in TABLES.items()},
            weighted_metrics={"probabilities": [m.AUC(num_thresholds=20), "accuracy"], "numbers": ["mae", "mse"]},
            run_eagerly=True,
        )
    logs = BatchLogs()
    result = model.evaluate(x, targets, 12, verbose=0, sample_weight=WEIGHT, callbacks=[logs], return_dict=True)
    return {"batch logs": np.array(logs.rows), **{f"log {name}": np.array(value) for name, value in result.items()}}


@case
def metrics_by_name_with_a_mask(run: Run) -> dict:
    """Metrics by name, behind a mask and with weights for each time step."""
    random = np.random.default_rng(1)
    ids = random.integers(1, 9, (ROWS, 7)) * (np.arange(7) < random.integers(2, 8, (ROWS, 1)))
    classes, weight = random.integers(0, 3, (ROWS, 7)), random.uniform(0.1, 2, (ROWS, 7)).astype("float32")
    with run.scope():
        inputs = keras.Input((7,), dtype="int32")
        hidden = layers.Embedding(9, 5, mask_zero=True)(inputs)
        model = keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))
        model.compile(
            "adam",
            "sparse_categorical_crossentropy",
            metrics=["accuracy", m.SparseTopKCategoricalAccuracy(2)],
            weighted_metrics=["accuracy", "sparse_categorical_crossentropy"],
            steps_per_execution=2,
            jit_compile=False,
        )
    return fitted(model, ids.astype("int32"), classes, batch_size=4, sample_weight=weight)


class Values(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean, self.sum = dense(), m.Mean(name="mean"), m.Sum(name="sum")

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> dict:
        logs = super().train_step(data)
        errors = abs(data[1] - self(data[0]))
        self.mean.update_state(errors)
        self.sum.update_state(errors)
        return {**logs, "mean": self.mean.result(), "sum": self.sum.result()}


@case
def values_in_a_step_of_your_own(run: Run) -> dict:
    """`Mean` and `Sum` of values, updated by a `train_step`."""
    return trained(run, model=Values)


@case
def additive_metrics(run: Run) -> dict:
    """AUC of several labels, F1, precision, recall, IoU, accuracy, top-k, R2, while training."""
    x, y = regression(41)
    labels = np.eye(3, dtype="float32")[np.digitize(y[:, 0], [-0.5, 0.5])]
    with run.scope():
        model = dense(3, "softmax")
        model.compile(
            "adam",
            "categorical_crossentropy",
            metrics=[
                m.AUC(num_thresholds=20, multi_label=True, num_labels=3, curve="PR"),
                m.F1Score(),
                m.Precision(),
                m.Recall(),
                m.OneHotMeanIoU(3),
                m.CategoricalAccuracy(),
                m.TopKCategoricalAccuracy(2),
                m.R2Score(),
            ],
            jit_compile=False,
        )
    return fitted(model, x, labels, batch_size=13, validation_data=(x[:9], labels[:9]))


# -- of the user's own


class WithinHalf(keras.metrics.Metric):
    """A metric of the user's own: a share of all values, kept as two counts and a histogram."""

    def __init__(self) -> None:
        super().__init__(name="within_half")
        self.near = self.add_weight(name="near", initializer="zeros")
        self.all = self.add_weight(name="all", initializer="zeros")
        self.histogram = self.add_weight(name="histogram", shape=(4,), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.abs(y_true - y_pred)
        self.near.assign_add(keras.ops.sum(keras.ops.cast(error < 0.5, "float32")))
        self.all.assign_add(keras.ops.cast(keras.ops.size(error), "float32"))
        bins = keras.ops.cast(keras.ops.minimum(error, 3.0), "int32")
        self.histogram.assign_add(keras.ops.sum(keras.ops.one_hot(keras.ops.reshape(bins, (-1,)), 4), axis=0))

    def result(self) -> Any:
        return self.near / self.all + keras.ops.max(self.histogram) / 1000


@case(core=True)
def custom_metric(run: Run) -> dict:
    """A metric of your own of counts and sums."""
    return trained(run, metrics=[WithinHalf(), "mae"], validation_data=regression(7, 1), rows=41)


class Extremes(m.Metric):
    """Largest and smallest error, the last one, and how many were seen: no state but the count adds up."""

    def __init__(self, name: str = "extremes") -> None:
        super().__init__(name=name)
        self.count = self.add_weight(name="count", dtype="int32", initializer="zeros")
        self.largest = self.add_weight(name="largest", initializer=keras.initializers.Constant(-np.inf))
        self.smallest = self.add_weight(name="smallest", initializer=keras.initializers.Constant(np.inf))
        self.last = self.add_weight(name="last", shape=(2,), initializer="zeros")
        self.any_big = self.add_weight(name="any_big", dtype="bool", initializer=lambda shape, dtype: np.array(False))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = y_true - y_pred
        self.count.assign_add(keras.ops.shape(error)[0])
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(error)))
        self.smallest.assign(keras.ops.minimum(self.smallest, keras.ops.min(error)))
        self.last.assign(keras.ops.concatenate([error[-1], y_true[-1]]))
        self.any_big.assign(keras.ops.logical_or(self.any_big, keras.ops.any(error > 1.0)))

    def reset_state(self) -> None:
        self.count.assign(0)
        self.largest.assign(-np.inf)
        self.smallest.assign(np.inf)
        self.last.assign([0.0, 0.0])
        self.any_big.assign(False)

    def result(self) -> dict:
        return {
            "largest": self.largest + 0.0,
            "smallest": self.smallest + 0.0,
            "last": self.last[0] + 10 * self.last[1],
            "count": self.count + 0,
            "any_big": keras.ops.cast(self.any_big, "float32"),
        }

    def merge_states(self, states: Any) -> Any:
        counts, largest, smallest, last, any_big = (keras.ops.stack(values) for values in zip(*states, strict=True))
        # The last task that has seen a row.
        order = keras.ops.arange(len(states)) * keras.ops.cast(counts > 0, "int32")
        return [
            keras.ops.sum(counts),
            keras.ops.max(largest),
            keras.ops.min(smallest),
            last[keras.ops.argmax(order)],
            keras.ops.any(any_big),
        ]


class Counting(m.Metric):
    """Integers that add up, a start that is not zero, and a constant that no reset touches."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.scale = self.add_weight(name="scale", initializer=keras.initializers.Constant(3.0))
        self.rows = self.add_weight(name="rows", dtype="int64", initializer="zeros")
        self.bins = self.add_weight(name="bins", shape=(3,), initializer="ones")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "int64"))
        index = keras.ops.cast(keras.ops.clip(y_true[:, 0] + 1, 0, 2), "int32")
        self.bins.assign_add(keras.ops.sum(keras.ops.one_hot(index, 3), axis=0))

    def reset_state(self) -> None:
        self.rows.assign(0)
        self.bins.assign([1.0, 1.0, 1.0])

    def result(self) -> Any:
        return keras.ops.sum(self.bins * self.bins) * self.scale + keras.ops.cast(self.rows, "float32")


class Holding(m.Metric):
    """Holds other metrics, one of which says how it is merged, and a sum of its own."""

    def __init__(self) -> None:
        super().__init__(name="holding")
        self.mean, self.extremes = m.MeanSquaredError(), Extremes("inner")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(y_true, y_pred, sample_weight)
        self.extremes.update_state(y_true, y_pred)
        self.total.assign_add(keras.ops.sum(y_pred))

    def reset_state(self) -> None:
        self.mean.reset_state()
        self.extremes.reset_state()
        self.total.assign(0)

    def result(self) -> Any:
        return self.mean.result() + self.extremes.result()["largest"] + self.total


@case(core=True)
def metrics_that_merge_their_states(run: Run) -> dict:
    """Metrics of your own with `merge_states` (a maximum, the last value, truth values), and that hold others."""
    metrics = [Extremes(), Holding(), Counting()]
    return trained(run, metrics=metrics, rows=29, batch_size=7, validation_data=regression(9, 1))


class FirstRows(m.Metric):
    """A sample of rows: those with the largest targets; any order of it is as good."""

    def __init__(self, size: int = 4) -> None:
        super().__init__(name="sample")
        self.size = size
        self.rows = self.add_weight(name="rows", shape=(size, 2), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        pairs = keras.ops.concatenate([abs(y_true), y_pred], axis=-1)
        self.rows.assign(self.kept(keras.ops.concatenate([self.rows, pairs], axis=0)))

    def kept(self, rows: Any) -> Any:
        return keras.ops.take(rows, keras.ops.top_k(rows[:, 0], self.size)[1], axis=0)

    def result(self) -> Any:
        return keras.ops.std(self.rows[:, 1])

    def merge_states(self, states: Any) -> Any:
        return [self.kept(keras.ops.concatenate([rows for (rows,) in states], axis=0))]


@case
def sample_of_rows(run: Run) -> dict:
    """A metric of your own that keeps a sample of the rows, eagerly and on single batches."""
    x, y = regression(26)
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=[FirstRows()], run_eagerly=True)
    logs = [
        model.train_on_batch(x[:13], y[:13], class_weight=None, return_dict=True),
        model.train_on_batch(x[13:], y[13:], sample_weight=np.linspace(0, 1, 13, dtype="float32"), return_dict=True),
        model.test_on_batch(x[:1], y[:1], return_dict=True),
        model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True),
    ]
    return {f"logs {i}": np.array([log[name] for name in sorted(log)]) for i, log in enumerate(logs)}
