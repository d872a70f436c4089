"""TLS on a TCP socket by way of memory, which takes less time than ssl.SSLSocket.

An SSLSocket makes two system calls for each record, of 16 KiB at most. Here records are received
512 KiB at a time, and sent so.
"""

import socket
import ssl
import threading
from contextlib import suppress
from typing import Any, Final, NoReturn

PIECE_BYTES: Final = 512 << 10  # received, or encrypted and sent, at a time
_RECORD_BYTES: Final = 16 << 10  # the most that one call of OpenSSL gives
_ENCRYPTED_BYTES: Final = 5 + _RECORD_BYTES + 256  # of a record, at most: RFC 8446, 5.2

_local = threading.local()


class TlsSocket(socket.socket):
    """A connected socket that encrypts. asyncio's sock_recv and sock_sendall take it, unlike an
    SSLSocket. For one thread at a time, but for close().

    The handshake happens with the first bytes that are received, or in handshake(). All calls may
    raise ssl.SSLError, an OSError. A peer that hangs up without a close_notify has ended the
    stream: those who use it know how many bytes are to come.

    raw: is taken over.
    server_hostname: the name to be found in the certificate of the peer; None if it has connected
        to us.
    """

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None
    ) -> None:
        timeout_s = raw.gettimeout()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_hostname is None
        try:
            self._tls = context.wrap_bio(
                self._in, self._out, server_side=is_server, server_hostname=server_hostname
            )
        except ValueError as error:  # a name that no certificate can have
            raise OSError(str(error)) from None
        super().__init__(raw.family, raw.type, raw.proto, fileno=raw.detach())
        self.settimeout(timeout_s)
        self._ahead = b""  # decrypted, for the next that receives
        self._unsent = memoryview(b"")  # encrypted
        self._owed = 0

    @property
    def owed(self) -> int:
        """Bytes of a send() that did not end and has to be repeated. Their encrypted form is kept
        here, so the repetition may show other bytes."""
        return self._owed

    @property
    def num_passed(self) -> int:
        """Bytes among those that the system has taken already."""
        return max(0, self._owed - len(self._unsent))

    def certificate(self) -> bytes:
        """The certificate that the peer has shown, in PEM; b"" before the handshake."""
        der = self._tls.getpeercert(binary_form=True)
        return b"" if der is None else ssl.DER_cert_to_PEM_cert(der).encode()

    def handshake(self) -> None:
        """Make the TLS handshake. A peer that refuses our certificate may say so later."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    raise ConnectionError("closed in the handshake") from None
            except ssl.SSLError:
                self._say_why()
                raise
            else:
                return self._flush()

    # --- what others call on a socket ---

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive bytes into a buffer, those that recv() has read ahead first."""
        assert not flags, "only recv() looks ahead"
        with memoryview(buffer) as view:
            room = view[: nbytes or len(view)]
            if not self._ahead:
                return self._read_into(room)
            count = min(len(room), len(self._ahead))
            room[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            return count

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive bytes. With MSG_PEEK, unlike a socket, wait for so many bytes or the end."""
        if flags & socket.MSG_PEEK:
            while len(self._ahead) < bufsize and (more := self._read(bufsize)):
                self._ahead += more
            return self._ahead[:bufsize]
        if self._ahead:
            data, self._ahead = self._ahead[:bufsize], self._ahead[bufsize:]
            return data
        return self._read(bufsize)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send some of the data. Returns how much. After BlockingIOError or TimeoutError it has to
        be repeated, with the same data."""
        if not self._owed:
            with memoryview(data) as view:
                self._owed = self._tls.write(view[:PIECE_BYTES])
        self._flush()
        count, self._owed = self._owed, 0
        return count

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def shutdown(self, how: int) -> None:
        if how != socket.SHUT_RD:
            with suppress(
                ssl.SSLError
            ):  # the peer has still to answer, or the connection is broken
                self._tls.unwrap()
            self._say_why()
        super().shutdown(how)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("would pass by the encryption")

    recvfrom = recvfrom_into = recvmsg = recvmsg_into = _refuse
    sendto = sendmsg = sendfile = dup = _refuse

    # --- bytes ---

    def _read(self, bufsize: int) -> bytes:
        buffer = bytearray(min(bufsize, _RECORD_BYTES))
        return bytes(buffer[: self._read_into(memoryview(buffer))])

    def _read_into(self, room: memoryview) -> int:
        """Decrypt into a buffer all that has come, at least one record. Returns its size."""
        count = 0
        # OpenSSL says by an exception, which is slow, that it has no more than half a record. It is
        # asked where that may be so only if nothing else has come.
        if self._in.pending < _ENCRYPTED_BYTES and self.gettimeout() == 0:
            with suppress(BlockingIOError):
                self._fill()
        while count < len(room) and (not count or self._in.pending >= _ENCRYPTED_BYTES):
            try:
                left = room[count:]
                # With a buffer it returns the number of bytes, which the stubs do not know.
                more: int = self._tls.read(len(left), left)  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                if count:
                    break
                self._flush()  # what a handshake answers
                self._fill()
            except ssl.SSLEOFError:
                break
            except ssl.SSLError:
                if count:
                    break  # the next call hears of it
                self._say_why()
                raise
            else:
                if not more:
                    break
                count += more
        return count

    def _fill(self) -> int:
        """Receive encrypted bytes for OpenSSL. Returns how many; 0 at the end."""
        buffer: memoryview | None = getattr(_local, "buffer", None)
        if buffer is None:
            buffer = _local.buffer = memoryview(bytearray(PIECE_BYTES))
        count = super().recv_into(buffer)
        if count:
            self._in.write(buffer[:count])
        else:
            self._in.write_eof()
        return count

    def _flush(self) -> None:
        while self._unsent or self._out.pending:
            if not self._unsent:
                self._unsent = memoryview(self._out.read())
            self._unsent = self._unsent[super().send(self._unsent) :]

    def _say_why(self) -> None:
        """Send an alert, if it can be sent at once."""
        with suppress(OSError):
            self._flush()
