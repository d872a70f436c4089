"""Connections of the HTTP face: their number has a bound, and those that say nothing end.

A connection is idle until a whole request has come, and again once its answer is written. A new
connection that finds no room ends the idle one that has been so longest. The rest of a body that is
answered before it has come is read and left out: closed with unread bytes, a connection is reset,
and the client may never see the answer.
"""

import asyncio
import logging
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from xain_foundation.security.tls import Certificates

MAX_CONNECTIONS = 256
MAX_HEAD_BYTES = 16 << 10
HEAD_S = 10.0  # for a whole head
STALLED_S = 30.0  # without a byte of a body or of an answer
# Between two requests. Clients keep a connection for 5 to 60 s after an answer; one that the server
# ends first may lose the request that is on its way. nginx has the same default.
KEEP_ALIVE_S = 75.0
MAX_UNSENT_BYTES = 8 << 20  # of whole answers that clients do not read, in all


class Connections:
    """The idle connections of one face, the oldest first."""

    def __init__(self, most: int = MAX_CONNECTIONS, head_s: float = HEAD_S) -> None:
        self.most = most
        self.head_s = head_s
        self.idle: dict[Connection, None] = {}
        self.handshakes: dict[Handshake, None] = {}


class Handshake(SSLProtocol):
    """TLS below a connection. A server's context would be the same for all connections, and a
    connection that says nothing would not be counted."""

    def __init__(
        self, shared: Connections, certificates: Certificates, *args: Any, **kwargs: Any
    ) -> None:
        self._handshakes, self._most = shared.handshakes, shared.most
        self._raw: asyncio.Transport | None = None
        connection = Connection(shared, *args, **kwargs)
        connection.on_made = lambda: self._handshakes.pop(self, None)
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            certificates.accepts_all,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=shared.head_s,  # type: ignore[arg-type]  # takes a float
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count a handshake; the oldest one of too many is ended."""
        assert isinstance(transport, asyncio.Transport), "a connection of TCP has one"
        self._raw = transport
        if len(self._handshakes) >= self._most:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            assert oldest._raw is not None, "it is counted since it was made"
            oldest._raw.abort()
        self._handshakes[self] = None
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._handshakes.pop(self, None)
        super().connection_lost(exc)


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, with the bounds of this module."""

    def __init__(self, shared: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Anybody can cause a line of uvicorn's for each request.
        self.logger = logging.Logger("http", logging.CRITICAL)
        self._shared = shared
        self._num_received = 0
        self._progress = (0, 0)
        self._timer: asyncio.TimerHandle | None = None
        self.on_made: Callable[[], object] = lambda: None

    # A connection of TCP has a Transport; the method of uvicorn expects one, too.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a connection as idle; of too many the oldest idle one is ended, or this one's
        request is refused."""
        super().connection_made(transport)
        self.on_made()
        idle = self._shared.idle
        if len(self.connections) > self._shared.most:
            if idle:
                next(iter(idle)).end()
            else:
                self.limit_concurrency = 1  # its request is refused with 503
        idle[self] = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in received bytes, and note whether the connection is idle then."""
        begins = self._is_between_requests
        self._num_received += len(data)
        super().data_received(data)
        self._look(begins=begins)

    def on_response_complete(self) -> None:
        """Count the connection as idle again; if too many unsent bytes are held, idle connections
        with some are ended."""
        super().on_response_complete()
        self._look()
        unsent = {one: one.transport.get_write_buffer_size() for one in self._shared.idle}
        num_bytes = sum(unsent.values())
        for one, size in unsent.items():
            if num_bytes <= MAX_UNSENT_BYTES:
                break
            if size:
                num_bytes -= size
                one.end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing: _watch() ends what is idle."""

    def end(self) -> None:
        """End the connection, whatever has come."""
        self._leave()
        self.transport.abort()

    @property
    def _has_head(self) -> bool:
        """Whether the head of a request has come whose answer is not whole."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answered(self) -> bool:
        """Whether a whole request has come that has no whole answer yet."""
        return self._has_head and not self.cycle.more_body

    @property
    def _is_body_coming(self) -> bool:
        """Whether a head has come whose body has not, though it may have an answer."""
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _is_between_requests(self) -> bool:
        """Whether an answer is written and nothing of another request has come."""
        is_idle: bool = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        return self.cycle is not None and is_idle

    def _look(self, *, begins: bool = False) -> None:
        """Count the connection as idle unless a whole request of it is being answered. begins: its
        first bytes since an answer have come, so that its time starts anew."""
        idle = self._shared.idle
        if self.transport.is_closing():
            return
        if self._is_answered:
            self._leave()
        elif self not in idle or begins:
            idle[self] = None
            self._watch()

    def _watch(self) -> None:
        """Start the timer that ends the connection if nothing moves until then; an earlier timer is
        cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        self._progress = self._moved
        after_s = self._shared.head_s
        if self._is_body_coming or self._has_head or self.transport.get_write_buffer_size() > 0:
            after_s = STALLED_S
        elif self._is_between_requests:
            after_s = KEEP_ALIVE_S
        self._timer = self.loop.call_later(after_s, self._end_if_stalled)

    @property
    def _moved(self) -> tuple[int, int]:
        """Bytes of a body that have come, and, with a minus, of an answer that have not gone. A
        head is no progress before it is whole."""
        return (
            self._num_received if self._is_body_coming else 0,
            -self.transport.get_write_buffer_size(),
        )

    def _end_if_stalled(self, *, is_sure: bool = False) -> None:
        """End the connection if nothing has moved since _watch() and it does not wait for the
        coordinator. is_sure: whether bytes that had come were read before."""
        self._timer = None
        if self._is_answered and not self.transport.get_write_buffer_size():
            return  # it waits for the coordinator
        if self._moved > self._progress:
            self._watch()
        elif is_sure:
            self.end()
        else:
            # Bytes that came while the loop was busy are read first.
            again = partial(self._end_if_stalled, is_sure=True)
            self._timer = self.loop.call_later(0, again)

    def _leave(self) -> None:
        """Count the connection as idle no longer, and stop its timer."""
        self._shared.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
