"""A strict InfluxDB, and ways to write to it."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from support.influx_servers import StrictInflux
from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.telemetry.influx import InfluxWriter
from xain_foundation.net.backoff import Backoff


class Waits(threading.Event):
    """The end of a store, which comes after num_waits waits; none of them takes time."""

    def __init__(self, num_waits: int = 0) -> None:
        super().__init__()
        self._num_waits = num_waits
        self.lengths_s: list[float] = []
        if not num_waits:
            self.set()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.lengths_s.append(timeout)
        if len(self.lengths_s) == self._num_waits:
            self.set()
        return self.is_set()


@pytest.fixture
def server() -> Iterator[StrictInflux]:
    with StrictInflux() as one:
        yield one


@pytest.fixture
def write(server: StrictInflux) -> Iterator[Callable[..., int]]:
    """Write one batch in this thread; returns how many points are lost. At the end of `closing`
    what the server has not taken is lost; by default there is one try."""
    writer = InfluxWriter(server.url, server.org, server.bucket, lambda: server.token, 60.0)
    writer.backoff = Backoff(0.01, 0.02)

    def write(points: Sequence[Point], closing: threading.Event | None = None) -> int:
        return writer.write([(point.at_ns or 0, point) for point in points], closing or Waits())

    yield write
    writer.close()
