"""`tfdist.whole_batch` in one process, and which of Keras' losses and metrics need the whole batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tfdist.internals import keras as internals
from tfdist.trainer.whole_batch import is_whole


def ratio(y_true, y_pred):
    return keras.ops.sum(y_true) / keras.ops.sum(y_pred)


class Ratio(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ratio(y_true, y_pred)


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ratio(y_true, y_pred)


def needs_whole(loss, rank):
    return is_whole(loss, *internals.function_of_loss(loss), rank)


def test_in_one_process_a_marked_function_gives_what_it_gave():
    marked = tfdist.whole_batch(ratio)
    assert float(marked(np.ones(3), 2 * np.ones(3))) == 0.5
    assert marked.__name__ == "ratio"


@pytest.mark.parametrize("kind", [Ratio, OwnCall])
def test_a_marked_class_makes_losses_of_the_whole_batch(kind):
    class Marked(kind):
        pass

    loss = tfdist.whole_batch(Marked)()
    assert loss.__class__.__name__ == "Marked"
    assert needs_whole(loss, 2)
    assert float(loss(np.ones(3), 2 * np.ones(3))) == 0.5
    assert not needs_whole(kind(), 2)


def test_a_marked_object_alone_is_of_the_whole_batch():
    loss = Ratio()
    assert tfdist.whole_batch(loss) is loss
    assert needs_whole(loss, 2)
    assert not needs_whole(Ratio(), 2)


def test_an_object_with_a_call_of_its_own_is_refused_with_what_to_decorate():
    with pytest.raises(TypeError, match=r"OwnCall has a __call__ of its own; decorate the class"):
        tfdist.whole_batch(OwnCall())


@pytest.mark.parametrize(
    ("value", "words"), [("dice", r"not 'dice'; keras\.losses\.get"), (3, "not 3"), (keras.Model, "not <class")]
)
def test_what_is_no_loss_is_refused(value, words):
    with pytest.raises(TypeError, match=words):
        tfdist.whole_batch(value)


@pytest.mark.parametrize(
    ("loss", "rank", "whole"),
    [
        (keras.losses.Circle(), 2, True),
        (keras.losses.Dice(), 4, True),
        (keras.losses.Dice(axis=(1, 2, 3)), 4, False),
        (keras.losses.Dice(axis=(-4, 1)), 4, True),
        (keras.losses.Tversky(axis=-1), 2, False),
        (keras.losses.CosineSimilarity(), 2, False),
        (keras.losses.CosineSimilarity(), 1, True),
        (keras.losses.CosineSimilarity(axis=0), 2, True),
        (keras.losses.KLDivergence(), 1, True),
        (keras.losses.MeanSquaredError(), 1, False),
    ],
)
def test_a_loss_of_keras_needs_the_whole_batch_where_its_axis_takes_in_the_rows(loss, rank, whole):
    assert needs_whole(loss, rank) is whole
