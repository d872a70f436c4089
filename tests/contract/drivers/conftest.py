"""Drivers of each kind, which are closed in the end."""

from collections.abc import Callable, Iterator

import pytest

from support.messaging import DRIVERS, driver_maker
from xain_messaging.ports import Driver

NETWORKED = [kind for kind in DRIVERS if kind != "in-process"]


@pytest.fixture(params=DRIVERS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Driver]]:
    """Drivers that are closed in the end."""
    yield from closing(request.param)


@pytest.fixture(params=NETWORKED)
def make_networked(request: pytest.FixtureRequest) -> Iterator[Callable[[], Driver]]:
    yield from closing(request.param)


def closing(kind: str) -> Iterator[Callable[[], Driver]]:
    make_one = driver_maker(kind)
    made: list[Driver] = []

    def make() -> Driver:
        made.append(make_one())
        return made[-1]

    yield make
    for driver in made:
        driver.close(0.0)
