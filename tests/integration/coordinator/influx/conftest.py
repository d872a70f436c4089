"""A strict InfluxDB, and ways to write to it."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from support.influx_servers import StrictInflux
from xain_coordinator.core.values import Point
from xain_coordinator.metrics import influx, queue
from xain_coordinator.metrics.influx import InfluxWriter
from xain_coordinator.metrics.queue import Outcome


@pytest.fixture
def server() -> Iterator[StrictInflux]:
    with StrictInflux() as one:
        yield one


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries again at once, and a slow machine has time to end."""
    monkeypatch.setattr(influx, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(influx, "LAST_RETRY_S", 0.02)
    monkeypatch.setattr(influx, "LINGER_S", 0.02)
    monkeypatch.setattr(queue, "CLOSE_TIMEOUT_S", 60.0)


@pytest.fixture
def write(server: StrictInflux) -> Iterator[Callable[[Sequence[Point]], Outcome]]:
    """Write one batch, in this thread."""
    writer = InfluxWriter(server.url, server.org, server.bucket, server.token, 60.0)
    yield lambda points: writer.write([(point.at_ns or 0, point) for point in points])
    writer.close()
