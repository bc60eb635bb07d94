"""No module's tests depend on what another's did to this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfdist import process


@pytest.fixture(autouse=True, scope="module")
def _no_task_outlives_its_module() -> Iterator[None]:
    """create_strategy remembers for the rest of the process which task it is."""
    yield
    process.set_current(None)
