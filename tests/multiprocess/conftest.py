"""What tests of real tasks share."""

import pytest
from by_hand import ByHand, Template


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    template = Template(tmp_path_factory.mktemp("template"))
    yield template
    template.close()


@pytest.fixture
def by_hand(template):
    tasks = ByHand(template)
    yield tasks
    tasks.close()
