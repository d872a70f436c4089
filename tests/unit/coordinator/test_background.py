"""Work in the store that nobody waits for does not stand before work that somebody waits for."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server import background
from xain_coordinator.server.background import Background
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.threads import run_to_end

PATIENCE_S = 20.0
NUM_KEYS = 20


class Slow(MemoryStore):
    """Each deletion waits until it is let go. is_away: and then fails."""

    is_away = False

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Semaphore(0)
        self.begun: list[str] = []

    def delete(self, *keys: str) -> None:
        self.begun += keys
        assert self.go_on.acquire(timeout=PATIENCE_S), "the test never let it go"
        if self.is_away:
            raise StoreUnavailable("it is away")
        super().delete(*keys)


@pytest.fixture
async def store() -> AsyncIterator[Slow]:
    """With keys "0" and so on. All work in threads shares two of them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    store = Slow()
    store.put({str(number): b"x" for number in range(NUM_KEYS)})
    yield store
    store.go_on.release(NUM_KEYS)


async def until_empty(store: Slow, num_left: int = 0) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(list(store.keys())) > num_left:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)


async def test_it_takes_one_thread(store):
    background = Background(store)
    for key in list(store.keys()):
        background.delete(key)
    for _ in range(3):
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(int)  # as a commit, or an aggregation
    assert len(store.begun) == 1
    store.go_on.release(NUM_KEYS)
    await until_empty(store)
    assert store.begun == [str(number) for number in range(NUM_KEYS)]


async def test_what_fails_ends_nothing(store):
    background, is_done = Background(store), threading.Event()
    store.is_away = True
    store.go_on.release(2)
    background.delete("0")
    background.delete("1")
    background.do(is_done.set)
    assert await run_to_end(is_done.wait, PATIENCE_S)
    assert store.begun == ["0", "1"]
    store.is_away = False
    store.go_on.release()
    background.delete("1")  # after a pause, too
    await until_empty(store, NUM_KEYS - 1)


async def test_no_more_deletions_wait_than_are_allowed(store, monkeypatch):
    """What has a bound of its own is done all the same."""
    monkeypatch.setattr(background, "MAX_DELETIONS", 5)
    at_work, is_done = Background(store), threading.Event()
    for key in list(store.keys()):
        at_work.delete(key)
    at_work.do(is_done.set)
    store.go_on.release(NUM_KEYS)
    assert await run_to_end(is_done.wait, PATIENCE_S)
    assert store.begun == [str(number) for number in range(1 + 5)]
