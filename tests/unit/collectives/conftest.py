"""Groups for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from group_threads import Together


@pytest.fixture(params=[True, False], ids=["memory", "TCP"])
def make_together(request):
    """Makes groups for one test and closes them; those that share memory, then those that do not."""
    made = []

    def make(count: int, **settings: Any) -> Together:
        made.append(Together(count, **{"share_memory": request.param, **settings}))
        return made[-1]

    yield make
    for together in made:
        together.close()


@pytest.fixture(
    scope="module",
    params=[
        (1, True, ""),
        *((n, s, "") for n in (2, 3, 5) for s in (True, False)),
        (3, True, "aba"),
        (5, True, "abbac"),
    ],
    ids=lambda p: f"{p[0]} tasks {p[2] or ('memory' if p[1] else 'TCP')}",
)
def together(request):
    """A group of every size and way, shared by the tests of a module that leave it whole."""
    count, share_memory, hosts = request.param
    group = Together(count, share_memory=share_memory, hosts=hosts)
    yield group
    group.close()
