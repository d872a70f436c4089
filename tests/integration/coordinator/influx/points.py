"""Points on their way to a strict InfluxDB, and which of them it has."""

import time

from support.influx_servers import StrictInflux
from xain_coordinator.config.coordinator import MetricsSettings
from xain_coordinator.core.values import Point
from xain_coordinator.metrics.influx import LINGER_S, InfluxWriter
from xain_coordinator.metrics.queue import MAX_WAITING_BYTES, QueuedMetrics
from xain_coordinator.stores.secret_files import read_secret


def connect(
    server: StrictInflux, max_waiting_bytes: int = MAX_WAITING_BYTES, **settings: object
) -> QueuedMetrics:
    """settings: of [metrics], other than those of the server."""
    chosen = MetricsSettings.model_validate({**server.settings(), **settings})
    token = read_secret("metrics", chosen, "token")
    writer = InfluxWriter(chosen.url, chosen.org, chosen.bucket, token, chosen.timeout_s)
    return QueuedMetrics(
        writer, time.time_ns, linger_s=LINGER_S, max_waiting_bytes=max_waiting_bytes
    )


def numbered(*numbers: int) -> list[Point]:
    return [Point("m", {"n": n}, {}, 1000 + n) for n in numbers]


def numbers(server: StrictInflux) -> list[int]:
    return [int(line.fields["n"]) for line in server.lines]
