"""A small group whose ranges a test moves, refuses or rolls back."""

from collections.abc import Iterator

import pytest

from support.parameter_group import Group


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()
