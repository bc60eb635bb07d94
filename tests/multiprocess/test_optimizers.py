"""Every optimizer has its parity case, and a step sends no more messages than it must."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
from parity.optimizing import EVERY, SCHEDULES, of_keras, schedules_of_keras

from tfdist import process
from tfdist.testing import local_cluster

STEPS = 12


def test_every_optimizer_of_keras_has_a_case():
    assert set(of_keras()) <= {name.partition(" ")[0] for name in EVERY}


def test_every_learning_rate_schedule_of_keras_has_a_case():
    assert set(schedules_of_keras()) <= set(SCHEDULES)


# -- messages, counted on a task


def _optimizers():
    o = keras.optimizers
    return {
        "plain": o.Adam(1e-2, clipnorm=0.1, use_ema=True),
        "loss scale": o.LossScaleOptimizer(o.Adam(1e-2), initial_scale=64.0),
        "accumulation": o.Adam(1e-2, gradient_accumulation_steps=3, global_clipnorm=0.1),
        "accumulation and loss scale": o.LossScaleOptimizer(
            o.SGD(1e-2, gradient_accumulation_steps=3), initial_scale=64.0
        ),
    }


def count_messages(strategy):
    """The sums of one fit of 12 batches, by what they are called, for each optimizer."""
    group = process.current().group
    all_reduce, counts = group.all_reduce, {}
    x = np.random.default_rng(0).normal(size=(STEPS * 4, 3)).astype("float32")
    for name, optimizer in _optimizers().items():
        calls = Counter()

        def counting(arrays, *, op="sum", tag, calls=calls):
            calls[tag] += 1
            return all_reduce(arrays, op=op, tag=tag)

        group.all_reduce = counting
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
        counts[name] = dict(calls)
    return counts


@pytest.fixture(scope="module")
def counts():
    with local_cluster(workers=2, strategy="synchronous") as cluster:
        first, second = cluster.run(count_messages)
    assert first == second
    return first


PER_STEP = {"gradients", "logs", "finite check", "accumulated gradients"}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("plain", {"gradients": STEPS, "logs": STEPS}),
        ("loss scale", {"gradients": STEPS, "logs": STEPS}),
        ("accumulation", {"accumulated gradients": STEPS // 3, "logs": STEPS}),
        (
            "accumulation and loss scale",
            {"accumulated gradients": STEPS // 3, "finite check": STEPS, "logs": STEPS},
        ),
    ],
)
def test_a_step_sends_one_sum_of_gradients_or_one_for_each_update(counts, optimizer, expected):
    assert {tag: count for tag, count in counts[optimizer].items() if tag in PER_STEP} == expected


@pytest.mark.parametrize("optimizer", ["plain", "loss scale", "accumulation"])
def test_no_other_sum_is_made_as_often_as_there_are_steps(counts, optimizer):
    other = {tag: count for tag, count in counts[optimizer].items() if tag not in PER_STEP}
    assert all(count <= 2 for tag, count in other.items() if tag != "stop"), other
