"""Arrays: all tasks together get each row of each global batch once, in an order that follows from seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (13, 5), (1, 1), (2, 5), (7, 3), (5, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tasks_together_get_each_row_of_each_batch_once_in_order(rows, batch_size, size, in_order, cut):
    pipeline = tfdist.data.from_arrays(np.arange(rows), batch_size)
    assert in_order(pipeline, size) == cut(range(rows), batch_size)
    assert pipeline.steps_per_epoch == len(cut(range(rows), batch_size))
    assert pipeline.rows == rows


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("epoch", [0, 4])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_a_shuffled_order_is_numpys_permutation_for_seed_and_epoch(size, epoch, drop_remainder, in_order, cut):
    pipeline = tfdist.data.from_arrays(np.arange(20), 6, shuffle=True, seed=7, drop_remainder=drop_remainder)
    order = np.random.default_rng((7, epoch)).permutation(20).tolist()
    assert in_order(pipeline, size, epoch=epoch) == cut(order, 6, drop_remainder)


def test_other_epochs_and_seeds_have_other_orders(in_order):
    def order(seed, epoch):
        return in_order(tfdist.data.from_arrays(np.arange(30), 30, shuffle=True, seed=seed), 1, epoch=epoch)[0]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert all(sorted(one) == list(range(30)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4


def test_an_unseeded_shuffle_has_the_same_order_whatever_seed_tensorflow_has(in_order):
    def order():
        return in_order(tfdist.data.from_arrays(np.arange(30), 30, shuffle=True), 2)

    tf.random.set_seed(1)
    first = order()
    tf.random.set_seed(2)
    assert order() == first


@pytest.mark.parametrize("start_step", [0, 1, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_can_be_entered_at_any_step(shuffle, start_step, in_order):
    pipeline = tfdist.data.from_arrays(np.arange(14), 4, shuffle=shuffle, seed=1)
    whole = in_order(pipeline, 3, epoch=2)
    assert in_order(pipeline, 3, epoch=2, start_step=start_step) == whole[start_step:]
