"""Copies of what participants have put into the store themselves, and who hears of them."""

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest

from support.wire import digest, npy
from xain_coordinator.core.errors import InvalidUpdate
from xain_coordinator.core.keys import round_of
from xain_coordinator.core.values import StoredWeights
from xain_coordinator.server.adoptions import Adoptions
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.updates.background import Background
from xain_coordinator.updates.readings import Readings

PATIENCE_S = 20.0
DATA = npy(np.ones(4, np.float32))


class Store(MemoryStore):
    def copy(self, source: str, target: str, size_bytes: int) -> None:
        with self.open(source) as reader:
            self.put({target: reader.read(0, reader.size)})


class Rounds:
    """Of which those before `newest` are over."""

    newest = 0

    def wanted(self, places: Iterable[str]) -> set[str]:
        return {place for place in places if round_of(place) >= self.newest}

    def is_wanted(self, place: str) -> bool:
        return bool(self.wanted([place]))

    def distance(self, round_: int) -> None:
        return None


class Bench:
    def __init__(self) -> None:
        self.store = Store()
        self.rounds = Rounds()
        background = Background(self.store)
        self.adoptions = Adoptions(self.store, self.store, self.rounds, Readings(), background)

    async def adopt(self, place: str) -> StoredWeights | None:
        """What should lie there, from "incoming/" before the place."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.adoptions.adopt(
                f"incoming/{place}", place, len(DATA), digest(DATA).hex()
            )

    def begun(self, place: str) -> "asyncio.Task[StoredWeights | None]":
        return self.adoptions._adoptions[place].task


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_who_waits_for_one_hears_of_it_whoever_comes_meanwhile(bench):
    """Its round is over, and another participant comes before its caller has woken up."""
    bench.store.put({"incoming/0/a": DATA, "incoming/1/b": DATA})
    waiting = asyncio.ensure_future(bench.adopt("0/a"))
    await asyncio.sleep(0)  # it has begun
    ended = bench.begun("0/a")
    async with asyncio.timeout(PATIENCE_S):
        while not ended.done():  # noqa: ASYNC110  # its caller hears of it one turn later
            await asyncio.sleep(0)  # one turn of the loop
    assert not waiting.done()
    bench.rounds.newest = 1
    other = await bench.adopt("1/b")
    heard = await waiting
    assert heard is not None
    assert other is not None
    assert {heard.ref.key, other.ref.key} <= set(bench.store.keys())
    assert not bench.adoptions._adoptions


async def test_what_nobody_came_back_for_is_forgotten(bench):
    """When its round is over, with the copy."""
    bench.store.put({"incoming/0/a": DATA, "incoming/1/b": DATA})
    gone = asyncio.ensure_future(bench.adopt("0/a"))
    await asyncio.sleep(0)  # it has begun
    ended = bench.begun("0/a")
    gone.cancel()
    await asyncio.wait([gone])
    copy = await ended
    bench.rounds.newest = 1
    assert await bench.adopt("1/b") is not None
    assert not bench.adoptions._adoptions
    async with asyncio.timeout(PATIENCE_S):
        while copy.ref.key in set(bench.store.keys()):  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)  # a poll, not a race: it ends when it is so


@pytest.mark.parametrize("before", [DATA[:-1] + b"x", None])
async def test_what_came_to_nothing_answers_for_nothing_else(bench, before):
    """The call that would have heard that it is wrong, or not there, was given up. What was put
    there since is looked at itself."""
    if before is not None:
        bench.store.put({"incoming/0/a": before})
    given_up = asyncio.ensure_future(bench.adopt("0/a"))
    await asyncio.sleep(0)  # it has begun
    ended = bench.begun("0/a")
    given_up.cancel()
    await asyncio.wait([given_up, ended])
    assert isinstance(ended.exception(), InvalidUpdate) == (before is not None)
    bench.store.put({"incoming/0/a": DATA})
    adopted = await bench.adopt("0/a")
    assert adopted is not None
    assert adopted.ref.digest == digest(DATA).hex()
