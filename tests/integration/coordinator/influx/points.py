"""Points on their way to a strict InfluxDB, and which of them it has."""

import time
from collections.abc import Mapping

from support.influx_servers import StrictInflux
from xain_coordinator.config.sections.metrics import MetricsSettings
from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.stores.secret_files import Secret
from xain_coordinator.telemetry.influx import InfluxWriter
from xain_coordinator.telemetry.queue import QueuedMetrics
from xain_foundation.net.backoff import Backoff


def connect(
    server: StrictInflux,
    *,
    linger_s: float = 0.02,
    last_retry_s: float = 0.02,
    timeout_s: float = 10.0,
    bounds: Mapping[str, int] | None = None,
    **settings: object,
) -> QueuedMetrics:
    """A store that tries again at once, and that has time to end on a slow machine.

    bounds: of the queue. settings: of [metrics], other than those of the server.
    """
    chosen = MetricsSettings.model_validate({**server.settings(), **settings})
    token = Secret("metrics", chosen, "token")
    writer = InfluxWriter(chosen.url, chosen.org, chosen.bucket, token, timeout_s)
    writer.backoff = Backoff(0.01, last_retry_s)
    metrics = QueuedMetrics(writer, time.time_ns, linger_s=linger_s, **(bounds or {}))
    metrics.close_timeout_s = 60.0
    return metrics


def numbered(*numbers: int) -> list[Point]:
    return [Point("m", {"n": n}, {}, 1000 + n) for n in numbers]


def numbers(server: StrictInflux) -> list[int]:
    return [int(line.fields["n"]) for line in server.lines]
