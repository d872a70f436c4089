"""Frames over gRPC: to each peer a stream of bytes, on which nothing comes back.

Every peer serves `/xain_messaging.Exchange/Deliver`, a client stream of bytes, whose format is in
grpc_framing.py. The event loop of the process reads the streams of all peers. To each peer a thread
of gRPC sends.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc

from xain_foundation.backoff import Backoff
from xain_foundation.logger import get_logger
from xain_messaging import background
from xain_messaging.codec import MAX_MESSAGE_BYTES, Frames, num_bytes
from xain_messaging.drivers.addresses import told_host
from xain_messaging.drivers.grpc_framing import MAX_CHUNK_BYTES, Malformed, Reader, to_chunks
from xain_messaging.errors import Closed, UnknownPeer
from xain_messaging.links import MAX_HEAD_BYTES
from xain_messaging.waits import LONGEST_S, left_s

log = get_logger(__name__)

METHOD: Final = "/xain_messaging.Exchange/Deliver"

# Seconds between two attempts to reach a peer.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0

# Seconds for the last calls to end when the server stops. Without any, gRPC reports an error to the
# peers, which print it.
STOP_GRACE_S: Final = 1.0

# Seconds that close() waits for the server to stop.
STOP_S: Final = 5.0

# Statuses of a stream that is finished, of a connection that breaks, and of a peer that closes.
_USUAL: Final = frozenset(
    {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
)

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES),
    ("grpc.max_send_message_length", MAX_CHUNK_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", round(1000 * RETRY_S)),
    ("grpc.min_reconnect_backoff_ms", round(1000 * RETRY_S)),
    ("grpc.max_reconnect_backoff_ms", round(1000 * MAX_RETRY_S)),
    # Channels to one address must not share a connection: it would outlive disconnect().
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
)


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


class _Connection:
    """The way to one peer: a stream that begins with the first packet. A stream that has broken is
    followed by another one, after a back-off.

    on_lost: called after the back-off, when packets go over another stream.
    """

    def __init__(
        self, peer: str, address: str, tls: TlsFiles | None, on_lost: Callable[[str], None]
    ) -> None:
        if tls is None:
            self._channel = grpc.insecure_channel(address, OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, tls.of_channel(), OPTIONS)
        self._peer = peer
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._packets: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._call: Any = None
        self._begun_at = 0.0
        self._backoff = Backoff(RETRY_S, MAX_RETRY_S)
        self._is_closed = False

    def send(self, frames: Frames) -> None:
        with self._lock:
            self._packets.put(frames)
            if self._call is None:
                self._begun_at = time.monotonic()
                method: Any = self._channel.stream_unary(METHOD)
                # The stream waits until the peer is there; the channel tries to reach it.
                self._call = method.future(_chunks(self._packets), wait_for_ready=True)
                self._call.add_done_callback(self._ended)

    def _ended(self, call: Any) -> None:
        """The stream has broken. Packets that are sent before on_lost() are lost with it."""
        self._packets.put(None)  # for gRPC's thread, which may wait for more
        with self._lock:
            if self._is_closed:
                return
            if time.monotonic() - self._begun_at >= 1:
                self._backoff.reset()
        level = log.debug if call.code() in _USUAL else log.warning
        level("stream_ended", peer=self._peer, code=str(call.code()), details=call.details())
        loop = background.event_loop()
        loop.call_soon_threadsafe(loop.call_later, self._backoff.next_s(), self._reopen)

    def _reopen(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._packets, self._call = queue.SimpleQueue(), None
        self._on_lost(self._peer)

    def finish(self) -> None:
        """Let the stream end when all packets have gone."""
        self._packets.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the peer has all packets, or until the deadline."""
        call = self._call
        while call is not None and not call.done() and time.monotonic() < deadline:
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(left_s(deadline))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._packets.put(None)
        self._channel.close()


def _chunks(packets: "queue.SimpleQueue[Frames | None]") -> Iterator[bytes]:
    while (frames := packets.get()) is not None:
        yield from to_chunks(frames)
        del frames  # the next may be long in coming


class Room:
    """A bound on the bytes of packets that are put together at the same time.

    coming_bytes: of those packets now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.coming_bytes = 0
        self._has_changed = asyncio.Event()

    async def reserve(self, size_bytes: int) -> None:
        """Wait until this many bytes have room beside others, or nothing else is in use."""
        while self.coming_bytes and self.coming_bytes + size_bytes > self.max_bytes:
            self._has_changed.clear()
            await self._has_changed.wait()
        self.coming_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.coming_bytes -= size_bytes
        self._has_changed.set()


class GrpcDriver:
    """See ports.Driver. It listens on its host at a port that is free, unless one is given.

    listen: "HOST:PORT", port 0 for any.
    advertise: the host that others are told, if it is not that of `listen`. A host that stands for
        all interfaces, such as "0.0.0.0", needs that.
    tls: without it everything goes in the clear, and anybody may connect. With it only peers whose
        certificates `ca` has signed.
    num_refused: streams that were ended because they carried no packets.
    """

    max_message_bytes = MAX_MESSAGE_BYTES
    small_bytes = 16 << 20  # of a small packet
    is_polled = False  # the event loop reads

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        advertise: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        host = told_host(listen.rpartition(":")[0], advertise)  # before anything is open
        self.num_refused = 0
        self._tls = tls
        # Packets of more than one chunk that are put together at the same time, of all peers. Each
        # counts with the size that it announces. One that finds no room waits, and its stream is
        # not read meanwhile; one that is larger than the room is put together alone. A peer that
        # announces a large one and then stalls holds up only other large ones.
        self._small, self._large = Room(256 << 20), Room(768 << 20)
        self._on_packet: Callable[[Frames], None] = lambda frames: None
        self._on_lost: Callable[[str], None] = lambda peer: None
        self._is_served = asyncio.Event()
        self._is_woken = threading.Event()
        self._lost: deque[str] = deque()
        self._connections: dict[str, _Connection] = {}
        self._streams: set[asyncio.Task[Any]] = set()  # that peers have opened
        self._is_closed = False
        self._server: grpc.aio.Server | None = None
        try:
            self.address = f"{host}:{background.run(self._listen(listen))}"
        except BaseException:  # an interrupt too: no server stays behind
            background.finish(self._stop(), STOP_S)
            raise

    async def _listen(self, address: str) -> int:
        """Start the server. Returns its port."""
        handler: Any = grpc.stream_unary_rpc_method_handler(self._deliver)
        service, _, method = METHOD[1:].partition("/")
        server = self._server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: handler})]
        )
        if self._tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self._tls.of_server())
        await server.start()
        return port

    # --- out ---

    def connect(self, peer: str, address: str) -> None:
        self._check_open()
        self.disconnect(peer)
        self._connections[peer] = _Connection(peer, address, self._tls, self._note_lost)

    def disconnect(self, peer: str) -> None:
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()

    def send(self, peer: str, frames: Frames) -> None:
        self._check_open()
        connection = self._connections.get(peer)
        if connection is None:
            raise UnknownPeer(f"{peer!r} is not connected")
        connection.send(frames)

    # --- in ---

    def serve(self, on_packet: Callable[[Frames], None], on_lost: Callable[[str], None]) -> None:
        self._on_packet, self._on_lost = on_packet, on_lost
        background.event_loop().call_soon_threadsafe(self._is_served.set)

    def run(self, timeout_s: float) -> None:
        """Report lost connections; packets come in the event loop."""
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

    async def _deliver(self, _: object, context: Any) -> bytes:
        reader = Reader(self.max_message_bytes + MAX_HEAD_BYTES)
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        await self._is_served.wait()
        room, reserved = self._small, 0
        try:
            while (chunk := await context.read()) is not grpc.aio.EOF:
                if (frames := reader.feed(chunk)) is not None:
                    self._on_packet(frames)
                    room.release(reserved)
                    reserved = 0
                elif not reserved:
                    size = num_bytes(reader.frames)
                    room = self._small if size < self.small_bytes else self._large
                    await room.reserve(size)
                    reserved = size
                del chunk, frames  # the next may be long in coming
            reader.end()
        except Malformed as error:
            self.num_refused += 1
            log.warning("stream_refused", peer=context.peer(), error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            # gRPC ends no call whose task is cancelled, and _stop() would wait for it.
        finally:
            room.release(reserved)
        return b""

    # --- the end ---

    def close(self, linger_s: float) -> None:
        if self._is_closed:
            return
        try:
            self._is_closed = True
            deadline = time.monotonic() + linger_s
            connections = list(self._connections.values())
            for connection in connections:
                connection.finish()
            for connection in connections:
                connection.join(deadline)
        finally:  # an interrupt too
            try:
                while self._connections:
                    self._connections.popitem()[1].close()
            finally:
                self._is_woken.set()
                background.finish(self._stop(), STOP_S)

    async def _stop(self) -> None:
        for stream in self._streams:
            stream.cancel()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")
