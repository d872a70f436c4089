"""Bodies of HTTP requests and answers: bytes between a socket and the store, moved by threads.

A thread moves the bytes of one connection for as long as they flow. A connection that would make
its thread wait goes back to the event loop of the weights port, which waits for the socket. So a
slow peer holds a socket and what the kernel has received, and neither a thread nor a buffer.
"""

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.ports import Reader
from xain_coordinator.updates.measured_upload import MeasuredUpload
from xain_foundation.net.sockets import unacknowledged_bytes
from xain_foundation.security.tls_socket import PIECE_BYTES as ENCRYPTED_BYTES
from xain_foundation.security.tls_socket import TlsSocket
from xain_wire.limits import LEAST_BYTES, STALLED_S

PIECE_BYTES = 1 << 20  # received, measured and written at a time
SENT_BYTES = 8 << 20  # handed to the kernel at a time
SHARE_BYTES = 64 << 20  # moved for one connection while others wait for a thread
# Time for which a thread waits for the peer while no other connection waits for a thread: less than
# the way through the event loop and back would cost a fast peer again and again.
POLL_S = 0.02

_local = threading.local()


class Stalled(Unavailable):
    """The peer has moved too few bytes for too long; see StallTimer."""


class StallTimer:
    """Time for which a transfer has waited for its peer since least_bytes were moved last; the
    peer has stalled_s. Waiting for a thread or for the disk does not count.

    now: a clock, in seconds.
    """

    # The slowest peer that is served moves so much in so long; as on the way through gRPC.
    least_bytes = LEAST_BYTES
    stalled_s = STALLED_S

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._bytes = 0
        self._waited_s = 0.0
        self._waits_since: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds for which the peer has kept its transfer waiting, if it does so now; else 0.
        May be read in any thread."""
        since = self._waits_since
        return 0.0 if since is None else self._waited_s + self._now() - since

    @property
    def left_s(self) -> float:
        """Seconds that the peer has for the next bytes."""
        return max(0.0, self.stalled_s - self._waited_s)

    def count(self, num_bytes: int) -> None:
        """Count moved bytes; after each least_bytes of them the time waited is 0 again."""
        self._bytes += num_bytes
        if self._bytes >= self.least_bytes:
            self._bytes, self._waited_s = 0, 0.0

    def error(self) -> Stalled:
        """The error of a transfer whose peer has no time left; it is not raised here."""
        least, seconds = self.least_bytes, self.stalled_s
        return Stalled(f"less than {least} bytes have come through in {seconds:g} s")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting for the peer."""
        began_at = self._waits_since = self._now()
        try:
            yield
        finally:
            self._waits_since = None
            self._waited_s += self._now() - began_at


class Incoming:
    """The body of a PUT: an upload measures and writes each piece of it.

    is_sending: whether the thread waits for room to send, and not for bytes to receive.

    rest: bytes of the body that came with the head. num_bytes: of the whole body.
    """

    is_sending = False

    def __init__(self, sock: socket.socket, rest: bytes, num_bytes: int) -> None:
        self.sock = sock
        self.stall_timer = StallTimer()
        self._rest = rest[:num_bytes]
        self._left = num_bytes
        self._upload: MeasuredUpload | None = None
        self._has_ended = False

    def begin(self, upload: MeasuredUpload) -> None:
        """Set the upload that takes the bytes."""
        self._upload = upload

    def end(self) -> None:
        """Move no more bytes. A thread that waits for the peer stops at once."""
        self._has_ended = True
        with suppress(OSError):  # the peer was faster
            self.sock.shutdown(socket.SHUT_RD)

    def look(self) -> None:
        """Do nothing: bytes are counted as they are received. See Outgoing.look."""

    def move(self, is_wanted: Callable[[], bool]) -> bool:
        """Move bytes, in a thread, until all are moved (True) or the peer keeps us waiting, or
        others wait (False).

        is_wanted: whether other connections wait for a thread. Raises OSError and the store's
        errors.
        """
        assert self._upload is not None, "begin() comes first"
        buffer = _buffer()
        moved = 0
        while self._left and not self._has_ended:
            count, is_waiting = self._fill(buffer[: min(PIECE_BYTES, self._left)], is_wanted)
            if count:
                self._upload.write(buffer[:count])
                self._left -= count
                moved += count
            self.stall_timer.count(count)
            if is_waiting or (moved >= SHARE_BYTES and is_wanted()):
                return self._has_ended or not self._left
        return True

    def _fill(self, buffer: memoryview, is_wanted: Callable[[], bool]) -> tuple[int, bool]:
        """Fill the buffer; returns the number of bytes received, and whether the peer has no more
        at the moment."""
        count = len(self._rest)
        if count:
            count = min(count, len(buffer))
            buffer[:count] = self._rest[:count]
            self._rest = self._rest[count:]
        while count < len(buffer):
            try:
                received = self.sock.recv_into(buffer[count:])
            except BlockingIOError:
                if is_wanted() or not _wait_for_socket(self):
                    return count, True
                continue
            if not received:
                self._has_ended = True
                break
            count += received
        return count, False


class Outgoing:
    """The head and the body of an answer to GET: a range of an open object.

    reader: closed by its owner. fd: the object's file where the system sends it by itself.
    """

    is_sending = True

    def __init__(
        self, sock: socket.socket, head: bytes, reader: Reader, fd: int, start: int, end: int
    ) -> None:
        self.sock = sock
        self.stall_timer = StallTimer()
        self._head = memoryview(head)
        self._reader = reader
        self._fd = fd
        self._at, self._end = start, end
        self._has_ended = False
        self._handed = self._acknowledged = 0

    def end(self) -> None:
        """Move no more bytes."""
        self._has_ended = True

    def look(self) -> None:
        """Count what the peer has acknowledged since the last look: this system takes megabytes at
        once, and on a slow line takes nothing more for minutes while they go out."""
        handed = self._handed + (self.sock.num_passed if isinstance(self.sock, TlsSocket) else 0)
        acknowledged = max(self._acknowledged, handed - unacknowledged_bytes(self.sock))
        self.stall_timer.count(acknowledged - self._acknowledged)
        self._acknowledged = acknowledged

    def move(self, is_wanted: Callable[[], bool]) -> bool:
        """Send bytes, in a thread, until all are sent (True), or the peer takes none or others wait
        for a thread (False). is_wanted: whether others wait."""
        moved = 0
        while (self._head or self._at < self._end) and not self._has_ended:
            try:
                count = self._send()
            except BlockingIOError:
                if is_wanted() or not _wait_for_socket(self):
                    return False
                continue
            moved += count
            self._handed += count
            self.look()
            if moved >= SHARE_BYTES and is_wanted():
                return False
        return True

    def _send(self) -> int:
        """Send the next bytes of the head, or else of the body, as the system and TLS allow.
        Returns their number. Raises BlockingIOError if the peer takes none now, and ConnectionError
        if the object is too short."""
        if self._head:
            count = self.sock.send(self._head)
            self._head = self._head[count:]
            return count
        left = self._end - self._at
        if isinstance(self.sock, TlsSocket):
            piece = _buffer()[: min(left, ENCRYPTED_BYTES)]
            # Read, and not mapped: a disk that fails ends a thread that reads a map, and us.
            if not self.sock.owed and self._reader.read_into(self._at, piece) < len(piece):
                raise _shorter()
            count = self.sock.send(piece)
        elif sys.platform == "linux":
            count = os.sendfile(self.sock.fileno(), self._fd, self._at, min(left, SENT_BYTES))
        else:  # sendfile of other systems differs, or is missing
            count = self.sock.send(self._reader.read(self._at, min(left, PIECE_BYTES)))
        if not count:
            raise _shorter()
        self._at += count
        return count


Transfer = Incoming | Outgoing


def _shorter() -> ConnectionError:
    """The error of an object that ends before its body does."""
    return ConnectionError("the object is shorter than it was")


def _buffer() -> memoryview:
    """A buffer of PIECE_BYTES, one for each thread."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = memoryview(bytearray(PIECE_BYTES))
    return buffer


def _wait_for_socket(transfer: Transfer) -> bool:
    """Wait at most POLL_S for the socket. Returns whether it is ready, and the peer has time
    left."""
    sock, is_sending = transfer.sock, transfer.is_sending
    with transfer.stall_timer.waiting():
        poll = select.poll()
        poll.register(sock, select.POLLOUT if is_sending else select.POLLIN)
        is_ready = bool(poll.poll(POLL_S * 1000))
    return is_ready and transfer.stall_timer.left_s > 0
