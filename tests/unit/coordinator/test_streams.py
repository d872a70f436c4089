"""What an upload's stream holds while it comes, and that it ends whatever its sender does."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from xain_coordinator.core.errors import InvalidUpdate, Unavailable
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.files import FileStore, FileUpload
from xain_coordinator.stores.reading import CHUNK_BYTES
from xain_coordinator.updates import bodies
from xain_coordinator.updates.measuring import Inspector
from xain_coordinator.updates.reception import Announced, Reception
from xain_coordinator.updates.streams import Intake
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.np import npy_header

VECTOR = np.arange(3 * CHUNK_BYTES // 4, dtype=np.float32)
DATA = npy_header(VECTOR.dtype, VECTOR.shape) + VECTOR.tobytes()
ANNOUNCED = Announced(0, len(DATA), xxhash.xxh3_128(DATA).hexdigest())
HEADER = pb.PutWeightsRequest.Header(size_bytes=len(DATA))
NUM = 3

# The sizes of the messages of one upload, header first: as our participants send them, as earlier
# ones do, and as others do.
SENDERS = {
    "present": (256 << 10,) * 13,
    "earlier": (CHUNK_BYTES,) * 4,
    "header first": (0, *(CHUNK_BYTES,) * 4),
    "tiny": (0, *(1000,) * 20, *(CHUNK_BYTES,) * 4),
}


class Stream:
    """The messages of an upload. on_read: called when another one is asked for."""

    def __init__(self, sizes: tuple[int, ...], on_read: Callable[[], None] = lambda: None) -> None:
        self._on_read = on_read
        self._messages: deque[Any] = deque()
        at = 0
        for size in sizes:
            header = None if self._messages else HEADER
            self._messages.append(pb.PutWeightsRequest(header=header, data=DATA[at : at + size]))
            at += size

    async def read(self) -> Any:
        self._on_read()
        await asyncio.sleep(0)  # one turn of the event loop
        return self._messages.popleft() if self._messages else grpc.aio.EOF


@pytest.fixture
def writes() -> asyncio.Semaphore:
    return asyncio.Semaphore(NUM)


@pytest.fixture
def reception(tmp_path: Path) -> Iterator[Reception]:
    reception = Reception(FileStore(tmp_path), "0/a", ANNOUNCED, Inspector(), "ab")
    yield reception
    reception.abort()


async def take_in(writes: asyncio.Semaphore, stream: Stream, reception: Reception) -> None:
    intake = Intake(stream.read, writes)
    await intake.header()
    await intake.into(reception)


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_upload_is_written_however_it_is_cut_into_messages(
    writes: asyncio.Semaphore, reception: Reception, sizes: tuple[int, ...]
) -> None:
    await take_in(writes, Stream(sizes), reception)
    assert reception.is_whole
    assert reception.complete().ref.digest == ANNOUNCED.digest
    assert writes._value == NUM


async def test_next_message_is_read_when_the_one_before_is_written(
    writes: asyncio.Semaphore, reception: Reception
) -> None:
    """One message of an upload is in memory at a time."""
    read = written = 0

    def count() -> None:
        nonlocal read, written
        assert reception.offset == written
        written = min(len(DATA), read + CHUNK_BYTES)
        read += CHUNK_BYTES

    await take_in(writes, Stream(SENDERS["earlier"], count), reception)
    assert read > len(DATA)


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_cancelled_upload_leaves_no_slot_taken(
    writes: asyncio.Semaphore, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Cancelled while it waits for a message, for a slot, or for the disk."""
    number = 0
    while True:
        number += 1
        reception = Reception(FileStore(tmp_path), f"0/{number}", ANNOUNCED, Inspector(), "ab")
        task = asyncio.ensure_future(take_in(writes, Stream(sizes), reception))
        for _ in range(3 * number):
            await asyncio.sleep(0)  # one turn of the event loop
        was_done = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert writes._value == NUM
        reception.abort()
        if was_done:
            break
    assert number > 3


@pytest.mark.parametrize("number", [1, 2])
async def test_failed_write_ends_the_upload_and_keeps_no_part(
    writes: asyncio.Semaphore,
    reception: Reception,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """What was measured and not written is nothing to go on with."""
    write, sizes = FileUpload.write, list[int]()

    def failing(self: FileUpload, chunk: bytes) -> None:
        sizes.append(len(chunk))
        if len(sizes) == number:
            raise StoreUnavailable("the disk is full")
        write(self, chunk)

    monkeypatch.setattr(FileUpload, "write", failing)
    with pytest.raises(StoreUnavailable, match="full"):
        await take_in(writes, Stream(SENDERS["present"]), reception)
    assert writes._value == NUM
    assert not reception.is_open


async def test_failed_write_of_a_cancelled_upload_keeps_no_part(
    writes: asyncio.Semaphore, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once: the connection is gone, and so is the disk."""
    uploading: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    def failing(self: FileUpload, chunk: bytes) -> None:
        loop.call_soon_threadsafe(uploading[0].cancel)
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(FileUpload, "write", failing)
    stream = Stream(SENDERS["present"])
    uploading.append(asyncio.ensure_future(take_in(writes, stream, reception)))
    await asyncio.wait(uploading)
    assert not reception.is_open
    assert writes._value == NUM


async def test_upload_without_a_header_is_refused(writes: asyncio.Semaphore) -> None:
    async def no_header() -> Any:
        return pb.PutWeightsRequest(data=b"x")

    async def nothing() -> Any:
        return grpc.aio.EOF

    for read in (no_header, nothing):
        with pytest.raises(InvalidUpdate, match="header"):
            await Intake(read, writes).header()


async def test_sender_that_trickles_bytes_is_ended(
    writes: asyncio.Semaphore, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then does not begin the time limit again. What was written stays."""
    monkeypatch.setattr(bodies, "STALLED_S", 0.2)
    stream = Stream((1000,) * 3)
    num_bytes = 0

    async def read() -> Any:
        nonlocal num_bytes
        if reception.offset < 2000:
            return await stream.read()
        await asyncio.sleep(0.01)
        num_bytes += 1
        return pb.PutWeightsRequest(data=DATA[reception.offset : reception.offset + 1])

    intake = Intake(read, writes)
    await intake.header()
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match="FindUpload says"):
            await intake.into(reception)
    assert reception.is_open
    assert reception.offset == 2000 + num_bytes or reception.offset == 2000 + num_bytes - 1


async def test_upload_that_waits_can_be_ended_for_another(writes: asyncio.Semaphore) -> None:
    async def silence() -> Any:
        await asyncio.Event().wait()

    intake = Intake(silence, writes)
    task = asyncio.ensure_future(intake.header())
    await asyncio.sleep(0)  # it waits for its sender
    assert intake.waited_s >= 0
    intake.end("others wait")
    with pytest.raises(Unavailable, match="others wait"):
        await task
    assert intake.waited_s == 0
