"""The stream of one upload: read a message, write it in a thread, read the next one.

An upload holds one message in memory, and gRPC what it lets come ahead of it. So Inbox.max_uploads
and the size of a message bound the memory of all uploads.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Unavailable
from xain_coordinator.updates.bodies import StallTimer
from xain_coordinator.updates.measured_upload import Announced, Header, MeasuredUpload
from xain_foundation.threads import run_to_end
from xain_wire.fl.coordinator_pb2 import Encoding

Read = Callable[[], Awaitable[Any]]  # read() of a servicer's context


class UploadStream:
    """The stream of messages of one upload: header(), then into(), in one task.

    read: returns the next message, or grpc.aio.EOF. The iterator of requests that gRPC offers would
    keep each message until it has the next one.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._first = b""  # data of the message with the header
        self.stall_timer = StallTimer(_now)
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
        return Header(announced, said.offset, said.encoding, said.is_part)

    async def into(self, upload: MeasuredUpload) -> None:
        """Write the data of all messages to `upload`. Returns when the last one is written. Raises
        Unavailable, and what MeasuredUpload.write raises."""
        data, self._first = self._first, b""
        while True:
            if data:
                await run_to_end(upload.write, data)
            data = b""  # not held while the next message comes
            message = await self._message()
            if message is grpc.aio.EOF:
                return
            data = message.data
            del message

    async def _message(self) -> Any:
        """Read the next message, or grpc.aio.EOF. Raises Unavailable if the sender is too slow
        altogether."""
        try:
            with self.stall_timer.waiting():
                async with asyncio.timeout(self.stall_timer.left_s):
                    message = await self._read()
        except TimeoutError:
            stalled = self.stall_timer.error()
            raise Unavailable(f"{stalled}; FindUpload says where the upload can go on") from None
        if message is not grpc.aio.EOF:
            self.stall_timer.count(len(message.data))
        return message


def _now() -> float:
    return asyncio.get_running_loop().time()
