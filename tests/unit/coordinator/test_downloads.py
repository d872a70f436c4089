"""What downloads read and hold, and that nothing of it stays whatever happens."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xain_coordinator.core.errors import Unavailable
from xain_coordinator.core.values import GlobalModel, WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server import downloads, places
from xain_coordinator.server.downloads import BLOCK_BYTES, MAX_BLOCKS, NUM_CHUNKS, Downloads
from xain_coordinator.server.places import CHUNK_BYTES, SMALL_BYTES
from xain_coordinator.stores.files import FileStore

KEY = "1/global"
DATA = bytes(range(256)) * (12 * BLOCK_BYTES // 256)


class Store(FileStore):
    """Counts the bytes that are read. is_away: it fails."""

    num_bytes = 0
    is_away = False

    def open(self, key: str, start: int = 0, length: int | None = None) -> Any:
        if self.is_away:
            raise StoreUnavailable("the disk is away")
        self.num_bytes += length or 0
        return super().open(key, start, length)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.put({KEY: DATA})
    return store


@pytest.fixture
def sender(store: Store, monkeypatch: pytest.MonkeyPatch) -> Downloads:
    """Of a model, over lines that are fast unless a test says otherwise."""
    monkeypatch.setattr(places, "SLOW_S", 1e6)
    model = GlobalModel(1, WeightsRef(KEY, len(DATA), ""), "float32", (len(DATA) // 4,))
    driver = SimpleNamespace(history=SimpleNamespace(models={KEY: model}))
    return Downloads(cast(Driver, driver), store)


async def at_once(_: int) -> None:
    """A turn that need not be waited for."""


async def discard(_: WeightsRef, chunk: bytes) -> None:
    """To a line that takes everything."""
    await asyncio.sleep(0)  # one turn of the event loop


def assert_all_free(sender: Downloads) -> None:
    rooms = sender._places.fast, sender._places.slow
    assert [room._num_free for room in rooms] == [NUM_CHUNKS, downloads.NUM_SLOW_CHUNKS]


async def test_whenever_a_download_ends_its_places_are_free(sender: Downloads) -> None:
    """Cancelled while it waits for a place, for the disk or for its line, or at its end."""
    for number in range(0, 200, 13):
        tasks = [
            asyncio.ensure_future(sender.send(KEY, 0, discard, at_once))
            for _ in range(NUM_CHUNKS + 2)
        ]
        for _ in range(number):
            await asyncio.sleep(0)  # one turn of the event loop
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert_all_free(sender)
    await sender.send(KEY, 0, discard, at_once)
    assert_all_free(sender)


async def test_a_download_that_fails_leaves_no_place_taken(
    sender: Downloads, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the store, of its line, or because it has become slow where many are."""
    sent = 0

    async def fail(_: WeightsRef, chunk: bytes) -> None:
        nonlocal sent
        sent += len(chunk)
        store.is_away = sent >= 3 * BLOCK_BYTES

    with pytest.raises(StoreUnavailable):
        await sender.send(KEY, 0, fail, at_once)
    assert_all_free(sender)
    store.is_away = False

    async def gone(_: WeightsRef, chunk: bytes) -> None:
        if len(chunk) == CHUNK_BYTES:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await sender.send(KEY, 0, gone, at_once)
    assert_all_free(sender)

    async def slow(_: WeightsRef, chunk: bytes) -> None:
        if len(chunk) == CHUNK_BYTES:
            monkeypatch.setattr(places, "SLOW_S", 0.0)
            place = next(iter(looked))
            assert line._timer is not None
            line._timer.cancel()
            line._look(place)
            await asyncio.Event().wait()

    looked: list[places.Place] = []
    look_later = places.Line._look_later

    def noted(self: places.Line, place: places.Place | None) -> None:
        nonlocal line
        if place is not None:
            line = self
            looked.append(place)
        look_later(self, place)

    line: Any = None
    monkeypatch.setattr(places.Line, "_look_later", noted)
    taken = [sender._places.slow.try_enter() for _ in range(downloads.NUM_SLOW_CHUNKS)]
    assert all(taken)
    with pytest.raises(Unavailable, match="slow"):
        await sender.send(KEY, 0, slow, at_once)
    for _ in taken:
        sender._places.slow.leave()
    assert_all_free(sender)


class Enough(Exception):
    """So much was received."""


class Zeros:
    """A reader of a model that is as large as is asked for."""

    def __enter__(self) -> "Zeros":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, offset: int, length: int) -> bytes:
        return bytes(length)


async def test_more_downloads_than_blocks_hardly_read_one_twice(
    sender: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each at another part of the model, so that none reads for another."""
    number, num_blocks = MAX_BLOCKS + 3, 4
    size = number * (num_blocks + 2) * BLOCK_BYTES
    model = GlobalModel(1, WeightsRef(KEY, size, ""), "float32", (size // 4,))
    monkeypatch.setitem(sender.driver.history.models, KEY, model)
    read: list[int] = []  # offsets of whole blocks

    def open_(self: Store, key: str, start: int = 0, length: int | None = None) -> Zeros:
        if length == BLOCK_BYTES:
            read.append(start)
        return Zeros()

    monkeypatch.setattr(Store, "open", open_)

    async def one(n: int) -> None:
        received = 0

        async def count(ref: WeightsRef, chunk: bytes) -> None:
            nonlocal received
            received += len(chunk)
            if received >= num_blocks * BLOCK_BYTES:
                raise Enough
            await discard(ref, chunk)

        with pytest.raises(Enough):
            await sender.send(KEY, n * (num_blocks + 2) * BLOCK_BYTES, count, at_once)

    await asyncio.gather(*(one(n) for n in range(number)))
    # Those that are read ahead just before others begin to wait are read again.
    assert len(read) < 1.5 * number * num_blocks


async def test_a_download_that_goes_on_reads_no_more_than_it_sends(
    sender: Downloads, store: Store
) -> None:
    """Before its line is known it would read whole blocks for small chunks."""
    sent = 0

    async def write(_: WeightsRef, chunk: bytes) -> None:
        nonlocal sent
        sent += len(chunk)
        if sent >= CHUNK_BYTES // 2:
            raise Enough

    with pytest.raises(Enough):
        await sender.send(KEY, 3 * BLOCK_BYTES, write, at_once)
    assert store.num_bytes == sent


# --- strangers ---


def stranger() -> bool:
    return True


async def test_strangers_take_one_small_chunk_at_a_time(sender: Downloads) -> None:
    """However many there are, nothing is read or kept for them that members use."""
    num_passing = most = 0
    sizes: set[int] = set()

    async def write(_: WeightsRef, chunk: bytes) -> None:
        nonlocal num_passing, most
        num_passing += 1
        most = max(most, num_passing)
        sizes.add(len(chunk))
        assert_all_free(sender)
        await asyncio.sleep(0)  # one turn of the event loop
        num_passing -= 1

    start = 6 * BLOCK_BYTES
    calls = (sender.send(KEY, start, write, at_once, stranger) for _ in range(5))
    await asyncio.gather(*calls)
    assert most == 1
    assert sizes == {SMALL_BYTES}
    assert sender._blocks == {}


async def test_no_block_stays_longer_because_of_a_stranger(sender: Downloads, store: Store) -> None:
    """It has what is there, and those that members use go in the order in which they used them."""
    await sender.send(KEY, 0, discard, at_once)
    blocks, num_bytes = list(sender._blocks), store.num_bytes
    received = bytearray()

    async def write(_: WeightsRef, chunk: bytes) -> None:
        received.extend(chunk)
        if len(received) >= CHUNK_BYTES:
            raise Enough

    _, start = blocks[0]
    with pytest.raises(Enough):
        await sender.send(KEY, start, write, at_once, stranger)
    assert received == DATA[start : start + CHUNK_BYTES]
    assert store.num_bytes == num_bytes
    assert list(sender._blocks) == blocks


async def test_a_small_model_that_a_stranger_asks_for_is_not_kept(
    sender: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one of them, and it is the one that everybody asks for."""
    model = GlobalModel(1, WeightsRef(KEY, CHUNK_BYTES, ""), "float32", (CHUNK_BYTES // 4,))
    monkeypatch.setitem(sender.driver.history.models, KEY, model)
    received = bytearray()

    async def write(_: WeightsRef, chunk: bytes) -> None:
        received.extend(chunk)

    await sender.send(KEY, 0, write, at_once, stranger)
    assert received == DATA[:CHUNK_BYTES]
    assert sender._small_model is None


async def test_strangers_that_take_nothing_hold_up_no_member(sender: Downloads) -> None:
    """Nor is there an end to them: those who are too many are told so at once."""
    passing = asyncio.Event()

    async def dead(_: WeightsRef, chunk: bytes) -> None:
        passing.set()
        await asyncio.Event().wait()

    strangers = [
        asyncio.ensure_future(sender.send(KEY, 0, dead, at_once, stranger))
        for _ in range(downloads.MAX_STRANGERS)
    ]
    await passing.wait()
    with pytest.raises(Unavailable, match="no members"):
        await sender.send(KEY, 0, discard, at_once, stranger)
    await sender.send(KEY, 0, discard, at_once)
    for one in strangers:
        one.cancel()
    await asyncio.wait(strangers)
    await sender.send(KEY, 0, discard, at_once, stranger)


async def test_whoever_loses_its_lease_goes_on_among_strangers(sender: Downloads) -> None:
    """And is a member again as soon as it is back."""
    received = bytearray()
    sizes: list[tuple[bool, int]] = []

    def has_no_lease() -> bool:
        return 3 * BLOCK_BYTES <= len(received) < 4 * BLOCK_BYTES

    async def write(_: WeightsRef, chunk: bytes) -> None:
        if has_no_lease():
            assert_all_free(sender)
        sizes.append((has_no_lease(), len(chunk)))
        received.extend(chunk)

    await sender.send(KEY, 0, write, at_once, has_no_lease)
    assert received == DATA
    assert {size for is_stranger, size in sizes if is_stranger} == {SMALL_BYTES}
    assert sizes[-1] == (False, CHUNK_BYTES)
    assert_all_free(sender)
