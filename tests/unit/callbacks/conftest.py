"""A strategy of one task for the tests of a module, and the process as it was after them."""

import pytest

import tfdist
from tfdist import process


@pytest.fixture(scope="module")
def strategy():
    before = process.current()
    yield tfdist.create_strategy()
    process.set_current(before)
