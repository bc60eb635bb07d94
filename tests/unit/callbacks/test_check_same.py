"""`tfdist.callbacks.CheckSame` and `tfdist.check_same` on one task, which is always the same as itself."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist


@pytest.mark.parametrize("every_steps", [0, -1, True, 1.5, "2", None])
def test_how_often_must_be_a_number_of_steps(every_steps):
    with pytest.raises(ValueError, match=r"every_steps must be a whole number from 1 on, not"):
        tfdist.callbacks.CheckSame(every_steps)


def test_one_task_trains_as_without(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[tfdist.callbacks.CheckSame(1)])
    tfdist.check_same(model, "after training")


def test_a_model_of_no_strategy_trains_as_without():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[tfdist.callbacks.CheckSame(1)])
    tfdist.check_same([variable.value for variable in model.variables])
