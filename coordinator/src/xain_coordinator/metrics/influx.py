"""Metrics in InfluxDB 2, or whatever else speaks its write API, through influxdb-client.

The client's own batching buffers without a bound and logs what it likes, so only its synchronous
writes are used; queue.py does the rest.

What a server answers falls in three classes. It is away (no connection, no answer in time, too
busy, an error of its own): try again, later each time. It does not let us in (token, org, bucket,
address): only a person can put that right, so try again slowly. It does not take these points: they
are lost, and if it took none of a batch because of some, these are found by halving.

An address may lead to something else, such as a proxy's or an HTTPS port, that refuses whatever it
is sent. So a refusal counts only from a server that takes something: another part of the batch, or
once more what it took before, which changes nothing in it. From another, nobody is let in.
"""

import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from typing import Any, Protocol

import structlog
import urllib3
from influxdb_client.client.influxdb_client import InfluxDBClient
from influxdb_client.client.write.point import Point as LinePoint
from influxdb_client.rest import ApiException
from influxdb_client.service.write_service import WriteService

from xain_coordinator.core.values import Point
from xain_coordinator.metrics.queue import MAX_WAITING, Outcome, QueuedMetrics, Stamped
from xain_coordinator.ports import StoreError
from xain_coordinator.stores.secret_files import read_secret

log = structlog.get_logger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
MAX_RETRY_AFTER_S = 300.0
# In one go; the rest of the batch waits for the next.
MAX_REQUESTS = 100
# Splits of one participant's points into halves: log2(n) find one bad point among n. A participant
# that has many bad points in a batch loses good ones with them, but only its own.
MAX_SPLITS = 32
LINGER_S = 1.0

_BATCH = 1000
_MAX_REASON = 200  # characters of what a server says, in a log line

_WRITTEN = 204  # anything else may be a page to log in at
_AWAY = frozenset({0, 408, 425, 429})  # and 5xx; 0 is the client's for a failed TLS handshake
_TOO_LARGE = 413
_POINTS_REFUSED = frozenset({400, _TOO_LARGE, 422})
# How InfluxDB says that it has written all but so many points; 2.0 did so with status 500.
_PARTIAL = re.compile(r"partial write: .*dropped=(\d{1,18})", re.DOTALL)


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


class InfluxSettings(Protocol):
    """Settings of the bucket, as in [metrics]; read_secret() reads the token."""

    @property
    def url(self) -> str: ...
    @property
    def org(self) -> str: ...
    @property
    def bucket(self) -> str: ...
    @property
    def timeout_s(self) -> float: ...


def open_influx(settings: InfluxSettings, wall_ns: Callable[[], int]) -> InfluxMetrics:
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A point of a batch, and its line. place: in the batch."""

    place: int
    stamped: Stamped
    line: bytes

    @property
    def participant(self) -> str:
        """Participant of the points; "" for the coordinator."""
        return self.stamped[1].tags.get("id", "")


_Group = Sequence[_Entry]
_participant = attrgetter("participant")
_place = attrgetter("place")


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
        self._api = WriteService(  # type: ignore[no-untyped-call]  # the client's
            self._client.api_client
        )
        self._org = org
        self._bucket = bucket
        self._token = token
        self._delay_s = FIRST_RETRY_S
        self._trouble = ""
        self._has_refused = False
        self._taken = b""  # a line that the server took

    def close(self) -> None:
        self._client.close()  # type: ignore[no-untyped-call]  # the client's

    def write(self, batch: Sequence[Stamped]) -> Outcome:
        search = _Search(batch)
        num_lost = len(batch) - search.num_pending
        num_requests = 0
        takes_points = False  # as far as this batch has shown
        failure: _Failure | None = None
        while search.pending and num_requests < MAX_REQUESTS:
            group = search.pending.pop()
            num_requests += 1
            failure = self._send([entry.line for entry in group])
            if failure is None:
                takes_points = True
                self._taken = group[-1].line
            elif failure.num_dropped is not None:
                takes_points = True
                num_lost += self._lose(group, failure, min(failure.num_dropped, len(group)))
            elif failure.status in _POINTS_REFUSED:
                search.refused(group, failure)
                if not takes_points and self._taken:
                    num_requests += 1
                    failure = self._send([self._taken])
                    if failure is not None and failure.num_dropped is None:
                        return self._try_later(num_lost, search, failure)
                    takes_points = True
            else:
                search.pending.append(group)
                return self._try_later(num_lost, search, failure)
            if takes_points:
                self._is_well()
                num_lost += sum(self._lose(*given_up) for given_up in search.take_given_up())
        if failure is not None and not takes_points:
            return self._try_later(num_lost, search, failure)
        rest = search.rest()
        return Outcome(num_lost, rest, _with_jitter(FIRST_RETRY_S) if rest else 0.0)

    def _try_later(self, num_lost: int, search: "_Search", failure: _Failure) -> Outcome:
        return Outcome(num_lost, search.rest(), self._has_trouble(failure))

    def _lose(self, group: "_Group", failure: _Failure, num_points: int) -> int:
        """The number. Told once: one participant may send such a point in every round, and they are
        counted."""
        tell = log.debug if self._has_refused else log.warning
        self._has_refused = True
        participants = {entry.participant for entry in group}
        tell(
            "metric_points_refused",
            participant=participants.pop() if len(participants) == 1 else None,
            points=num_points,
            status=failure.status,
            error=failure.reason,
        )
        return num_points

    def _send(self, lines: Sequence[bytes]) -> _Failure | None:
        try:
            _, status, _ = self._api.post_write_with_http_info(  # type: ignore[no-untyped-call]  # the client's
                self._org,
                self._bucket,
                b"\n".join(lines),
                precision="ns",
                content_type="text/plain; charset=utf-8",
            )
        except ApiException as error:
            return self._answered(error)
        except urllib3.exceptions.HTTPError as error:
            return _Failure(0, self._clean(f"{type(error).__name__}: {error}"))
        except (OSError, ValueError) as error:  # such as an answer that is not text
            return _Failure(0, type(error).__name__)
        if status != _WRITTEN:
            return _Failure(status, f"it answers {status} where InfluxDB says {_WRITTEN}")
        return None

    def _answered(self, error: Any) -> _Failure:
        """Failure that an ApiException stands for, without its headers."""
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


class _Search:
    """The points of a batch that the server has neither taken nor refused alone.

    pending: groups to send, the last one first.
    """

    def __init__(self, batch: Sequence[Stamped]) -> None:
        entries = [
            _Entry(place, stamped, line)
            for place, stamped in enumerate(batch)
            if (line := to_line(*stamped))
        ]
        self.num_pending = len(entries)
        self.pending: list[_Group] = [entries] if entries else []
        self._given_up: list[tuple[_Group, _Failure, int]] = []
        self._num_splits: Counter[str] = Counter()

    def refused(self, group: _Group, failure: _Failure) -> None:
        """Send its halves, or give it up: a point alone, or those of a participant that has many.

        Sorted, the points of one are soon apart from those of others, and cost them none.
        """
        group = sorted(group, key=_participant)
        first, last = group[0].participant, group[-1].participant
        # A request that is too large is nobody's fault.
        is_its_fault = first == last and failure.status != _TOO_LARGE
        if len(group) == 1 or (is_its_fault and self._num_splits[first] == MAX_SPLITS):
            self._given_up.append((group, failure, len(group)))
            return
        self._num_splits[first] += is_its_fault
        half = len(group) // 2
        self.pending += [group[half:], group[:half]]

    def take_given_up(self) -> list[tuple[_Group, _Failure, int]]:
        """Add a loss, with its number of points."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def rest(self) -> Sequence[Stamped]:
        """Points that are neither written nor lost, in their order."""
        groups = [*self.pending, *(group for group, *_ in self._given_up)]
        entries = sorted((entry for group in groups for entry in group), key=_place)
        return tuple(entry.stamped for entry in entries)


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
    """Spread the retries of many coordinators."""
    return delay_s * random.uniform(0.5, 1.0)


def _retry_after_s(header: str | None) -> float:
    """Seconds, or a date as HTTP has it; 0 if it is neither."""
    if not header:
        return 0.0
    try:
        return float(urllib3.Retry().parse_retry_after(header))
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return 0.0
