"""Objects of the store are read back a few at a time, for any purpose."""

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from support.transfers import DATA, MIB, PATIENCE_S, VECTOR, found, parts, put
from support.waiting import until
from support.wire import Code, assert_refused
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.stores.files import FileReader
from xain_coordinator.updates import sources
from xain_coordinator.updates.measured_upload import MeasuredUpload
from xain_coordinator.updates.slots import NUM_READINGS
from xain_wire.fl import coordinator_pb2 as pb


class Held:
    """Work that waits in its thread until it is let go.

    num: at the moment. most: at a time. num_begun: so far.
    """

    def __init__(self) -> None:
        self.num = self.most = self.num_begun = 0
        self._lock = threading.Lock()
        self._is_open = threading.Event()

    def holding(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, held."""

        def held(*arguments: Any) -> Any:
            with self._lock:
                self.num += 1
                self.num_begun += 1
                self.most = max(self.most, self.num)
            try:
                assert self._is_open.wait(PATIENCE_S)
                return work(*arguments)
            finally:
                with self._lock:
                    self.num -= 1

        return held

    def let_go(self) -> None:
        self._is_open.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(sources, "measure", held.holding(sources.measure))
    monkeypatch.setattr(MeasuredUpload, "pick_up", held.holding(MeasuredUpload.pick_up))
    return held


async def test_few_are_read_back_at_a_time(start, join, tmp_path, held):
    """Updates that are only named, those of a predecessor, and what it has received of others. So
    there are threads left, and who sends an update needs to wait for none of them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_READINGS + 2))
    named, uploaded, broken = ([f"{kind}-{n}" for n in range(3)] for kind in "nub")
    names = [*named, *uploaded, *broken, "other"]
    settings = {"rounds": {"rounds": 1, "min_participants": len(names)}}
    coordinator = await start(**settings)
    members = {name: join(coordinator, name) for name in names}
    await asyncio.gather(*(member.rendezvous() for member in members.values()))
    await members["other"].until(pb.ROUND, 0)
    refs = {name: await members[name].upload(VECTOR) for name in uploaded}
    sending = [await put(members[name], 0, 3 * MIB) for name in broken]
    await until(lambda: sum(part.stat().st_size == 3 * MIB for part in parts(tmp_path)) == 3)
    for call in sending:
        call.cancel()
    await coordinator.stop()

    coordinator = await start(**settings)
    members = {name: join(coordinator, name) for name in names}
    coordinator.store.put({f"0/{name}": DATA for name in named})
    calls = [members[name].end(name=name, round_=None) for name in named]
    calls += [members[name].end(refs[name]) for name in uploaded]
    calls += [found(members[name]) for name in broken]
    asked = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: held.num == NUM_READINGS)
    other = members["other"]
    await other.end(await other.upload(VECTOR))
    assert held.num == NUM_READINGS
    held.let_go()
    answers = await asyncio.gather(*asked)
    assert held.most == NUM_READINGS
    assert all(2 * MIB < offset < 3 * MIB for offset in answers[-len(broken) :])
    for name in broken:
        await members[name].end((await (await put(members[name]))).ref)
    await until(lambda: coordinator.driver.session.phase is Phase.FINISHED)


# Half of the updates close a round.
QUORUM = {"quorum": "participant:update:50%", "start_participants": 2, "max_participants": 2}


@asynccontextmanager
async def no_free_slot(coordinator: SessionCoordinator) -> AsyncIterator[None]:
    async with AsyncExitStack() as held_slots:
        for _ in range(NUM_READINGS):
            await held_slots.enter_async_context(coordinator._server.slots.readings)
        yield


def is_reading(coordinator: SessionCoordinator, participant_id: str) -> bool:
    """Whether something is read back for the participant, or waits for a slot."""
    slot = coordinator._server.slots.by_name.get(participant_id)
    return slot is not None and slot.reading is not None


async def test_update_of_a_closed_round_is_not_read(in_round, held):
    """The round of an update is over when a slot is free."""
    coordinator, a, b = await in_round("a", "b", rounds={"rounds": 2, **QUORUM})
    coordinator.store.put({"0/b": DATA})
    async with no_free_slot(coordinator):
        handing_in = asyncio.ensure_future(b.end(name="b", round_=None))
        await until(lambda: is_reading(coordinator, "b"))
        await a.hand_in(VECTOR)
        await a.until(pb.ROUND, 1)
    held.let_go()
    await assert_refused(handing_in, Code.FAILED_PRECONDITION, "STALE_ROUND")
    assert held.num_begun == 0


async def test_more_of_them_take_no_more_memory(start, join, monkeypatch):
    """However many are handed in at the same time, and however large they are."""
    num_members = 4 * NUM_READINGS
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * num_members))
    coordinator = await start(
        rounds={"rounds": 1, "min_participants": num_members + 1}  # one more: nothing is made
    )
    members = [join(coordinator, f"p{i}") for i in range(num_members + 1)]
    await asyncio.gather(*(member.rendezvous() for member in members))
    other = members.pop()
    await other.until(pb.ROUND, 0)
    coordinator.store.put({f"0/{member.participant_id}": DATA for member in members})
    held = Held()
    monkeypatch.setattr(FileReader, "read_into", held.holding(FileReader.read_into))
    tracemalloc.start()
    try:
        asked = [asyncio.ensure_future(member.end(round_=None)) for member in members]
        await until(lambda: held.num >= NUM_READINGS)
        for _ in range(5):
            await other.heartbeat()
        held.let_go()
        await asyncio.gather(*asked)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A buffer, and which of its elements are finite; and some for the calls.
    assert peak < 1.5 * NUM_READINGS * MIB + 2 * MIB
