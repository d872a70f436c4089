"""What goes out over gRPC: to each peer a line, of one stream after another."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import grpc

from xain_foundation.logger import get_logger
from xain_messaging.codec import Frames
from xain_messaging.drivers.addresses import split_limit
from xain_messaging.drivers.grpc_framing import MAX_CHUNK_BYTES, to_chunks
from xain_messaging.waits import left_s

log = get_logger(__name__)

METHOD: Final = "/xain_messaging.Exchange/Deliver"

# A stream on which nothing goes for so long ends, and makes room for another peer's.
IDLE_S: Final = 10.0

# Between two attempts to reach a peer.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0

# How long the first message on a stream waits for gRPC's thread, at most.
BEGIN_S: Final = 1.0

# Between two lines in the log that say the same of one peer.
WARN_EVERY_S: Final = 60.0

# A line that breaks, and a peer that closes.
_BROKEN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})

# Of both ends.
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


class Line:
    """To one peer: a stream, and another one when it has broken or was idle, as soon as there is
    something to send.

    credentials: without them everything goes in the clear.
    on_lost: is told when the line has broken; what is sent after that goes over the next stream.
    max_bytes: of a message that the peer takes; None for no limit.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        on_lost: Callable[[str], None],
    ) -> None:
        plain, self.max_bytes = split_limit(address)
        self._peer = peer
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # it is closed, or to finish
        self._is_closed = False
        self._is_finishing = False
        self._has_finished = threading.Event()
        self._retry_s = RETRY_S
        self._waiting: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # while there is something to send
        self._has_begun = threading.Event()  # its first stream, with a thread of gRPC
        self._has_stream = False
        self._is_ending = False  # the stream: what waits goes over the next one
        self._warned: tuple[object, float] = (None, 0.0)  # of which status, and when
        self._address = plain
        self._credentials = credentials
        self._channel = self._open()

    def _open(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self._address, OPTIONS)
        return grpc.secure_channel(self._address, self._credentials, OPTIONS)

    def send(self, frames: Frames) -> None:
        """Returns when gRPC has a thread that sends: from Python 3.12 on none can be started at the
        end of the program, which may come next.

        Raises what the system says when it has no thread for it; then nothing waits.
        """
        with self._lock:
            self._waiting.put(frames)
            if self._thread is not None:
                return
            self._has_begun.clear()
            try:
                thread = threading.Thread(target=self._run, name="messages-out", daemon=True)
                thread.start()
            except BaseException:  # no thread, or an interrupt: nobody would send what waits
                self._waiting = queue.SimpleQueue()
                raise
            self._thread = thread  # not before: one that was interrupted in its start ends at once
        self._has_begun.wait(BEGIN_S)

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
                self._has_begun.set()
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
            self._has_begun.set()
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
        finally:
            self._has_begun.set()
        return grpc.StatusCode.OK, None

    def _chunks(self, waiting: "queue.SimpleQueue[Frames | None]") -> Iterator[bytes]:
        self._has_begun.set()
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
        self._on_lost(self._peer)
        self._has_finished.set()  # if it was to: there is no second attempt

    def _tell(self, code: Any, details: object) -> None:
        """A line that breaks is nothing special; one that the other end does not want is."""
        status, told_at = self._warned
        now = time.monotonic()
        level = log.warning
        if code in _BROKEN or (code is status and now - told_at < WARN_EVERY_S):
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

    def join(self, deadline: float) -> None:
        """Until the peer has all, or until then, on time.monotonic()."""
        while not self._has_finished.wait(left_s(deadline)) and time.monotonic() < deadline:
            pass

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._waiting.put(None)
            self._changed.notify()
            channel = self._channel
        channel.close()
