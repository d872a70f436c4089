"""An object that a participant has stored counts only as a copy that we have measured."""

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import grpc
import numpy as np
import pytest

from support.transfers import PATIENCE_S
from support.waiting import until
from support.wire import Code, assert_refused, digest, npy
from xain_coordinator.assembly import coordinator
from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.keys import incoming_key
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.memory import MemoryStore, MemoryUpload
from xain_coordinator.updates.slots import NUM_READINGS, Slots
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.limits import MAX_INLINE_BYTES

SIZE = MAX_INLINE_BYTES // 4 + 1  # float32, just too large to travel inside
GOOD = npy(np.ones(SIZE, np.float32))


class Reachable(MemoryStore):
    """A store that participants reach, too: "get:KEY" and "put:KEY" stand for signed URLs."""

    signs = True

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[tuple[str, ...]] = []

    def delete(self, *keys: str) -> None:
        super().delete(*keys)
        self.removed.append(keys)

    def download_url(self, key: str) -> str:
        if not self.signs:
            raise StoreUnavailable("the credentials cannot be renewed")
        return f"get:{key}"

    def upload_url(self, key: str) -> str:
        return f"put:{key}"

    def copy(self, source: str, target: str, size_bytes: int) -> int:
        with self.open(source) as reader:
            if reader.size != size_bytes:
                return reader.size
            data = reader.read(0, reader.size)
        self.begin_copy(target)
        self.put({target: data})
        return size_bytes

    def begin_copy(self, target: str) -> None:
        """Begin a copy; tests hold it up."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Reachable:
    store = Reachable()
    monkeypatch.setattr(coordinator, "open_store", lambda _, *, try_out: store)
    return store


async def put(store: Reachable, work: pb.StartTrainingRoundResponse, data: bytes) -> pb.WeightsRef:
    """Use the offer as a participant does."""
    store.put({work.upload.url.removeprefix("put:"): data})
    return pb.WeightsRef(key=work.upload.key, size_bytes=len(data), digest=digest(data))


def held_copies(
    store: Reachable, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], threading.Event]:
    """Keys that are copied from now on, and none is done before the event is set."""
    copies = []
    go_on = threading.Event()

    def slow(target: str) -> None:
        copies.append(target)
        assert go_on.wait(60)

    monkeypatch.setattr(store, "begin_copy", slow)
    return copies, go_on


async def first_round(start: Any, enter: Any, *names: str, **settings: Any) -> tuple[Any, ...]:
    """A coordinator, and members whose round 0 has made a model that is not small; 1 is open."""
    names = names or ("a",)
    rounds = {"rounds": 2, "min_participants": len(names)}
    coordinator = await start(rounds=rounds, **settings)
    members = await enter(coordinator, *names)
    for member in members:
        await member.until(pb.ROUND, 0)
        await member.hand_in(np.zeros(SIZE, np.float32))
    for member in members:
        await member.until(pb.ROUND, 1)
    return coordinator, *members


async def test_object_put_by_url_is_dropped_with_its_round(enter, store, start):
    """All of it together: a deletion for each hand-in would keep a slow store from what somebody
    waits for."""
    coordinator, a, b = await first_round(start, enter, "a", "b")
    for member in (a, b):
        await member.end(await put(store, await member.start(), GOOD), round_=1)
    await a.until(pb.FINISHED, 1)
    session = coordinator.driver.session.session_id
    await until(lambda: not list(store.keys(f"{session}/incoming")))
    (removed,) = [keys for keys in store.removed if any("/incoming/" in key for key in keys)]
    assert set(removed) == {f"{session}/{incoming_key(1, name)}" for name in "ab"}


async def test_small_models_are_not_offered(store, in_round):
    """Small models travel in the message; a URL to sign for each participant would cost more."""
    _, member = await in_round("a", rounds={"rounds": 2})
    work = await member.start()
    assert work.model.data
    assert not work.model.url
    assert work.upload.url, "the model is empty, what the round makes need not be small"
    await member.hand_in([1.0, 2.0])
    await member.until(pb.ROUND, 1)
    work = await member.start()
    assert work.model.data
    assert not work.HasField("upload")


async def test_url_that_cannot_be_signed_is_not_offered(enter, store, start):
    """The round goes on through the coordinator."""
    _, member = await first_round(start, enter)
    store.signs = False
    work = await member.start()
    assert not work.model.url
    assert not work.HasField("upload")
    await member.hand_in(np.ones(SIZE, np.float32), round_=1)
    await member.until(pb.FINISHED, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy(np.full(SIZE, np.nan, np.float32)), "not finite"),
        (npy(np.zeros(SIZE - 1, np.float32)), "shape"),
        (b"no array" * 8210, "cannot be read"),
        (b"no array", "cannot be float32 weights"),
    ],
)
async def test_a_bad_one_is_refused_and_a_good_one_may_follow(enter, store, start, data, message):
    _, member = await first_round(start, enter)
    work = await member.start()
    await assert_refused(
        member.end(await put(store, work, data), round_=1), Code.INVALID_ARGUMENT, "", message
    )
    await member.end(await put(store, work, GOOD), round_=1)
    await member.until(pb.FINISHED, 1)
    assert await member.download("2/global") == GOOD


async def test_after_it_is_accepted_its_url_is_worth_nothing(enter, store, start):
    """The same URL, used again, changes neither what counts nor the answer to a resend."""
    _, a, b = await first_round(start, enter, "a", "b")
    work = await a.start()
    ref = await put(store, work, npy(np.full(SIZE, 2, np.float32)))
    await a.end(ref, round_=1)
    other = await put(store, work, npy(np.full(SIZE, 1000, np.float32)))
    await a.end(ref, round_=1)  # as after a lost answer
    await assert_refused(a.end(other, round_=1), Code.ALREADY_EXISTS)
    await b.hand_in(np.full(SIZE, 4, np.float32), round_=1)
    await b.until(pb.FINISHED, 1)
    assert await b.download("2/global") == npy(np.full(SIZE, 3, np.float32))


async def test_object_that_is_too_large_is_not_copied(enter, store, start):
    """A URL takes whatever is put there. It goes, and the participant may put its update."""
    coordinator, member = await first_round(start, enter)
    work = await member.start()
    ref = await put(store, work, GOOD)
    await put(store, work, bytes(10 * len(GOOD)))
    before = set(store.keys())
    await assert_refused(
        member.end(ref, round_=1), Code.INVALID_ARGUMENT, "", f"{10 * len(GOOD)} bytes"
    )
    session = coordinator.driver.session.session_id
    assert before - set(store.keys()) == {f"{session}/{incoming_key(1, 'a')}"}
    await member.end(await put(store, work, GOOD), round_=1)
    await member.until(pb.FINISHED, 1)


async def test_wrong_object_is_deleted_before_its_sender_is_told(enter, store, start, monkeypatch):
    """The sender puts the right object there, under the same URL, once it hears of it."""
    _, member = await first_round(start, enter)
    work = await member.start()
    ref = await put(store, work, GOOD)
    await put(store, work, GOOD + b"and more")
    delete, is_deleting, go_on = store.delete, threading.Event(), threading.Event()

    def slow(*keys: str) -> None:
        is_deleting.set()
        assert go_on.wait(PATIENCE_S)
        delete(*keys)

    monkeypatch.setattr(store, "delete", slow)
    handing_in = asyncio.ensure_future(member.end(ref, round_=1))
    assert await asyncio.to_thread(is_deleting.wait, PATIENCE_S)
    for _ in range(5):
        await member.heartbeat()
    assert not handing_in.done()
    go_on.set()
    await assert_refused(handing_in, Code.INVALID_ARGUMENT)
    await member.end(await put(store, work, GOOD), round_=1)
    await member.until(pb.FINISHED, 1)


async def test_work_goes_on_when_its_caller_has_lost_patience(enter, store, start, monkeypatch):
    """Copying and measuring may take longer than a call; the next call finds them done."""
    _, member = await first_round(start, enter)
    ref = await put(store, await member.start(), GOOD)
    copies, go_on = held_copies(store, monkeypatch)
    for _ in range(2):
        given_up = asyncio.ensure_future(member.end(ref, round_=1))
        async with asyncio.timeout(60):
            while not copies:
                await member.heartbeat()
        given_up.cancel()
        await asyncio.wait([given_up])
    go_on.set()
    await member.end(ref, round_=1)
    await member.until(pb.FINISHED, 1)
    assert len(copies) == 1


async def test_refused_copy_answers_for_no_other_update(enter, store, start, monkeypatch):
    """The call that would have heard that the update is wrong was given up. What its sender has put
    there since is read itself."""
    coordinator, member = await first_round(start, enter)
    work = await member.start()
    ref = await put(store, work, GOOD)
    await put(store, work, GOOD[:-1] + b"x")
    copies, go_on = held_copies(store, monkeypatch)
    given_up = asyncio.ensure_future(member.end(ref, round_=1))
    await until(lambda: copies)
    task = coordinator._server.slots.by_name["a"].reading.task
    given_up.cancel()
    await asyncio.wait([given_up])
    go_on.set()
    await asyncio.wait([task])
    assert isinstance(task.exception(), InvalidUpdate)
    await put(store, work, GOOD)
    await member.end(ref, round_=1)
    assert len(copies) == 2


def is_reading(slots: Slots, participant_id: str) -> bool:
    slot = slots.by_name.get(participant_id)
    return slot is not None and slot.reading is not None


@pytest.mark.parametrize("is_late_at", ["its slot", "its end"])
async def test_late_object_is_not_copied_or_does_not_stay(store, in_round, monkeypatch, is_late_at):
    """The round closes without the object, and its sender does not come back for it."""
    quorum = {"quorum": "participant:update:50%", "start_participants": 2, "max_participants": 2}
    coordinator, a, b = await in_round("a", "b", rounds={"rounds": 2, **quorum})
    await a.hand_in(np.zeros(SIZE, np.float32))
    await b.until(pb.ROUND, 1)
    ref = await put(store, await b.start(), GOOD)
    copy, copies, go_on = store.copy, [], threading.Event()

    def slow(source: str, target: str, size_bytes: int) -> int:
        copies.append(target)
        size = copy(source, target, size_bytes)
        assert go_on.wait(60)
        return size

    monkeypatch.setattr(store, "copy", slow)
    slots = coordinator._server.slots
    async with AsyncExitStack() as held_slots:
        if is_late_at == "its slot":
            for _ in range(NUM_READINGS):
                await held_slots.enter_async_context(slots.readings)
        given_up = asyncio.ensure_future(b.end(ref, round_=1))
        async with asyncio.timeout(60):
            while not (copies if is_late_at == "its end" else is_reading(slots, "b")):
                await a.heartbeat()
        task = slots.by_name["b"].reading.task
        given_up.cancel()
        await asyncio.wait([given_up])
        await a.hand_in(np.zeros(SIZE, np.float32), round_=1)
        await a.until(pb.FINISHED, 1)
    go_on.set()
    assert await task is None
    assert len(copies) == (is_late_at == "its end")
    await until(lambda: not set(copies) & set(store.keys()))


async def test_a_coordinator_that_stops_ends_no_copy_half_way(enter, store, start, monkeypatch):
    """The stop waits for the copy that is being made, and begins no other one."""
    coordinator, a, b = await first_round(start, enter, "a", "b")
    slots = coordinator._server.slots
    slots.readings = asyncio.Semaphore(1)
    refs = {member: await put(store, await member.start(), GOOD) for member in (a, b)}
    before = set(store.keys())
    copies, go_on = held_copies(store, monkeypatch)
    handing_in = [asyncio.ensure_future(member.end(refs[member], round_=1)) for member in (a, b)]
    async with asyncio.timeout(60):
        while not copies or not all(is_reading(slots, name) for name in "ab"):
            await a.heartbeat()
    stopping = asyncio.ensure_future(slots.close())
    for _ in range(5):
        await a.heartbeat()
    assert not stopping.done()
    go_on.set()
    await stopping
    assert len(copies) == 1
    answers = await asyncio.gather(*handing_in, return_exceptions=True)
    refused = [isinstance(answer, grpc.aio.AioRpcError) for answer in answers]
    assert sorted(refused) == [False, True]
    assert len(set(store.keys()) - before) == 1


async def test_lost_store_request_that_arrives_late_changes_no_accepted_update(
    store, in_round, monkeypatch
):
    """A store far away may carry out a request after its caller gave up, even after another update
    of the same participant was accepted. Each attempt has a key of its own, so nothing changes."""
    coordinator, member = await in_round("a", rounds={"rounds": 1})
    late = []

    class LostUpload(MemoryUpload):
        """The request of the commit is lost on its way to the store."""

        def commit(self, *, overwrite: bool) -> None:
            assert self._data is not None
            late.append((self._key, bytes(self._data)))
            raise StoreUnavailable("no answer")

    monkeypatch.setattr(store, "upload", lambda key, label="", size_bytes=0: LostUpload(store, key))
    await assert_refused(member.upload(np.full(SIZE, 1, np.float32)), Code.UNAVAILABLE)
    monkeypatch.undo()
    assert len(late) == 1
    late_before_effects(monkeypatch, coordinator, store, late)
    other = np.full(SIZE, 2, np.float32)
    await member.hand_in(other)
    await member.until(pb.FINISHED, 0)
    assert late == []
    assert await member.download("1/global") == npy(other)


def late_before_effects(
    monkeypatch: pytest.MonkeyPatch,
    coordinator: Any,
    store: Reachable,
    late: list[tuple[str, bytes]],
) -> None:
    """The lost requests arrive when an update is accepted, before that is aggregated."""
    take_effect = coordinator.driver._take_effect

    def arrive(*arguments: Any, **keywords: Any) -> None:
        if coordinator.driver._decided.phase is Phase.AGGREGATING:
            while late:
                key, data = late.pop()
                store.store_object(key, data, overwrite=True)
        take_effect(*arguments, **keywords)

    monkeypatch.setattr(coordinator.driver, "_take_effect", arrive)
