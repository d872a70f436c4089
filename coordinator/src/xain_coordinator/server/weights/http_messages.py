"""Messages of the weights port as HTTP/1.1 has them: requests, ranges, and answers in a line."""

import asyncio
import contextlib
import re
import socket
from dataclasses import dataclass
from http import HTTPStatus

from xain_wire.weights_port import DIGEST_HEADER

LINGER_BYTES = 1 << 20

_RANGE = re.compile(rb"bytes=([0-9]{0,19})-([0-9]{0,19})")
CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
SIZE = re.compile(rb"bytes \*/([0-9]{1,19})")
_DIGEST = re.compile(rb"[0-9a-f]{32}")


class Answer(Exception):
    """An answer without a body but for one line of text."""

    def __init__(self, status: int, line: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(line)
        self.status = status
        self.headers = headers

    def encode(self, *, is_head: bool = False) -> bytes:
        """The answer as bytes; for HEAD without its body."""
        body = f"{self}\n".encode()
        headers = (("Content-Type", "text/plain; charset=utf-8"), *self.headers)
        return encode_head(self.status, len(body), headers) + (b"" if is_head else body)


@dataclass(frozen=True, slots=True)
class Request:
    """rest: what came of the body with the head."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    rest: bytes


def port_full() -> Answer:
    """The answer to a request for which there is no room."""
    return Answer(503, "the port is full; use gRPC, or come again later")


def encode_head(status: int, length: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    """The head of an answer whose body has so many bytes."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers]
    # no-store: a proxy on the way must not keep what a capability gives.
    return "\r\n".join([*lines, "Cache-Control: no-store", "Connection: close", "", ""]).encode()


async def send_answer(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, linger_s: float, answer: bytes
) -> None:
    """Send an answer, and leave the peer a moment to read it: closing a socket that has unread
    bytes makes the peer's system forget what came before."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(linger_s):
            await loop.sock_sendall(sock, answer)
            sock.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            while left > 0 and (data := await loop.sock_recv(sock, 64 << 10)):
                left -= len(data)


def range_of(header: bytes | None, size: int) -> tuple[int, int]:
    """The bytes that a Range asks for, as start and end. Raises Answer."""
    if header is None:
        return 0, size
    said = _RANGE.fullmatch(header.replace(b" ", b""))
    if said is None or not (said[1] or said[2]):
        return 0, size  # RFC 9110: a range that is not understood is ignored
    if said[1]:
        start, end = int(said[1]), min(int(said[2] or size), size - 1) + 1
    else:
        start, end = max(0, size - int(said[2])), size
    if start >= end:
        raise Answer(416, f"the object has {size} bytes", (("Content-Range", f"bytes */{size}"),))
    return start, end


def digest_of(headers: dict[bytes, bytes]) -> str:
    """The digest that a request names of the object that it brings. Raises Answer."""
    digest = headers.get(DIGEST_HEADER.lower().encode(), b"")
    if _DIGEST.fullmatch(digest) is None:
        raise Answer(400, f"{DIGEST_HEADER} must be the xxh3-128 of the whole object, in hex")
    return digest.decode()
