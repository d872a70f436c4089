"""The fence: of the coordinators of one session, which one is the owner."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.journals import copy_journal
from support.logs import capture_logs
from support.memory_journal import MemoryJournal
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.storage import StorageSettings
from xain_coordinator.core.machine.needed import Needed
from xain_coordinator.driver.clock import SessionClock
from xain_coordinator.driver.driver import Driver
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Fenced, StoreUnavailable, WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.stores.s3.s3 import open_s3
from xain_coordinator.upkeep.fence import Fence, FencedStore
from xain_coordinator.upkeep.retention import GROUP_SIZE, Retention

SESSION = "5e5510485e55"

Journals = Callable[..., SqliteJournal]


@pytest.fixture(params=["memory", "files", "seaweedfs", "minio_gateway"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightsStore]:
    match request.param:
        case "memory":
            yield MemoryStore()
        case "files":
            yield PrefixedStore(FileStore(tmp_path / "weights"), SESSION)
        case name:
            server = request.getfixturevalue(name)
            settings = server.settings(server.new_bucket(), path=tmp_path / "spool")
            s3 = open_s3(StorageSettings.model_validate(settings))
            yield PrefixedStore(s3, SESSION)
            s3.close()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journals]:
    """The journal of this name, which begins as a copy of the other one, or empty."""
    opened = {}

    def get(name: str, copy_of: str = "") -> SqliteJournal:
        if name not in opened:
            if copy_of:
                copy_journal(tmp_path / copy_of, tmp_path / name)
            opened[name] = SqliteJournal(tmp_path / name / "journal.sqlite")
        return opened[name]

    yield get
    for each in opened.values():
        each.close()


def fence(store: WeightsStore, journal: SqliteJournal) -> Fence:
    return Fence(store, journal, SESSION, "the store")


def owner(store: WeightsStore, journal: SqliteJournal) -> Fence:
    made = fence(store, journal)
    made.take_over()
    return made


def owners(store: WeightsStore) -> list[str]:
    return sorted(store.keys("owners/"))


def is_owner(one: Fence) -> bool:
    try:
        one.check()
    except Fenced:
        return False
    return True


def test_the_newer_is_the_owner(store, journal):
    """The last of several starts is the owner; the earlier ones hear who it is, and little of them
    stays in the store or, for long, in the journal."""
    fences = []
    for number in range(1, 4):
        fences.append(fence(store, journal("a")))
        fences[-1].take_over()
        assert [is_owner(one) for one in fences] == [False] * (number - 1) + [True]
        (key,) = owners(store)
        assert key.startswith(f"owners/0000000{number}.")
        assert len(journal("a").owners(SESSION)) <= 2
    with pytest.raises(Fenced, match=rf"owner 3 \(host .*, pid {os.getpid()}, since 2.*owner 1"):
        fences[0].check()


def test_overtaken_coordinator_cannot_take_over_again(store, journal):
    """Started again on its own journal, as whatever watches over it would, it changes nothing: what
    the other has acknowledged since is not in there. An operator who knows that it is lost can have
    it so; then the other hears of it, should it be alive."""
    owner(store, journal("a"))
    newer = owner(store, journal("b", copy_of="a"))
    before = owners(store)
    for _ in range(2):
        with pytest.raises(Fenced, match=f"start that one.*delete {SESSION}/owners in the store"):
            owner(store, journal("a"))
        assert owners(store) == before
    assert is_owner(newer)
    newer = owner(store, journal("b"))  # its own may, as often as it dies

    for key in owners(store):
        store.delete(key)
    chosen = owner(store, journal("a"))
    assert is_owner(chosen)
    assert not is_owner(newer)


class Failing(MemoryStore):
    """Fails to put, having done it or not; calls `meanwhile` at the given operation of its kind."""

    fails: bool = False
    does: bool = False
    is_away: bool = False
    countdown = -1
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _step(self) -> None:
        self.countdown -= 1
        if self.countdown == -1:
            self.meanwhile()

    def put(self, objects: Mapping[str, bytes]) -> None:
        self._step()
        if self.does or not self.fails:
            super().put(objects)
        if self.fails:
            raise StoreUnavailable("no answer")

    def keys(self, prefix: str = "") -> Iterator[str]:
        self._step()
        if self.is_away:
            raise StoreUnavailable("no route")
        return super().keys(prefix)

    def delete(self, *keys: str) -> None:
        self._step()
        super().delete(*keys)


@pytest.mark.parametrize("arrives", ["never", "at once", "late"])
def test_a_start_that_failed_is_in_nobodys_way(journal, arrives):
    """Whether or not the store has heard of it, and also if it hears later: the same journal's next
    start is the owner, and stays it."""
    store = Failing()
    owner(store, journal("a"))
    store.fails, store.does = True, arrives == "at once"
    with pytest.raises(StoreUnavailable):
        owner(store, journal("a"))
    failed = max(journal("a").owners(SESSION))
    store.fails = False
    next_one = owner(store, journal("a"))
    if arrives == "late":
        store.put({f"owners/{failed}": b"as it was sent"})
    assert is_owner(next_one)
    owner(store, journal("a"))


@pytest.mark.parametrize("step", range(5))  # it lists, puts, lists, lists, and deletes
def test_one_of_two_that_start_at_once_is_the_owner(journal, step):
    """One comes between any two steps of the other. The loser hears it at its start, or when it
    looks the next time."""
    store = Failing()
    owner(store, journal("a"))
    one, other = fence(store, journal("a")), fence(store, journal("b", copy_of="a"))
    came_between = []

    def come() -> None:
        with contextlib.suppress(Fenced):
            other.take_over()
        came_between.append(True)

    store.meanwhile, store.countdown = come, step
    with contextlib.suppress(Fenced):
        one.take_over()
    assert came_between
    assert sorted(map(started_and_owns, (one, other))) == [False, True]


def started_and_owns(one: Fence) -> bool:
    """Whether a fence owns the session; one that did not start owns nothing."""
    try:
        return is_owner(one)
    except AssertionError:
        return False


def test_a_store_that_was_emptied_has_no_newer_coordinator(journal):
    """An empty or unmounted store is no reason to give up."""
    store = MemoryStore()
    one = owner(store, journal("a"))
    for key in owners(store):
        store.delete(key)
    assert is_owner(one)


def test_other_objects_are_not_taken_for_owners(journal):
    """Other names in the folder, and words that a terminal would obey."""
    store = MemoryStore()
    one = owner(store, journal("a"))
    store.put({"owners/99999999": b"", "owners/x.part": b"", f"owners/9/{'0' * 32}": b""})
    assert is_owner(one)
    store.put({f"owners/00000007.{'0' * 32}": b"\x1b[2J\n\xff" + b"x" * 10_000})
    with pytest.raises(Fenced) as caught:
        one.check()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_publishing_and_removing_need_the_owner(journal):
    """An object that is written once is not written any more, and none is removed; the rest is as
    before."""
    store = MemoryStore()
    older = owner(store, journal("a"))
    guarded = FencedStore(store, older.check)
    first = guarded.upload("0/global")
    first.write(b"0")
    first.commit(overwrite=False)
    late = guarded.upload("1/global")
    late.write(b"1")
    owner(store, journal("a"))
    with pytest.raises(Fenced):
        late.commit(overwrite=False)
    late.abort()
    update = guarded.upload("0/p")
    update.write(b"u")
    update.commit(overwrite=True)
    guarded.put({"0/q": b"u"})
    guarded.settle("0/q")
    with pytest.raises(Fenced):
        guarded.delete("0/q")
    with guarded.open("0/global") as reader:
        assert reader.read(0, 10) == b"0"
    assert set(guarded.keys("0/")) | set(guarded.keys("1/")) == {"0/global", "0/p", "0/q"}


def test_overtaken_coordinator_drops_nothing(store, journal):
    """The newer may go on with a round or a session that the older takes to be over. The older does
    not get through one group of keys before it hears of that."""
    older = owner(store, journal("a"))
    store.put({f"0/{number}.{'0' * 32}": b"u" for number in range(2 * GROUP_SIZE + 1)})
    store.put({"incoming/0/a": b"u"})
    guarded = FencedStore(store, older.check)
    delete = guarded.delete
    num_groups = 0

    def overtaken(*keys: str) -> None:
        nonlocal num_groups
        num_groups += 1
        if num_groups == 3:  # incoming, and a group of the updates
            owner(store, journal("b", copy_of="a"))
        delete(*keys)

    guarded.delete = overtaken
    dropping = Retention(guarded, 0)
    for _ in range(3):
        with pytest.raises(Fenced):
            dropping.drop(Needed(1, 0))
    assert len(list(store.keys("0/"))) == GROUP_SIZE + 1


async def test_a_store_that_is_away_ends_nobody(journal):
    """One warning says that the owner is unknown, and a takeover meanwhile is noticed later."""
    store = Failing()
    older = fence(store, journal("a"))
    older.look_every_s = 0.001
    older.take_over()
    driver = Driver.open(
        MemoryJournal(), SessionClock, CoordinatorConfig().rules(), lambda: SESSION
    )
    failed = threading.Event()
    looks = []

    def look() -> None:
        looks.append(None)
        store.countdown = 0
        if len(looks) == 3:
            failed.set()

    store.meanwhile, store.is_away, store.countdown = look, True, 0
    with capture_logs() as told:
        watch = asyncio.create_task(older.watch(driver))
        assert await asyncio.to_thread(failed.wait, 60)
        assert driver.failure is None
        store.is_away = False
        owner(store, journal("a"))
        await asyncio.wait_for(watch, 60)
    assert isinstance(driver.failure, Fenced)
    warnings = [line for line in told if line["event"] == "store_unavailable"]
    assert [line["error"] for line in warnings] == ["no route"]
    await driver.close()


async def test_a_defect_of_the_watch_ends_the_process(journal):
    """A watch that has failed would never notice a takeover."""
    one = fence(MemoryStore(), journal("a"))  # which has not taken over: an AssertionError
    one.look_every_s = 0.0
    driver = Driver.open(
        MemoryJournal(), SessionClock, CoordinatorConfig().rules(), lambda: SESSION
    )
    await one.watch(driver)
    assert isinstance(driver.failure, AssertionError)
    await driver.close()
