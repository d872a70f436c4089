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
from xain_coordinator.core.errors import InvalidUpdate, LineSlow
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server import flushes, streams
from xain_coordinator.server.flushes import NUM_AT_A_TIME, Flushes
from xain_coordinator.server.places import CHUNK_BYTES, SMALL_BYTES, Places, Room
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
PATIENCE_S = 60.0

# The sizes of the messages of one upload, header first: as our participants send them over fast and
# slow lines, and as others do. Who is SMALL says so.
SMALL = (*(SMALL_BYTES,) * 48, SMALL_BYTES)
SENDERS = {
    "large": (CHUNK_BYTES,) * 4,
    "small": SMALL,
    "header first": (0, *(CHUNK_BYTES,) * 4),
    "tiny": (0, *(1000,) * 20, *(CHUNK_BYTES,) * 4),
}


def num_free(room: Room) -> int:
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

    @property
    def num_left(self) -> int:
        return len(self._messages)

    async def read(self) -> Any:
        self._on_read()
        await asyncio.sleep(0)  # one turn of the event loop
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


async def take_in(
    places: Places, stream: Stream, reception: Reception, *, is_small: bool = False
) -> None:
    intake = Intake(places, stream.read, at_once, Flushes(), is_small=is_small)
    await all_of(intake, reception)


async def all_of(intake: Intake, reception: Reception) -> None:
    try:
        await intake.header()
        await intake.into(reception)
    finally:
        intake.close()


async def assert_all_free(places: Places) -> None:
    await asyncio.sleep(0)  # what has been written is told of in the next turn
    assert (num_free(places.fast), num_free(places.slow)) == (NUM, NUM_SLOW)
    assert places.gathered_bytes == 0


@pytest.mark.parametrize("sizes", SENDERS.values(), ids=SENDERS)
async def test_an_upload_is_written_and_leaves_no_place_taken(
    places: Places, reception: Reception, sizes: tuple[int, ...]
) -> None:
    """However it is cut into messages."""
    await take_in(places, Stream(sizes), reception, is_small=sizes is SMALL)
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
        uploading = take_in(places, Stream(sizes), reception, is_small=sizes is SMALL)
        task = asyncio.ensure_future(uploading)
        for _ in range(3 * number):
            await asyncio.sleep(0)  # one turn of the event loop
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
        await take_in(places, Stream(sizes), reception, is_small=sizes is SMALL)
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


async def test_small_messages_take_no_place(reception: Reception) -> None:
    """Where their sender says that they are, from the first one on."""
    async with asyncio.timeout(60):
        await take_in(Places(0, 0), Stream(SMALL), reception, is_small=True)
    assert reception.is_whole


async def test_an_upload_in_small_messages_is_not_ended_for_slowness(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at its first message either, however slow it is and however many others are."""
    monkeypatch.setattr("xain_coordinator.server.places.SLOW_S", -1.0)
    monkeypatch.setattr("xain_coordinator.server.places.LONGEST_WAIT_S", 0.0)
    await take_in(Places(NUM, 0), Stream(SMALL), reception, is_small=True)
    assert reception.is_whole
    with pytest.raises(LineSlow):
        await take_in(Places(NUM, 0), Stream(SMALL), reception)


@pytest.mark.parametrize("sizes", [SENDERS["large"], SENDERS["header first"], SMALL])
async def test_large_messages_take_places(
    places: Places, reception: Reception, sizes: tuple[int, ...]
) -> None:
    """Each of them, from before it comes."""
    free: list[int] = []
    stream = Stream(sizes, lambda: free.append(num_free(places.fast)))
    await take_in(places, stream, reception)
    assert max(free) < NUM


@pytest.mark.parametrize("num_small", [0, 1])
async def test_who_says_small_and_goes_on_large_is_not_trusted_again(
    places: Places, reception: Reception, num_small: int
) -> None:
    """One message is in memory without a place, and no other."""
    free: list[int] = []
    sizes = (CHUNK_BYTES, SMALL_BYTES, SMALL_BYTES, SMALL_BYTES, CHUNK_BYTES, CHUNK_BYTES)
    stream = Stream((1000,) * num_small + sizes, lambda: free.append(num_free(places.fast)))
    await take_in(places, stream, reception, is_small=True)
    assert set(free[: num_small + 1]) == {NUM}
    assert max(free[num_small + 1 :]) < NUM


async def test_a_turn_is_paid_by_the_size_of_what_came_before(
    places: Places, reception: Reception
) -> None:
    """Whether or not it has a place: what comes next is not known yet."""
    turns: list[int] = []

    async def turn(num_bytes: int) -> None:
        turns.append(num_bytes)

    intake = Intake(places, Stream((0, 1000, 5000, CHUNK_BYTES)).read, turn, Flushes())
    await intake.header()
    await intake.into(reception)
    assert turns == [CHUNK_BYTES, CHUNK_BYTES, 1000, 5000, CHUNK_BYTES]


async def test_no_place_is_held_between_header_and_chunks(places: Places) -> None:
    """What comes in between may take long."""
    for sizes, held in ((SMALL, 0), (SENDERS["header first"], 0), ((CHUNK_BYTES,), 1)):
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


async def test_batches_are_shared_out_among_the_threads_that_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that keeps one of them waiting does not keep all."""
    groups: list[int] = []
    flush_all = flushes._flush_all

    def noted(group: list[Any]) -> list[Any]:
        groups.append(len(group))
        return flush_all(group)

    monkeypatch.setattr(flushes, "_flush_all", noted)
    store, them = FileStore(tmp_path), Flushes()
    receptions = [Reception(store, f"0/{n}", ANNOUNCED, Inspector()) for n in range(10)]
    await asyncio.gather(*(them.add(one, [DATA[:1000]]) for one in receptions))
    assert sorted(groups) == [2, 2, 3, 3]
    assert len(groups) == NUM_AT_A_TIME
    for one in receptions:
        one.abort()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_all_are_told_though_their_thread_has_failed(
    reception: Reception, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Nobody waits for what no thread will end."""
    working: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "run_in_executor", lambda *_: working, raising=False)
    them = Flushes()
    writing = [them.add(reception, [b"x"]) for _ in range(NUM_AT_A_TIME)]
    await asyncio.sleep(0)  # one turn of the event loop: all have asked for a thread
    if is_cancelled:
        working.cancel()
    else:
        working.set_exception(GeneratorExit())
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*writing, return_exceptions=True)
    assert {type(end) for end in ends} == {RuntimeError}
    assert not them._num_busy


@pytest.mark.parametrize(("most", "size"), [(1 << 20, 20_000), (0, 0)])
async def test_small_messages_gather_in_memory_up_to_a_bound(
    places: Places,
    reception: Reception,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    size: int,
) -> None:
    """A sender that pauses in the middle of a batch keeps no more than that in memory."""
    monkeypatch.setattr(streams, "GATHERED_BYTES", most)
    stream = Stream((0, *(10_000,) * 2))
    pause = asyncio.Event()

    async def read() -> Any:
        if not stream.num_left:
            await pause.wait()
        return await stream.read()

    intake = Intake(places, read, at_once, Flushes(), is_small=True)
    task = asyncio.ensure_future(all_of(intake, reception))
    async with asyncio.timeout(PATIENCE_S):
        while stream.num_left or reception.offset != 20_000 - size:  # noqa: ASYNC110  # a thread's
            await asyncio.sleep(0.001)  # a poll, not a race: it ends when a thread has written
    assert places.gathered_bytes == size
    task.cancel()
    await asyncio.wait([task])
    await assert_all_free(places)
