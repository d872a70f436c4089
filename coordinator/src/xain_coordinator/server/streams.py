"""The stream of an upload: while a thread writes one batch, the next one comes.

A batch has a place in memory from before its first byte comes until it is written; see places. So
one upload holds two batches at most, and all of them together no more than there are places. A
batch has CHUNK_BYTES, or a message more than what is less. Small messages make batches of fewer
than 2 * SMALL_BYTES, which need no place.

gRPC says how large a message is when it is there, so the sender says before that it sends no other
than small ones. If it does, that message is in memory without a place: those after it have one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from xain_coordinator.admission import CHUNK_BYTES
from xain_coordinator.core.errors import InvalidUpdate
from xain_coordinator.server.flushes import Flushes
from xain_coordinator.server.places import SMALL_BYTES, Line, Place, Places
from xain_coordinator.server.reception import Reception
from xain_coordinator.threads import wait_to_end
from xain_coordinator.turns import Turn
from xain_proto.fl.coordinator_pb2 import PutWeightsRequest

# In memory at a time. A line brings one message in each there and back, so this bounds what comes
# over all of them: to 120 MB a second at 50 ms.
NUM_BATCHES = 6
NUM_SLOW_BATCHES = 32  # of one message each
# In a batch, however small they are: an object costs some hundred bytes beside what is in it.
BATCH_MESSAGES = 64
# In all batches of small messages that are being gathered. Beyond it each message is written by
# itself: a sender that pauses in the middle of a batch would hold the rest of it in memory.
GATHERED_BYTES = 16 << 20

Read = Callable[[], Awaitable[Any]]  # what a servicer's context has as read()


class Intake:
    """Of one stream, in one task: header(), then into(), and in the end close().

    read: the next message, or grpc.aio.EOF. Not the iterator of requests that gRPC offers, which
    keeps each message until it has the next one.
    turn: to be waited for before each message.
    flushes: of what has no place.
    is_small: no message has more than SMALL_BYTES, its sender says.
    """

    def __init__(
        self, places: Places, read: Read, turn: Turn, flushes: Flushes, *, is_small: bool = False
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._read = read
        self._turn = turn
        self._flushes = flushes
        self._places = places
        self._line = Line(places, "FindUpload says where the upload can go on")
        self._has_ended = False
        self._is_small = is_small  # what comes next, for all we know
        # Of the last message. The first one may be as large as any.
        self._message_bytes = SMALL_BYTES if is_small else CHUNK_BYTES
        self._place: Place | None = None  # of the batch
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._gathered_bytes = 0  # of the batch, counted in places

    async def header(self) -> PutWeightsRequest.Header:
        """What the first message says of the rest. Raises InvalidUpdate and Unavailable."""
        if not self._is_small:
            self._place = await self._line.take()
        first = await self._message()
        if first is grpc.aio.EOF or not first.HasField("header"):
            raise InvalidUpdate("the first message of an upload must carry its header")
        self._add(first.data)
        if self._batch_bytes <= SMALL_BYTES:
            place, self._place = self._place, None
            _give_back(place)  # until the rest is asked for, nothing else will come
            self._count()
        # A copy: a part of a message keeps the whole of it in memory, with its data.
        header = PutWeightsRequest.Header()
        header.CopyFrom(first.header)
        return header

    async def into(self, reception: Reception) -> None:
        """All that comes. Returns when it is written.

        Raises Unavailable, and what flush() raises: at once, even if the sender pauses.
        """
        writer = _Writer(reception, self._flushes, on_failure=self._task.cancel)
        try:
            while not self._has_ended:
                if self._place is None and not self._is_small:
                    self._place = await self._line.take()
                await self._gather()
                await writer.write(*self._take_batch())
        except asyncio.CancelledError:
            # By the writer, unless it was somebody else as well.
            if not writer.has_failed or self._task.uncancel():
                raise
        finally:
            await writer.end()

    @property
    def waited_s(self) -> float:
        """Seconds for which the upload has waited for its sender."""
        return self._line.waited_s

    def end(self, why: str) -> None:
        """End an upload that waits for its sender, which may go on with it later."""
        self._line.end(why)

    def close(self) -> None:
        """Give back what is held."""
        _, place = self._take_batch()
        _give_back(place)

    def _take_batch(self) -> tuple[list[bytes], Place | None]:
        batch, place = self._batch, self._place
        self._places.gathered_bytes -= self._gathered_bytes
        self._gathered_bytes = 0
        self._batch, self._batch_bytes, self._place = [], 0, None
        return batch, place

    async def _gather(self) -> None:
        """A batch. Of a slow line each message is one: a part of it would be held for long."""
        while not self._is_full:
            request = await self._message()
            if request is grpc.aio.EOF:
                self._has_ended = True
                return
            self._add(request.data)

    async def _message(self) -> Any:
        await self._turn(self._message_bytes)  # the next one is probably as large
        with self._line.passing(self._place):
            message = await self._read()
            if message is not grpc.aio.EOF:
                self._line.count(len(message.data))
        if message is not grpc.aio.EOF and message.data:
            self._message_bytes = len(message.data)
            self._is_small = self._is_small and self._message_bytes <= SMALL_BYTES
        return message

    @property
    def _is_full(self) -> bool:
        if len(self._batch) >= BATCH_MESSAGES:
            return True
        if self._place is not None:
            most = CHUNK_BYTES
        else:
            most = SMALL_BYTES if self._places.gathered_bytes <= GATHERED_BYTES else 1
        return self._batch_bytes >= most or (self._line.is_slow and bool(self._batch))

    def _add(self, data: bytes) -> None:
        if data:
            self._batch.append(data)
            self._batch_bytes += len(data)
            self._count()

    def _count(self) -> None:
        if self._place is None:
            self._places.gathered_bytes += self._batch_bytes - self._gathered_bytes
            self._gathered_bytes = self._batch_bytes


class _Writer:
    """Lets a thread write one batch at a time.

    on_failure: called once, when writing has failed before anybody waited for it.
    """

    def __init__(
        self, reception: Reception, flushes: Flushes, on_failure: Callable[[], object]
    ) -> None:
        self.has_failed = False
        self._reception = reception
        self._flushes = flushes
        self._on_failure = on_failure
        self._writing: asyncio.Future[None] | None = None
        self._is_waited_for = False

    async def write(self, batch: list[bytes], place: Place | None) -> None:
        """Begin to, when what came before is written. Raises what writing that has raised."""
        try:
            await self.end()
        except BaseException:  # also a cancellation: nobody else knows the place
            _give_back(place)
            raise
        if not batch:
            _give_back(place)
            return
        self._is_waited_for = False
        if place is None:
            self._writing = self._flushes.add(self._reception, batch)
        else:
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(None, self._reception.flush, batch)
        self._writing.add_done_callback(partial(self._written, place))

    def _written(self, place: Place | None, writing: asyncio.Future[None]) -> None:
        _give_back(place)
        has_failed = writing.cancelled() or writing.exception() is not None
        if has_failed and not self._is_waited_for:
            self.has_failed = True
            self._on_failure()

    async def end(self) -> None:
        """No thread is writing any more. Raises what writing has raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._is_waited_for = True
            await wait_to_end(writing)


def _give_back(place: Place | None) -> None:
    if place is not None:
        place.give_back()
