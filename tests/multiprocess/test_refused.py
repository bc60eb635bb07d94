"""What several tasks can't make right is refused on every task, with the way out: each of `parity.refused`."""

from __future__ import annotations

import re

import pytest
from parity.refused import REFUSED, raised

import tfdist


@pytest.fixture(scope="module")
def errors():
    """What each raised on worker 0 and on worker 1."""
    with tfdist.testing.local_cluster(workers=2, strategy=True) as cluster:
        return cluster.run(raised)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_right_is_refused_on_every_task_with_the_way_out(name, errors):
    for texts in errors:
        assert texts[name], "nothing was raised"
        assert re.search(REFUSED[name].words, texts[name], re.DOTALL), texts[name]
