"""Groups for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from group_threads import Together


@pytest.fixture
def make_together():
    """Makes groups for one test and closes them."""
    made = []

    def make(count: int, **settings: Any) -> Together:
        made.append(Together(count, **settings))
        return made[-1]

    yield make
    for together in made:
        together.close()


@pytest.fixture(scope="module", params=[1, 2, 3, 5], ids="{} tasks".format)
def together(request):
    """A group of every size, shared by the tests of a module that leave it whole."""
    group = Together(request.param)
    yield group
    group.close()
