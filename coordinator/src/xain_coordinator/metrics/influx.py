"""Metrics in InfluxDB 2, or whatever else speaks its write API.

The package influxdb-client is not used: its batching buffers without a bound, it logs answers that
it does not understand, whole, to the root logger, where the answer of a proxy may show the token,
and its import takes half a second and 30 MB. queue.py makes the batches.

A batch is sent until the server takes or refuses it, with growing waits between the tries; points
that come meanwhile wait in the queue, which is bounded. Of a batch with points that it refuses,
InfluxDB writes the others and says how many it dropped.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from gzip import compress
from math import isfinite
from random import Random
from urllib.parse import urlencode

import structlog
import urllib3

from xain_coordinator.core.values import Point
from xain_coordinator.metrics.queue import Stamped
from xain_coordinator.ports import StoreError
from xain_foundation.backoff import Backoff
from xain_foundation.rate_limited_log import RateLimitedLog

log = structlog.get_logger(__name__)

LINGER_S = 1.0  # of the queue before it

_MAX_ANSWER_BYTES = 64 << 10
_MAX_REASON = 200  # characters of what a server says, in a log line

_WRITTEN = 204  # anything else may be a page to log in at
_POINTS_REFUSED = frozenset({400, 413, 422})


@dataclass(frozen=True, slots=True)
class _Failure:
    """Failure of a write request. status: 0 if there was no answer."""

    status: int
    reason: str

    @property
    def is_refusal(self) -> bool:
        """Whether the server has read the points, and will never take all of them."""
        # InfluxDB 2.0 says so with status 500 of some points, and of the same ones each time.
        return self.status in _POINTS_REFUSED or "partial write" in self.reason


class InfluxWriter:
    """Writes batches to a bucket. Raises StoreError if the token cannot be one."""

    def __init__(self, url: str, org: str, bucket: str, token: str, timeout_s: float) -> None:
        # Anything else could not be sent, and the error that says so would show it.
        if not (token.isascii() and token.isprintable()) or token != token.strip():
            raise StoreError(
                "the token of [metrics] must be printable ASCII without blanks at its ends"
            )
        query = urlencode({"org": org, "bucket": bucket, "precision": "ns"})
        self._url = f"{url.rstrip('/')}/api/v2/write?{query}"
        self._http = urllib3.PoolManager(
            headers={
                "Authorization": f"Token {token}",
                "Content-Encoding": "gzip",
                "Content-Type": "text/plain; charset=utf-8",
            },
            timeout=urllib3.Timeout(total=timeout_s),
            retries=False,
        )
        self._token = token
        self.backoff = Backoff(0.5, 30.0, Random())
        self._refused = RateLimitedLog(log.warning, "metric_points_refused")

    def close(self) -> None:
        self._http.clear()

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        lines = [line for at, point in batch if (line := to_line(at, point))]
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
        """Returns None if the server took the lines, else why it did not. After any failure but a
        refusal they are sent again, and once more at the end."""
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
        try:
            answer = self._http.request(
                "POST", self._url, body=compress(b"\n".join(lines)), preload_content=False
            )
            status = answer.status
            text = b"" if status == _WRITTEN else answer.read(_MAX_ANSWER_BYTES)
            if len(text) < _MAX_ANSWER_BYTES:
                answer.release_conn()
            else:  # a connection on which the rest of an answer is left is not used again
                answer.close()
        except urllib3.exceptions.HTTPError as error:
            return _Failure(0, self._clean(f"{type(error).__name__}: {error}"))
        if status == _WRITTEN:
            return None
        if status < 400:
            return _Failure(status, f"it answers {status} where InfluxDB says {_WRITTEN}")
        return _Failure(status, self._clean(f"{answer.reason}: {_message_of(text)}"))

    def _clean(self, text: str) -> str:
        # A proxy may show the request that it did not like.
        if self._token:
            text = text.replace(self._token, "***")
        return text[:_MAX_REASON]


def _message_of(answer: bytes) -> str:
    """The error text of InfluxDB's answer, or the text of another server's."""
    try:
        return str(json.loads(answer)["message"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return answer.decode("utf-8", "replace")


def to_line(at_ns: int, point: Point) -> bytes:
    """The point in line protocol, always one line; b"" if it has none, such as one with a field
    that is not finite.

    A backslash in a name or a tag would escape what follows, and servers disagree about line ends
    in text: with either a sender could write into the series of others. They become a slash and
    "\\n".
    """
    try:
        if not point.fields or "" in point.fields:
            return b""
        tags = {_name(name): _name(tag) for name, tag in point.tags.items() if name and tag}
        fields = {_name(name): _value(value) for name, value in point.fields.items()}
        series = ",".join([_name(point.measurement), *_pairs(tags)])
        return f"{series} {','.join(_pairs(fields))} {at_ns}".encode()
    except (AttributeError, TypeError, ValueError):
        return b""


def _pairs(texts: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in sorted(texts.items())]


_ESCAPED = str.maketrans(
    {"\\": "/", ",": r"\,", "=": r"\=", " ": r"\ ", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
)


def _name(text: str) -> str:
    """A measurement, or the name or value of a tag, or the name of a field."""
    return text.translate(_ESCAPED)


def _value(value: int | float | str) -> str:
    """The value of a field. Raises ValueError if it is not finite, and TypeError."""
    match value:
        case str():
            text = "\\n".join(value.splitlines()).replace("\\", "\\\\").replace('"', r"\"")
            return f'"{text}"'
        case float() if isfinite(value):
            return float.__repr__(value).removesuffix(".0")
        case float():
            raise ValueError(f"{value} is not finite")
        case _:
            return f"{value:d}i"
