"""Metrics of the user's own that can't be added up over tasks are found before they show a wrong number.

Each task keeps a metric's state for its own rows, and the states of all tasks are summed. That is right for counts,
sums and histograms, which is what every metric of Keras keeps, and wrong for a maximum or the last value seen. Nothing
in a class tells which it is, so the first rows are tried: two halves, summed, must give what they give together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import keras as internals
from tfdist.trainer.step import CaptureScope

# Sums of float32 in another order; a state that is no sum is off by far more.
TOLERANCE = 1e-3


def not_additive(model: Any, first_rows: Callable[[], Any]) -> list[str]:
    """Returns the names of the model's own metrics whose states can't be summed.

    Args:
        model: A built and compiled model.
        first_rows: Returns some rows of the model's data, one or more; called only where there is something to try.
    """
    custom = [metric for metric in _flat(model.metrics) if not type(metric).__module__.startswith("keras.")]
    if not custom:
        return []
    x, y, weight = internals.UNPACK.find()(first_rows())
    rows = int(tf.shape(tf.nest.flatten(x)[0])[0])
    # The same rows twice over, so that there are two halves of one row or more.
    x, y, weight = (_map(lambda t: tf.concat([t, t], 0), part) for part in (x, y, weight))
    y_pred = model(x, training=False)
    every = [v for metric in _flat(model.metrics) for v in metric.variables]

    def states(first: int, last: int) -> dict[int, np.ndarray]:
        """The states after these rows alone."""

        def part(value: Any) -> Any:
            return _map(lambda t: t[first:last], value)

        with CaptureScope([(v, tf.zeros(v.shape, v.dtype)) for v in every]) as scope:
            model.reset_metrics()
            if first != last:
                model.compute_metrics(part(x), part(y), part(y_pred), sample_weight=part(weight))
            return {id(v): np.asarray(scope.get_current_value(v), "float64") for v in every}

    none, whole = states(0, 0), states(0, 2 * rows)
    halves = [states(0, rows), states(rows, 2 * rows)]
    wrong = []
    for metric in custom:
        for variable in metric.variables:
            key = id(variable)
            summed = halves[0][key] + halves[1][key]
            # A state that does not start at zero would be counted once per task.
            if np.any(none[key] != 0) or not np.allclose(summed, whole[key], rtol=TOLERANCE, atol=1e-5):
                wrong.append(metric.name)
                break
    return wrong


def _flat(metrics: Any) -> list[Any]:
    """The metrics inside Keras' own containers."""
    found: list[Any] = []
    for metric in metrics:
        inner = internals.metrics_inside(metric)
        found += _flat(inner) if inner is not None else [metric]
    return found


def _map(function: Any, value: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), value)
