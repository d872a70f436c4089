"""Metrics in InfluxDB 2, or whatever else speaks its write API, through influxdb-client.

The client's own batching buffers without a bound and logs what it likes, so only its synchronous
writes are used; queue.py does the rest.

What a server answers falls in three classes. It is away (no connection, no answer in time, too
busy, an error of its own): try again, later each time. It does not let us in (token, org, bucket,
address): only a person can put that right, so try again slowly. It does not take these points: they
are lost, and if it took none of a batch because of some, these are found by halving.
"""

import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import structlog
import urllib3
from influxdb_client.client.influxdb_client import InfluxDBClient
from influxdb_client.client.write.point import Point as LinePoint
from influxdb_client.client.write_api import SYNCHRONOUS
from influxdb_client.rest import ApiException

from xain_coordinator.config import MetricsSettings
from xain_coordinator.core.values import Point
from xain_coordinator.metrics.queue import MAX_WAITING, Outcome, QueuedMetrics, Stamped
from xain_coordinator.ports import StoreError
from xain_coordinator.secret_files import read_secret

log = structlog.get_logger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
MAX_RETRY_AFTER_S = 300.0
# Halving finds one bad point in a batch with 2 log2(_BATCH) requests. A batch with so many that
# this does not suffice loses some good ones with them.
MAX_REQUESTS = 100
LINGER_S = 1.0

_BATCH = 1000
_MAX_REASON = 200  # characters of what a server says, in a log line

_AWAY = frozenset({0, 408, 425, 429})  # and 5xx; 0 is the client's for a failed TLS handshake
_POINTS_REFUSED = frozenset({400, 413, 422})
# How InfluxDB says that it has written all but so many points.
_PARTIAL = re.compile(r"partial write: .*dropped=(\d+)", re.DOTALL)


class InfluxMetrics(QueuedMetrics):
    """Writes to one bucket, from a thread of its own.

    token: "" where the server asks for none.
    wall_ns: the time for points that have none.
    max_waiting: points that may wait for the server.
    Raises StoreError if the token cannot be one.
    """

    def __init__(
        self,
        url: str,
        org: str,
        bucket: str,
        token: str,
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        timeout_s: float = 10.0,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        super().__init__(
            InfluxWriter(url, org, bucket, token, timeout_s),
            wall_ns,
            batch=_BATCH,
            linger_s=LINGER_S,
            max_waiting=max_waiting,
        )


def open_influx(settings: MetricsSettings, wall_ns: Callable[[], int]) -> InfluxMetrics:
    """Raises StoreError."""
    token = read_secret("metrics", settings, "token")
    return InfluxMetrics(
        settings.url, settings.org, settings.bucket, token, wall_ns, timeout_s=settings.timeout_s
    )


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a request failed.

    status: 0 if there was no answer.
    retry_after_s: 0 if the server has not asked for it.
    num_dropped: points that were lost, if it says that all others were written.
    """

    status: int
    reason: str
    retry_after_s: float = 0.0
    num_dropped: int | None = None

    @property
    def is_away(self) -> bool:
        return self.status in _AWAY or self.status >= 500


def _is_not_of_the_client(record: logging.LogRecord) -> bool:
    return "influxdb_client" not in record.pathname


class InfluxWriter:
    """Writes batches to a bucket. Raises StoreError if the token cannot be one."""

    def __init__(self, url: str, org: str, bucket: str, token: str, timeout_s: float) -> None:
        # Anything else could not be sent, and the error that says so would show it.
        if not (token.isascii() and token.isprintable()) or token != token.strip():
            raise StoreError(
                "the token of [metrics] must be printable ASCII without blanks at its ends"
            )
        # The client logs answers that it does not understand, whole, to the root logger: a proxy's
        # may show the request, with the token.
        logging.getLogger().addFilter(_is_not_of_the_client)
        timeout_ms = max(1, round(1000 * timeout_s))  # 0 would mean none
        self._client = InfluxDBClient(
            url, token=token, org=org, timeout=timeout_ms, enable_gzip=True
        )
        self._api = self._client.write_api(write_options=SYNCHRONOUS)
        self._bucket = bucket
        self._token = token
        self._delay_s = FIRST_RETRY_S
        self._trouble = ""
        self._has_refused = False

    def close(self) -> None:
        self._client.close()  # type: ignore[no-untyped-call]  # the client's

    def write(self, batch: Sequence[Stamped]) -> Outcome:
        pending = [[(stamped, line) for stamped in batch if (line := to_line(*stamped))]]
        num_lost = len(batch) - len(pending[0])
        num_requests = 0
        while pending:
            group = pending.pop()
            if not group:
                continue
            num_requests += 1
            failure = self._send([line for _, line in group])
            if failure is None:
                self._is_well()
                continue
            if failure.status not in _POINTS_REFUSED:
                pending.append(group)
                rest = [stamped for group in reversed(pending) for stamped, _ in group]
                return Outcome(num_lost, rest, self._has_trouble(failure))
            self._is_well()  # it has looked at them
            num_refused = failure.num_dropped
            if num_refused is None:
                if len(group) > 1 and num_requests < MAX_REQUESTS:
                    half = len(group) // 2
                    pending += [group[half:], group[:half]]
                    continue
                num_refused = len(group)
            num_lost += num_refused
            self._tell_refused(failure, num_refused)
        return Outcome(num_lost)

    def _send(self, lines: Sequence[bytes]) -> _Failure | None:
        try:
            self._api.write(self._bucket, record=list(lines))
        except ApiException as error:
            return self._answered(error)
        except urllib3.exceptions.HTTPError as error:
            return _Failure(0, self._clean(f"{type(error).__name__}: {error}"))
        except (OSError, ValueError) as error:  # such as an answer that is not text
            return _Failure(0, type(error).__name__)
        return None

    def _answered(self, error: Any) -> _Failure:
        """What an ApiException says, without headers."""
        said = "" if error.response is None else error.message
        if isinstance(said, bytes):
            said = said.decode("utf-8", "replace")
        reason = f"{error.reason}: {said}" if said and said != error.reason else str(error.reason)
        partial = _PARTIAL.search(reason)
        return _Failure(
            int(error.status),
            self._clean(reason),
            _retry_after_s(error.retry_after),
            int(partial[1]) if partial else None,
        )

    def _clean(self, text: str) -> str:
        # A proxy may show the request that it did not like.
        if self._token:
            text = text.replace(self._token, "***")
        return text[:_MAX_REASON]

    def _has_trouble(self, failure: _Failure) -> float:
        """After how many seconds to try again."""
        trouble = "away" if failure.is_away else "not let in"
        if trouble != self._trouble:
            self._trouble = trouble
            hint = "" if failure.is_away else "; check url, org, bucket and token of [metrics]"
            log.warning(
                "metrics_unavailable",
                status=failure.status,
                error=f"{failure.reason}{hint}",
            )
        if not failure.is_away:
            return _with_jitter(LAST_RETRY_S)
        delay_s = _with_jitter(self._delay_s)
        self._delay_s = min(2 * self._delay_s, LAST_RETRY_S)
        return max(delay_s, min(failure.retry_after_s, MAX_RETRY_AFTER_S))

    def _is_well(self) -> None:
        self._delay_s = FIRST_RETRY_S
        if self._trouble:
            self._trouble = ""
            log.info("metrics_available")

    def _tell_refused(self, failure: _Failure, num_points: int) -> None:
        """Once: one participant may send such a point in every round, and they are counted."""
        tell = log.debug if self._has_refused else log.warning
        self._has_refused = True
        tell(
            "metric_points_refused", points=num_points, status=failure.status, error=failure.reason
        )


def to_line(at_ns: int, point: Point) -> bytes:
    """The point in line protocol, always one line; b"" if it has none, such as one with a field
    that is not finite.

    A backslash in a name or a tag would escape what follows, and servers disagree about line ends
    in text: whoever chose either could write into the series of others. They become a slash and
    "\\n".
    """
    try:
        # The client would leave out such a field, and nobody would know.
        if any(isinstance(value, float) and not isfinite(value) for value in point.fields.values()):
            return b""
        if "" in point.fields:
            return b""
        record = {
            "measurement": point.measurement,
            "tags": {_name(name): _name(value) for name, value in point.tags.items()},
            "fields": {_name(name): _value(value) for name, value in point.fields.items()},
            "time": at_ns,
        }
        line: str = LinePoint.from_dict(record).to_line_protocol()
        return line.encode()
    except (AttributeError, TypeError, ValueError):
        return b""


def _name(text: str) -> str:
    return text.replace("\\", "/")


def _value(value: int | float | str) -> int | float | str:
    return "\\n".join(value.splitlines()) if isinstance(value, str) else value


def _with_jitter(delay_s: float) -> float:
    """So that many coordinators do not come back at the same moment."""
    return delay_s * random.uniform(0.5, 1.0)


def _retry_after_s(header: str | None) -> float:
    """Seconds, or a date as HTTP has it; 0 if it is neither."""
    if not header:
        return 0.0
    try:
        return float(urllib3.Retry().parse_retry_after(header))
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return 0.0
