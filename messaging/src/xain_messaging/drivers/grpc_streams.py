"""Frames over gRPC: to each peer a stream of bytes, on which nothing comes back.

Every peer serves `/xain_messaging.Exchange/Deliver`, a client stream of bytes, whose format is in
grpc_framing.py. Each stream has a thread at both ends: one of gRPC sends, and one of the driver
reads. An event loop that reads all streams needs fewer threads, and takes 200 us longer for each
round trip.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import grpc

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.net.backoff import Backoff
from xain_foundation.net.channels import open_channel
from xain_foundation.net.connection_limit import ConnectionLimit, max_connections
from xain_foundation.net.grpc_calls import Cancellable
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Identity, NoIdentity, Role, peer_host
from xain_foundation.security.tls import Certificates
from xain_foundation.settings.fields import require_private
from xain_foundation.waits import LONGEST_S, left_s
from xain_membership.errors import Closed
from xain_messaging.drivers.addresses import told_host
from xain_messaging.drivers.grpc_framing import MAX_CHUNK_BYTES, packets, to_chunks
from xain_messaging.errors import MalformedMessage, PeersMissing
from xain_messaging.format.codec import MAX_MESSAGE_BYTES, Frames
from xain_messaging.links import MAX_HEAD_BYTES
from xain_messaging.ports import OnPacket, ignore

log = get_logger(__name__)

METHOD: Final = "/xain_messaging.Exchange/Deliver"

# Seconds between two attempts to reach a peer.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0

# Seconds that close() waits for the server and for the threads of streams.
STOP_S: Final = 5.0

# Streams at a time, which each have a thread. A peer of a group has one.
MAX_STREAMS: Final = 4096

# Roles that may send packets.
PEERS: Final = frozenset((Role.PARTICIPANT, Role.NODE, Role.OPERATOR))

# Bytes of packets of more than one chunk that are put together at the same time, of all peers.
SMALL_ROOM_BYTES: Final = 256 << 20
LARGE_ROOM_BYTES: Final = 768 << 20

# A driver with certificates looks so often whether their files have changed, also if nothing moves.
FOLLOW_S: Final = 5.0

# A stream that waits looks so often whether it has ended.
LOOK_S: Final = 1.0

# Name of the threads that read streams.
STREAM: Final = "messages-stream"

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


class _Stream:
    """A stream to a peer, over a connection of its own.

    backoff: of the streams to this peer. on_end: called in a thread of gRPC.
    version: of the certificates that it shows.
    is_waiting: for the peer to take the first packet.
    due_at: when the next stream may begin, once this one has ended.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        backoff: Backoff,
        tls: Certificates | None,
        on_end: Callable[["_Stream"], None],
    ) -> None:
        self.peer = peer
        self.backoff = backoff
        self.version = 0 if tls is None else tls.look()
        self.is_waiting = True
        self.begun_at = time.monotonic()
        self.due_at = math.inf
        options: tuple[tuple[str, Any], ...] = OPTIONS
        if tls is not None and tls.are_of_coordinator:
            options = (*options, ("grpc.ssl_target_name_override", peer_host(peer)))
        self.channel = open_channel(address, options, None if tls is None else tls.of_channel())
        self._packets: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self.send = self._packets.put
        method: Any = self.channel.stream_unary(METHOD)
        # The stream waits until the peer is there; the channel tries to reach it.
        self._call = Cancellable(method.future(self._chunks(), wait_for_ready=True))
        self.call = self._call.call
        self.call.add_done_callback(lambda _: on_end(self))

    def _chunks(self) -> Iterator[bytes]:
        for frames in iter(self._packets.get, None):
            yield from to_chunks(frames)
            self.is_waiting = False  # gRPC asks for more when this is on its way to the peer
            del frames  # the next may be long in coming

    def join(self, deadline: float) -> None:
        """Wait until the peer has all packets, or until the deadline."""
        while not self.call.done() and time.monotonic() < deadline:
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                self.call.result(left_s(deadline))

    def close(self) -> None:
        self.send(None)
        self._call.cancel()
        self.channel.close()


class Room:
    """A bound on the bytes of packets that are put together at the same time.

    coming_bytes: of those packets now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.coming_bytes = 0
        self._has_changed = threading.Condition()

    @contextmanager
    def reserved(self, size_bytes: int, is_active: Callable[[], bool]) -> Iterator[None]:
        """Wait until this many bytes have room beside others, or nothing else is in use. Raises
        EOFError if the stream ends meanwhile, as `is_active` tells."""
        with self._has_changed:
            while self.coming_bytes and self.coming_bytes + size_bytes > self.max_bytes:
                self._has_changed.wait(LOOK_S)
                if not is_active():
                    raise EOFError
            self.coming_bytes += size_bytes
        try:
            yield
        finally:
            with self._has_changed:
                self.coming_bytes -= size_bytes
                self._has_changed.notify_all()


class _Threads(Executor):
    """A thread for each stream, and one that waits for the next stream: from Python 3.12 on no
    thread starts after the last line of a program, when a peer may still have to ask for something.

    The threads are daemons, unlike those of a ThreadPoolExecutor: a program may end without
    close(). Only the server's own thread calls submit().
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._num_waiting = 0
        self._start()

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        """Call `work` in a thread, or here without one. The future ends with the call."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                work(*args)
            finally:
                future.set_result(None)

        self._start()
        if self._num_waiting:
            self._num_waiting -= 1
            self._work.put(run)
            self._start()
        else:
            run()  # on the server's own thread, where _deliver() refuses the stream
        return future

    def _start(self) -> None:
        """Start a thread that waits for a stream, unless one waits."""
        if not self._num_waiting:
            with suppress(RuntimeError):  # the system has no more threads
                threading.Thread(target=self._run, name=STREAM, daemon=True).start()
                self._num_waiting = 1

    def _run(self) -> None:
        self._work.get()()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread that waits."""
        self._work.put(lambda: None)


class GrpcDriver:
    """See ports.Driver. It listens on its host at a port that is free, unless one is given.

    listen: "HOST:PORT", port 0 for any.
    advertise: the host that others are told, if it is not that of `listen`. A host that stands for
        all interfaces, such as "0.0.0.0", needs that.
    tls: without it everything goes in the clear, and anybody may connect. With it only peers of the
        same authority, each under the name in its certificate.
    insecure: without `tls` also on a host that other machines reach.
    Raises ValueError for such a host with neither.
    num_refused: streams that were ended because they carried no packets.
    """

    max_message_bytes = MAX_MESSAGE_BYTES
    small_bytes = 16 << 20  # of a small packet
    max_streams = MAX_STREAMS
    # For the last calls to end when the server stops. Without it, gRPC reports an error to the
    # peers, which print it.
    stop_grace_s = 1.0
    is_polled = False  # threads of the driver read

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        advertise: str = "",
        tls: Certificates | None = None,
        insecure: bool = False,
    ) -> None:
        own_host = listen.rpartition(":")[0]
        host = told_host(own_host, advertise)  # before anything is open
        require_private(own_host, is_encrypted=tls is not None, insecure=insecure)
        self.num_refused = 0
        self._refused = RateLimitedLog(log.warning, "peer_refused")  # any peer can cause it
        self._counting = threading.Lock()
        self._tls = tls
        self._version = 0 if tls is None else tls.version
        # Each packet counts with the size that it announces. One that finds no room waits, and its
        # stream is not read meanwhile; one that is larger than the room is put together alone. A
        # peer that announces a large one and then stalls holds up only other large ones.
        self._small, self._large = Room(SMALL_ROOM_BYTES), Room(LARGE_ROOM_BYTES)
        self._on_packet: OnPacket = ignore
        self._on_lost: Callable[[str], None] = lambda peer: None
        self._is_served = threading.Event()
        # Held, and released to wake run(). An Event would have a lock of its own, for which a
        # signal handler that wakes could wait forever.
        self._waker = threading.Lock()
        self._waker.acquire()
        self._peers: dict[str, tuple[str, Backoff]] = {}  # with their addresses
        self._sending: dict[str, _Stream] = {}  # to the peers that have been sent to
        self._opening = threading.RLock()  # a signal handler may close while its thread sends
        self._broken: set[_Stream] = set()  # of those
        self._streams: dict[Any, threading.Thread] = {}  # that peers have opened
        self._senders: dict[Any, Caller] = {}  # of these streams, where there are certificates
        self._revoked: Set[str] = frozenset()  # whose streams have ended
        self._is_closed = False
        self._limit: ConnectionLimit | None = None
        handler: Any = grpc.stream_unary_rpc_method_handler(self._deliver)
        service, _, method = METHOD[1:].partition("/")
        handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
        self._threads = _Threads()
        pool: Any = self._threads
        most = max_connections(self.max_streams)
        options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", most))
        self._server = grpc.server(
            pool, handlers, options=options, maximum_concurrent_rpcs=self.max_streams
        )
        try:
            if tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, tls.of_server())
            self.address = f"{host}:{port}"
            self._server.start()
            self._limit = ConnectionLimit(port, max_owners=self.max_streams, per_owner=1)
        except BaseException:  # an interrupt too: no server stays behind
            self.close(0.0)
            raise

    @property
    def own_name(self) -> str | None:
        """The name that peers take packets of this driver from; None if they take any."""
        if self._tls is None:
            return None
        with suppress(NoIdentity):
            return _name_of(self._tls.identity)
        return None

    # --- out ---

    def connect(self, peer: str, address: str) -> None:
        self._check_open()
        self.disconnect(peer)
        self._peers[peer] = (address, Backoff(RETRY_S, MAX_RETRY_S))

    def disconnect(self, peer: str) -> None:
        with self._opening:
            self._peers.pop(peer, None)
            stream = self._sending.pop(peer, None)
        if stream is not None:
            stream.close()  # without the lock: it waits for gRPC's thread

    def send(self, peer: str, frames: Frames) -> None:
        self._check_open()
        stream = self._sending.get(peer) or self._open_stream(peer)
        stream.send(frames)

    def _open_stream(self, peer: str) -> _Stream:
        """Open a stream to a peer. Raises PeersMissing if it is not connected."""
        with self._opening:
            self._check_open()  # another thread may have closed it meanwhile
            if peer not in self._peers:
                raise PeersMissing(f"{peer!r} is not connected", [peer])
            stream = _Stream(peer, *self._peers[peer], self._tls, self._note_end)
            self._sending[peer] = stream
            return stream

    def _note_end(self, stream: _Stream) -> None:
        """Note a broken stream, for run() to report. Packets that are sent before the next one
        begins are lost."""
        stream.send(None)  # for gRPC's thread, which may wait for more
        if time.monotonic() - stream.begun_at >= 1:
            stream.backoff.reset()
        code = stream.call.code()
        level = log.debug if code in _USUAL else log.warning
        level("stream_ended", peer=stream.peer, code=str(code), details=stream.call.details())
        stream.due_at = time.monotonic() + stream.backoff.next_s()
        self._broken.add(stream)
        self.wake()

    # --- in ---

    def serve(self, on_packet: OnPacket, on_lost: Callable[[str], None]) -> None:
        self._on_packet, self._on_lost = on_packet, on_lost
        self._is_served.set()

    def run(self, timeout_s: float) -> None:
        """Report lost connections, when their peers are to be tried again. Packets come in threads
        of their own."""
        if self._is_closed:
            return
        retry_at = min((stream.due_at for stream in list(self._broken)), default=math.inf)
        wait_s = min(timeout_s, retry_at - time.monotonic(), LONGEST_S)
        if self._tls is not None:
            wait_s = min(wait_s, FOLLOW_S)
        self._waker.acquire(timeout=max(0.0, wait_s))
        if self._tls is not None:
            self._follow_files(self._tls)
        now = time.monotonic()
        for stream in [each for each in list(self._broken) if each.due_at <= now]:
            self._broken.discard(stream)
            with self._opening:
                is_last = self._sending.get(stream.peer) is stream
                if is_last:
                    del self._sending[stream.peer]
            if is_last:
                stream.close()
                self._on_lost(stream.peer)

    def _follow_files(self, tls: Certificates) -> None:
        """Apply changed certificates: open streams go on; a stream that waits for its peer is
        ended, so that the next one shows them. Streams of revoked certificates end."""
        if self._version != tls.look():
            self._version = tls.version
            for stream in list(self._sending.values()):
                if stream.is_waiting and stream.version != tls.version:
                    stream.call.cancel()
        if self._revoked is not tls.callers.revoked:
            self._revoked = tls.callers.revoked
            for context, sender in list(self._senders.items()):
                if sender.serial in self._revoked:
                    context.cancel()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it is released already
            self._waker.release()

    def _deliver(self, chunks: Iterator[bytes], context: Any) -> bytes:
        """Hand over the packets of one stream. Refuses malformed ones and wrong senders."""
        if (thread := threading.current_thread()).name != STREAM:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the peer has no thread to read with")
        self._streams[context] = thread
        if self._is_closed:  # before or after _stop() has looked
            context.cancel()
        while not self._is_served.wait(LOOK_S) and context.is_active():
            pass
        limit = self._limit
        sender: str | None = None
        callers = None if self._tls is None else self._tls.callers
        try:
            if callers is not None:
                caller = self._senders[context] = callers.of_call(context)
                if caller.identity.role not in PEERS:
                    raise NoIdentity(f"{caller.identity} is no peer of a group")
                sender = _name_of(caller.identity)
            for frames in self._read(chunks, context):
                if limit is not None:  # once, with the first packet
                    limit.keep(context.peer(), context.peer())
                    limit = None
                if callers is not None:
                    callers.require(caller)
                self._on_packet(frames, sender)
                del frames  # the next may be long in coming
        except NoIdentity as error:
            self._refused(peer=context.peer(), reason=str(error))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        finally:
            self._senders.pop(context, None)
            del self._streams[context]
        return b""

    def _read(self, chunks: Iterator[bytes], context: Any) -> Iterator[Frames]:
        """Yield the packets of a stream until it ends. A malformed one refuses the stream."""

        def reserved(size_bytes: int) -> AbstractContextManager[None]:
            room = self._small if size_bytes < self.small_bytes else self._large
            return room.reserved(size_bytes, context.is_active)

        try:
            yield from packets(chunks, self.max_message_bytes + MAX_HEAD_BYTES, reserved)
        except EOFError:
            pass
        except MalformedMessage as error:
            with self._counting:
                self.num_refused += 1
            log.warning("stream_refused", peer=context.peer(), error=str(error))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    # --- the end ---

    def close(self, linger_s: float) -> None:
        """Wait linger_s for queued packets to go, then end all streams and the server."""
        with self._opening:
            self._is_closed = True
        try:
            deadline = time.monotonic() + linger_s
            streams = list(self._sending.values())
            for stream in streams:
                stream.send(None)
            for stream in streams:
                stream.join(deadline)
        finally:  # an interrupted wait too
            self._stop()

    def _stop(self) -> None:
        """Stop the server, and end all streams and threads."""
        self.wake()
        if self._limit is not None:
            self._limit.stop()
        self._on_packet = ignore
        self._is_served.set()
        # A server that never started sets the event of stop(), and does not end another wait.
        wait: Callable[[float], bool] = self._server.wait_for_termination
        with suppress(RuntimeError):  # no thread that cancels calls after the grace
            wait = self._server.stop(self.stop_grace_s).wait
        # gRPC ends no call by itself before the grace is over.
        for stream in list(self._streams):
            stream.cancel()
        for peer in list(self._sending):
            self.disconnect(peer)
        deadline = time.monotonic() + STOP_S
        for thread in list(self._streams.values()):
            if thread is not threading.current_thread():  # a stream's own thread may close
                thread.join(left_s(deadline))
        wait(left_s(deadline))
        self._threads.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the driver has been closed")


def _name_of(identity: Identity) -> str | None:
    """The only name that packets may be in; None for an operator, who may take any."""
    return None if identity.role is Role.OPERATOR else identity.name
