"""Small updates are written together, and each caller hears what became of its own."""

import asyncio
import threading
from collections.abc import Mapping

import pytest

from xain_coordinator import bundles
from xain_coordinator.bundles import BUNDLE_SIZE, Bundles, open_weights
from xain_coordinator.core.keys import bundled_key, object_of, piece_of, place_of
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.memory import MemoryStore


class GatedStore(MemoryStore):
    """Writes only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.begun = threading.Event()
        self.broken = False

    def put(self, objects: Mapping[str, bytes]) -> None:
        self.begun.set()
        assert self.gate.acquire(timeout=60)
        if self.broken:
            raise StoreUnavailable("the disk is full")
        super().put(objects)


def tasks_of(written: Bundles, places: list[str]) -> list[asyncio.Task[str]]:
    return [asyncio.ensure_future(written.put(place, place.encode())) for place in places]


async def begin(written: Bundles, store: GatedStore, places: list[str]) -> list[asyncio.Task[str]]:
    """Tasks that wait, the first of them for a write that is under way."""
    tasks = tasks_of(written, places)
    assert await asyncio.to_thread(store.begun.wait, 60)
    return tasks


def content(store: MemoryStore, key: str) -> bytes:
    with open_weights(store, key) as reader:
        return reader.read(0, reader.size)


async def test_what_gathers_during_a_write_is_written_together() -> None:
    """And each is found under a key of its own, in its place."""
    store = GatedStore()
    written = Bundles(store)
    tasks = await begin(written, store, ["3/a"])
    tasks += tasks_of(written, ["3/b", "3/c", "3/dd"])
    store.gate.release(2)
    keys = await asyncio.gather(*tasks)
    assert [place_of(key) for key in keys] == ["3/a", "3/b", "3/c", "3/dd"]
    assert [content(store, key) for key in keys] == [b"3/a", b"3/b", b"3/c", b"3/dd"]
    assert sorted(store.keys("3/bundle.")) == sorted({object_of(key) for key in keys})
    assert len({object_of(key) for key in keys}) == len({*map(object_of, keys[1:])}) + 1 == 2
    store.gate.release()
    (key,) = await asyncio.gather(*tasks_of(written, ["3/e"]))  # it begins anew after a rest
    assert content(store, key) == b"3/e"


async def test_bundles_are_bounded_and_of_one_round() -> None:
    """That of a round goes with it."""
    store = GatedStore()
    store.gate.release(10)
    written = Bundles(store)
    places = [f"3/k{i}" for i in range(2 * BUNDLE_SIZE + 1)] + ["4/a", "4/b", "3/a"]
    keys = await asyncio.gather(*tasks_of(written, places))
    assert [content(store, key).decode() for key in keys] == places
    sizes = [[*map(object_of, keys)].count(whole) for whole in dict.fromkeys(map(object_of, keys))]
    assert sizes == [BUNDLE_SIZE, BUNDLE_SIZE, 1, 2, 1]
    assert len(list(store.keys("3/"))) == 4
    assert len(list(store.keys("4/"))) == 1


async def test_a_failure_is_its_bundles_alone() -> None:
    store = GatedStore()
    store.broken = True
    written = Bundles(store)
    tasks = await begin(written, store, ["3/a", "3/b"])
    store.gate.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable, StoreUnavailable]
    store.broken = False
    store.gate.release()
    (key,) = await asyncio.gather(*tasks_of(written, ["3/c"]))
    assert list(store.keys()) == [object_of(key)]


async def test_a_cancelled_caller_waits_for_the_end() -> None:
    """Its locks are what keeps others from its place while a thread is still writing."""
    store = GatedStore()
    (task,) = await begin(Bundles(store), store, ["3/a"])
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    store.gate.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(list(store.keys())) == 1


async def test_a_bundle_is_of_no_use_when_its_last_update_is_not() -> None:
    store = GatedStore()
    store.gate.release(3)
    written = Bundles(store)
    (a,) = await asyncio.gather(*tasks_of(written, ["3/a"]))
    b, c = await asyncio.gather(*tasks_of(written, ["3/b", "3/c"]))
    assert written.discard(b) is None
    assert written.discard(a) == object_of(a)
    assert written.discard(c) == object_of(c) == object_of(b)
    assert written.discard(c) is None, "it has gone"


async def test_what_is_not_counted_any_more_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its round is over; there may be a use for another one in the same bundle."""
    monkeypatch.setattr(bundles, "MAX_COUNTED", 1)
    store = GatedStore()
    store.gate.release(2)
    written = Bundles(store)
    (a,) = await asyncio.gather(*tasks_of(written, ["3/a"]))
    (b,) = await asyncio.gather(*tasks_of(written, ["3/b"]))
    assert written.discard(a) is None
    assert written.discard(b) == object_of(b)
    assert Bundles(store).discard(b) is None, "another process has written it"
    attempt = f"3/a.{'0' * 32}"
    assert written.discard(attempt) == attempt


def test_a_piece_is_all_that_a_reader_sees() -> None:
    store = MemoryStore()
    attempt = "0" * 32
    store.put({f"7/bundle.{attempt}": b"0123456789"})
    with open_weights(store, bundled_key("7/a", attempt, 2, 5), 1, 3) as reader:
        assert reader.size == 5
        assert reader.read(0, 100) == b"23456"
        assert reader.read(4, 100) == b"6"
        assert reader.read(5, 1) == reader.read(6, 1) == b""
        buffer = bytearray(b"-" * 8)
        assert reader.read_into(3, memoryview(buffer)) == 2
        assert bytes(buffer) == b"56------"
        assert reader.read_into(6, memoryview(buffer)) == 0
        with pytest.raises(ValueError, match="must not be negative"):
            reader.read(-1, 1)
        with pytest.raises(ValueError, match="must not be negative"):
            reader.read(0, -1)
        with pytest.raises(ValueError, match="must not be negative"):
            reader.read_into(-1, memoryview(buffer))
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 1)
    # What was cut short is shorter, not longer.
    with open_weights(store, bundled_key("7/a", attempt, 8, 5)) as reader:
        assert (reader.size, reader.read(0, 9)) == (2, b"89")
    with open_weights(store, bundled_key("7/a", attempt, 11, 5)) as reader:
        assert (reader.size, reader.read(0, 9)) == (0, b"")


@pytest.mark.parametrize("name", ["a", "bundle", f"a.{'f' * 32}", f"a.{'f' * 32}-1-2", "1-2"])
def test_no_name_makes_a_piece_of_what_is_none(name: str) -> None:
    """Participants choose names; they have no slash."""
    attempt = "0" * 32
    for key in (f"3/{name}", f"3/{name}.{attempt}", "3/global", "optimizer/3/momentum"):
        assert piece_of(key) is None
        assert object_of(key) == key
    key = bundled_key(f"3/{name}", attempt, 20, 400)
    assert place_of(key) == f"3/{name}"
    piece = piece_of(key)
    assert piece is not None
    assert (piece.key, piece.start, piece.size) == (f"3/bundle.{attempt}", 20, 400)
