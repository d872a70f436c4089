"""The stream of one upload: read a message, write it in a thread, read the next one.

An upload holds one message in memory, and gRPC what it lets come ahead of it. So MAX_UPLOADS and
the size of a message bound the memory of all uploads.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from xain_coordinator.core.errors import InvalidUpdate, Unavailable
from xain_coordinator.updates.reception import Announced, Header, Reception
from xain_foundation.threads import run_to_end
from xain_proto.fl.coordinator_pb2 import Encoding

# Threads of the pool that write messages. The others are left for commits and models.
NUM_WRITES = 4
# An upload ends when its sender takes longer for so many bytes, or for one message.
LEAST_BYTES = 64 << 10
STALLED_S = 30.0

Read = Callable[[], Awaitable[Any]]  # read() of a servicer's context


class Intake:
    """The messages of one upload: header(), then into(), in one task.

    read: returns the next message, or grpc.aio.EOF. The iterator of requests that gRPC offers would
    keep each message until it has the next one.
    writes: slots for messages that are being written, shared by all uploads.
    """

    def __init__(self, read: Read, writes: asyncio.Semaphore) -> None:
        self._read = read
        self._writes = writes
        self._first = b""  # data of the message with the header
        self._limit: asyncio.Timeout | None = None  # of the present read
        self._began_at = 0.0  # the present read
        self._waited_s = 0.0  # for the sender, since the last LEAST_BYTES
        self._num_bytes = 0  # since then
        self._why_ended = ""
        self.encoding: Encoding.ValueType = Encoding.PLAIN  # of the data

    async def header(self) -> Header:
        """Read the first message. Raises InvalidUpdate and Unavailable."""
        first = await self._message()
        if first is grpc.aio.EOF or not first.HasField("header"):
            raise InvalidUpdate("the first message of an upload must carry its header")
        self._first = first.data
        said = first.header
        self.encoding = said.encoding
        announced = Announced(said.round, said.size_bytes, said.digest.hex())
        return Header(announced, said.offset, said.encoding)

    async def into(self, reception: Reception) -> None:
        """Write all messages. Returns when the last one is written.

        Raises Unavailable, and what Reception.write raises.
        """
        data, self._first = self._first, b""
        while True:
            if data:
                async with self._writes:
                    await run_to_end(reception.write, data)
            data = b""  # not held while the next message comes
            message = await self._message()
            if message is grpc.aio.EOF:
                return
            data = message.data
            del message

    @property
    def waited_s(self) -> float:
        """Seconds for which the upload has waited for the present message; 0 without one."""
        return 0.0 if self._limit is None else _now() - self._began_at

    def end(self, why: str) -> None:
        """End an upload that waits for its sender, which may go on with it later."""
        if self._limit is not None:
            self._why_ended = why
            self._limit.reschedule(_now())

    async def _message(self) -> Any:
        self._began_at = _now()
        try:
            async with asyncio.timeout(max(0.0, STALLED_S - self._waited_s)) as self._limit:
                message = await self._read()
        except TimeoutError:
            why = self._why_ended or f"less than {LEAST_BYTES} bytes came in {STALLED_S:g} s"
            raise Unavailable(f"{why}; FindUpload says where the upload can go on") from None
        finally:
            self._limit = None
        self._waited_s += _now() - self._began_at
        if message is not grpc.aio.EOF:
            self._num_bytes += len(message.data)
        if self._num_bytes >= LEAST_BYTES:
            self._waited_s, self._num_bytes = 0.0, 0
        return message


def _now() -> float:
    return asyncio.get_running_loop().time()
