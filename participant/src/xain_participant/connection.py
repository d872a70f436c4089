"""The connection to the coordinator, and its replacement when it has gone silent.

A connection can be dead without either end having heard of it: the peer lost its power, a NAT
forgot the connection, a middlebox acknowledges everything and passes on nothing. gRPC itself may
take minutes to find out; by then the lease is long over. So a sign of life that is not answered
within silence_s is repeated over a fresh connection, and the first answer counts. With the default
lease of 15 s and heartbeats every 10 s this is early enough to keep it.

A coordinator that does not answer may as well be slow: a busy one answers the old question, too,
and then the fresh connection is closed again. A dead connection never does. So the old connection
is replaced only if it was silent for grace_s more, although the coordinator answers on the fresh
one. The old connection is closed when its transfers, which may be what keeps it busy, have ended,
or when none of them makes progress: their callers try again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any, Generic, Protocol, TypeVar

import grpc

from xain_foundation.backoff import Backoff
from xain_participant.runtime import Queue, Runtime
from xain_proto.fl.coordinator_pb2_grpc import CoordinatorStub

# Longest pause between two fresh connections. Each is twice as long after one that was needless,
# else a slow coordinator would be asked everything twice just when it has too much to do.
MAX_PAUSE_S = 120.0

_Answer = TypeVar("_Answer")
_Answer_co = TypeVar("_Answer_co", covariant=True)


class Question(Protocol[_Answer_co]):
    """The future of a gRPC call, as far as it is used here."""

    def done(self) -> bool: ...
    def code(self) -> grpc.StatusCode: ...
    def result(self) -> _Answer_co: ...
    def cancel(self) -> object: ...
    def add_done_callback(self, fn: Callable[[Any], None], /) -> None: ...


class Stream(Protocol):
    """A stream, which ends with its connection."""

    def cancel(self) -> None: ...


class Connection:
    """One channel, and what is under way on it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._streams: list[Stream] = []  # the latest of each kind
        self.stub = CoordinatorStub(channel)
        self.transfers: list[Transfer] = []
        self.is_retired = False
        self.is_closed = False

    @property
    def gets_on(self) -> bool:
        return any(not transfer.is_overdue for transfer in self.transfers)

    def add_stream(self, stream: Stream) -> None:
        """A stream that is cancelled when this connection is not the one that is used any more."""
        self._streams = [*(one for one in self._streams if type(one) is not type(stream)), stream]
        if self.is_retired:
            stream.cancel()

    def retire(self) -> None:
        self.is_retired = True
        for stream in self._streams:
            stream.cancel()

    def close(self) -> None:
        """Cancel the calls under way. An upload ends when gRPC has sent its last bytes, or the
        kernel has given up on them, which takes as long as grpc.keepalive_timeout_ms."""
        self.is_closed = True
        self._channel.close()


class Transfer:
    """Something that may take long, over the connection that was in use when it began."""

    def __init__(self, connection: Connection, now: Callable[[], float], allowed_s: float) -> None:
        self.connection = connection
        self._now = now
        self.allow(allowed_s)

    def allow(self, seconds: float) -> None:
        """Note progress. The next progress may take this many seconds."""
        self._due_at = self._now() + seconds

    @property
    def is_overdue(self) -> bool:
        return self._now() > self._due_at


class Connections:
    """The one that is used, the one that it has replaced, and one that is being tried.

    Safe to use from several threads, but contact() from one.
    open_: a new channel.
    """

    silence_s = 2.0
    # silence_s and grace_s together are the time limit of a sign of life, so that a connection with
    # an answer within the limit is never replaced.
    grace_s = 3.0
    # Pause between two fresh connections: a little less than between two heartbeats, so that each
    # heartbeat may have one.
    min_pause_s = 8.0
    stall_s = 20.0  # of a transfer; a chunk takes 8 s on the slowest line that is worth using

    def __init__(self, open_: Callable[[], grpc.Channel], runtime: Runtime) -> None:
        self._open = open_
        self._runtime = runtime
        self._lock = threading.Lock()  # never held while something may wait
        self._current = Connection(open_())
        self._open_ones = [self._current]  # the oldest first
        self.backoff = Backoff(self.min_pause_s, MAX_PAUSE_S)
        self._not_before = runtime.now()  # when there may be another fresh one
        self.is_closed = False

    @property
    def current(self) -> Connection:
        return self._current

    def close(self) -> None:
        """Cancel what is under way. Later calls raise ValueError, as on a closed channel."""
        with self._lock:
            self.is_closed = True
            connections = list(self._open_ones)
        for connection in connections:
            connection.close()

    def contact(
        self, ask: Callable[[CoordinatorStub, float], Question[_Answer]], timeout_s: float
    ) -> _Answer:
        """Ask a question that may be asked twice, for timeout_s in all. Raises grpc.RpcError."""
        self._close_unused()
        asked = _Asked[_Answer](self._runtime.queue())
        silence_s = min(self.silence_s, timeout_s / 2)
        question = asked.add(ask(self._current.stub, timeout_s))
        if asked.is_done(silence_s):
            if _is_answered(question):
                self.backoff.reset()
        elif self._runtime.now() >= self._not_before:
            return self._ask_afresh(ask, timeout_s - silence_s, asked, question)
        else:
            asked.is_done()
        return question.result()

    @contextmanager
    def transfer(self, allowed_s: float) -> Iterator[Transfer]:
        """Begin a call that may take long and reports its progress. allowed_s: time until its first
        progress."""
        with self._lock:
            connection = self._current
            transfer = Transfer(connection, self._runtime.now, allowed_s)
            connection.transfers.append(transfer)
        try:
            yield transfer
        finally:
            with self._lock:
                connection.transfers.remove(transfer)
            self._close_unused()

    def _ask_afresh(
        self,
        ask: Callable[[CoordinatorStub, float], Question[_Answer]],
        timeout_s: float,
        asked: "_Asked[_Answer]",
        old: Question[_Answer],
    ) -> _Answer:
        self._not_before = self._runtime.now() + self.min_pause_s
        fresh = self._open_fresh()
        is_needed = False
        try:
            new = asked.add(ask(fresh.stub, timeout_s))
            asked.is_done()
            if not _is_answered(old) and not _is_answered(new):
                asked.is_done()  # one has failed, which says nothing about the other
            if _is_answered(old) or not _is_answered(new):
                return old.result()
            if not old.done():
                asked.is_done(self.grace_s)
            # A connection that is known to be broken is not silent: gRPC connects it again.
            is_needed = not old.done() or old.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return new.result()
        finally:
            if is_needed:
                self._use(fresh)
                old.cancel()
            else:
                fresh.retire()
                self._not_before = self._runtime.now() + self.backoff.next_s()
            self._close_unused()

    def _open_fresh(self) -> Connection:
        fresh = Connection(self._open())
        with self._lock:
            self._open_ones.append(fresh)
            is_closed = self.is_closed
        if is_closed:
            fresh.close()  # and the question is refused
        return fresh

    def _use(self, fresh: Connection) -> None:
        with self._lock:
            old, self._current = self._current, fresh
        self.backoff.reset()
        old.retire()

    def _close_unused(self) -> None:
        """Close the connections that have been replaced and on which no call makes progress."""
        with self._lock:
            ended = [c for c in self._open_ones if c.is_retired and not c.gets_on]
            self._open_ones = [c for c in self._open_ones if c not in ended]
        for connection in ended:
            connection.close()


class _Asked(Generic[_Answer]):
    """Questions under way, each of which ends by its own time limit at the latest."""

    def __init__(self, ended: Queue[Any]) -> None:
        self._ended = ended

    def add(self, question: Question[_Answer]) -> Question[_Answer]:
        question.add_done_callback(self._ended.put)
        return question

    def is_done(self, timeout_s: float | None = None) -> bool:
        """Wait for the next question to end; returns whether one did in time."""
        try:
            self._ended.get(timeout=timeout_s)
        except Empty:
            return False
        return True


# Statuses from the participant's own side of a connection, which say nothing about the other side.
_NO_ANSWER = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)


def _is_answered(question: Question[Any]) -> bool:
    return question.done() and question.code() not in _NO_ANSWER
