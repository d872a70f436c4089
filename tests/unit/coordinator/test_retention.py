"""Objects that a session does not need any more are deleted; the others stay."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from support.logs import capture_logs
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.decider import decide
from xain_coordinator.core.machine.needed import Needed, needed_by
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.buffered import BufferedWork
from xain_coordinator.core.parts.evaluation import Best, EvaluationProgress
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.commands import RemoveModels
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.events import ModelsRemoved
from xain_coordinator.core.vocabulary.keys import is_model
from xain_coordinator.core.vocabulary.values import Base, GlobalModel, Lineage, Phase, WeightsRef
from xain_coordinator.driver.broadcast import Broadcast
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.upkeep import retention
from xain_coordinator.upkeep.retention import GROUP_SIZE, Retention

PATIENCE_S = 20.0
RULES = CoordinatorConfig().rules()


class Store(MemoryStore):
    """num_deletions: so many calls succeed, the next ones do not. asked: what was listed."""

    num_deletions = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def keys(self, prefix: str = "") -> Iterator[str]:
        self.asked.append(prefix)
        return super().keys(prefix)

    def delete(self, *keys: str) -> None:
        self.num_deletions -= 1
        if self.num_deletions < 0:
            raise StoreUnavailable("it is away")
        super().delete(*keys)


def fill(store: MemoryStore, rounds: range) -> None:
    for round_ in rounds:
        updates = [f"{round_}/a.0", f"{round_}/b.1"]
        others = [f"{round_}/global", f"optimizer/{round_}/momentum", f"incoming/{round_}/a"]
        store.put(dict.fromkeys([*updates, *others], b"x"))


def store_of(rounds: int) -> Store:
    store = Store()
    fill(store, range(rounds))
    store.put({"owners/00000001": b"x", "global": b"x"})
    return store


def updates(store: MemoryStore) -> list[int]:
    """The rounds of which all updates are there. Of no round only some are."""
    found = [int(key.split("/")[0]) for key in sorted(store.keys()) if key.endswith((".0", ".1"))]
    assert all(found.count(round_) == 2 for round_ in found)
    return sorted(set(found))


def folder(store: MemoryStore, name: str) -> list[int]:
    return sorted(int(key.split("/")[1]) for key in store.keys(f"{name}/"))


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [9, 10, 11]), (1, [8, 9, 10, 11]), (20, range(12)), (None, range(12))]
)
def test_the_latest_stay(keep, left):
    """All models stay too, and objects that are not of a round; round 1 is not taken for 10."""
    store = store_of(12)
    before = set(store.keys())
    Retention(store, keep).drop(Needed(9, 10))
    assert updates(store) == list(left)
    assert folder(store, "optimizer") == [n for n in range(12) if keep is None or n >= 10 - keep]
    # Of what participants have put there nothing counts: that is a copy.
    assert folder(store, "incoming") == [9, 10, 11]
    models = {f"{n}/global" for n in range(12)}
    gone = before - set(store.keys())
    assert not gone & (models | {"owners/00000001", "global"})


def test_retention_continues_after_an_error():
    """Where it has ended, and nothing is looked at again."""
    store = store_of(6)
    dropping = Retention(store, 0)
    dropping.drop(Needed(2, 2))
    store.num_deletions = 1  # of what was put there itself; not the updates
    with pytest.raises(StoreUnavailable):
        dropping.drop(Needed(4, 4))
    assert updates(store) == [2, 3, 4, 5]
    store.num_deletions = 2  # those, and the states
    dropping.drop(Needed(4, 4))
    assert updates(store) == [4, 5]
    store.asked.clear()
    store.num_deletions = 3
    dropping.drop(Needed(5, 5))
    assert store.asked == ["incoming/4/", "4/", "optimizer/4/"]


def test_many_go_in_groups_between_which_it_can_be_stopped():
    store = store_of(1)
    store.put(dict.fromkeys([f"0/{number}.x" for number in range(3 * GROUP_SIZE)], b"x"))
    dropping = Retention(store, 0)
    num_before = len(list(store.keys("0/")))
    delete = store.delete

    def stop_after(*keys):
        delete(*keys)
        if any(key.endswith(".x") for key in keys):
            dropping.stop()

    store.delete = stop_after
    dropping.drop(Needed(1, 1))
    assert num_before - len(list(store.keys("0/"))) == GROUP_SIZE
    store.asked.clear()
    dropping.drop(Needed(1, 1))
    assert store.asked == [], "it asks nothing of a store any more"


def models(store: MemoryStore) -> list[int]:
    return sorted(int(key.split("/")[0]) for key in store.keys("") if is_model(key))


def test_models_that_an_earlier_process_was_to_remove_are_removed():
    """The journal names them before the first is removed. Later calls look at no object that is
    gone, and objects beside the models stay."""
    store = store_of(6)
    told = []
    removing = Retention(store, None, 2, told.extend)
    store.num_deletions = 1  # of what participants have put there
    with pytest.raises(StoreUnavailable):
        removing.drop(Needed(5, 5), frozenset({0, 1, 2}))
    assert models(store) == [0, 1, 2, 3, 4, 5]
    store.num_deletions = 10
    removing.drop(Needed(5, 5), frozenset({0, 1, 2}))
    assert models(store) == [3, 4, 5]
    assert updates(store) == list(range(6))
    store.asked.clear()
    removing.drop(Needed(5, 5), frozenset({0, 1, 2, 3}))
    assert store.asked == []
    assert models(store) == [4, 5]
    assert told == [0, 1, 2, 3]


def test_models_in_use_are_not_removed():
    """Whatever the caller asks for: the last and the one before, the best, those that are trained
    from or to be evaluated, and the first of a session that began with another one's model."""

    def model(round_):
        return GlobalModel(round_, WeightsRef(f"{round_}/global", 1, ""), "float32", (1,))

    def removed(session):
        decision = decide(session, RemoveModels(tuple(range(10))), 0.0)
        (event,) = decision.events
        assert isinstance(event, ModelsRemoved)
        assert decision.session == session
        return list(event.rounds)

    session = replace(Session("s", RULES), phase=Phase.FINISHED, round=8, model=model(9))
    assert removed(session) == [0, 1, 2, 3, 4, 5, 6, 7]
    base = Base(model(3), 1, 0, 0.0)
    session = replace(session, buffered=BufferedWork({"a": 3}, {3: base}))
    best = Best("accuracy", False, 5, 0.5, 5, 0.5, 8, 0.4)
    session = replace(session, evaluation=EvaluationProgress(best=best, owed=(model(6),)))
    assert removed(session) == [0, 1, 2, 4, 7]
    assert removed(replace(session, lineage=Lineage("file"))) == [1, 2, 4, 7]


def test_needed_objects_stay():
    session = Session("s", RULES)
    assert needed_by(session) == Needed(0, 0)
    model = GlobalModel(3, WeightsRef("3/global", 1, ""), "float32", (1,))
    open_ = replace(session, phase=Phase.COLLECTING, round=3, model=model)
    assert needed_by(open_) == Needed(3, 3)
    # One of them trains an earlier round, and may hand in for it.
    behind = replace(open_, buffered=BufferedWork({"a": 1, "b": 2}))
    assert needed_by(behind) == Needed(3, 3, frozenset({1, 2}))
    # Once it is over, whatever for, nothing counts any more.
    failed = replace(
        open_, phase=Phase.FINISHED, buffered=BufferedWork({"a": 1}), cause="it was idle"
    )
    assert needed_by(failed) == Needed(4, 3)
    last = replace(model, round=4)
    assert needed_by(replace(open_, phase=Phase.FINISHED, model=last)) == Needed(4, 4)


@dataclass
class Driver:
    """The part of a driver that is watched."""

    session: Session
    history: History = field(default_factory=History)
    changes: Broadcast = field(default_factory=Broadcast)
    is_over: bool = False

    async def wait_for_change(self) -> None:
        await self.changes.wait()
        if self.is_over:
            raise Unavailable("it stops")

    def at(self, round_: int, size_bytes: int = 1) -> None:
        ref = WeightsRef(f"{round_}/global", size_bytes, "")
        model = GlobalModel(round_, ref, "float32", (1,))
        self.session = replace(self.session, round=round_, model=model, phase=Phase.COLLECTING)
        self.changes.wake()

    async def until_it_waits(self) -> None:
        """For a change, all that there was to drop having been dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.changes._waiting:  # noqa: ASYNC110  # nothing tells that it waits
                await asyncio.sleep(0.01)  # a poll: a thread may be at work


class Quick(Retention):
    every_s = 0.01


def driver_of() -> Driver:
    driver = Driver(Session("s", RULES))
    driver.at(0)
    return driver


async def end(driver: Driver, watching: asyncio.Task[None]) -> None:
    driver.is_over = True
    driver.changes.wake()
    async with asyncio.timeout(PATIENCE_S):
        await watching


async def test_retention_drops_at_the_start_and_after_each_model():
    driver, store = driver_of(), store_of(6)
    driver.at(2)
    watching = asyncio.create_task(Quick(store, 0).watch(driver))
    await driver.until_it_waits()
    assert updates(store) == [2, 3, 4, 5]
    store.asked.clear()
    driver.changes.wake()  # somebody has come
    await driver.until_it_waits()
    assert not store.asked
    driver.at(4)
    await driver.until_it_waits()
    assert updates(store) == [4, 5]
    await end(driver, watching)


async def test_a_slow_store_takes_one_thread():
    """Rounds that end meanwhile are dropped together, afterwards."""
    driver, store = driver_of(), store_of(9)
    gate, begun = threading.Semaphore(0), threading.Event()
    at_work = []
    delete = store.delete

    def wait(*keys):
        at_work.append(threading.current_thread().name)
        begun.set()
        assert gate.acquire(timeout=PATIENCE_S)
        delete(*keys)

    store.delete = wait
    driver.at(1)
    watching = asyncio.create_task(Quick(store, 0).watch(driver))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for round_ in range(2, 9):
        driver.at(round_)
        await asyncio.sleep(0)  # an iteration of the event loop, in which it could begin another
    assert len(at_work) == 1
    gate.release(100)
    await driver.until_it_waits()
    assert updates(store) == [8]
    # Two times the three folders: of round 0, and of all that were over then.
    assert len(at_work) == 6
    await end(driver, watching)


@pytest.mark.parametrize("error", [StoreUnavailable("it is away"), ZeroDivisionError("a defect")])
async def test_a_store_that_fails_costs_no_round(error):
    """The failure is logged, and the deletion tried again after the next round at the latest."""
    driver, store = driver_of(), store_of(4)
    delete = store.delete

    def fail(*keys):
        raise error

    store.delete = fail
    driver.at(2)
    with capture_logs() as logs:
        dropping = Quick(store, 0)
        dropping.first_wait_s = 10 * PATIENCE_S
        watching = asyncio.create_task(dropping.watch(driver))
        await driver.until_it_waits()
    (told,) = logs
    assert (told["event"], told["log_level"], told["round"]) == (
        "updates_not_dropped",
        "warning",
        2,
    )
    assert updates(store) == [0, 1, 2, 3]
    store.delete = delete
    driver.at(3)
    await driver.until_it_waits()
    assert updates(store) == [3]
    await end(driver, watching)


@pytest.mark.parametrize("phase", [Phase.COLLECTING, Phase.FINISHED])
async def test_failed_drop_is_tried_again(monkeypatch, phase):
    """After the end of a session too, when there is no next round. It is told once."""
    waits = []
    timeout = asyncio.timeout

    def noted(wait_s):
        waits.append(wait_s)
        return timeout(wait_s / 1000)

    monkeypatch.setattr(retention.asyncio, "timeout", noted)
    driver, store = driver_of(), store_of(4)
    driver.at(3)
    driver.session = replace(driver.session, phase=phase)
    is_back, delete, num_failed = threading.Event(), store.delete, 0

    def fail(*keys):
        nonlocal num_failed
        if num_failed == 7:
            store.delete = delete
            is_back.set()
        num_failed += 1
        raise StoreUnavailable("it is away")

    store.delete = fail
    with capture_logs() as logs:
        watching = asyncio.create_task(Quick(store, 0).watch(driver))
        assert await asyncio.to_thread(is_back.wait, PATIENCE_S)
        left = [] if phase is Phase.FINISHED else [3]
        async with timeout(PATIENCE_S):
            while updates(store) != left:  # noqa: ASYNC110  # nothing tells
                await asyncio.sleep(0.01)  # a poll, not a race: it ends when it is so
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert [told["event"] for told in logs] == ["updates_not_dropped"]
    monkeypatch.undo()
    await driver.until_it_waits()  # the objects are gone a moment before the thread is done
    await end(driver, watching)
