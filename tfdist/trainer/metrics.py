"""States of metrics, one of each task -> those of all rows.

Each task keeps a metric's state for its own rows alone, and the states are merged where a number is shown: in batch
logs, epoch logs and what `evaluate` returns. Counts, sums and histograms, which is what every metric of Keras keeps,
add up. A metric whose state does not (a maximum, the last value, a sample of rows) says how it is merged:

    class Largest(keras.metrics.Metric):
        def merge_states(self, states):
            # One entry per task, in task order; each holds a value for every variable of the metric, in their order.
            # A task that has seen no row yet brings what reset_state() leaves.
            return [keras.ops.max(keras.ops.stack([value for (value,) in states]))]

`merge_states` returns one value per variable, by operations of `keras.ops` or TensorFlow, since it runs inside the
step. It must be right for states that were counted up separately, each from a reset, whatever their number. With
`trying.py` the first rows of the data are tried: two parts, merged, must give what they give together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import keras as internals

HOOK = "merge_states"


def flat(metrics: Any) -> list[Any]:
    """Returns the metrics inside Keras' own containers."""
    found: list[Any] = []
    for metric in metrics:
        inner = internals.metrics_inside(metric)
        found += flat(inner) if inner is not None else [metric]
    return found


def groups(metrics: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields variables that are merged together, with the metric that merges them, or None where they add up.

    A metric that holds others without a hook of its own leaves it to theirs.
    """
    for metric in flat(metrics):
        if hasattr(metric, HOOK):
            yield metric, list(metric.variables)
            continue
        inside = internals.metrics_of(metric)
        theirs = {id(variable) for one in inside for variable in one.variables}
        yield None, [variable for variable in metric.variables if id(variable) not in theirs]
        yield from groups(inside)


def separate_groups(metrics: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the same with each variable once, also where several metrics hold it."""
    seen: set[int] = set()
    found: list[tuple[Any, list[Any]]] = []
    for metric, variables in groups(metrics):
        mine = [variable for variable in variables if id(variable) not in seen]
        seen |= {id(variable) for variable in mine}
        found.append((metric, mine))
    return found


class States:
    """How the states of a model's metrics cross tasks: all travel in one sum.

    Args:
        metrics: `model.metrics`.
        index: This task's position.
        size: Number of tasks.
        starts: (variable, value) of those that are not zero after a reset: what is added to them adds up.

    Attributes:
        variables: Of all metrics, each once.
    """

    def __init__(
        self, metrics: Any, index: int, size: int, starts: Sequence[tuple[Any, np.ndarray[Any, Any]]] = ()
    ) -> None:
        self._index, self._size = index, size
        self._groups = separate_groups(metrics)
        self._starts = {id(variable): start for variable, start in starts}
        self.variables = [variable for _, variables in self._groups for variable in variables]

    def to_sum(self, states: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what this task adds to the sum."""
        return [
            self._in_own_place(state) if metric is not None else state - self._start(variable, state.dtype)
            for (metric, variable), state in zip(self._each(), states, strict=True)
        ]

    def merged(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the states of all rows from the sums."""
        rest = iter(sums)
        result: list[tf.Tensor] = []
        for metric, variables in self._groups:
            mine = [next(rest) for _ in variables]
            if metric is None:
                result += [s + self._start(v, s.dtype) for v, s in zip(variables, mine, strict=True)]
            else:
                typed = [tf.cast(s, v.dtype) for v, s in zip(variables, mine, strict=True)]
                result += merge(metric, [[values[task] for values in typed] for task in range(self._size)])
        return result

    def _each(self) -> Iterator[tuple[Any, Any]]:
        return ((metric, variable) for metric, variables in self._groups for variable in variables)

    def _start(self, variable: Any, dtype: tf.DType) -> Any:
        start = self._starts.get(id(variable))
        return tf.zeros([], dtype) if start is None else tf.constant(start, dtype)

    def _in_own_place(self, state: tf.Tensor) -> tf.Tensor:
        """The state in a row of its own, so that the sum over tasks holds them all."""
        state = tf.cast(state, tf.int32) if state.dtype == tf.bool else state
        nothing = tf.zeros_like(state)
        return tf.stack([state if task == self._index else nothing for task in range(self._size)])


def merge(metric: Any, states: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns what the metric's own hook makes of the states, as tensors of its variables' dtypes.

    Raises:
        ValueError: The hook returns another number of values than the metric has variables.
    """
    values = list(metric.merge_states([list(state) for state in states]))
    variables = metric.variables
    if len(values) != len(variables):
        raise ValueError(
            f"the metric {metric.name}: merge_states() returned {len(values)} values for {len(variables)} variables "
            f"({', '.join(variable.name for variable in variables)}); return one for each, in this order"
        )
    return [tf.cast(tf.convert_to_tensor(value), v.dtype) for v, value in zip(variables, values, strict=True)]


def cannot_be_merged(wrong: dict[str, str]) -> str:
    """Returns the words of the refusal; `wrong` is {metric: problem}, empty where only another task saw one."""
    problems = " and ".join(f"{name}: {problem}" for name, problem in wrong.items()) or "(on another task)"
    return (
        f"the states of a metric can't be merged over tasks: {problems}. Keep sums and counts, which add up, and form "
        f"the number in result(); or give the metric class a method {HOOK}(self, states) that returns the merged "
        "values, one per variable, from a list of values of each task; or compute it from predict() in a callback"
    )


def results_by_name(model: Any) -> dict[str, Any]:
    """Returns results as Keras' own step logs them, and under each metric's name as its guides do."""
    results = {**{metric.name: metric.result() for metric in model.metrics}, **model.get_metrics_result()}
    return as_tensors(results)


def as_tensors(results: Any) -> Any:
    """Returns values as they are now: a metric may return its variable itself, which may hold another one later."""
    # Keras 3.12 gives some as Python numbers, which are not float32.
    return keras.tree.map_structure(lambda r: r if isinstance(r, float) else tf.convert_to_tensor(r), results)


def same_structure(one: Any, other: Any) -> bool:
    """Whether two logs hold values in the same places."""
    try:
        tf.nest.assert_same_structure(one, other)
    except (TypeError, ValueError):
        return False
    return True


def all_equal(values: Sequence[tf.Tensor], others: Sequence[Any]) -> tf.Tensor:
    """Returns, as a scalar, whether two lists hold the same numbers."""
    equal = tf.constant(True)
    for value, other in zip(values, others, strict=True):
        other = tf.cast(other, value.dtype)
        both = (value == other) | ((value != value) & (other != other))  # NaN is NaN's equal here
        equal &= tf.reduce_all(both)
    return equal
