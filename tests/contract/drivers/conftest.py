"""Drivers of each kind, which are closed in the end."""

from collections.abc import Callable, Iterator

import pytest

from support.drivers import Receiving
from support.messaging import DRIVERS, driver_maker

NETWORKED = [kind for kind in DRIVERS if kind != "in-process"]


@pytest.fixture(params=DRIVERS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Receiving]]:
    """Drivers that are closed in the end."""
    yield from closing(request.param)


@pytest.fixture(params=NETWORKED)
def make_networked(request: pytest.FixtureRequest) -> Iterator[Callable[[], Receiving]]:
    yield from closing(request.param)


def closing(kind: str) -> Iterator[Callable[[], Receiving]]:
    make_one = driver_maker(kind)
    made = []

    def make() -> Receiving:
        made.append(Receiving(make_one()))
        return made[-1]

    yield make
    for driver in made:
        driver.close(0.0)
