"""TLS around the sockets of the transport."""

import selectors
import socket
import ssl
import threading
from collections.abc import Sequence

from xain_parameters.transport.frames import Piece, Socket

PIECE_BYTES = 64 << 10  # encrypted at once


class LockedTlsSocket:
    """A socket with TLS, in place of a plain one; see frames.Socket.

    Unlike the foundation's TlsSocket, which is for one thread at a time, it serves a thread that
    receives beside threads that send. OpenSSL takes one call at a time for a connection. So once
    the Hello is over no call waits, and a lock is enough for these threads.
    """

    def __init__(self, wrapped: ssl.SSLSocket) -> None:
        self._socket = wrapped
        self._lock = threading.Lock()

    def handshake(self) -> None:
        """Agree on keys, for a socket that was wrapped without. Waits for the other side."""
        self._socket.do_handshake()

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int, /) -> int:
        with self._lock:
            try:
                return self._socket.recv_into(buffer)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def sendmsg(self, pieces: Sequence[Piece], ancillary: tuple[()] = (), flags: int = 0, /) -> int:
        """Send some of the first piece. After BlockingIOError the next call begins with it."""
        with self._lock:
            try:
                return self._socket.send(memoryview(pieces[0])[:PIECE_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def sendall(self, piece: Piece, /) -> None:
        self._socket.sendall(piece)

    def settimeout(self, timeout_s: float | None, /) -> None:
        """Set the limit of each call. None, after the Hello: no call waits from now on."""
        self._socket.settimeout(0.0 if timeout_s is None else timeout_s)

    def shutdown(self, how: int, /) -> None:
        # SSLSocket.shutdown makes a plain socket of itself, while the other thread may read it.
        socket.socket.shutdown(self._socket, how)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def wait_readable(connection: Socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.select()
