"""Effects done on a real driver: what is waited for, what ends the process, what ends the session.

The journal survives its driver, as a disk does, so that a restart is a second driver on it.
"""

import asyncio
import re
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from tests.unit.core import bench

from support.aggregation import npy, read
from support.clock import HeldClock
from support.logs import capture_logs
from support.memory_journal import MemoryJournal
from xain_coordinator.core.machine.decider import resume
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import TABLE_ONE, journalled_key
from xain_coordinator.core.vocabulary.replies import Reply
from xain_coordinator.core.vocabulary.values import DataProfile, Phase, Rules
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.effects import StoreWorker, checks_off
from xain_coordinator.ports import Fenced, JournalError, KeyNotFound, Record, StoreUnavailable
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.stores.memory import MemoryStore, MemoryUpload
from xain_coordinator.telemetry.null import NullMetricsStore
from xain_coordinator.updates.measuring import measure, measure_bytes
from xain_coordinator.upkeep.model_copies import ModelCopies
from xain_foundation.exit_statuses import CommandFailed
from xain_workloads.model import Model, TensorSpec
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.workload import create

VECTOR = np.arange(3, dtype=np.float32)
PROFILE = DataProfile(10, 3)


def make_rules(
    num_participants: int = 1, aggregation: str = "mean", initial: str = "empty", **more: Any
) -> Rules:
    """One round."""
    rules = bench.make_rules(rounds=1, min_participants=num_participants, initial=initial, **more)
    return replace(rules, aggregation=aggregation)


class Disk(MemoryJournal):
    """Stays when its driver closes it. dies_before: the event that is not written any more."""

    dies_before: type[e.DurableEvent] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[type[e.DurableEvent]]] = []  # of each append
        self.is_closed = False

    def append(self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None) -> None:
        for record in records:
            if self.dies_before is not None and isinstance(record.event, self.dies_before):
                raise JournalError("the power is gone")
        super().append(records, objects)
        self.groups.append([type(record.event) for record in records])

    def read_object(self, key: str) -> bytes | None:
        if self.is_closed:
            raise JournalError("the journal is closed")
        return super().read_object(key)

    def close(self) -> None:
        pass

    @property
    def events(self) -> list[e.DurableEvent]:
        return [record.event for record in self.load()]


class WatchedDriver(Driver):
    """Tells what the worker brought back, once it has been decided and is durable."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.brought: asyncio.Queue[c.Command] = asyncio.Queue()

    async def submit(self, command: c.Command, update: bytes = b"") -> Reply:
        reply = await super().submit(command, update)
        self.brought.put_nowait(command)
        return reply

    async def brings(self, kind: type[c.Command]) -> c.Command:
        """The next command of this kind."""
        while not isinstance(command := await self.brought.get(), kind):
            pass
        return command


class Fleet:
    """A driver, its worker, and participants p0, p1, … as the server would speak for them."""

    def __init__(self, driver: WatchedDriver, worker: StoreWorker, store: MemoryStore) -> None:
        self.driver = driver
        self.worker = worker
        self.store = store

    async def join(self, *names: str) -> None:
        for name in names:
            await self.driver.submit(c.Rendezvous(name, PROFILE))

    async def until(self, phase: Phase) -> None:
        """Wait until p0 sees this phase."""
        async for seen in self.driver.watch("p0"):
            if seen.phase is phase:
                return

    async def hand_in(self, name: str, vector: NDArray[Any] = VECTOR, round_: int = 0) -> None:
        key = f"{round_}/{name}"
        put(self.store, key, vector)
        weights = measure(self.store, key)
        await self.driver.submit(c.EndTrainingRound(name, round_, 1, weights))

    async def hand_in_one(self) -> None:
        """Let p0 join and hand in its update of the first round."""
        await self.join("p0")
        await self.until(Phase.COLLECTING)
        await self.hand_in("p0")

    async def send(self, name: str, vector: NDArray[Any] = VECTOR) -> None:
        """Hand in a small update, which travels inside its call."""
        data = npy(vector)
        key = journalled_key(f"0/{name}", uuid.uuid4().hex)
        weights = measure_bytes(data, key, None, xxhash.xxh3_128(data).hexdigest())
        assert weights is not None
        await self.driver.submit(c.EndTrainingRound(name, 0, 1, weights), data)

    async def failure(self) -> BaseException:
        await self.driver.failed.wait()
        assert self.driver.failure is not None
        return self.driver.failure


@asynccontextmanager
async def fleet(
    journal: MemoryJournal,
    store: MemoryStore,
    rules: Rules | None = None,
    *,
    workload: Any = None,
    require_owner: Callable[[], None] = lambda: None,
    first_retry_s: float = 0.0,
) -> AsyncIterator[Fleet]:
    driver = WatchedDriver.open(journal, HeldClock, rules or make_rules(), lambda: "session")
    assert isinstance(driver, WatchedDriver)
    part = JournalledStore(store, journal, is_new=driver.is_new)
    worker = StoreWorker(
        driver,
        part,
        NullMetricsStore(),
        workload,
        require_owner=require_owner,
        first_retry_s=first_retry_s,
    )
    driver.start(worker)
    try:
        yield Fleet(driver, worker, store)
    finally:
        await worker.close()
        await driver.close()


def put(store: MemoryStore, key: str, vector: NDArray[Any]) -> None:
    store.put({key: npy(vector)})


class HookedStore(MemoryStore):
    """Calls `hook` before the object of model 1 is begun."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> MemoryUpload:
        if key == "1/global":
            self.hook()
        return super().upload(key)


# --- a store that is away -------------------------------------------------------------------------


async def test_a_store_that_is_away_is_waited_for():
    """The session stays where it is, shows what is wrong, and goes on when the store is back."""
    store = HookedStore()
    troubles = []
    async with fleet(Disk(), store) as f:

        def fail_three_times():
            troubles.append(f.worker.trouble)
            if len(troubles) <= 3:
                raise StoreUnavailable(f"no route, attempt {len(troubles)}")

        store.hook = fail_three_times
        await f.hand_in_one()
        await f.until(Phase.FINISHED)
        assert f.driver.session.cause == "completed"
        assert f.driver.failure is None
        assert troubles == ["", *(f"no route, attempt {n}" for n in (1, 2, 3))]
        assert f.worker.trouble == ""
    assert read(store, "1/global") == npy(VECTOR)


@pytest.fixture
def store() -> HookedStore:
    return HookedStore()


@pytest.fixture
def journal() -> Disk:
    return Disk()


async def test_a_store_that_is_away_at_the_end_is_not_waited_for(store, journal):
    """The session has ended without the model, which is not tried any more, and the operator
    of a session that is over is shown no trouble."""
    loop, tried_again = asyncio.get_running_loop(), asyncio.Event()

    def away():
        if f.worker.trouble:
            loop.call_soon_threadsafe(tried_again.set)
        raise StoreUnavailable("no route")

    store.hook = away
    async with fleet(journal, store) as f:
        await f.hand_in_one()
        await tried_again.wait()
        await f.driver.submit(c.EffectFailed("it waited for too long"))
        trouble = f.worker.trouble
        async with asyncio.timeout(60):
            while trouble:
                await asyncio.sleep(0.001)  # a poll, not a race: it ends with the work
                trouble = f.worker.trouble
        store.hook = lambda: None
        await f.worker.close()
        assert f.driver.failure is None
    assert "1/global" not in set(store.keys())
    assert isinstance(journal.events[-1], e.SessionFinished)


async def test_a_coordinator_stops_while_a_thread_is_at_work(store, journal):
    """The thread ends after its tile, close() waits for it, and nothing is published by it."""
    loop, begun, released = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hold():
        loop.call_soon_threadsafe(begun.set)
        released.wait()

    store.hook = hold
    async with fleet(journal, store) as f:
        await f.hand_in_one()
        await begun.wait()
        closing = asyncio.ensure_future(f.worker.close())
        await asyncio.sleep(0)  # it has begun, and waits
        assert not closing.done()
        released.set()
        await closing
        assert f.driver.failure is None
        assert "1/global" not in set(store.keys())
        # What comes after is for the next start as well.
        for effect in resume(f.driver.session):
            f.worker.perform(effect)
        await f.worker.close()
        assert "1/global" not in set(store.keys())
    assert not isinstance(journal.events[-1], e.SessionFinished)


# --- small models ---------------------------------------------------------------------------------


async def small_session(f: Fleet) -> None:
    """One round of two participants, of models whose mean is VECTOR + 1."""
    await f.join("p0", "p1")
    await f.until(Phase.COLLECTING)
    await f.send("p0")
    await f.send("p1", VECTOR + 2)
    await f.until(Phase.FINISHED)


async def test_small_model_is_committed_with_the_update_that_closes_its_round(store, journal):
    """One transaction has the last update, the model and the end of the session. The store has the
    model once it is copied, and the journal no more then."""
    async with fleet(journal, store, make_rules(num_participants=2)) as f:
        await small_session(f)
        assert journal.groups[-1] == [
            e.UpdateAccepted,
            e.RoundClosed,
            e.ModelPublished,
            e.SessionFinished,
        ]
        assert "1/global" not in list(store.keys())
        part = JournalledStore(store, journal)
        assert part.models == ["1/global"]
        assert read(part, "1/global") == f.worker.made_model("1/global") == npy(VECTOR + 1)
        ModelCopies(part).copy()
        assert part.models == []
        assert read(part, "1/global") == read(store, "1/global") == npy(VECTOR + 1)
        assert journal.read_object("1/global") is None
        assert JournalledStore(store, journal).models == []


async def test_small_model_is_written_to_the_store_while_too_many_wait_to_be_copied(store, journal):
    async with fleet(journal, store, make_rules(num_participants=2)) as f:
        f.worker.max_uncopied = 0
        await small_session(f)
        assert f.driver.session.cause == "completed"
    assert read(store, "1/global") == npy(VECTOR + 1)


async def test_small_model_of_another_coordinator_is_never_overwritten(store, journal):
    async with fleet(journal, store, make_rules(num_participants=2)) as f:
        await small_session(f)
        put(store, "1/global", VECTOR + 5)
        copies = ModelCopies(JournalledStore(store, journal))
        await copies.copy_now(f.driver)
        assert isinstance(await f.failure(), Fenced)
    assert read(store, "1/global") == npy(VECTOR + 5)


async def test_small_model_is_not_made_after_another_coordinator_has_taken_over(store, journal):
    """The last update is accepted; the model is then not published, as a large one is not."""

    def taken_over():
        raise Fenced("another coordinator has taken over")

    store.hook = taken_over
    rules = make_rules(num_participants=2)
    async with fleet(journal, store, rules, require_owner=taken_over) as f:
        await f.join("p0", "p1")
        await f.until(Phase.COLLECTING)
        await f.send("p0")
        await f.send("p1")
        assert isinstance(await f.failure(), Fenced)
    assert isinstance(journal.events[-1], e.RoundClosed)


async def test_update_is_in_the_journal_if_its_model_cannot_be_made_at_once(store, journal):
    """An error on the event loop costs no acknowledged update: the model is then made in a thread,
    as a large one is."""

    def out_of_memory():
        raise MemoryError("unexpected")

    rules = make_rules(num_participants=2)
    async with fleet(journal, store, rules, require_owner=out_of_memory) as f:
        await small_session(f)
        assert f.driver.session.cause == "completed"
        assert f.driver.failure is None
    accepted = [one for one in journal.events if isinstance(one, e.UpdateAccepted)]
    assert [one.update.participant_id for one in accepted] == ["p0", "p1"]
    assert read(store, "1/global") == npy(VECTOR + 1)


# --- what ends the process and not the session ----------------------------------------------------


async def test_a_fenced_coordinator_ends(store, journal):
    """Another one works on its store. The session is that one's; this one touches nothing."""
    async with fleet(journal, store) as f:
        await f.join("p0")
        await f.until(Phase.COLLECTING)
        put(store, "1/global", VECTOR + 1)
        await f.hand_in("p0")
        assert isinstance(await f.failure(), Fenced)
        assert "another model lies under" in f.worker.trouble
    assert isinstance(journal.events[-1], e.RoundClosed)
    assert read(store, "1/global") == npy(VECTOR + 1)


async def test_weights_that_are_missing_end_the_process_and_not_the_session(store, journal):
    """The disk is the wrong one, or a restored one: with the right one the session goes on."""
    store.hook = lambda: store.delete("0/p0")
    async with fleet(journal, store) as f:
        await f.hand_in_one()
        failure = await f.failure()
        assert isinstance(failure, KeyNotFound)
        assert f.worker.trouble == str(failure)
    assert not any(isinstance(event, e.SessionFinished) for event in journal.events)
    store.hook = lambda: None
    put(store, "0/p0", VECTOR)
    async with fleet(journal, store) as f:
        await f.until(Phase.FINISHED)
        assert f.driver.session.cause == "completed"
    assert read(store, "1/global") == npy(VECTOR)


async def test_damaged_updates_are_asked_for_again_all_at_once(store, journal):
    """The round waits for those that are damaged, and for nothing else."""

    def change():
        put(store, "0/p0", VECTOR + 1)
        put(store, "0/p2", VECTOR[:2])

    store.hook = change
    async with fleet(journal, store, make_rules(num_participants=3)) as f:
        await f.join("p0", "p1", "p2")
        await f.until(Phase.COLLECTING)
        for name in ("p0", "p1", "p2"):
            await f.hand_in(name)
        await f.driver.brings(c.NoteDamagedUpdates)
        assert f.driver.session.opened.outstanding == ("p0", "p2")
        assert f.driver.failure is None
        store.hook = lambda: None
        for name in ("p0", "p2"):
            await f.hand_in(name)
        await f.until(Phase.FINISHED)
    assert read(store, "1/global") == npy(VECTOR)


async def test_model_is_verified_once_a_minute_at_most(monkeypatch):
    """However many participants say that it is damaged. While it is read, all of them wait."""
    store = MemoryStore()
    readings = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    async with fleet(Disk(), store) as f:

        def read_model():
            readings.append("begun")
            loop.call_soon_threadsafe(done.set)
            return False

        monkeypatch.setattr(f.worker, "rebuild_damaged", read_model)
        assert [f.worker.verify() for _ in range(3)] == [True, True, True]
        await done.wait()
        async with asyncio.timeout(20.0):
            while f.worker.verify():  # noqa: ASYNC110  # it tells nobody when it has ended
                await asyncio.sleep(0)  # lets the reading end
        assert readings == ["begun"]
        f.worker.verify_again_s = 0.0
        assert f.worker.verify()


@pytest.mark.parametrize("defect", [ValueError, OSError, MemoryError, AssertionError])
async def test_a_defect_ends_the_process(defect, store, journal):
    """Loudly, with the journal as it was: an unexpected error is no reason to end a week's
    training."""

    def crash():
        raise defect("unexpected")

    store.hook = crash
    async with fleet(journal, store) as f:
        await f.hand_in_one()
        assert isinstance(await f.failure(), defect)
    assert isinstance(journal.events[-1], e.RoundClosed)


# --- what ends the session ------------------------------------------------------------------------


async def test_a_rule_that_fails_ends_the_session(store, journal):
    """The same updates would fail for ever; the cause is there to be read."""
    async with fleet(journal, store, make_rules(num_participants=2, aggregation="sum")) as f:
        await f.join("p0", "p1")
        await f.until(Phase.COLLECTING)
        for name in ("p0", "p1"):
            await f.hand_in(name, np.full(3, np.finfo(np.float32).max))
        await f.until(Phase.FINISHED)
        assert re.search("'sum' .*float32 in round 0", f.driver.session.cause)
        assert f.driver.failure is None
    assert isinstance(journal.events[-1], e.SessionFinished)


# --- the initial model ----------------------------------------------------------------------------


class Workload:
    """Makes a model, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def initial_model(self, profiles: Sequence[DataProfile], metadata: object = None) -> Model:
        self.profiles = list(profiles)
        if self.error is not None:
            raise self.error
        # Big-endian on purpose: what is stored never is.
        return Model(VECTOR.astype(">f4"), (TensorSpec("w", (3,), "float32"),), {"a": "b"})


WITH_WORKLOAD = make_rules(initial="workload")


@pytest.mark.parametrize("names", [("p0", "p1"), ("p1", "p0")])
async def test_model_and_table_one_do_not_depend_on_the_order_of_arrival(names, store):
    """Where sketches of many sites are joined, quantiles depend on the order of the sites."""
    profiles = {"p0": DataProfile(10, 3), "p1": DataProfile(20, 3)}
    workload = Workload()
    rules = make_rules(initial="workload", num_participants=2)
    with capture_logs() as lines:
        async with fleet(Disk(), store, rules, workload=workload) as f:
            for name in names:
                await f.driver.submit(c.Rendezvous(name, profiles[name]))
            await f.driver.brings(c.InitialisationDone)
    table = TableOne.from_json(read(store, TABLE_ONE).decode())
    assert workload.profiles == [*profiles.values()]
    assert list(table.num_samples) == [*profiles]
    (line,) = [one for one in lines if one["event"] == "two_sites"]
    assert "each can compute the other's figures" in line["reason"]


async def test_sites_see_no_table_one_before_the_model_is_made():
    """Figures of a site that joins after a failed attempt could be computed from the tables before
    and after."""
    workload = Workload(ValueError("no participant has any rows"))
    async with fleet(Disk(), MemoryStore(), WITH_WORKLOAD, workload=workload) as f:
        await f.join("p0")
        await f.driver.brings(c.InitialisationFailed)
        assert f.worker.description() == ""
        workload.error = None
        await f.join("p1")
        await f.driver.brings(c.InitialisationDone)
        assert TableOne.from_json(f.worker.description()).num_sites == 2


@pytest.mark.parametrize("error", [MemoryError("400 GB"), RuntimeError("a defect")])
async def test_a_workload_that_crashes_ends_the_process(error):
    """A crash says nothing of the participants' data, so the session does not fail."""
    journal = Disk()
    async with fleet(journal, MemoryStore(), WITH_WORKLOAD, workload=Workload(error)) as f:
        await f.join("p0")
        assert await f.failure() is error
    assert isinstance(journal.events[-1], e.ModelRequested)


async def test_a_missing_workload_ends_the_process(store, journal):
    """With the line that is missing in the configuration; with it, the session goes on."""
    async with fleet(journal, store, WITH_WORKLOAD) as f:
        await f.join("p0")
        failure = await f.failure()
        assert isinstance(failure, CommandFailed)
        assert "set workload.name = " in str(failure)
    assert isinstance(journal.events[-1], e.ModelRequested)
    async with fleet(journal, store, workload=Workload()) as f:
        await f.until(Phase.COLLECTING)


@pytest.mark.parametrize(
    ("name", "options", "is_told"),
    [
        ("sgd", {}, True),
        ("mlp", {"mode": "federated"}, True),
        ("sgd", {"remedy": "scaffold"}, False),
        ("sgd", {"mode": "gradient"}, False),
        ("xgboost", {}, False),
        ("describe", {}, True),
    ],
)
def test_remedy_is_named_where_models_are_averaged_without_one(name, options, is_told):
    assert checks_off(create(name, options)) == ({} if is_told else {"unlike_classes": "off"})
