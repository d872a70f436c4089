"""Metrics in InfluxDB 2, or whatever else speaks its write API, through influxdb-client.

Of the package only Point and the synchronous WriteApi are used: queue.py makes the batches, and its
one thread waits for the answers (docs/decisions/0009). The import takes half a second and 14 MB, so
this module is imported only with kind = "influxdb".

A batch is sent until the server takes or refuses it, with growing waits between the tries; points
that come meanwhile wait in the queue, which is bounded. Of a batch with points that it refuses,
InfluxDB writes the others and says how many it dropped.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import influxdb_client
from influxdb_client.client.write_api import SYNCHRONOUS
from influxdb_client.rest import ApiException
from urllib3.exceptions import HTTPError

from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.ports import StoreError
from xain_coordinator.telemetry.queue import Stamped
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.net.backoff import Backoff

log = get_logger(__name__)

LINGER_S = 1.0  # of the queue before it

_MAX_REASON = 200  # characters of what a server says, in a log line

_WRITTEN = 204  # anything else may be a page to log in at
_POINTS_REFUSED = frozenset({400, 413, 422})


@dataclass(frozen=True, slots=True)
class _Failure:
    """Failure of a write request. status: 0 if there was no answer that could be read."""

    status: int
    reason: str

    @property
    def is_refusal(self) -> bool:
        """Whether the server has read the points, and will never take all of them."""
        # InfluxDB 2.0 says so with status 500 of some points, and of the same ones each time.
        return self.status in _POINTS_REFUSED or "partial write" in self.reason


class InfluxWriter:
    """Writes batches to a bucket.

    token: called before each request, so that a token that has changed is used from the next one
    on. Raises StoreError if the token cannot be one, at the start only.
    authorities: a file with those that may have signed the server's certificate; None: the
    system's.
    """

    def __init__(
        self,
        url: str,
        org: str,
        bucket: str,
        token: Callable[[], str],
        timeout_s: float = 10.0,
        authorities: str | None = None,
    ) -> None:
        self._bucket = bucket
        self._read_token = token
        self._token = _checked(token())
        self._client = influxdb_client.InfluxDBClient(
            url.rstrip("/"),
            self._token,
            org=org,
            timeout=timeout_s * 1000,
            enable_gzip=True,
            ssl_ca_cert=authorities,
        )
        self._api = self._client.write_api(SYNCHRONOUS)
        self.backoff = Backoff(0.5, 30.0, Random())
        self._refused = RateLimitedLog(log.warning, "metric_points_refused")

    def close(self) -> None:
        self._client.close()

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        """Send a batch, again and again until the server answers or `closing` is set. Returns the
        number of points that are lost."""
        lines = [line for at, point in batch if (line := _line(at, point))]
        failure = self._send_until_answered(lines, closing) if lines else None
        if failure is None:
            return len(batch) - len(lines)
        num_lost = len(lines)
        if failure.is_refusal:
            dropped = re.search(r"\bdropped=(\d{1,9})\b", failure.reason)
            num_lost = num_lost if dropped is None else min(num_lost, int(dropped[1]))
            self._refused(points=num_lost, status=failure.status, error=failure.reason)
        return len(batch) - len(lines) + num_lost

    def _send_until_answered(
        self, lines: Sequence[bytes], closing: threading.Event
    ) -> _Failure | None:
        """Send lines until the server takes or refuses them, and once more after `closing` is set.
        Returns None if it took them, else why not."""
        while True:
            is_last = closing.is_set()
            failure = self._send(lines)
            if failure is None or failure.is_refusal:
                if self.backoff.has_failed:
                    log.info("metrics_available")
                self.backoff.reset()
                return failure
            if not self.backoff.has_failed:
                hint = "if it stays, check url, org, bucket and token of [metrics]"
                log.warning(
                    "metrics_unavailable",
                    status=failure.status,
                    error=f"{failure.reason}; {hint}",
                )
            wait_s = self.backoff.next_s()
            if is_last:
                return failure
            closing.wait(wait_s)

    def _send(self, lines: Sequence[bytes]) -> _Failure | None:
        """Send lines once, with the present token. Returns None if the server took them, else the
        failure."""
        client = self._client.api_client
        try:
            if (token := _checked(self._read_token())) != self._token:
                self._token = token
                client.set_default_header("Authorization", f"Token {token}")
            self._api.write(self._bucket, record=lines)
        except ApiException as error:
            reason = f"{error.reason}: {error.message}" if error.status else str(error.reason)
            return _Failure(error.status, self._clean(reason))
        except UnicodeDecodeError:  # the client reads every answer as text
            return _Failure(0, "the answer is not text, so it is not InfluxDB's")
        except (HTTPError, StoreError) as error:
            return _Failure(0, self._clean(f"{type(error).__name__}: {error}"))
        # The client takes every 2xx for success.
        status = client.last_response.status
        if status != _WRITTEN:
            return _Failure(status, f"it answers {status} where InfluxDB says {_WRITTEN}")
        return None

    def _clean(self, text: str) -> str:
        """A text without the token, cut to _MAX_REASON characters."""
        # A proxy may show the request that it did not like.
        if self._token:
            text = text.replace(self._token, "***")
        return text[:_MAX_REASON]


def _checked(token: str) -> str:
    """The same token, if a header can carry it. Raises StoreError."""
    # Anything else could not be sent, and the error that says so would show it.
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise StoreError(
            "the token of [metrics] must be printable ASCII without blanks at its ends"
        )
    return token


def _line(at_ns: int, point: Point) -> bytes:
    """The point in line protocol, always one line; b"" if nothing of it can be written.

    A backslash in a name or a tag would escape what follows, and servers disagree about line ends
    in text: with either a sender could write into the series of others. They become a slash and
    "\\n".
    """
    try:
        one = influxdb_client.Point(_name(point.measurement)).time(at_ns)
        for name, tag in point.tags.items():
            one.tag(_name(name), _name(tag))
        for name, value in point.fields.items():
            if name:
                text = "\\n".join(value.splitlines()) if isinstance(value, str) else value
                one.field(_name(name), text)
        return str(one.to_line_protocol()).encode()
    except (AttributeError, TypeError, ValueError):
        return b""


def _name(text: str) -> str:
    """A measurement, or the name or value of a tag, or the name of a field."""
    return text.replace("\\", "/")
