"""What an upload's stream holds while it comes, and that nothing of it stays whatever happens."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from xain_coordinator.admission import Inspector
from xain_coordinator.core.errors import InvalidUpdate
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server.flushes import Flushes
from xain_coordinator.server.places import CHUNK_BYTES, SMALL_BYTES, Places, _Room
from xain_coordinator.server.reception import Announced, Reception
from xain_coordinator.server.streams import Intake
from xain_coordinator.stores.files import FileStore, FileUpload
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.np import npy_header

VECTOR = np.arange(3 * CHUNK_BYTES // 4, dtype=np.float32)
DATA = npy_header(VECTOR.dtype, VECTOR.shape) + VECTOR.tobytes()
ANNOUNCED = Announced(0, len(DATA), xxhash.xxh3_128(DATA).hexdigest())
HEADER = pb.PutWeightsRequest.Header(size_bytes=len(DATA))
NUM, NUM_SLOW = 3, 2

# The sizes of the messages of one upload, header first: as our participants send them over fast and
# slow lines, and as others do.
SENDERS = {
    "large": (CHUNK_BYTES,) * 4,
    "small": (4 << 10, *(SMALL_BYTES,) * 48),
    "header first": (0, *(CHUNK_BYTES,) * 4),
    "tiny": (0, *(1000,) * 20, *(CHUNK_BYTES,) * 4),
}


def num_free(room: _Room) -> int:
    number = 0
    while room.try_enter():
        number += 1
    for _ in range(number):
        room.leave()
    return number


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
        await asyncio.sleep(0)
        return self._messages.popleft() if self._messages else grpc.aio.EOF


async def at_once(_: int) -> None:
    """A turn that need not be waited for."""


@pytest.fixture
def places() -> Places:
    return Places(NUM, NUM_SLOW)


@pytest.fixture
def reception(tmp_path: Path) -> Iterator[Reception]:
    reception = Reception(FileStore(tmp_path), "0/a", ANNOUNCED, Inspector(), "ab")
    yield reception
    reception.abort()


async def take_in(places: Places, stream: Stream, reception: Reception) -> None:
    intake = Intake(places, stream.read, at_once, Flushes())
    try:
        await intake.header()
        await intake.into(reception)
    finally:
        intake.close()


async def assert_all_free(places: Places) -> None:
    await asyncio.sleep(0)  # what has been written is told of in the next turn
    assert (num_free(places.fast), num_free(places.slow)) == (NUM, NUM_SLOW)


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_an_upload_is_written_and_leaves_no_place_taken(
    places: Places, reception: Reception, sizes: tuple[int, ...]
) -> None:
    """However it is cut into messages."""
    await take_in(places, Stream(sizes), reception)
    assert reception.is_whole
    assert reception.complete().ref.digest == ANNOUNCED.digest
    await assert_all_free(places)


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_whenever_an_upload_is_cancelled_its_places_are_free(
    places: Places, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """While it waits for a message, for a place, or for the disk."""
    number = 0
    while True:
        number += 1
        reception = Reception(FileStore(tmp_path), f"0/{number}", ANNOUNCED, Inspector(), "ab")
        task = asyncio.ensure_future(take_in(places, Stream(sizes), reception))
        for _ in range(3 * number):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        await asyncio.wait([task])
        await assert_all_free(places)
        reception.abort()
        if was_done:
            break
    assert number > 3


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("number", [1, 2])
async def test_a_write_that_fails_leaves_no_place_taken_and_no_part(
    places: Places,
    reception: Reception,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    number: int,
) -> None:
    """The sender hears of it; what was measured and not written is nothing to go on with."""
    write, writes = FileUpload.write, list[int]()

    def failing(self: FileUpload, chunk: bytes) -> None:
        writes.append(len(chunk))
        if len(writes) == number:
            raise StoreUnavailable("the disk is full")
        write(self, chunk)

    monkeypatch.setattr(FileUpload, "write", failing)
    with pytest.raises(StoreUnavailable, match="full"):
        await take_in(places, Stream(sizes), reception)
    await assert_all_free(places)
    assert not reception.is_open


async def test_a_failed_write_is_no_part_though_its_upload_is_cancelled(
    places: Places, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once: the line is gone, and so is the disk."""
    uploading: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    def failing(self: FileUpload, chunk: bytes) -> None:
        loop.call_soon_threadsafe(uploading[0].cancel)
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(FileUpload, "write", failing)
    stream = Stream(SENDERS["large"])
    uploading.append(asyncio.ensure_future(take_in(places, stream, reception)))
    await asyncio.wait(uploading)
    assert not reception.is_open
    await assert_all_free(places)


async def test_what_is_refused_leaves_no_place_taken(places: Places, reception: Reception) -> None:
    """An upload without a header, and one that is too long."""

    async def none() -> Any:
        return pb.PutWeightsRequest(data=b"x")

    intake = Intake(places, none, at_once, Flushes())
    with pytest.raises(InvalidUpdate, match="header"):
        await intake.header()
    intake.close()
    await assert_all_free(places)
    reception.announced = Announced(0, CHUNK_BYTES, "")
    with pytest.raises(InvalidUpdate, match="longer"):
        await take_in(places, Stream(SENDERS["large"]), reception)
    await assert_all_free(places)


async def test_small_messages_take_no_place(places: Places, reception: Reception) -> None:
    """But the first, of which nobody knows how large it is."""
    free: list[int] = []
    stream = Stream(SENDERS["small"], lambda: free.append(num_free(places.fast)))
    await take_in(places, stream, reception)
    assert reception.is_whole
    assert free[0] == NUM - 1
    assert set(free[1:]) == {NUM}


@pytest.mark.parametrize("sizes", [SENDERS["large"], SENDERS["header first"]])
async def test_large_messages_take_places(
    places: Places, reception: Reception, sizes: tuple[int, ...]
) -> None:
    """Each of them, from before it comes."""
    free: list[int] = []
    stream = Stream(sizes, lambda: free.append(num_free(places.fast)))
    await take_in(places, stream, reception)
    assert max(free) < NUM


async def test_who_begins_small_and_goes_on_large_is_not_trusted_again(
    places: Places, reception: Reception
) -> None:
    """One message is in memory without a place, and no other."""
    free: list[int] = []
    sizes = (1000, CHUNK_BYTES, SMALL_BYTES, SMALL_BYTES, SMALL_BYTES, CHUNK_BYTES, CHUNK_BYTES)
    stream = Stream(sizes, lambda: free.append(num_free(places.fast)))
    await take_in(places, stream, reception)
    assert free[1] == NUM
    assert max(free[2:]) < NUM


async def test_no_place_is_held_between_header_and_chunks(places: Places) -> None:
    """What comes in between may take long."""
    for sizes, held in ((SENDERS["small"], 0), (SENDERS["header first"], 0), ((CHUNK_BYTES,), 1)):
        intake = Intake(places, Stream(sizes).read, at_once, Flushes())
        await intake.header()
        assert num_free(places.fast) == NUM - held
        intake.close()
        await assert_all_free(places)


async def test_batches_are_flushed_together(tmp_path: Path) -> None:
    """What fails is that of one of them."""
    store, flushes = FileStore(tmp_path), Flushes()
    receptions = [Reception(store, f"0/{n}", ANNOUNCED, Inspector()) for n in range(20)]
    receptions[3].announced = Announced(0, 1, "")
    writing = [flushes.add(one, [DATA[:1000]]) for one in receptions]
    ends = await asyncio.gather(*writing, return_exceptions=True)
    assert [isinstance(end, InvalidUpdate) for end in ends] == [n == 3 for n in range(20)]
    assert [one.offset for one in receptions] == [0 if n == 3 else 1000 for n in range(20)]
    for one in receptions:
        one.abort()
