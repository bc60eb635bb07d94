"""States of metrics over tasks: what each task adds to the sum, and what comes out of it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.trainer.metrics import States, groups


class Plain(keras.metrics.Metric):
    def __init__(self, dtype="int32"):
        super().__init__(name="plain")
        self.count = self.add_weight(name="count", dtype=dtype, initializer="zeros")


class Largest(Plain):
    def __init__(self):
        super().__init__("bool")
        self.largest = self.add_weight(name="largest", shape=(2,), initializer="zeros")

    def merge_states(self, states):
        seen, largest = zip(*states, strict=True)
        return [keras.ops.any(keras.ops.stack(seen)), keras.ops.max(keras.ops.stack(largest), axis=0)]


class Holding(Plain):
    def __init__(self):
        super().__init__("float32")
        self.one, self.other = keras.metrics.Mean(), Largest()


def over_tasks(metrics, states, **arguments):
    """What tasks with these states make of them, by one sum."""
    tasks = [States(metrics, index, len(states), **arguments) for index in range(len(states))]
    sent = [task.to_sum([tf.constant(v) for v in mine]) for task, mine in zip(tasks, states, strict=True)]
    sums = [tf.add_n(parts) for parts in zip(*sent, strict=True)]
    return [value.numpy() for value in tasks[0].merged(sums)]


def test_states_without_a_hook_add_up():
    assert over_tasks([Plain()], [[3], [0], [4]]) == [7]


def test_a_start_that_is_not_zero_is_counted_once():
    metric = Plain()
    assert over_tasks([metric], [[5], [8], [6]], starts=[(metric.count, np.array(5))]) == [9]


@pytest.mark.parametrize("states", [[[True, [1.0, -np.inf]], [False, [-3.0, np.nan]]], [[False, [np.inf, 0.0]]] * 3])
def test_a_hook_sees_the_state_of_each_task(states):
    seen, largest = over_tasks([Largest()], states)
    assert seen == any(state[0] for state in states)
    np.testing.assert_array_equal(largest, tf.reduce_max([state[1] for state in states], 0))


def test_a_metric_that_holds_others_leaves_the_merging_to_them():
    holding = Holding()
    found = [(metric, [v.name for v in variables]) for metric, variables in groups([holding])]
    assert found == [(None, ["count"]), (None, ["total", "count"]), (holding.other, ["count", "largest"])]
    merged = over_tasks([holding], [[1.0, 2.0, 3.0, True, [4.0, 0.0]], [10.0, 20.0, 30.0, False, [1.0, 5.0]]])
    assert [np.asarray(v).tolist() for v in merged] == [11.0, 22.0, 33.0, True, [4.0, 5.0]]
