"""Small objects are written in groups, and each caller hears what became of its own."""

import asyncio
import threading
from collections.abc import Mapping

import pytest

from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server.group_writer import GROUP_SIZE, GroupWriter
from xain_coordinator.stores.memory import MemoryStore


class GatedStore(MemoryStore):
    """Writes only when it is let; `groups` are the keys of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.begun = threading.Event()
        self.groups: list[list[str]] = []
        self.broken = False

    def put(self, objects: Mapping[str, bytes]) -> None:
        self.groups.append(list(objects))
        self.begun.set()
        assert self.gate.acquire(timeout=60)
        if self.broken:
            raise StoreUnavailable("the disk is full")
        super().put(objects)


async def begin(
    writer: GroupWriter, store: GatedStore, keys: list[str]
) -> list[asyncio.Task[None]]:
    """Tasks that wait, the first of them for a write that is under way."""
    tasks = [asyncio.ensure_future(writer.put(key, key.encode())) for key in keys]
    assert await asyncio.to_thread(store.begun.wait, 60)
    return tasks


async def test_what_gathers_during_a_write_is_written_together() -> None:
    store = GatedStore()
    writer = GroupWriter(store)
    tasks = await begin(writer, store, ["a"])
    tasks += [asyncio.ensure_future(writer.put(key, key.encode())) for key in "bcd"]
    store.gate.release(2)
    await asyncio.gather(*tasks)
    assert store.groups == [["a"], ["b", "c", "d"]]
    assert sorted(store.keys()) == ["a", "b", "c", "d"]
    store.gate.release()
    await writer.put("e", b"e")  # it begins anew after a rest
    assert store.groups[-1] == ["e"]


async def test_groups_are_bounded() -> None:
    store = GatedStore()
    store.gate.release(10)
    writer = GroupWriter(store)
    keys = [f"k{i}" for i in range(2 * GROUP_SIZE + 1)]
    await asyncio.gather(*(writer.put(key, b"") for key in keys))
    assert [len(group) for group in store.groups] == [GROUP_SIZE, GROUP_SIZE, 1]


async def test_a_failure_is_its_groups_alone() -> None:
    store = GatedStore()
    store.broken = True
    writer = GroupWriter(store)
    tasks = await begin(writer, store, ["a", "b"])
    store.gate.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable, StoreUnavailable]
    store.broken = False
    store.gate.release()
    await writer.put("c", b"c")
    assert list(store.keys()) == ["c"]


async def test_a_cancelled_caller_waits_for_the_end() -> None:
    """Its locks are what keeps others from the key while a thread is still writing."""
    store = GatedStore()
    (task,) = await begin(GroupWriter(store), store, ["a"])
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    store.gate.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(store.keys()) == ["a"]
