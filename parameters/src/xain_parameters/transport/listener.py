"""The server's side: connections of workers and of other servers."""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.names import shortened
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import NoIdentity, Role
from xain_foundation.security.tls import Certificates
from xain_parameters.messages import VERSION, AnyHead, Done, Hello, Message, Refused
from xain_parameters.transport.channel import (
    CLOSE_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    Channel,
    OnClosed,
    OnMessage,
    require_nothing,
    shut,
    tune,
)
from xain_parameters.transport.frames import Malformed, Receiver, Socket, pieces_of
from xain_parameters.transport.tls import LockedTlsSocket

MAX_CONNECTIONS: Final = 1024

log = get_logger(__name__)


def _only_hello(head: AnyHead, num_keys: int, num_bytes: int) -> None:
    if not isinstance(head, Hello):
        raise Malformed(f"{type(head).__name__} came before a Hello")


def _why_refused(hello: Hello, caller: Caller | NoIdentity | None) -> str:
    """Why a connection is refused; "" if it is taken. caller: None without certificates."""
    if hello.version != VERSION:
        return f"version {hello.version} of the protocol; this server speaks {VERSION}"
    if isinstance(caller, NoIdentity):
        return str(caller)
    role = Role.NODE if hello.role == "server" else Role.PARTICIPANT
    if caller is None or caller.identity.speaks_for(hello.name, role):
        return ""
    return (
        f"the certificate is that of {caller.identity}, and the connection is in the name of the "
        f"{shortened(hello.role)} {shortened(hello.name)!r}"
    )


class Listener:
    """Accepts connections, each with a reading thread of its own.

    At most max_connections: the next one is closed, or takes the place of the oldest that has not
    said Hello. So connections that say nothing keep no worker out.

    address: "HOST:PORT"; port 0 takes a free one, see `port`.
    on_message, on_closed: see Channel; called in the thread of the connection. While on_message
        runs, nothing more is read from that connection.
    tls: with the certificate of this server, and the names that others may have; None: no TLS.
    """

    def __init__(
        self,
        address: str,
        on_message: OnMessage,
        on_closed: OnClosed = lambda channel, why: None,
        *,
        tls: Certificates | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._tls = tls
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._is_closed = False
        self._greeting: dict[Socket, threading.Thread] = {}
        self._silent: dict[Socket, None] = {}  # those without a Hello yet, the oldest first
        self._channels: set[Channel] = set()
        # Log lines that any peer can cause, as often as it likes.
        self._tls_failed = RateLimitedLog(log.warning, "tls_handshake_failed")
        self._malformed = RateLimitedLog(log.warning, "malformed_message")
        self._refused = RateLimitedLog(log.warning, "connection_refused")
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, int(port)), family=family, backlog=256)
        self.port: int = self._socket.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._acceptor.start()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._channels) + len(self._greeting)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Accept no more, and end all connections. Returns when their threads have ended, after
        timeout_s at the latest for each one that is still busy."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
            greeting = dict(self._greeting)
        shut(self._socket)
        self._acceptor.join(timeout_s)
        self._socket.close()
        for connection in greeting:
            shut(connection)
        for channel in channels:
            channel.close()
        deadline = time.monotonic() + timeout_s
        for thread in greeting.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        for channel in channels:
            if not channel.join(timeout_s):
                log.warning("connection_is_busy", peer=channel.peer.name)

    # --- in threads ---

    def _accept(self) -> None:
        """Accept connections until the listener is closed, each greeted in a thread of its own.
        Where it is full, the oldest that has said nothing makes room."""
        while True:
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError as error:
                with self._lock:
                    if self._is_closed:
                        return
                log.warning("accept_failed", error=str(error))
                threading.Event().wait(0.1)  # no descriptor is free; one may be in a moment
                continue
            with self._lock:
                is_full = len(self._channels) + len(self._greeting) >= self._max_connections
                if is_full and self._silent:
                    oldest = next(iter(self._silent))
                    del self._silent[oldest], self._greeting[oldest]
                    shut(oldest)
                    is_full = False
                if is_full or self._is_closed:
                    connection.close()
                else:
                    # A Hello that does not come holds up no other connection.
                    greet = threading.Thread(
                        target=self._greet, args=(connection, host), name="greet", daemon=True
                    )
                    self._greeting[connection] = greet
                    self._silent[connection] = None
                    greet.start()
            if is_full:
                self._refused(reason="too many", limit=self._max_connections)

    def _greet(self, accepted: socket.socket, host: str) -> None:
        """Shake hands with a new connection and take its Hello. Makes a channel, or closes it."""
        connection: Socket = accepted
        channel = None
        caller: Caller | NoIdentity | None = None
        require: Callable[[], None] = require_nothing
        try:
            accepted.settimeout(HELLO_TIMEOUT_S)
            tune(accepted)
            if self._tls is not None:
                context = self._tls.accepts
                # The descriptor moves from `accepted`; close() has to shut the one that has it.
                with self._lock:
                    if self._is_closed or accepted not in self._silent:
                        raise EOFError
                    wrapped = context.wrap_socket(
                        accepted, server_side=True, do_handshake_on_connect=False
                    )
                    thread = self._greeting.pop(accepted)
                    del self._silent[accepted]
                    connection = secured = LockedTlsSocket(wrapped)
                    self._greeting[connection] = thread
                    self._silent[connection] = None
                secured.handshake()
                try:
                    caller = self._tls.callers.of_socket(wrapped)
                    require = partial(self._tls.callers.require, caller)
                except NoIdentity as error:
                    caller = error
            receiver = Receiver(connection, _only_hello)
            hello = receiver.receive().head
            assert isinstance(hello, Hello)
            receiver.destination = None
            with self._lock:
                if connection not in self._silent:  # another one has its place
                    raise EOFError
                del self._silent[connection]
            text = _why_refused(hello, caller)
            refused = Refused(0, "invalid", text) if text else None
            for piece in pieces_of(Message(refused or Done(0))):
                connection.sendall(piece)
            connection.settimeout(None)
            if refused is None:
                channel = Channel(
                    connection, hello, receiver, self._on_message, self._forget, require
                )
            else:
                self._refused(peer=shortened(hello.name), host=host, reason=text)
        except (EOFError, OSError) as error:
            # The end of the stream, which OpenSSL has two errors for, is a probe, or close().
            ended = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
            if isinstance(error, ssl.SSLError) and not isinstance(error, ended):
                self._tls_failed(host=host, error=str(error))
            log.debug("connection_gone", error=str(error))
        except Malformed as error:
            self._malformed(peer="?", error=str(error))
        except Exception:  # a defect of ours ends this connection only
            log.exception("hello_failed")
        with self._lock:
            self._greeting.pop(connection, None)
            self._silent.pop(connection, None)
            if channel is not None and not self._is_closed:
                self._channels.add(channel)
                channel.start()
                return
        connection.close()

    def _forget(self, channel: Channel, why: Exception | None) -> None:
        with self._lock:
            self._channels.discard(channel)
        self._on_closed(channel, why)
