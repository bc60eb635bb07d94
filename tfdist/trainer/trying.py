"""Losses and metrics of the user's own, tried on the first rows before they show a wrong number.

Nothing in a function or class tells whether its parts add up to the whole, so it is tried: what two parts of the rows
give must give what they give together. A loss or metric function that fails sees the whole batch from then on
(`whole_batch.py`); a metric class that fails is refused, since no one but its author knows how its states are merged
(`metrics.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component
from tfdist.trainer.metrics import HOOK, flat, groups, merge
from tfdist.trainer.step import CaptureScope
from tfdist.trainer.whole_batch import is_whole

logger = logging.getLogger(__name__)

# Sums of float32 in another order; what does not add up is off by far more.
TOLERANCE = 1e-3
# The same of functions. Where it is too strict, a loss that needs no other rows sees them, which is right as well.
TOLERANCE_OF_FUNCTIONS = 1e-4
# Few rows may add up by chance: a root of a mean does where all are equally wrong.
FEW_ROWS = 8
_recording = threading.local()


def recorded(function: Any, y_true: Any, y_pred: Any) -> None:
    """Called by the hooks for each loss and metric function that runs."""
    calls = getattr(_recording, "calls", None)
    if calls is not None:
        calls.append((function, y_true, y_pred))


@contextmanager
def _recorded_calls() -> Iterator[list[tuple[Any, Any, Any]]]:
    _recording.calls = []
    try:
        yield _recording.calls
    finally:
        _recording.calls = None


class Trial:
    """The losses and metrics of a compiled model, tried on some of its rows.

    Args:
        model: A built and compiled model.
        first_rows: Returns rows of the model's data, one or more; called only where there is something to try.

    Attributes:
        functions: Losses and metrics of the user's own that are functions of (y_true, y_pred), the same on every task.
        metrics: Metric classes of the user's own, the same on every task.
    """

    def __init__(self, model: Any, first_rows: Callable[[], Any]) -> None:
        self._model, self._first_rows = model, first_rows
        every = flat(model.metrics)
        functions = [(loss, *internals.function_of_loss(loss)) for loss in internals.compiled_losses(model)]
        functions += [(m, *internals.function_of_metric(m)) for m in every if _is_wrapper(m)]
        self.functions = [
            owner
            for owner, function, arguments in functions
            if _is_own(owner if function is None else function) and not is_whole(owner, function, arguments, None)
        ]
        self.metrics = [m for m in every if not _is_wrapper(m) and (_is_own(m) or hasattr(m, HOOK))]
        self._variables = [variable for metric in every for variable in metric.variables]
        self._rows: tuple[Any, Any, Any, Any, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.functions or self.metrics)

    # -- functions

    def need_the_whole_batch(self) -> list[bool]:
        """Returns, for each of `functions`, whether its values for parts of the rows miss that of all."""
        if not self.functions:
            return []
        try:
            return self._try_functions()
        except Exception:
            # A step of the user's own may call them with something else, or the model not at all; a loss may need more
            # of a tensor than its rows. What is wrong with a loss itself, the first step will tell.
            names = ", ".join(function.name for function in self.functions)
            logger.info("%s could not be tried on the first rows of the data", names, exc_info=True)
            return [False for _ in self.functions]

    def _try_functions(self) -> list[bool]:
        x, y, y_pred, weight, count = self._whole()
        with CaptureScope(self._now()), _recorded_calls() as calls:
            compiled = internals.compiled_loss(self._model)
            if compiled is not None and y is not None:
                compiled(y, y_pred, weight)
            self._model.compute_metrics(x, y, y_pred, sample_weight=weight)
        tried = {id(owner): (owner, y_true, y_pred) for owner, y_true, y_pred in calls}
        return [id(f) in tried and not _adds_up(*tried[id(f)], count) for f in self.functions]

    # -- metrics

    def what_is_wrong(self) -> dict[str, str]:
        """Returns, by the names of those of `metrics` that can't be merged, what is wrong with their states."""
        if not self.metrics:
            return {}
        count = self._whole()[-1]
        cut = max(1, count // 3)
        none, whole, again = self._states(0, 0), self._states(0, count), self._states(0, count)
        parts = [self._states(0, cut), self._states(cut, count)]
        wrong = {}
        for metric in self.metrics:
            for merging, variables in groups([metric]):
                keys = [id(variable) for variable in variables]
                mine = [[states[key] for key in keys] for states in (none, whole, *parts)]
                if not _all_close([again[key] for key in keys], mine[1]):
                    continue  # it draws random numbers: two runs over the same rows differ, and nothing can be told
                problem = _problem_of_sum(variables, *mine) if merging is None else _problem_of_hook(merging, *mine)
                if problem:
                    wrong[metric.name] = problem
        return wrong

    def starts(self) -> list[tuple[Any, np.ndarray[Any, Any]]]:
        """Returns the variables of `metrics` that are not zero after a reset, and what they are."""
        if not self.metrics:
            return []
        none = self._states(0, 0)
        added = [v for merging, variables in groups(self.metrics) if merging is None for v in variables]
        return [(v, none[id(v)]) for v in added if np.any(none[id(v)] != 0)]

    # -- rows

    def _whole(self) -> tuple[Any, Any, Any, Any, int]:
        if self._rows is None:
            x, y, weight = internals.UNPACK.find()(self._first_rows())
            count = int(tf.shape(tf.nest.flatten(x)[0])[0])
            y_pred = self._model(x, training=False)
            self._rows = x, y, y_pred, weight, count
            for _ in range(1 if count >= FEW_ROWS else 3):
                self._rows = _with_other_predictions(*self._rows)
        return self._rows

    def _now(self) -> list[tuple[Any, tf.Tensor]]:
        return [(v, tf.convert_to_tensor(local_component(internals.native(v)))) for v in self._variables]

    def _states(self, first: int, last: int) -> dict[int, np.ndarray[Any, Any]]:
        """The states after a reset and these rows alone."""
        x, y, y_pred, weight, _ = self._whole()
        with CaptureScope(self._now()) as scope:
            self._model.reset_metrics()
            if first != last:
                parts = [_map(lambda t: _slice(t, first, last), part) for part in (x, y, y_pred, weight)]
                self._model.compute_metrics(parts[0], parts[1], parts[2], sample_weight=parts[3])
            return {id(v): np.asarray(scope.get_current_value(v)) for v in self._variables}


def _with_other_predictions(x: Any, y: Any, y_pred: Any, weight: Any, count: int) -> tuple[Any, Any, Any, Any, int]:
    """The rows, and the same again with other predictions: parts of them differ, whatever the data."""
    other = _map(lambda t: t * tf.cast(0.6, t.dtype) if t.dtype.is_floating else t, y_pred)
    return _join(x, x), _join(y, y), _join(y_pred, other), _join(weight, weight), 2 * count


def _problem_of_sum(variables: Any, none: Any, whole: Any, first: Any, second: Any) -> str:
    for variable, n, w, a, b in zip(variables, none, whole, first, second, strict=True):
        n, w, a, b = (np.asarray(value, "float64") for value in (n, w, a, b))
        with np.errstate(invalid="ignore"):
            total = a + b - n
        if not _all_close([total], [w]):
            return (
                f"its {variable.name} is {_number(a)} and {_number(b)} after two parts of the first rows, and "
                f"{_number(w)} after both"
            )
    return ""


def _problem_of_hook(metric: Any, none: Any, whole: Any, first: Any, second: Any) -> str:
    for states, what in (
        ([first, second], "two parts of the first rows"),
        ([none, whole], "no rows and the first rows"),
        ([whole, none], "the first rows and no rows"),
    ):
        merged = [np.asarray(value) for value in merge(metric, [_typed(metric, state) for state in states])]
        # Two orders of the same sample are as good as each other: the numbers that come out count, too.
        if not _all_close(merged, whole) and not _same_result(metric, merged, whole):
            return (
                f"its merge_states() makes {_numbers(merged)} of the states of {what}, {_numbers(states[0])} and "
                f"{_numbers(states[1])}, where all rows in one task give {_numbers(whole)}"
            )
    return ""


def _typed(metric: Any, state: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.constant(value, v.dtype) for v, value in zip(metric.variables, state, strict=True)]


def _same_result(metric: Any, one: Sequence[Any], other: Sequence[Any]) -> bool:
    def result(state: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        with CaptureScope(list(zip(metric.variables, _typed(metric, state), strict=True))):
            return [np.asarray(value) for value in keras.tree.flatten(metric.result())]

    return _all_close(result(one), result(other))


def _adds_up(owner: Any, y_true: Any, y_pred: Any, count: int) -> bool:
    """Whether a function's value for all rows is the mean of its values for two parts, or all of their entries."""
    cut = max(1, count // 3)

    def value(first: int, last: int) -> np.ndarray[Any, Any]:
        t, p = (_map(lambda leaf: _slice(_dense(leaf, owner.dtype), first, last), part) for part in (y_true, y_pred))
        if _is_wrapper(owner):
            function, arguments = internals.function_of_metric(owner)
            return np.asarray(function(t, p, **arguments), "float64")
        has_own_call = type(owner).__call__ is not keras.losses.Loss.__call__
        return np.asarray(owner(t, p) if has_own_call else owner.call(t, p), "float64")

    whole, first, second = value(0, count), value(0, cut), value(cut, count)
    if whole.ndim and len(whole) == count and len(first) == cut:
        return _all_close([np.concatenate([first, second])], [whole], TOLERANCE_OF_FUNCTIONS)
    mean = (cut * first + (count - cut) * second) / count
    return whole.shape == first.shape and _all_close([mean], [whole], TOLERANCE_OF_FUNCTIONS)


def _dense(leaf: Any, dtype: str) -> Any:
    return keras.ops.convert_to_tensor(leaf, dtype=dtype)


def _is_wrapper(metric: Any) -> bool:
    return isinstance(metric, keras.metrics.MeanMetricWrapper)


def _is_own(part: Any) -> bool:
    """Whether a function, or an object's class, is not Keras'."""
    return not (getattr(part, "__module__", None) or "").startswith("keras.")


def _slice(tensor: Any, first: int, last: int) -> Any:
    return tf.sparse.to_dense(tensor)[first:last] if isinstance(tensor, tf.SparseTensor) else tensor[first:last]


def _join(one: Any, other: Any) -> Any:
    def join(a: Any, b: Any) -> Any:
        if a is None:
            return None
        return tf.sparse.concat(0, [a, b]) if isinstance(a, tf.SparseTensor) else tf.concat([a, b], 0)

    return keras.tree.map_structure(join, one, other)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), value)


def _all_close(ones: Sequence[Any], others: Sequence[Any], tolerance: float = TOLERANCE) -> bool:
    return all(
        np.shape(one) == np.shape(other)
        and np.allclose(
            np.asarray(one, "float64"),
            np.asarray(other, "float64"),
            rtol=tolerance,
            atol=tolerance / 100,
            equal_nan=True,
        )
        for one, other in zip(ones, others, strict=True)
    )


def _number(value: Any) -> str:
    return np.array2string(np.asarray(value), precision=4, threshold=6, edgeitems=2)


def _numbers(values: Sequence[Any]) -> str:
    return "[" + ", ".join(_number(value) for value in values) + "]"
