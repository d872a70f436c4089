"""Frames over gRPC: to each peer a stream, on which nothing comes back.

It is opened when there is something to send, and ends when there has been nothing for IDLE_S; so a
peer has as many streams at a time as others talk to it, however many there are.

Everybody serves `/xain_messaging.Exchange/Deliver`, a client stream of bytes. A packet is a prelude
and its frames, one after another, in messages of at most CHUNK_BYTES:

    number of frames    4 bytes, unsigned, little-endian
    size of each        8 bytes each
    the frames

The next packet begins with a message of its own. There is no protobuf in it: that would copy every
array twice more at each end.

A message is in memory once at the receiver, in its place, while it comes. What has come waits until
the receiver's program asks for it. When that is more than those who keep to their Bounds can have
sent, no more is read, and gRPC's flow control holds back who sends.
"""

import math
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
import structlog

from xain_messaging.codec import MAX_FRAMES, MAX_MESSAGE_BYTES, Frame, Frames, num_bytes
from xain_messaging.drivers.addresses import split_limit, told_host, with_limit
from xain_messaging.drivers.event_queue import EventQueue
from xain_messaging.errors import BodyError, Closed, UnknownPeer
from xain_messaging.links import DEFAULT_BOUNDS, TOLERANCE, Bounds, max_head_bytes
from xain_messaging.ports import Arrived, DriverEvent, Lost
from xain_messaging.spare import spare

log = structlog.get_logger(__name__)

METHOD: Final = "/xain_messaging.Exchange/Deliver"
# Each costs some hand-overs between threads at both ends, whatever its size.
CHUNK_BYTES: Final = 2 << 20
# What Python and numpy take for each frame that waits, beside its bytes.
FRAME_BYTES: Final = 512

# A thread waits on each stream that comes.
MAX_PEERS: Final = 256

# A stream on which nothing goes for so long ends, and makes room for another peer's.
IDLE_S: Final = 10.0
# Who keeps a stream open all the same loses it after so many times that, if its place is needed. It
# is also the time that a network may take for a piece of CHUNK_BYTES then.
MAX_IDLE_TIMES: Final = 3

# Between two attempts to reach a peer.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0

# How long the server may take to end, once nothing is sent or taken any more.
STOP_S: Final = 5.0

# Between two lines in the log that say the same of one peer.
WARN_EVERY_S: Final = 60.0

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


@dataclass(slots=True, eq=False)
class _Waiting:
    """How much has come that nobody has received: of one stream, or of all."""

    max_packets: int
    max_bytes: int
    num_packets: int = 0
    num_bytes: int = 0

    def has_room(self, size_bytes: int) -> bool:
        """One that is larger than all that may wait has room where nothing else waits."""
        fits = self.num_bytes + size_bytes <= self.max_bytes
        return not self.num_packets or (fits and self.num_packets < self.max_packets)

    def add(self, num_packets: int, size_bytes: int) -> None:
        self.num_packets += num_packets
        self.num_bytes += size_bytes


@dataclass(slots=True, eq=False)
class _Stream:
    """One that comes: its chunks.

    changed: something of it has been received, or it is its turn.
    silent_since: from when on the next chunk has been awaited; math.inf while it is we who make its
        peer wait.
    """

    changed: threading.Condition
    waiting: _Waiting
    chunks: Iterator[bytes]
    context: grpc.ServicerContext
    silent_since: float = math.inf
    has_ended: bool = False

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> bytes:
        self.silent_since = time.monotonic()
        try:
            return next(self.chunks)
        finally:
            self.silent_since = math.inf


class _Packet(NamedTuple):
    """One that waits."""

    frames: Frames
    stream: _Stream
    num_bytes: int


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
    bounds: those of the peers that send to it. Of what they send four times as much may wait here,
        each frame with 512 bytes beside its own. A peer's is that of its stream: who it is, nobody
        here knows, and one that opens several has as many times as much; of all together no more
        waits for that.
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
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        host = told_host(listen.rpartition(":")[0], advertise)  # before anything is open
        self.num_refused = 0
        self._tls = tls
        self._bounds = bounds
        self._max_message_bytes = max_message_bytes
        self._events: EventQueue[Lost | _Packet] = EventQueue()
        in_all = bounds.max_messages_in_all, bounds.max_bytes_in_all
        self._waiting = _Waiting(*(TOLERANCE * most for most in in_all))  # of all streams
        self._in_turn: deque[_Stream] = deque()  # that wait for room among all
        self._lock = threading.RLock()
        self._lines: dict[str, _Line] = {}
        self._is_closed = False
        self._max_peers = max_peers
        self._streams: set[_Stream] = set()
        self._threads = _Threads(self._end_silent)
        try:
            port = self._serve(listen)
        except BaseException:  # the port is taken, say
            self._threads.end(lambda: None, STOP_S)
            raise
        limit = max_message_bytes if max_message_bytes < MAX_MESSAGE_BYTES else None
        self._address = with_limit(f"{host}:{port}", limit)

    def _serve(self, listen: str) -> int:
        """Returns the port."""
        handler: Any = grpc.stream_unary_rpc_method_handler(self._deliver)
        service, _, method = METHOD[1:].partition("/")
        self._server = grpc.server(
            self._threads,  # type: ignore[arg-type]  # any Executor will do
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
            options=_OPTIONS,
            maximum_concurrent_rpcs=self._max_peers,
        )
        if self._tls is None:
            port = self._server.add_insecure_port(listen)
        else:
            tls = self._tls
            credentials = grpc.ssl_server_credentials(
                [(tls.key, tls.certificate)], tls.ca, require_client_auth=True
            )
            port = self._server.add_secure_port(listen, credentials)
        self._server.start()
        return port

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

    def receive(self, timeout_s: float | None) -> DriverEvent | None:
        event = self._events.get(timeout_s)
        if not isinstance(event, _Packet):
            return event
        with self._lock:
            self._count(event.stream, -1, -event.num_bytes)
            event.stream.changed.notify()
            self._wake_next()
        return Arrived(event.frames)

    def wake(self) -> None:
        self._events.wake()

    def _deliver(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        bounds = self._bounds
        most = bounds.max_messages, bounds.max_bytes
        waiting = _Waiting(*(TOLERANCE * limit for limit in most))
        stream = _Stream(threading.Condition(self._lock), waiting, chunks, context)

        def end() -> None:
            with self._lock:
                self._streams.discard(stream)
                stream.has_ended = True
                stream.changed.notify()

        max_packet_bytes = self._max_message_bytes + max_head_bytes(bounds)
        with self._lock:
            self._streams.add(stream)
        try:
            if context.add_callback(end):
                for frames in from_chunks(stream, max_packet_bytes):
                    self._add(stream, frames)
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
            if silent_s >= MAX_IDLE_TIMES * IDLE_S:
                log.warning("stream_silent", peer=stream.context.peer(), silent_s=round(silent_s))
                stream.context.cancel()

    def _add(self, stream: _Stream, frames: Frames) -> None:
        """Waits for room. What comes on a stream that ends meanwhile is dropped, as if it had come
        too late: who sent it knows that the line is broken."""
        size = num_bytes(frames) + FRAME_BYTES * len(frames)
        with self._lock:
            stream.changed.wait_for(lambda: stream.has_ended or stream.waiting.has_room(size))
            # In turn, so that small ones do not keep a large one waiting without end.
            self._in_turn.append(stream)
            stream.changed.wait_for(lambda: stream.has_ended or self._is_next(stream, size))
            self._in_turn.remove(stream)
            if not stream.has_ended:
                self._count(stream, 1, size)
                self._events.put(_Packet(frames, stream, size))
            self._wake_next()

    def _is_next(self, stream: _Stream, size_bytes: int) -> bool:
        return self._in_turn[0] is stream and self._waiting.has_room(size_bytes)

    def _count(self, stream: _Stream, num_packets: int, size_bytes: int) -> None:
        for waiting in (stream.waiting, self._waiting):
            waiting.add(num_packets, size_bytes)

    def _wake_next(self) -> None:
        if self._in_turn:
            self._in_turn[0].changed.notify()

    # --- the end ---

    def close(self, linger_s: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            lines, self._lines = self._lines, {}
        with ExitStack() as rest:  # all of it, whatever one of them raises
            rest.callback(self._events.close)
            rest.callback(self._threads.end, partial(self._server.stop, None), STOP_S)
            for line in lines.values():
                rest.callback(line.close)
            for line in lines.values():
                line.finish()
            deadline = time.monotonic() + linger_s
            for line in lines.values():
                line.join(max(0.0, deadline - time.monotonic()))

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")


class _Line:
    """To one peer: a stream, and another one when it has broken or was idle, as soon as there is
    something to send.

    max_bytes: of a message that the peer takes; None for no limit.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        tls: TlsFiles | None,
        events: "EventQueue[Lost | _Packet]",
    ) -> None:
        plain, self.max_bytes = split_limit(address)
        self._peer = peer
        self._events = events
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # it is closed, or to finish
        self._is_closed = False
        self._is_finishing = False
        self._has_finished = threading.Event()
        self._retry_s = RETRY_S
        self._waiting: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # while there is something to send
        self._has_stream = False
        self._is_ending = False  # the stream: what waits goes over the next one
        self._warned: tuple[object, float] = (None, 0.0)  # of which status, and when
        self._address = plain
        self._credentials: grpc.ChannelCredentials | None = None
        if tls is not None:
            self._credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        self._channel = self._open()

    def _open(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self._address, _OPTIONS)
        return grpc.secure_channel(self._address, self._credentials, _OPTIONS)

    def send(self, frames: Frames) -> None:
        """Raises what the system says when it has no thread for it; then nothing waits."""
        with self._lock:
            self._waiting.put(frames)
            if self._thread is not None:
                return
            try:
                thread = threading.Thread(target=self._run, name="messages-out", daemon=True)
                thread.start()
            except BaseException:
                self._waiting = queue.SimpleQueue()
                raise
            self._thread = thread  # not before: one that was interrupted in its start ends at once

    def _run(self) -> None:
        """One stream after another, for as long as there is something to send. No other thread of
        ours is begun for that, nor for the pauses: the system may have none left, and nobody would
        be there to hear of it."""
        try:
            while (waiting := self._next_stream()) is not None:
                begun_at = time.monotonic()
                code, details = self._stream(waiting)
                self._ended(waiting, code, details, time.monotonic() - begun_at)
        except BaseException:  # whatever it is: what waits is lost, and has to go again
            with self._lock:
                self._has_stream, self._thread = False, None
                self._lose(self._waiting)
            raise

    def _next_stream(self) -> "queue.SimpleQueue[Frames | None] | None":
        """What it is to carry; None if there is nothing."""
        with self._lock:
            if threading.current_thread() is not self._thread:
                return None
            self._has_stream = not self._is_closed and not self._waiting.empty()
            if self._has_stream:
                return self._waiting
            self._thread = None
            if self._is_finishing:
                self._has_finished.set()
            return None

    def _stream(self, waiting: "queue.SimpleQueue[Frames | None]") -> tuple[object, object]:
        """Returns when it has ended: its status, and what more is known."""
        channel = self._channel
        try:
            method: Any = channel.stream_unary(METHOD)
            # It waits for as long as nobody is there; the channel tries to reach it. Not future():
            # a channel whose thread for those cannot be started can be neither used nor closed.
            method(self._chunks(waiting), wait_for_ready=True)
        except grpc.RpcError as error:
            status: Any = error
            return status.code(), status.details()
        except Exception as error:
            # gRPC has a thread of its own that sends, and there may be none; the stream is left
            # half open. The same comes of a channel that is closed meanwhile.
            channel.close()
            with self._lock:
                if not self._is_closed:
                    self._channel = self._open()
            return None, repr(error)
        return grpc.StatusCode.OK, None

    def _chunks(self, waiting: "queue.SimpleQueue[Frames | None]") -> Iterator[bytes]:
        while (frames := self._next(waiting)) is not None:
            yield from to_chunks(frames)
            del frames  # the next may be long in coming

    def _next(self, waiting: "queue.SimpleQueue[Frames | None]") -> Frames | None:
        """None when the stream is to end."""
        while True:
            with suppress(queue.Empty):
                if (frames := waiting.get(timeout=IDLE_S)) is not None:
                    return frames
            with self._lock:
                if waiting is not self._waiting:
                    return None  # it has ended
                if waiting.empty():
                    self._is_ending = True
                    self._waiting = queue.SimpleQueue()
                    return None

    def _ended(
        self,
        waiting: "queue.SimpleQueue[Frames | None]",
        code: object,
        details: object,
        lived_s: float,
    ) -> None:
        """Returns when it is time for the next one."""
        with self._lock:
            self._has_stream = False
            was_ending, self._is_ending = self._is_ending, False
            if self._is_closed or (was_ending and code is grpc.StatusCode.OK):
                # The peer has all of it. Not before that is known does the next one begin: what
                # goes over it must not overtake this.
                return
            self._lose(waiting)
            self._tell(code, details)
            self._retry_s = RETRY_S if lived_s > 1 else min(2 * self._retry_s, MAX_RETRY_S)
            # Whoever is to finish does so rather now than too late.
            self._changed.wait_for(lambda: self._is_closed or self._is_finishing, self._retry_s)

    def _lose(self, waiting: "queue.SimpleQueue[Frames | None]") -> None:
        waiting.put(None)  # lets gRPC's thread go that waits for more
        # First a new queue, then the word: what goes into the old one after it would be lost.
        self._waiting = queue.SimpleQueue()
        self._events.put(Lost(self._peer))
        self._has_finished.set()  # if it was to: there is no second attempt

    def _tell(self, code: Any, details: object) -> None:
        """A line that breaks is nothing special; one that the other end does not want is."""
        status, told_at = self._warned
        now = time.monotonic()
        level = log.warning
        if code is grpc.StatusCode.UNAVAILABLE or (code is status and now - told_at < WARN_EVERY_S):
            level = log.debug
        else:
            self._warned = (code, now)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            level(
                "peer_has_no_room",
                peer=self._peer,
                why="it has as many streams as it takes at a time; nothing goes to it before one "
                "of them is idle. Raise max_peers of its GrpcDriver",
            )
        else:
            level("stream_ended", peer=self._peer, code=str(code), details=details)

    def finish(self) -> None:
        """No more will come. See join()."""
        with self._lock:
            self._is_finishing = True
            self._has_finished.clear()
            if not self._waiting.empty() or (self._has_stream and not self._is_ending):
                self._waiting.put(None)
            elif not self._has_stream:
                self._has_finished.set()
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Until the peer has all, or as long as that."""
        self._has_finished.wait(timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._waiting.put(None)
            self._changed.notify()
            channel = self._channel
        channel.close()


class _Threads(Executor):
    """A thread for each call that runs. None holds up the end of the process, as those of a
    ThreadPoolExecutor do when somebody forgets to close.

    One more is there from the beginning: when the system has none for a call, it tries again, since
    what submit() raises would end the thread of gRPC that hears of calls. And every IDLE_S it does
    what it is given.
    """

    def __init__(self, every_idle_s: Callable[[], None]) -> None:
        self._every_idle_s = every_idle_s
        self._late: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: Callable[[], object] | None = None
        self._is_over = threading.Event()
        self._standing = threading.Thread(target=self._stand, name="messages-late", daemon=True)
        self._standing.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it is the caller's
                future.set_exception(error)

        if not self._start(run):
            self._late.put(run)
        return future

    @staticmethod
    def _start(run: Callable[[], None]) -> bool:
        try:
            threading.Thread(target=run, name="messages", daemon=True).start()
        except Exception:  # RuntimeError, or no memory for it
            return False
        return True

    def _stand(self) -> None:
        while not self._is_over.is_set():
            with suppress(queue.Empty):
                run = self._late.get(timeout=max(IDLE_S, RETRY_S))
                while run is not None and not self._start(run):
                    if self._is_over.wait(RETRY_S):
                        break
                del run
            with suppress(Exception):  # whatever it says: nobody else starts what is late
                self._every_idle_s()
        if self._last is not None:
            self._last()

    def end(self, last: Callable[[], object], timeout_s: float) -> None:
        """No call begins any more; `last` is what is done then, and waited for so long."""
        self._last = last
        self._is_over.set()
        self._late.put(None)
        self._standing.join(timeout_s)


# --- packets in a stream --------------------------------------------------------------------------


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


def from_chunks(chunks: Iterator[bytes], max_packet_bytes: int) -> Iterator[list[Frame]]:
    """The packets of a stream; each frame is a buffer of its own. Raises Malformed."""
    # Without variables: nobody here has what was read while the next is awaited.
    return iter(lambda: _read_packet(chunks, max_packet_bytes), None)


def _read_packet(chunks: Iterator[bytes], max_packet_bytes: int) -> list[Frame] | None:
    """None at the end of the stream."""
    chunk = next(chunks, None)
    if chunk is None:
        return None
    sizes, rest = _read_prelude(chunk, max_packet_bytes)
    # Not bytearrays: what is announced takes memory only when it comes.
    frames: list[Frame] = [spare.take(size).data for size in sizes]
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
    return frames


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
