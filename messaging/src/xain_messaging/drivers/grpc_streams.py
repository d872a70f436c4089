"""Frames over gRPC: to each peer a stream, on which nothing comes back.

It is opened when there is something to send, and ends when there has been nothing for IDLE_S; so a
peer has as many streams at a time as others talk to it, however many there are.

Everybody serves `/xain_messaging.Exchange/Deliver`, a client stream of bytes. What these are is
told in grpc_framing.py; what goes out is in grpc_lines.py, what comes in is here.

A message is in memory once at the receiver, in its place, while it comes. What has come waits until
the receiver's program asks for it. When that is more than those who keep to their Bounds can have
sent, no more is read, and gRPC's flow control holds back who sends.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import grpc

from xain_foundation.logger import get_logger
from xain_messaging.codec import MAX_MESSAGE_BYTES, Frames, num_bytes
from xain_messaging.drivers import grpc_lines
from xain_messaging.drivers.addresses import told_host, with_limit
from xain_messaging.drivers.event_queue import EventQueue
from xain_messaging.drivers.grpc_framing import Malformed, from_chunks
from xain_messaging.drivers.grpc_lines import METHOD, OPTIONS, Line
from xain_messaging.drivers.grpc_threads import Threads
from xain_messaging.errors import BodyError, Closed, UnknownPeer
from xain_messaging.links import DEFAULT_BOUNDS, TOLERANCE, Bounds, max_head_bytes
from xain_messaging.ports import Arrived, DriverEvent, Lost
from xain_messaging.waits import LONGEST_S

log = get_logger(__name__)

# What Python and numpy take for each frame that waits, beside its bytes.
FRAME_BYTES: Final = 512

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
class _Waiting:
    """How much has come that nobody has received: of one stream, or of all.

    packets: of each that waits its number, and the bytes of all that came before it.
    sum_bytes: of all that ever came.
    """

    max_packets: int
    max_bytes: int
    packets: deque[tuple[int, int]] = field(default_factory=deque, init=False)
    sum_bytes: int = field(default=0, init=False)

    @property
    def num_packets(self) -> int:
        return len(self.packets)

    @property
    def num_bytes(self) -> int:
        return self.sum_bytes - self.packets[0][1] if self.packets else 0

    def has_room(self, size_bytes: int) -> bool:
        """One that is larger than all that may wait has room where nothing else waits."""
        fits = self.num_bytes + size_bytes <= self.max_bytes
        return not self.packets or (fits and self.num_packets < self.max_packets)

    def add(self, number: int, size_bytes: int) -> None:
        self.packets.append((number, self.sum_bytes))
        self.sum_bytes += size_bytes

    def remove(self, last: int) -> None:
        """All up to this number. An interrupt may come between any two of them."""
        while self.packets and self.packets[0][0] <= last:
            self.packets.popleft()


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
    """One that waits. number: from 1 on, as they have come."""

    frames: Frames
    stream: _Stream
    number: int


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
        self._num_come = 0  # packets
        self._num_gone = 0  # of these, and their streams have been told
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
            self._lines[peer] = Line(peer, address, credentials, self._events.put)

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
        if self._num_gone < self._num_come and not self._events.size:
            self._tell_all()
        event = self._events.get(None if timeout_s is None else min(timeout_s, LONGEST_S))
        if not isinstance(event, _Packet):
            return event
        with self._lock:
            # If there are others before it, interrupts have kept us from telling of them.
            is_next = event.number == self._num_gone + 1
            self._tell_of_room(event.number, [event.stream] if is_next else self._streams)
        return Arrived(event.frames)

    def _tell_all(self) -> None:
        """An interrupt may have taken the last packet out of the queue, and it is nowhere now. What
        it brought is sent again; its room must not be lost."""
        with self._lock:
            if not self._events.size:
                self._tell_of_room(self._num_come, self._streams)

    def _tell_of_room(self, last: int, streams: Iterable[_Stream]) -> None:
        """All packets up to this number have gone. An interrupt may come anywhere: what it cuts
        short is done anew, since it counts as done after the last line only."""
        self._waiting.remove(last)
        for stream in streams:
            stream.waiting.remove(last)
            stream.changed.notify()
        self._wake_next()
        self._num_gone = last

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
            if silent_s >= MAX_IDLE_TIMES * grpc_lines.IDLE_S:
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
                self._num_come += 1
                for waiting in (stream.waiting, self._waiting):
                    waiting.add(self._num_come, size)
                self._events.put(_Packet(frames, stream, self._num_come))
            self._wake_next()

    def _is_next(self, stream: _Stream, size_bytes: int) -> bool:
        return self._in_turn[0] is stream and self._waiting.has_room(size_bytes)

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
