"""Frames over gRPC: to each peer a stream, on which nothing comes back.

Everybody serves `/xain_messaging.Exchange/Deliver`, a client stream of bytes. A packet is a prelude
and its frames, one after another, in messages of at most CHUNK_BYTES:

    number of frames    4 bytes, unsigned, little-endian
    size of each        8 bytes each
    the frames

The next packet begins with a message of its own. There is no protobuf in it: that would copy every
array twice more at each end.

A message is in memory once at the receiver, in its place, while it comes. gRPC's flow control holds
back who sends faster than that. What has come waits until the receiver's program asks for it. Those
who keep to their Bounds cannot have much waiting; a stream that brings more than that is ended with
RESOURCE_EXHAUSTED, and what waits of it is dropped, as after a line that broke.
"""

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import structlog

from xain_messaging.codec import MAX_MESSAGE_BYTES, Frame, Frames, num_bytes
from xain_messaging.drivers.event_queue import EventQueue
from xain_messaging.errors import Closed, UnknownPeer
from xain_messaging.links import DEFAULT_BOUNDS, TOLERANCE, Bounds
from xain_messaging.ports import Arrived, DriverEvent, Lost
from xain_messaging.spare import spare

log = structlog.get_logger(__name__)

METHOD: Final = "/xain_messaging.Exchange/Deliver"
# Each costs some hand-overs between threads at both ends, whatever its size.
CHUNK_BYTES: Final = 2 << 20
# More than a message has; see codec.py.
MAX_FRAMES: Final = 4096
MAX_PACKET_BYTES: Final = MAX_MESSAGE_BYTES + (16 << 20)

# A thread waits on each stream that comes.
MAX_PEERS: Final = 256

# Between two attempts to reach a peer.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", CHUNK_BYTES + 8 * MAX_FRAMES + 64),
    ("grpc.max_send_message_length", CHUNK_BYTES + 8 * MAX_FRAMES + 64),
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


class Malformed(Exception):
    """A stream that is none of ours."""


class TooMuch(Exception):
    """More than a peer may send that nobody has received."""


@dataclass(slots=True, eq=False)
class _Stream:
    """What waits of one that comes."""

    packets: deque[Frames] = field(default_factory=deque)
    num_bytes: int = 0


class GrpcDriver:
    """See ports.Driver. It listens on its host at a port that is free, unless one is given.

    listen: "HOST:PORT", port 0 for any.
    advertise: the host that others are told, if it is not that of `listen`.
    tls: without it everything goes in the clear, and anybody may connect. With it only those whose
        certificates `ca` has signed; which of them a peer is, it says itself.
    max_peers: whose streams are taken at a time; those beyond it try again until there is room.
    max_packet_bytes: a message that is larger is refused, with its stream.
    bounds: those of the peers that send to it, and of all that come together.
    num_refused: streams that were ended because they were none of ours, or brought too much.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        advertise: str = "",
        tls: TlsFiles | None = None,
        max_peers: int = MAX_PEERS,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self.num_refused = 0
        self._tls = tls
        self._bounds = bounds
        self._max_packet_bytes = max_packet_bytes
        # In the place of a packet, the stream that has it.
        self._events: EventQueue[Lost | _Stream] = EventQueue()
        self._waiting_bytes = 0  # of all streams
        self._lock = threading.RLock()
        self._lines: dict[str, _Line] = {}
        self._is_closed = False
        handler: Any = grpc.stream_unary_rpc_method_handler(self._deliver)
        service, _, method = METHOD[1:].partition("/")
        self._server = grpc.server(
            _Threads(),  # type: ignore[arg-type]  # any Executor will do
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
            options=_OPTIONS,
            maximum_concurrent_rpcs=max_peers,
        )
        if tls is None:
            port = self._server.add_insecure_port(listen)
        else:
            credentials = grpc.ssl_server_credentials(
                [(tls.key, tls.certificate)], tls.ca, require_client_auth=True
            )
            port = self._server.add_secure_port(listen, credentials)
        self._address = f"{advertise or listen.rpartition(':')[0]}:{port}"
        self._server.start()

    @property
    def address(self) -> str:
        return self._address

    # --- out ---

    def connect(self, peer: str, address: str) -> None:
        with self._lock:
            self._check_open()
            self.disconnect(peer)
            self._lines[peer] = _Line(peer, address, self._tls, self._events)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            line = self._lines.pop(peer, None)
        if line is not None:
            line.close()

    def send(self, peer: str, frames: Frames) -> None:
        with self._lock:
            self._check_open()
            if peer not in self._lines:
                raise UnknownPeer(f"{peer!r} is not connected")
            self._lines[peer].send(frames)

    # --- in ---

    def receive(self, timeout_s: float | None) -> DriverEvent | None:
        event = self._events.get(timeout_s)
        if not isinstance(event, _Stream):
            return event
        with self._lock:
            if not event.packets:
                return None  # it has been refused
            frames = event.packets.popleft()
            self._count(event, -self._size(frames))
        return Arrived(frames)

    def wake(self) -> None:
        self._events.wake()

    def _deliver(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        stream = _Stream()
        try:
            for frames in from_chunks(chunks, self._max_packet_bytes):
                self._add(stream, frames)
        except Malformed as error:
            self._refuse(stream, context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except TooMuch as error:
            self._refuse(stream, context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        return b""

    def _add(self, stream: _Stream, frames: Frames) -> None:
        bounds = self._bounds
        with self._lock:
            self._count(stream, self._size(frames))
            stream.packets.append(frames)
            of_one = len(stream.packets), stream.num_bytes
            of_all = self._events.size, self._waiting_bytes
        most = bounds.max_messages, bounds.max_bytes
        most_in_all = bounds.max_messages_in_all, bounds.max_bytes_in_all
        for waiting, limits, whose in ((of_one, most, "this peer"), (of_all, most_in_all, "all")):
            if waiting[0] > TOLERANCE * limits[0] or waiting[1] > TOLERANCE * limits[1]:
                raise TooMuch(
                    f"{waiting[0]} messages of {waiting[1]} bytes of {whose} wait to be received, "
                    f"and no more than {limits[0]} of {limits[1]} may be on their way: see Bounds"
                )
        self._events.put(stream)

    def _size(self, frames: Frames) -> int:
        # A single one may be larger than all that may wait, and counts as much.
        return min(num_bytes(frames), self._bounds.max_bytes)

    def _count(self, stream: _Stream, size_bytes: int) -> None:
        stream.num_bytes += size_bytes
        self._waiting_bytes += size_bytes

    def _refuse(
        self,
        stream: _Stream,
        context: grpc.ServicerContext,
        code: grpc.StatusCode,
        error: Exception,
    ) -> None:
        with self._lock:
            self.num_refused += 1
            self._count(stream, -stream.num_bytes)
            stream.packets.clear()
        log.warning("stream_refused", peer=context.peer(), code=str(code), error=str(error))
        context.abort(code, str(error))

    # --- the end ---

    def close(self, linger_s: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.finish()
        deadline = time.monotonic() + linger_s
        for line in lines.values():
            line.join(max(0.0, deadline - time.monotonic()))
            line.close()
        self._server.stop(0.0).wait()
        self._events.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")


class _Line:
    """To one peer: a stream, and another one whenever it has broken."""

    def __init__(
        self,
        peer: str,
        address: str,
        tls: TlsFiles | None,
        events: "EventQueue[Lost | _Stream]",
    ) -> None:
        self._peer = peer
        self._events = events
        self._lock = threading.RLock()
        self._is_closed = False
        self._begun_at = 0.0
        self._retry_s = RETRY_S
        self._timer: threading.Timer | None = None
        self._waiting: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._stream: Any = None
        if tls is None:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        self._method: Any = self._channel.stream_unary(METHOD)
        self._begin()

    def send(self, frames: Frames) -> None:
        self._waiting.put(frames)

    def _begin(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._begun_at = time.monotonic()
            # It waits for as long as nobody is there; the channel tries to reach it.
            self._stream = self._method.future(_chunks(self._waiting), wait_for_ready=True)
            self._stream.add_done_callback(self._ended)

    def _ended(self, stream: Any) -> None:
        with self._lock:
            if self._is_closed or stream is not self._stream:
                return
            self._waiting.put(None)  # lets gRPC's thread go that waits for more
            # A line that breaks is nothing special; one that the other end does not want is.
            code = None if stream.cancelled() else stream.code()
            level = log.debug if code is grpc.StatusCode.UNAVAILABLE else log.warning
            level("stream_ended", peer=self._peer, code=str(code), details=stream.details())
            # First a new queue, then the word: what goes into the old one after it would be lost.
            self._waiting = queue.SimpleQueue()
            self._events.put(Lost(self._peer))
            lived_s = time.monotonic() - self._begun_at
            self._retry_s = RETRY_S if lived_s > 1 else min(2 * self._retry_s, MAX_RETRY_S)
            self._timer = threading.Timer(self._retry_s, self._begin)
            self._timer.daemon = True
            self._timer.start()

    def finish(self) -> None:
        """No more will come. See join()."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Until the peer has all, or as long as that."""
        with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            if self._stream is not None:
                self._stream.result(timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._waiting.put(None)
        self._channel.close()


class _Threads(Executor):
    """A thread for each call that runs. None holds up the end of the process, as those of a
    ThreadPoolExecutor do when somebody forgets to close."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it is the caller's
                future.set_exception(error)

        threading.Thread(target=run, name="messages", daemon=True).start()
        return future


# --- packets in a stream --------------------------------------------------------------------------


def _chunks(waiting: "queue.SimpleQueue[Frames | None]") -> Iterator[bytes]:
    while (frames := waiting.get()) is not None:
        yield from to_chunks(frames)


def to_chunks(frames: Frames) -> Iterator[bytes]:
    """One packet."""
    views = [memoryview(frame).cast("B") for frame in frames]
    prelude = struct.pack(f"<I{len(views)}Q", len(views), *(view.nbytes for view in views))
    pieces: list[Frame] = [prelude]
    room = CHUNK_BYTES
    for view in views:
        while view.nbytes > room:
            yield b"".join([*pieces, view[:room]])
            view, pieces, room = view[room:], [], CHUNK_BYTES
        pieces.append(view)
        room -= view.nbytes
    if pieces:
        yield b"".join(pieces)


def from_chunks(
    chunks: Iterator[bytes], max_packet_bytes: int = MAX_PACKET_BYTES
) -> Iterator[list[Frame]]:
    """The packets of a stream; each frame is a buffer of its own. Raises Malformed."""
    for chunk in chunks:
        sizes, rest = _read_prelude(chunk, max_packet_bytes)
        # Not bytearrays: what is announced takes memory only when it comes.
        frames: list[Frame] = [spare.lend(size) for size in sizes]
        for frame in frames:
            target = memoryview(frame)
            while target.nbytes:
                if not rest.nbytes:
                    rest = memoryview(next(chunks, b""))
                    if not rest.nbytes:
                        raise Malformed("the stream ends within a message")
                size = min(target.nbytes, rest.nbytes)
                target[:size] = rest[:size]
                target, rest = target[size:], rest[size:]
        if rest.nbytes:
            raise Malformed(f"{rest.nbytes} bytes more than a message has")
        yield frames


def _read_prelude(chunk: bytes, max_packet_bytes: int) -> tuple[tuple[int, ...], memoryview]:
    try:
        (number,) = struct.unpack_from("<I", chunk)
        if number > MAX_FRAMES:
            raise Malformed(f"a message of {number} frames; at most {MAX_FRAMES} are taken")
        sizes = struct.unpack_from(f"<{number}Q", chunk, 4)
    except struct.error:
        raise Malformed("a message without its prelude") from None
    if sum(sizes) > max_packet_bytes:
        raise Malformed(f"a message of {sum(sizes)} bytes; at most {max_packet_bytes} are taken")
    return sizes, memoryview(chunk)[4 + 8 * number :]
