"""Points on their way to a strict InfluxDB, and which of them it has."""

from support.influx_servers import StrictInflux
from xain_coordinator.core.values import Point
from xain_coordinator.metrics.influx import InfluxMetrics


def connect(server: StrictInflux, **kwargs: float) -> InfluxMetrics:
    return InfluxMetrics(server.url, server.org, server.bucket, server.token, **kwargs)  # type: ignore[arg-type]  # numbers


def numbered(*numbers: int) -> list[Point]:
    return [Point("m", {"n": n}, {}, 1000 + n) for n in numbers]


def numbers(server: StrictInflux) -> list[int]:
    return [int(line.fields["n"]) for line in server.lines]
