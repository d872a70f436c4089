"""Memory of an upload's stream while it comes, and its end whatever its sender does."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Unavailable
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.files import FileStore, FileUpload
from xain_coordinator.stores.reading import CHUNK_BYTES
from xain_coordinator.updates.measured_upload import Announced, MeasuredUpload
from xain_coordinator.updates.measuring import Inspector
from xain_coordinator.updates.upload_stream import UploadStream
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.np import npy_header

VECTOR = np.arange(3 * CHUNK_BYTES // 4, dtype=np.float32)
DATA = npy_header(VECTOR.dtype, VECTOR.shape) + VECTOR.tobytes()
ANNOUNCED = Announced(0, len(DATA), xxhash.xxh3_128(DATA).hexdigest())
HEADER = pb.PutWeightsRequest.Header(size_bytes=len(DATA))

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
        await asyncio.sleep(0)  # one iteration of the event loop
        return self._messages.popleft() if self._messages else grpc.aio.EOF


@pytest.fixture
def upload(tmp_path: Path) -> Iterator[MeasuredUpload]:
    upload = MeasuredUpload(FileStore(tmp_path), "0/a", ANNOUNCED, Inspector(), "ab")
    yield upload
    upload.abort()


async def receive(stream: Stream, upload: MeasuredUpload) -> None:
    stream = UploadStream(stream.read)
    await stream.header()
    await stream.into(upload)


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_upload_is_written_however_it_is_cut_into_messages(upload, sizes):
    await receive(Stream(sizes), upload)
    assert upload.is_whole
    assert upload.complete().ref.digest == ANNOUNCED.digest


async def test_next_message_is_read_when_the_one_before_is_written(upload):
    """One message of an upload is in memory at a time."""
    read = written = 0

    def count():
        nonlocal read, written
        assert upload.offset == written
        written = min(len(DATA), read + CHUNK_BYTES)
        read += CHUNK_BYTES

    await receive(Stream(SENDERS["earlier"], count), upload)
    assert read > len(DATA)


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_cancelled_upload_ends_wherever_it_waits(tmp_path, sizes):
    """Cancelled while it waits for a message or for the disk."""
    number = 0
    while True:
        number += 1
        upload = MeasuredUpload(FileStore(tmp_path), f"0/{number}", ANNOUNCED, Inspector(), "ab")
        task = asyncio.ensure_future(receive(Stream(sizes), upload))
        for _ in range(3 * number):
            await asyncio.sleep(0)  # one iteration of the event loop
        was_done = task.done()
        task.cancel()
        await asyncio.wait([task])
        upload.abort()
        if was_done:
            break
    assert number > 3


@pytest.mark.parametrize("number", [1, 2])
async def test_failed_write_ends_the_upload_and_keeps_no_part(upload, monkeypatch, number):
    """A batch that was measured and not written is no part to go on with."""
    write, sizes = FileUpload.write, list[int]()

    def failing(self, chunk):
        sizes.append(len(chunk))
        if len(sizes) == number:
            raise StoreUnavailable("the disk is full")
        write(self, chunk)

    monkeypatch.setattr(FileUpload, "write", failing)
    with pytest.raises(StoreUnavailable, match="full"):
        await receive(Stream(SENDERS["present"]), upload)
    assert not upload.is_open


async def test_upload_without_a_header_is_refused():
    async def no_header():
        return pb.PutWeightsRequest(data=b"x")

    async def nothing():
        return grpc.aio.EOF

    for read in (no_header, nothing):
        with pytest.raises(InvalidUpdate, match="header"):
            await UploadStream(read).header()


async def test_sender_that_trickles_bytes_is_ended(upload):
    """A byte now and then does not begin the time limit again. What was written stays."""
    sent = Stream((1000,) * 3)
    num_bytes = 0

    async def read():
        nonlocal num_bytes
        if upload.offset < 2000:
            return await sent.read()
        await asyncio.sleep(0.01)  # shorter than the time limit
        num_bytes += 1
        return pb.PutWeightsRequest(data=DATA[upload.offset : upload.offset + 1])

    stream = UploadStream(read)
    stream.stall_timer.stalled_s = 0.2
    await stream.header()
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match="FindUpload says"):
            await stream.into(upload)
    assert upload.is_open
    assert upload.offset == 2000 + num_bytes or upload.offset == 2000 + num_bytes - 1
