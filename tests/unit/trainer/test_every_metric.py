"""Keras' metrics and losses all stand in a parity case: a release that brings a new one fails here, by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "multiprocess"))
from parity import losses, metrics

TRIED_METRICS = {name.partition(" ")[0] for table in metrics.TABLES.values() for name in table} | {*metrics.OF_VALUES}
TRIED_LOSSES = {name.partition(" ")[0] for name in (*losses.OF_ROWS, *losses.OF_THE_WHOLE_BATCH)} | {"CTC"}


def classes_of(module, base):
    found = {name: value for name, value in vars(module).items() if isinstance(value, type) and value is not base}
    return sorted(name for name, value in found.items() if issubclass(value, base))


@pytest.mark.parametrize("name", classes_of(keras.metrics, keras.metrics.Metric))
def test_a_metric_of_keras_has_a_parity_case(name):
    assert name in TRIED_METRICS


@pytest.mark.parametrize("name", classes_of(keras.losses, keras.losses.Loss))
def test_a_loss_of_keras_has_a_parity_case(name):
    assert name in TRIED_LOSSES
