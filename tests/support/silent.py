"""HTTP/2 connections of a client that opens gRPC calls and then says nothing more."""

import socket
import struct
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal header field without indexing (RFC 7541, section 6.2.2)."""
    assert max(len(name), len(value)) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class SilentConnection:
    """One raw connection to a gRPC server in the clear on this machine.

    window: how many bytes of answers the server may send on each stream.
    """

    def __init__(self, port: int, window: int = 65_535) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._next_stream = 1
        settings = struct.pack(">HI", 4, window)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))

    def open_calls(self, method: str, num_calls: int, message: bytes | None = None) -> None:
        """Send the headers of calls, and `message` where there is one; never the end."""
        headers = b"".join(
            _header(name, value)
            for name, value in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", method),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            )
        )
        frames = bytearray()
        for _ in range(num_calls):
            frames += _frame(_HEADERS, _END_HEADERS, self._next_stream, headers)
            if message is not None:
                data = b"\0" + struct.pack(">I", len(message)) + message
                frames += _frame(_DATA, 0, self._next_stream, data)
            self._next_stream += 2
        self._socket.sendall(frames)

    def received(self) -> bytes:
        """Frames that the server has sent by now, as they are."""
        self._socket.setblocking(False)
        try:
            chunks = []
            while chunk := self._socket.recv(1 << 16):
                chunks.append(chunk)
        except (BlockingIOError, ConnectionError):
            pass
        finally:
            self._socket.settimeout(10)
        return b"".join(chunks)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
