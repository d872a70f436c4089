"""Work in the store without a waiting caller does not stand before work with one."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.updates.background import GROUP_SIZE, MAX_DELETIONS, Background

PATIENCE_S = 20.0
NUM_KEYS = MAX_DELETIONS + 5


class Slow(MemoryStore):
    """Each call that deletes waits until it is let go. is_away: and then fails."""

    is_away = False

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Semaphore(0)
        self.begun: list[tuple[str, ...]] = []

    def delete(self, *keys: str) -> None:
        self.begun.append(keys)
        assert self.go_on.acquire(timeout=PATIENCE_S), "the test never let it go"
        if self.is_away:
            raise StoreUnavailable("it is away")
        super().delete(*keys)


class FewThreads(ThreadPoolExecutor):
    """num_missing: so many calls get no thread."""

    num_missing = 0

    def submit(self, *call: Any, **arguments: Any) -> Any:
        if self.num_missing:
            self.num_missing -= 1
            raise RuntimeError("can't start new thread")
        return super().submit(*call, **arguments)


@pytest.fixture
async def threads() -> FewThreads:
    """Two, for all that is done in threads."""
    threads = FewThreads(2)
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


@pytest.fixture
async def store(threads) -> AsyncIterator[Slow]:
    """A store with keys "0" and so on."""
    store = Slow()
    store.put({str(number): b"x" for number in range(NUM_KEYS)})
    yield store
    store.go_on.release(NUM_KEYS)


async def close(background: Background) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await background.close()


async def test_keys_are_deleted_together(store):
    at_work = Background(store)
    keys = list(store.keys())[: GROUP_SIZE + 5]
    for key in keys:
        at_work.delete(key)
    store.go_on.release(2)
    await close(at_work)
    assert [len(group) for group in store.begun] == [GROUP_SIZE, 5]
    assert not set(keys) & set(store.keys())


async def test_failed_background_work_ends_nothing(store):
    """Whether the store is away, or we are wrong."""
    at_work, is_done = Background(store), threading.Event()
    store.is_away = True
    store.go_on.release()
    at_work.delete("0")
    at_work.do(lambda: 1 // 0)  # type: ignore[arg-type, return-value]  # it is wrong
    at_work.do(is_done.set)
    await close(at_work)
    assert is_done.is_set()
    assert store.begun == [("0",)]
    store.is_away = False
    store.go_on.release()
    at_work.delete("1")  # after a pause, too
    await close(at_work)
    assert len(list(store.keys())) == NUM_KEYS - 1


async def test_no_more_deletions_wait_than_are_allowed(store):
    """Work with a bound of its own is done all the same."""
    at_work, is_done = Background(store), threading.Event()
    for key in list(store.keys()):
        at_work.delete(key)
    at_work.do(is_done.set)
    store.go_on.release(NUM_KEYS)
    await close(at_work)
    assert is_done.is_set()
    assert len(list(store.keys())) == NUM_KEYS - MAX_DELETIONS
