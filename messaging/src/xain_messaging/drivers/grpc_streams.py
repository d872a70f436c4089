"""Frames over gRPC: to each peer a stream, on which nothing comes back.

A stream is opened when there is something to send, and ends when there has been nothing for IDLE_S;
so a peer has as many streams at a time as others talk to it, however many there are.

Every peer serves `/xain_messaging.Exchange/Deliver`, a client stream of bytes. grpc_framing.py says
what these are; grpc_lines.py sends, this module receives. A packet is in memory once at the
receiver, in its place, while it comes; the thread of its stream hands it over.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import grpc

from xain_foundation.logger import get_logger
from xain_messaging.codec import MAX_MESSAGE_BYTES, Frames, num_bytes
from xain_messaging.drivers import grpc_lines
from xain_messaging.drivers.addresses import told_host, with_limit
from xain_messaging.drivers.grpc_framing import Malformed, from_chunks
from xain_messaging.drivers.grpc_lines import METHOD, OPTIONS, Line
from xain_messaging.drivers.grpc_threads import Threads
from xain_messaging.errors import BodyError, Closed, UnknownPeer
from xain_messaging.links import MAX_HEAD_BYTES
from xain_messaging.waits import LONGEST_S

log = get_logger(__name__)

# A thread waits on each stream that comes.
MAX_PEERS: Final = 256

# Who keeps a stream open though it is idle loses it after so many times IDLE_S, if its place is
# needed. It is also the time that a network may take for a piece of CHUNK_BYTES then.
MAX_IDLE_TIMES: Final = 3

# How long the server may take to end, once nothing is sent or taken any more.
STOP_S: Final = 5.0
STOP_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM, as bytes. Both ends show their certificates, and both must be signed by `ca`; that of a
    peer must be for the host in its address."""

    ca: bytes
    certificate: bytes
    key: bytes

    def of_server(self) -> grpc.ServerCredentials:
        own = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(own, self.ca, require_client_auth=True)

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


@dataclass(slots=True, eq=False)
class _Stream:
    """The chunks of a stream that comes.

    silent_since: from when on the next chunk has been awaited; math.inf while a packet is handled.
    """

    chunks: Iterator[bytes]
    context: grpc.ServicerContext
    silent_since: float = math.inf

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> bytes:
        self.silent_since = time.monotonic()
        try:
            return next(self.chunks)
        finally:
            self.silent_since = math.inf


class GrpcDriver:
    """See ports.Driver. It listens on its host at a port that is free, unless one is given.

    listen: "HOST:PORT", port 0 for any.
    advertise: the host that others are told, if it is not that of `listen`. A host that stands for
        all interfaces, such as "0.0.0.0", needs that.
    tls: without it everything goes in the clear, and anybody may connect. With it only those whose
        certificates `ca` has signed; which of them a peer is, it says itself.
    max_peers: whose streams are taken at a time. Those beyond it say so in their logs, and try
        again until one of the others has sent nothing for IDLE_S, and its stream has ended. One
        that does not end by itself is ended after three times that, while there is no place.
    max_message_bytes: a message that is larger is refused where it is sent, here and at the others:
        the address tells them. A stream that brings one is ended.
    num_refused: streams that were ended because they were none of ours.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        advertise: str = "",
        tls: TlsFiles | None = None,
        max_peers: int = MAX_PEERS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        host = told_host(listen.rpartition(":")[0], advertise)  # before anything is open
        self.num_refused = 0
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._on_packet: Callable[[Frames], None] = lambda frames: None
        self._on_lost: Callable[[str], None] = lambda peer: None
        self._is_served = threading.Event()
        self._is_woken = threading.Event()
        self._lost: deque[str] = deque()
        self._lock = threading.RLock()
        self._lines: dict[str, Line] = {}
        self._is_closed = False
        self._max_peers = max_peers
        self._streams: set[_Stream] = set()
        self._threads = Threads(self._end_silent, grpc_lines.IDLE_S)
        self._server: grpc.Server | None = None
        try:
            port = self._serve(listen)
            limit = max_message_bytes if max_message_bytes < MAX_MESSAGE_BYTES else None
            self._address = with_limit(f"{host}:{port}", limit)
        except BaseException:  # the port is taken, say; or an interrupt, when it serves already
            self._threads.end(self._stop, STOP_S)
            raise

    def _serve(self, listen: str) -> int:
        """Returns the port."""
        handler: Any = grpc.stream_unary_rpc_method_handler(self._deliver)
        service, _, method = METHOD[1:].partition("/")
        server = self._server = grpc.server(
            self._threads,  # type: ignore[arg-type]  # any Executor will do
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
            options=OPTIONS,
            maximum_concurrent_rpcs=self._max_peers,
        )
        if self._tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, self._tls.of_server())
        server.start()
        return port

    def _stop(self) -> None:
        """From its beginning on nobody listens at the port. Returns when the server has ended.

        That is never if gRPC has had no thread to serve in. Then the one that waits here keeps the
        server, for good: the collector, and the end of the process too, would wait for it with all
        other threads held up.
        """
        if self._server is None:
            return
        with self._lock:
            for stream in self._streams:
                stream.context.cancel()
        try:
            # Without time to end, gRPC reports an error to the peers, which print it.
            self._server.stop(STOP_GRACE_S).wait()
        except RuntimeError:  # no thread to wait in
            self._server.stop(None)

    @property
    def address(self) -> str:
        return self._address

    # --- out ---

    def connect(self, peer: str, address: str) -> None:
        with self._lock:
            self._check_open()
            self.disconnect(peer)
            credentials = None if self._tls is None else self._tls.of_channel()
            self._lines[peer] = Line(peer, address, credentials, self._note_lost)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            line = self._lines.pop(peer, None)
        if line is not None:
            line.close()

    def check(self, peer: str, frames: Frames) -> None:
        size, line = num_bytes(frames), self._lines.get(peer)
        if size > self._max_message_bytes:
            raise BodyError(
                f"a message of {size} bytes; this driver carries {self._max_message_bytes}"
            )
        if line is not None and line.max_bytes is not None and size > line.max_bytes:
            raise BodyError(f"a message of {size} bytes; {peer!r} takes {line.max_bytes} at once")

    def send(self, peer: str, frames: Frames) -> None:
        with self._lock:
            self._check_open()
            if peer not in self._lines:
                raise UnknownPeer(f"{peer!r} is not connected")
            self._lines[peer].send(frames)

    # --- in ---

    def serve(self, on_packet: Callable[[Frames], None], on_lost: Callable[[str], None]) -> None:
        self._on_packet, self._on_lost = on_packet, on_lost
        self._is_served.set()

    def run(self, timeout_s: float) -> None:
        """Packets come in the threads of their streams; only losses are told here."""
        if not self._is_closed:
            self._is_woken.wait(min(timeout_s, LONGEST_S))
        self._is_woken.clear()
        while self._lost:
            self._on_lost(self._lost.popleft())

    def _note_lost(self, peer: str) -> None:
        self._lost.append(peer)
        self._is_woken.set()

    def wake(self) -> None:
        self._is_woken.set()

    def _deliver(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        stream = _Stream(chunks, context)
        with self._lock:
            self._streams.add(stream)
        try:
            self._is_served.wait()
            for frames in from_chunks(stream, self._max_message_bytes + MAX_HEAD_BYTES):
                self._on_packet(frames)
                del frames  # the next may be long in coming
        except Malformed as error:
            with self._lock:
                self.num_refused += 1
            code = grpc.StatusCode.INVALID_ARGUMENT
            log.warning("stream_refused", peer=context.peer(), code=str(code), error=str(error))
            context.abort(code, str(error))
        finally:
            with self._lock:
                self._streams.discard(stream)
        return b""

    def _end_silent(self) -> None:
        """Who has a stream and sends nothing must not keep out the others. What is on its way to us
        just then goes again: its sender sees that the line has broken."""
        with self._lock:
            streams = list(self._streams)
        if len(streams) < self._max_peers:
            return
        now = time.monotonic()
        for stream in streams:
            silent_s = now - stream.silent_since
            if silent_s >= MAX_IDLE_TIMES * grpc_lines.IDLE_S:
                log.warning("stream_silent", peer=stream.context.peer(), silent_s=round(silent_s))
                stream.context.cancel()

    # --- the end ---

    def close(self, linger_s: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            lines, self._lines = self._lines, {}
        with ExitStack() as rest:  # all of it, whatever one of them raises
            rest.callback(self._is_woken.set)
            rest.callback(self._is_served.set)
            rest.callback(self._threads.end, self._stop, STOP_S)
            for line in lines.values():
                rest.callback(line.close)
            for line in lines.values():
                line.finish()
            deadline = time.monotonic() + linger_s
            for line in lines.values():
                line.join(deadline)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
