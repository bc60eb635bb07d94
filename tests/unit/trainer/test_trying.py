"""Losses and metrics of the user's own, tried on the first rows: which add up, and what is wrong with the others."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tfdist.trainer.trying import Trial

ops = keras.ops
X = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
Y = np.abs(X[:, :1]) + 0.1


@pytest.fixture(scope="module", autouse=True)
def hooks():
    tfdist.create_strategy(environ={})  # puts them in place


def trial(rows=9, first_rows=None, **compile_arguments):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="softplus")])
    model.compile("sgd", run_eagerly=True, **{"loss": "mse", **compile_arguments})
    model.evaluate(X, Y, verbose=0)  # builds losses and metrics
    some = (ops.convert_to_tensor(X[:rows]), ops.convert_to_tensor(Y[:rows]))
    return Trial(model, lambda: some if first_rows is None else first_rows)


def of_rows(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2, axis=-1)


def scalar_mean(y_true, y_pred):
    return ops.mean(abs(y_true - y_pred))


def root(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


def summed(y_true, y_pred):
    return ops.sum((y_true - y_pred) ** 2)


def contrast(y_true, y_pred):
    return ops.logsumexp(y_pred @ ops.transpose(y_true), axis=1)


class OwnClass(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return root(y_true, y_pred)


@pytest.mark.parametrize("rows", [9, 2, 1])
@pytest.mark.parametrize(
    ("function", "whole"),
    [(of_rows, False), (scalar_mean, False), (root, True), (summed, True), (contrast, True), (OwnClass(), True)],
)
def test_a_function_whose_parts_do_not_add_up_needs_the_whole_batch(function, whole, rows):
    assert trial(rows, loss=function).need_the_whole_batch() == [whole]


def test_functions_given_as_metrics_are_tried_too():
    assert trial(metrics=[of_rows, root, "mae"]).need_the_whole_batch() == [False, True]


def test_a_function_that_can_not_be_tried_is_left_as_it_is():
    features = (ops.ones((4, 3)),)  # a step of the user's own may make something else of a batch
    assert trial(first_rows=features, loss=root).need_the_whole_batch() == [False]


def test_what_is_keras_own_is_not_tried():
    assert not trial(loss=keras.losses.Dice(), metrics=["mae", keras.metrics.AUC()])


class State(keras.metrics.Metric):
    """One number, updated by the function given."""

    def __init__(self, update, start=0.0, **kwargs):
        super().__init__(name="state", **kwargs)
        self.update, self.start = update, start
        self.value = self.add_weight(name="value", initializer=keras.initializers.Constant(start))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.update(self.value, y_true))

    def reset_state(self):
        self.value.assign(self.start)

    def result(self):
        return self.value + 0.0


class WithHook(State):
    def __init__(self, update, merge, start=0.0):
        super().__init__(update, start)
        self.merge = merge

    def merge_states(self, states):
        return [self.merge(ops.stack([value for (value,) in states]))]


def largest(value, y):
    return ops.maximum(value, ops.max(y))


@pytest.mark.parametrize("rows", [9, 1])
def test_a_state_that_adds_up_is_right_wherever_it_starts(rows):
    adding = State(lambda value, y: value + ops.sum(y), start=5.0)
    tried = trial(rows, metrics=[adding])
    assert tried.what_is_wrong() == {}
    assert [(v.name, float(start)) for v, start in tried.starts()] == [("value", 5.0)]


@pytest.mark.parametrize(
    "metric",
    [
        State(largest),
        State(lambda value, y: y[-1, 0]),
        State(lambda value, y: ops.minimum(value, ops.min(y)), start=np.inf),
        State(lambda value, y: value + 1.0),
    ],
    ids=["maximum", "last", "minimum from infinity", "batches"],
)
def test_a_state_that_does_not_add_up_is_told_with_its_numbers(metric):
    assert "its value is" in trial(metrics=[metric]).what_is_wrong()["state"]


def test_a_hook_that_is_right_is_taken():
    assert trial(metrics=[WithHook(largest, ops.max)]).what_is_wrong() == {}


@pytest.mark.parametrize("merge", [ops.mean, ops.min, ops.sum, lambda values: values[0]])
def test_a_hook_that_makes_another_state_is_told_with_its_numbers(merge):
    assert "merge_states() makes [" in trial(metrics=[WithHook(largest, merge)]).what_is_wrong()["state"]


def test_a_hook_that_minds_tasks_without_rows_is_told():
    smallest = WithHook(lambda value, y: ops.minimum(ops.where(value == 0, 9.0, value), ops.min(y)), ops.min)
    assert "no rows" in trial(metrics=[smallest]).what_is_wrong()["state"]


def test_a_metric_that_draws_random_numbers_is_not_judged():
    drawn = State(lambda value, y: keras.random.uniform(()))
    assert trial(metrics=[drawn]).what_is_wrong() == {}


def test_trying_leaves_the_states_of_metrics_as_they_were():
    tried = trial(metrics=[State(lambda value, y: value + ops.sum(y))])
    before = [float(v) for m in tried.metrics for v in m.variables]
    tried.what_is_wrong()
    tried.need_the_whole_batch()
    assert [float(v) for m in tried.metrics for v in m.variables] == before
    assert before[0] > 0
