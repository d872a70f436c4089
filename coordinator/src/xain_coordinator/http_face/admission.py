"""Admission of request bodies: the bytes of all of them together have a bound.

A body is counted from its first byte until its answer begins, or until the answer has only to be
waited for. Parsed, it takes many times its size, so only some of the bodies that have come are
answered at a time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from xain_coordinator.http_face.errors import HttpError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

# Bodies that are held at a time, in bodies of the largest size; the others wait for their answers,
# in bytes as they came.
HELD = 2
# Key of a request's scope: a coroutine function that ends the count of its body before the answer
# begins. What waits for long after it has read the body calls it, so that other bodies do not wait.
RELEASE = "xain.release_body"
# Lists and objects in a body, which has one for each row. Each takes 20 times its two bytes.
MAX_LISTS = 100_000


class Bodies:
    """The bodies of one HTTP face. One event loop has it.

    max_bytes: of the largest body, and of all that are answered at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Bytes of bodies that are not whole yet, the oldest first. Its key ends one.
        self._arriving: dict[asyncio.Timeout, int] = {}
        self.num_bytes = 0  # held
        self._num_answered = 0  # bytes of bodies that are answered now
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, receive: Receive, most: int) -> AsyncIterator[bytes]:
        """A whole body, of `most` bytes at most; the bytes count until the end of the context.

        When there is no room the body that has been arriving longest is refused, so that clients
        that send little at a time shut out none.
        Raises HttpError, and IncompleteReadError.
        """
        body = await self._read(receive, most)
        size = len(body)
        has_slot = False
        try:
            if body.count(b"[") + body.count(b"{") > MAX_LISTS:
                raise HttpError(
                    "TOO_LARGE",
                    f"the body has more than {MAX_LISTS} lists and objects; send fewer rows",
                )
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._num_answered + size <= self._max_bytes or not self._num_answered
                )
                self._num_answered += size
                has_slot = True
            yield body
        finally:
            self.num_bytes -= size
            if has_slot:
                self._num_answered -= size
                await self._wake()

    async def _wake(self) -> None:
        """Wake the requests that wait for room."""
        async with self._changed:
            self._changed.notify_all()

    async def _read(self, receive: Receive, most: int) -> bytes:
        """Read a whole body of `most` bytes at most, counting its bytes. Raises HttpError, and
        IncompleteReadError."""
        chunks: list[bytes] = []
        limit = asyncio.timeout(None)  # _make_room() may end it
        try:
            async with limit:
                self._arriving[limit] = 0
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.IncompleteReadError(b"", None)
                    if limit not in self._arriving:
                        raise TimeoutError
                    chunk: bytes = message.get("body", b"")
                    if self._arriving[limit] + len(chunk) > most:
                        raise HttpError("TOO_LARGE", f"the body has more than {most} bytes")
                    self._make_room(len(chunk), limit)
                    chunks.append(chunk)
                    if not message.get("more_body"):
                        del self._arriving[limit]
                        return b"".join(chunks)
        except TimeoutError:
            why = "the body took long to come, and others needed its room; send it again"
            raise HttpError("TOO_BUSY", why) from None
        finally:
            self.num_bytes -= self._arriving.pop(limit, 0)

    def _make_room(self, size: int, limit: asyncio.Timeout) -> None:
        """Count bytes of an arriving body; without room for them, bodies that have been arriving
        longer end. Raises HttpError if none has. limit: the key of the body."""
        while self.num_bytes + size > HELD * self._max_bytes:
            oldest = next(iter(self._arriving))
            if oldest is limit:
                raise HttpError("TOO_BUSY", "too many bodies are being answered; try again")
            oldest.reschedule(asyncio.get_running_loop().time())
            self.num_bytes -= self._arriving.pop(oldest)
        self.num_bytes += size
        self._arriving[limit] += size
