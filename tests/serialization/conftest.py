"""What all tests of the documented functions need."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _trusted(trusted):
    """Their trees have namedtuples in them."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "inner" / "checkpoint"
