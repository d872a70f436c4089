"""The connection to the coordinator, and what replaces it when it has gone silent.

A connection can be dead without either end having heard of it: the peer lost its power, a NAT
forgot us, a middlebox acknowledges everything and passes on nothing. gRPC itself may take minutes
to find out; by then the lease is long over. So a sign of life that is not answered within SILENCE_S
is repeated over a fresh connection, and if that answers it is the connection from then on. With the
default lease of 15 s and heartbeats every 10 s this is early enough to keep it.

The old one may as well be slow, because an upload fills the line. It carries its transfers to their
end, and is closed then, or when nothing has moved on it for STALL_S: their owners try again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from xain_proto.fl.coordinator_pb2_grpc import CoordinatorStub

SILENCE_S = 2.0
# A chunk takes 8 s on the slowest line that is worth using.
STALL_S = 20.0

_Answer = TypeVar("_Answer")


class Connection:
    """One channel, and what is under way on it."""

    def __init__(self, channel: grpc.Channel, now: Callable[[], float]) -> None:
        self._channel = channel
        self._now = now
        self._watch: Any = None
        self.stub = CoordinatorStub(channel)
        self.num_transfers = 0
        self.is_retired = False
        self.moved()

    def moved(self) -> None:
        """A transfer gets on."""
        self._moved_at = self._now()

    @property
    def is_stalled(self) -> bool:
        return self._now() - self._moved_at > STALL_S

    def add_watch(self, call: Any) -> None:
        """A stream that ends when this connection is not the one that is used any more."""
        self._watch = call
        if self.is_retired:
            call.cancel()

    def retire(self) -> None:
        self.is_retired = True
        if self._watch is not None:
            self._watch.cancel()

    def close(self) -> None:
        """Cancels what is under way. An upload hears of it when gRPC has got rid of its last bytes,
        or the kernel has given up on them, which takes as long as grpc.keepalive_timeout_ms."""
        self._channel.close()


class Connections:
    """The one that is used, the one that it has replaced, and one that is being tried.

    Safe to use from several threads, but contact() from one.
    open_: a new channel. now: seconds, monotonic.
    """

    def __init__(self, open_: Callable[[], grpc.Channel], now: Callable[[], float]) -> None:
        self._open = open_
        self._now = now
        self._lock = threading.Lock()  # never held while something may wait
        self._current = Connection(open_(), now)
        self._open_ones = [self._current]  # the oldest first
        self._is_closed = False

    @property
    def current(self) -> Connection:
        return self._current

    def close(self) -> None:
        """Cancel what is under way. Later calls raise ValueError, as on a closed channel."""
        with self._lock:
            self._is_closed = True
            connections = list(self._open_ones)
        for connection in connections:
            connection.close()

    def contact(
        self, ask: Callable[[CoordinatorStub, float], _Answer], timeout_s: float
    ) -> _Answer:
        """Ask a question that may be asked twice, for timeout_s in all. Raises grpc.RpcError."""
        self._close_stalled()
        first_s = min(SILENCE_S, timeout_s / 2)
        try:
            return ask(self._current.stub, first_s)
        except grpc.RpcError as error:
            if _code(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return self._ask_afresh(ask, timeout_s - first_s)

    @contextmanager
    def transfer(self) -> Iterator[Connection]:
        """The connection for something that may take long; tell it what moves."""
        with self._lock:
            connection = self._current
            connection.num_transfers += 1
        connection.moved()
        try:
            yield connection
        finally:
            with self._lock:
                connection.num_transfers -= 1
            self._close_unused()

    def _ask_afresh(
        self, ask: Callable[[CoordinatorStub, float], _Answer], timeout_s: float
    ) -> _Answer:
        fresh = Connection(self._open(), self._now)
        with self._lock:
            self._open_ones.append(fresh)
            is_closed = self._is_closed
        if is_closed:
            fresh.close()  # and the question is refused
        is_answered = False
        try:
            answer = ask(fresh.stub, timeout_s)
            is_answered = True
        except grpc.RpcError as error:
            is_answered = _code(error) not in _NO_ANSWER
            raise
        finally:
            if is_answered:
                self._use(fresh)
            else:
                fresh.retire()
            self._close_unused()
        return answer

    def _use(self, fresh: Connection) -> None:
        with self._lock:
            old, self._current = self._current, fresh
        old.retire()

    def _close_unused(self) -> None:
        self._close(lambda connection: connection.num_transfers == 0)

    def _close_stalled(self) -> None:
        self._close(lambda connection: connection.is_stalled)

    def _close(self, is_over: Callable[[Connection], bool]) -> None:
        """Those that are not used any more and of which this is true."""
        with self._lock:
            ended = [c for c in self._open_ones if c.is_retired and is_over(c)]
            self._open_ones = [c for c in self._open_ones if c not in ended]
        for connection in ended:
            connection.close()


# What comes from our own side of a connection, and says nothing about the other.
_NO_ANSWER = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    # Every error of a blocking call is the call, too; the types do not say so.
    code: grpc.StatusCode = error.code()
    return code
