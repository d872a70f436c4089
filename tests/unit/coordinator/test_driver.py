"""The driver on a journal that the test holds up, lets go and breaks. Nothing here takes time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence

import pytest
from structlog.testing import capture_logs

from support.clock import HeldClock
from xain_coordinator import driver as module
from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core import commands as c
from xain_coordinator.core import events as e
from xain_coordinator.core import replies as r
from xain_coordinator.core.effects import Effect, InitialiseModel, RecordMetrics
from xain_coordinator.core.errors import (
    LateUpdate,
    NotAMember,
    NotInRound,
    RoundAlreadyClosed,
    StaleRound,
    Unavailable,
    UploadMissing,
)
from xain_coordinator.core.selection import ControllerFailed
from xain_coordinator.core.values import GlobalModel, Phase, Point, Rules, StoredWeights, WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.journal.memory import MemoryJournal
from xain_coordinator.ports import JournalError, Record, Snapshot

RULES = CoordinatorConfig.model_validate(
    {"rounds": {"min_participants": 2, "max_participants": 4}}
).rules()
MODEL = GlobalModel(0, WeightsRef("0/global", 128, "0" * 32), "float32", (0,))


class HeldJournal:
    """A Journal whose appends, once held, wait until they are let go or told to fail. Its snapshots
    do so on their own."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.groups: list[list[str]] = []  # the kinds of the events of each append
        self.num_closed = 0
        self._records = list(records)
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self._held = False
        self._go = threading.Semaphore(0)
        self._error: Exception | None = None
        self.saved: list[Snapshot] = []
        self.save_error: Exception | None = None
        self.may_save = threading.Event()
        self.may_save.set()
        self._begun_saving = asyncio.Event()

    def load(self, after: int = 0) -> Sequence[Record]:
        return self._records[after:]

    def snapshot(self) -> Snapshot | None:
        return None

    def save(self, snapshot: Snapshot) -> None:
        self.saved.append(snapshot)
        self._loop.call_soon_threadsafe(self._begun_saving.set)
        assert self.may_save.wait(timeout=60), "the test never let it go"
        if self.save_error is not None:
            raise self.save_error

    def append(self, records: Sequence[Record]) -> None:
        if self._held:
            self._loop.call_soon_threadsafe(self._begun.set)
            assert self._go.acquire(timeout=60), "the test never let it go"
        if self._error is not None:
            raise self._error
        self.groups.append([type(record.event).__name__ for record in records])

    def close(self) -> None:
        self.num_closed += 1

    def hold(self) -> None:
        self._held = True

    async def writing(self) -> None:
        """An append is under way."""
        await self._begun.wait()
        self._begun.clear()

    async def saving(self) -> None:
        """A snapshot is being written, or has been."""
        await self._begun_saving.wait()

    def let_go(self) -> None:
        """One append succeeds."""
        self._go.release()

    def fail(self) -> None:
        self._error = JournalError("no room left")
        self._go.release()


class Recorder:
    """A worker that only notes what it is to do."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def perform(self, effect: Effect) -> None:
        self.effects.append(effect)

    @property
    def num_initialisations(self) -> int:
        return sum(isinstance(effect, InitialiseModel) for effect in self.effects)


class Bench:
    """A started driver, what it stands on, and the calls to it."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.journal = HeldJournal()
        self.clock = HeldClock()
        self.worker = Recorder()
        self.driver = Driver.open(self.journal, lambda _: self.clock, rules, lambda: "s")
        self.driver.start(self.worker)

    async def submit(self, command: c.Command) -> asyncio.Task[r.Reply]:
        """A caller, on its way: the command is decided."""
        task = asyncio.create_task(self.driver.submit(command))
        await settled()
        return task


async def settled() -> None:
    """Whatever can go on by itself has done so."""
    for _ in range(20):
        await asyncio.sleep(0)  # one turn of the event loop; no time passes


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.journal.may_save.set()  # nothing may hang on a test that has failed
    for _ in range(100):
        bench.journal.let_go()
    await bench.driver.close()


async def fails(call: Coroutine[object, object, object] | asyncio.Task[r.Reply]) -> None:
    with pytest.raises(Unavailable):
        await call


async def test_a_reply_waits_for_the_commit(bench):
    """Durable before acknowledged: while the disk is at work nobody hears anything, and the session
    that others see does not know of it."""
    bench.journal.hold()
    joining = await bench.submit(c.Rendezvous("a"))
    await bench.journal.writing()
    await settled()
    assert not joining.done()
    assert not bench.driver.session.members
    bench.journal.let_go()
    assert await joining == r.Accepted(RULES.heartbeat_time_s)
    assert list(bench.driver.session.members) == ["a"]
    assert bench.journal.groups[-1] == ["ParticipantJoined"]


async def test_what_follows_from_the_uncommitted_waits_too(bench):
    """A refusal, and a reply without events of its own, that were decided on a state which is not
    durable yet must not tell of it."""
    await bench.driver.submit(c.Rendezvous("a"))
    bench.journal.hold()
    leaving = await bench.submit(c.Heartbeat("a", c.ParticipantState.FINISHED))
    await bench.journal.writing()
    refused = await bench.submit(c.Heartbeat("a"))
    stranger = await bench.submit(c.StartTrainingRound("b"))
    await settled()
    assert not any(task.done() for task in (leaving, refused, stranger))
    bench.journal.let_go()
    await leaving
    for task in (refused, stranger):
        with pytest.raises(NotAMember):
            await task


async def test_without_anything_on_its_way_nothing_waits(bench):
    """A heartbeat is not journalled, and is answered at once."""
    await bench.driver.submit(c.Rendezvous("a"))
    bench.journal.hold()
    assert await bench.driver.submit(c.Heartbeat("a")) == r.Advertisement(Phase.STANDBY, 0, False)
    with pytest.raises(NotAMember):
        await bench.driver.submit(c.Heartbeat("b"))


async def test_a_sign_of_life_does_not_wait_for_the_disk(bench):
    """It is told what is durable, which the round that is being opened is not; and the lease that
    it renews counts at once."""
    await bench.driver.submit(c.Rendezvous("a"))
    await bench.driver.submit(c.Rendezvous("b"))
    bench.journal.hold()
    opening = await bench.submit(c.InitialisationDone(MODEL))
    await bench.journal.writing()
    bench.clock.time_s = RULES.lease_s - 1
    standby = r.Advertisement(Phase.STANDBY, 0, False)
    assert await bench.driver.submit(c.Heartbeat("a")) == standby
    leaving = await bench.submit(c.Heartbeat("b", c.ParticipantState.FINISHED))
    assert not leaving.done()
    bench.clock.time_s = RULES.lease_s + 1
    ticking = await bench.submit(c.Tick())
    for _ in range(3):
        bench.journal.let_go()
    for task in (opening, leaving, ticking):
        await task
    assert list(bench.driver.session.members) == ["a"]


async def test_what_to_train_does_not_wait_for_the_disk(bench):
    """Of a round that is durable: it is asked for while the first updates of it are being written.
    Of one that is not, nobody hears."""
    for name in ("a", "b"):
        await bench.driver.submit(c.Rendezvous(name))
    bench.journal.hold()
    opening = await bench.submit(c.InitialisationDone(MODEL))
    await bench.journal.writing()
    early = await bench.submit(c.StartTrainingRound("a"))
    await settled()
    assert not early.done()
    bench.journal.let_go()
    await opening
    assert isinstance(await early, r.Assignment)
    handing_in = await bench.submit(update_of("a", 0))
    await bench.journal.writing()
    asking = await bench.submit(c.StartTrainingRound("b"))
    assert asking.done()
    assert await asking == r.Assignment(0, 0, 0, MODEL, update_accepted=False)
    told_of_it = await bench.submit(c.StartTrainingRound("a"))
    assert not handing_in.done()
    assert not told_of_it.done(), "that its update is accepted is not durable yet"
    bench.journal.let_go()
    await handing_in
    assert (await told_of_it).update_accepted


async def test_commands_share_an_append(bench):
    """Group commit: what comes while the disk is at work is written together, in order."""
    bench.journal.hold()
    first = await bench.submit(c.Rendezvous("a"))
    await bench.journal.writing()
    others = [await bench.submit(c.Rendezvous(name)) for name in ("b", "c", "d")]
    later = await bench.submit(c.Rendezvous("e"))
    bench.journal.let_go()
    await first
    await bench.journal.writing()
    assert not any(task.done() for task in (*others, later))
    bench.journal.let_go()
    for task in others:
        assert isinstance(await task, r.Accepted)
    assert isinstance(await later, r.Later)  # decided on the four before it
    assert bench.journal.groups[1:] == [
        ["ParticipantJoined"],
        ["ParticipantJoined", "ParticipantsGathered", "ModelRequested"] + ["ParticipantJoined"] * 2,
    ]
    assert list(bench.driver.session.members) == ["a", "b", "c", "d"]


async def test_a_failing_append_fails_everybody_who_waits(bench):
    """Nothing of what was lost is told to anybody, then or later; the process is to end."""
    await bench.driver.submit(c.Rendezvous("a"))
    before, effects = bench.driver.session, list(bench.worker.effects)
    bench.journal.hold()
    waiting = [await bench.submit(c.Rendezvous("b"))]
    await bench.journal.writing()
    waiting += [await bench.submit(c.Rendezvous("c")), await bench.submit(c.Heartbeat("stranger"))]
    bench.journal.fail()
    for task in waiting:
        await fails(task)
    assert bench.driver.failed.is_set()
    assert isinstance(bench.driver.failure, JournalError)
    assert bench.driver.session == before
    assert bench.worker.effects == effects
    await fails(bench.driver.submit(c.Heartbeat("a")))
    await fails(anext(bench.driver.watch("a")))
    assert bench.journal.groups == [["SessionOpened"], ["ParticipantJoined"]]


async def test_effects_run_after_the_commit(bench):
    """What is not durable has no consequences."""
    await bench.driver.submit(c.Rendezvous("a"))
    bench.journal.hold()
    joining = await bench.submit(c.Rendezvous("b"))
    await bench.journal.writing()
    await settled()
    assert bench.worker.num_initialisations == 0
    bench.journal.let_go()
    await joining
    assert bench.worker.num_initialisations == 1


async def test_watchers_see_what_is_durable(bench):
    """A round is announced when it is on the disk, not when it is decided."""
    await bench.driver.submit(c.Rendezvous("a"))
    await bench.driver.submit(c.Rendezvous("b"))
    watch = bench.driver.watch("a")
    assert (await anext(watch)).phase is Phase.STANDBY
    next_seen = asyncio.create_task(anext(watch))
    bench.journal.hold()
    initialised = await bench.submit(c.InitialisationDone(MODEL))
    await bench.journal.writing()
    joining_late = asyncio.create_task(anext(bench.driver.watch("b")))
    await settled()
    assert not next_seen.done()
    assert (await joining_late).phase is Phase.STANDBY
    bench.journal.let_go()
    await initialised
    assert (await next_seen).phase is Phase.COLLECTING


async def test_a_caller_that_goes_away_disturbs_nobody(bench):
    """What it asked for happens all the same, and those who wait beside it are answered."""
    bench.journal.hold()
    gone = await bench.submit(c.Rendezvous("a"))
    await bench.journal.writing()
    also_gone, stays = await bench.submit(c.Rendezvous("b")), await bench.submit(c.Rendezvous("c"))
    gone.cancel()
    also_gone.cancel()
    await settled()
    bench.journal.let_go()
    await bench.journal.writing()
    bench.journal.let_go()
    assert isinstance(await stays, r.Accepted)
    assert gone.cancelled()
    assert list(bench.driver.session.members) == ["a", "b", "c"]
    assert not bench.driver.failed.is_set()


async def test_close_waits_for_what_is_being_written(bench):
    """Callers whose command was decided get their answer; those who come later are refused; the
    journal is closed once, whoever asks how often."""
    bench.journal.hold()
    first = await bench.submit(c.Rendezvous("a"))
    await bench.journal.writing()
    second = await bench.submit(c.Rendezvous("b"))
    closing = asyncio.create_task(bench.driver.close())
    await settled()
    assert not closing.done()
    assert bench.journal.num_closed == 0
    await fails(bench.driver.submit(c.Rendezvous("c")))
    bench.journal.let_go()
    await bench.journal.writing()
    bench.journal.let_go()
    await closing
    assert isinstance(await first, r.Accepted)
    assert isinstance(await second, r.Accepted)
    await bench.driver.close()
    assert bench.journal.num_closed == 1
    assert not bench.driver.failed.is_set()


async def test_a_tick_that_meets_a_defect_ends_the_process(bench, monkeypatch):
    """Nobody waits for a tick, so its error must not vanish with it: leases would never end."""
    bench.journal.hold()
    joining = await bench.submit(c.Rendezvous("a"))
    await bench.journal.writing()
    bench.clock.time_s += RULES.lease_s  # so that the tick is due as soon as this is written

    def broken(*_: object) -> None:
        raise RuntimeError("broken invariant")

    monkeypatch.setattr("xain_coordinator.driver.decide", broken)
    bench.journal.let_go()
    await joining
    await asyncio.wait_for(bench.driver.failed.wait(), 30)
    assert isinstance(bench.driver.failure, RuntimeError)
    await fails(bench.driver.submit(c.Heartbeat("a")))


async def test_a_refused_command_changes_nothing(bench):
    """Nothing is written for it."""
    await bench.driver.submit(c.Rendezvous("a"))
    await bench.driver.submit(c.Rendezvous("b"))
    await bench.driver.submit(c.InitialisationDone(MODEL))
    before, groups = bench.driver.session, list(bench.journal.groups)
    with pytest.raises(UploadMissing):
        await bench.driver.submit(c.EndTrainingRound("a", "a", 0, 1, None))
    assert (bench.driver.session, bench.journal.groups) == (before, groups)


async def test_a_new_session_is_written_when_it_starts():
    """Not when it is prepared: until then the one before is the latest."""
    journal = HeldJournal()
    driver = Driver.open(journal, lambda _: HeldClock(), RULES, lambda: "s", new_session=True)
    assert driver.session.session_id == "s"
    assert journal.groups == []
    driver.start(Recorder())
    assert journal.groups == [["SessionOpened"]]
    await driver.close()


async def test_a_new_session_that_cannot_be_written_does_not_start():
    """start() says so, and the driver can still be closed."""
    journal = HeldJournal()
    journal.fail()
    driver = Driver.open(journal, lambda _: HeldClock(), RULES, lambda: "s")
    with pytest.raises(JournalError, match="no room"):
        driver.start(Recorder())
    await driver.close()
    assert journal.num_closed == 1


async def test_a_journal_that_makes_no_sense_is_a_journal_error():
    """One line that names the record, whatever it breaks in the session."""
    opened = Record(0.0, e.SessionOpened("s", RULES, 0.0))
    journal = HeldJournal([opened, Record(1.0, e.ParticipantsSelected(0, ("a",)))])
    message = "cannot be replayed: record 1, ParticipantsSelected: AssertionError: no round is open"
    with pytest.raises(JournalError, match=message):
        Driver.open(journal, lambda _: HeldClock(), RULES, lambda: "s")


# --- snapshots ---


class Disk(MemoryJournal):
    """Survives its driver. states: all it has ever held, write by write. num_loaded: records."""

    def __init__(self, records: Sequence[Record] = (), saved: Snapshot | None = None) -> None:
        super().__init__()
        self.states: list[tuple[Sequence[Record], Snapshot | None]] = []
        self.num_loaded = 0
        super().append(records)
        if saved is not None:
            super().save(saved)

    def load(self, after: int = 0) -> Sequence[Record]:
        records = super().load(after)
        self.num_loaded += len(records)
        return records

    def append(self, records: Sequence[Record]) -> None:
        super().append(records)
        self.note()

    def save(self, snapshot: Snapshot) -> None:
        super().save(snapshot)
        self.note()

    def note(self) -> None:
        self.states.append((super().load(), super().snapshot()))

    def close(self) -> None:
        pass


def model(round_: int) -> GlobalModel:
    return GlobalModel(round_, WeightsRef(f"{round_}/global", 140, "0" * 32), "float32", (3,))


def update(participant_id: str, round_: int, number: int = 0) -> c.EndTrainingRound:
    ref = WeightsRef(f"{round_}/{participant_id}", 140, f"digest {number}")
    weights = StoredWeights(ref, "float32", (3,))
    return c.EndTrainingRound(participant_id, participant_id, round_, 5, weights)


async def begin(driver: Driver) -> None:
    """Round 0 is open for a and b."""
    for command in (c.Rendezvous("a"), c.Rendezvous("b"), c.InitialisationDone(MODEL)):
        await driver.submit(command)


async def play(driver: Driver, rounds: range) -> None:
    for round_ in rounds:
        for participant_id in ("a", "b"):
            await driver.submit(update(participant_id, round_))
        await driver.submit(c.AggregationDone(model(round_ + 1)))


async def saved(driver: Driver) -> None:
    """No snapshot is being written any more."""
    await asyncio.gather(*driver._tasks)


def opened_on(journal: MemoryJournal) -> Driver:
    driver = Driver.open(journal, lambda _: HeldClock(), RULES, lambda: "s")
    driver._disk.shutdown()  # it is only looked at
    return driver


async def test_at_every_crash_point_it_is_the_same_session(monkeypatch):
    """Before a snapshot is written, after it, and after every record that came later: the session,
    its history, and its time are those of reading everything."""
    monkeypatch.setattr(module, "SNAPSHOT_RECORDS", 4)
    disk = Disk()
    clock = HeldClock()
    driver = Driver.open(disk, lambda _: clock, RULES, lambda: "s")
    driver.start(Recorder())
    await begin(driver)
    for round_ in range(4):
        clock.time_s += 1.0
        await play(driver, range(round_, round_ + 1))
        await saved(driver)
    await driver.close()
    num_snapshots = len({snapshot.num_records for _, snapshot in disk.states if snapshot})
    assert num_snapshots == 4
    for records, snapshot in disk.states:
        times: list[float] = []

        def made_clock(start: float, times: list[float] = times) -> HeldClock:
            times.append(start)
            return HeldClock()

        cached, whole = Disk(records, snapshot), Disk(records)
        again, expected = (
            Driver.open(journal, made_clock, RULES, lambda: "s") for journal in (cached, whole)
        )
        assert again.session == expected.session
        assert again.history == expected.history
        assert times == [records[-1].at] * 2
        assert whole.num_loaded == len(records)
        assert cached.num_loaded == len(records) - (snapshot.num_records if snapshot else 0)
        for looked_at in (again, expected):
            looked_at._disk.shutdown()
    assert opened_on(Disk(*disk.states[-1])).session == driver.session


async def test_a_snapshot_is_due_at_the_end_of_a_round(bench, monkeypatch):
    """And not at that of every small one: only when many records have come since the last one."""
    monkeypatch.setattr(module, "SNAPSHOT_RECORDS", 9)
    journal, driver = bench.journal, bench.driver
    await begin(driver)
    for participant_id in ("a", "b"):
        await driver.submit(update(participant_id, 0))
    await saved(driver)
    assert sum(map(len, journal.groups)) == 10
    assert journal.saved == []
    await driver.submit(c.AggregationDone(model(1)))
    await saved(driver)
    for round_ in range(1, 4):
        await play(driver, range(round_, round_ + 1))
        await saved(driver)
    assert [snapshot.num_records for snapshot in journal.saved] == [12, 22]
    assert journal.saved[-1].session.round == 3
    assert journal.saved[-1].history.rounds[-1].round == 3


async def test_a_snapshot_is_of_what_is_durable(bench, monkeypatch):
    """What has been decided and is not written yet may never have been."""
    monkeypatch.setattr(module, "SNAPSHOT_RECORDS", 1)
    await begin(bench.driver)
    for participant_id in ("a", "b"):
        await bench.driver.submit(update(participant_id, 0))
    bench.journal.hold()
    publishing = await bench.submit(c.AggregationDone(model(1)))
    await bench.journal.writing()
    handing_in = await bench.submit(update("a", 1))
    bench.journal.let_go()
    await publishing
    await bench.journal.writing()
    await bench.journal.saving()
    (snapshot,) = bench.journal.saved
    assert not handing_in.done()
    assert snapshot.num_records == sum(map(len, bench.journal.groups)) == 12
    assert not snapshot.session.open_round.updates
    assert not snapshot.history.rounds[-1].contributors
    bench.journal.let_go()
    await handing_in


async def test_rounds_are_not_waited_for_for_ever(bench, monkeypatch):
    """Participants who come and go for days make no round, but records all the same."""
    monkeypatch.setattr(module, "SNAPSHOT_RECORDS", 3)
    monkeypatch.setattr(module, "MAX_UNSAVED_RECORDS", 7)
    for _ in range(6):
        await bench.driver.submit(c.Rendezvous("a"))
        await bench.driver.submit(c.Heartbeat("a", c.ParticipantState.FINISHED))
        await saved(bench.driver)
    assert [snapshot.num_records for snapshot in bench.journal.saved] == [7]


async def test_nobody_waits_for_a_snapshot(bench, monkeypatch):
    """While it is being written, the session goes on, and what it contains does not change. Only
    who closes the journal waits."""
    monkeypatch.setattr(module, "SNAPSHOT_RECORDS", 1)
    bench.journal.may_save.clear()
    await begin(bench.driver)
    await play(bench.driver, range(1))
    await bench.journal.saving()
    (snapshot,) = bench.journal.saved
    before = repr(snapshot)
    await play(bench.driver, range(1, 3))
    assert await bench.driver.submit(c.Rendezvous("c")) == r.Accepted(RULES.heartbeat_time_s)
    assert bench.journal.saved == [snapshot]  # one at a time
    assert repr(snapshot) == before
    closing = asyncio.create_task(bench.driver.close())
    await settled()
    assert not closing.done()
    assert bench.journal.num_closed == 0
    bench.journal.may_save.set()
    await closing
    assert bench.journal.num_closed == 1


@pytest.mark.parametrize("error", [JournalError("no room left"), RuntimeError("a defect")])
async def test_a_snapshot_that_fails_costs_nothing(bench, monkeypatch, error):
    """The records are there. It is tried again, when as many have come again."""
    monkeypatch.setattr(module, "SNAPSHOT_RECORDS", 6)
    bench.journal.save_error = error
    await begin(bench.driver)
    for round_ in range(4):
        await play(bench.driver, range(round_, round_ + 1))
        await saved(bench.driver)
    assert [snapshot.num_records for snapshot in bench.journal.saved] == [12, 22]
    assert not bench.driver.failed.is_set()
    assert (await bench.driver.submit(c.Heartbeat("a"))).phase is Phase.COLLECTING


async def test_a_start_that_read_much_leaves_a_snapshot():
    """The next one need not read it again; not even if the session is over."""
    disk = Disk()
    disk.append([Record(0.0, e.SessionOpened("s", RULES, 0.0))])
    for number in range(module.SNAPSHOT_RECORDS // 2):
        name = f"p{number}"
        joined = Record(1.0, e.ParticipantJoined(name, None, 1.0))
        MemoryJournal.append(disk, [joined, Record(1.0, e.ParticipantLeft(name, "left"))])
    MemoryJournal.append(disk, [Record(9.0, e.SessionFinished("nobody stays", 9.0))])
    for num_loaded in (module.SNAPSHOT_RECORDS + 2, 0):
        disk.num_loaded = 0
        driver = Driver.open(disk, lambda _: HeldClock(), RULES, lambda: "s")
        driver.start(Recorder())
        await driver.close()
        assert driver.session.cause == "nobody stays"
        assert disk.num_loaded == num_loaded


# --- late updates ---


async def late(bench: Bench, command: c.Command) -> LateUpdate:
    with pytest.raises(LateUpdate) as caught:
        await bench.driver.submit(command)
    return caught.value


def late_points(bench: Bench) -> list[Point]:
    points = [
        point
        for effect in bench.worker.effects
        if isinstance(effect, RecordMetrics)
        for point in effect.points
    ]
    return [point for point in points if point.measurement == "late_update"]


async def test_late_updates_are_counted(bench):
    """Each participant's once a round, however it is sent and how often, and each is a point."""
    await begin(bench.driver)
    await play(bench.driver, range(1))
    assert isinstance(await late(bench, update("a", 0, 1)), StaleRound)
    await late(bench, update("a", 0, 1))
    await late(bench, c.BeginUpload("a", 0, "digest 2"))
    assert bench.driver.num_late == 1
    await late(bench, c.BeginUpload("b", 0, "digest 2"))
    for participant_id in ("a", "b"):
        await bench.driver.submit(update(participant_id, 1))
    assert isinstance(await late(bench, update("b", 1, 3)), RoundAlreadyClosed)
    assert isinstance(await late(bench, update("b", 2)), StaleRound)  # too early
    assert bench.driver.num_late == 3
    assert late_points(bench) == [
        Point("late_update", {"round": round_}, {"id": participant_id})
        for round_, participant_id in ((0, "a"), (0, "b"), (1, "b"))
    ]


async def test_what_is_not_late(bench):
    """Whoever asks for work too late has lost none; what was accepted may be sent again; and after
    the end a stranger was not awaited."""
    await begin(bench.driver)
    await play(bench.driver, range(1))
    await bench.driver.submit(update("a", 0))
    with pytest.raises(UploadMissing):
        await bench.driver.submit(c.EndTrainingRound("a", "a", 1, 1, None))
    await bench.driver.submit(c.EffectFailed("over"))
    await late(bench, c.StartTrainingRound("a"))
    await late(bench, update("stranger", 0))
    assert bench.driver.num_late == 0
    assert late_points(bench) == []


async def test_late_updates_are_remembered_within_bounds(bench, monkeypatch):
    """The latest ones; an old one that comes again is counted again."""
    monkeypatch.setattr(module, "MAX_LATE", 2)
    await begin(bench.driver)
    await play(bench.driver, range(4))
    for round_ in (0, 1, 2, 1, 2, 0):
        await late(bench, update("a", round_, 1))
    assert bench.driver.num_late == 4
    assert len(bench.driver._late) == 2


# --- updates that come while a model is made ---


async def asynchronous_bench() -> Bench:
    """Round 1 of an ASP session is being aggregated with the update of a, and b trains on."""
    bench = Bench(
        CoordinatorConfig.model_validate(
            {"rounds": {"min_participants": 1, "max_participants": 2, "consistency": "asp"}}
        ).rules()
    )
    for name in ("a", "b"):
        await bench.driver.submit(c.Rendezvous(name))
    await bench.driver.submit(c.InitialisationDone(MODEL))
    for round_ in (0, 1):
        for name in ("a", "b")[: 2 - round_]:
            await bench.driver.submit(update_of(name, round_))
        if round_ == 0:
            await bench.driver.submit(c.AggregationDone(model_of(1)))
    assert bench.driver.session.phase is Phase.AGGREGATING
    return bench


def update_of(name: str, round_: int) -> c.EndTrainingRound:
    ref = WeightsRef(f"{round_}/{name}", 140, name)
    return c.EndTrainingRound(name, name, round_, 1, StoredWeights(ref, "float32", (3,)))


def model_of(round_: int) -> GlobalModel:
    return GlobalModel(round_, WeightsRef(f"{round_}/global", 140, "m"), "float32", (3,))


async def test_what_comes_while_a_model_is_made_goes_into_the_next():
    """Its sender does not hear a refusal, on which some give up."""
    bench = await asynchronous_bench()
    late = asyncio.create_task(bench.driver.submit_update(update_of("b", 1)))
    await settled()
    assert not late.done()
    await bench.driver.submit(c.AggregationDone(model_of(2)))
    assert await late == r.Done()
    assert bench.driver.session.round == 2
    assert bench.driver.session.accepted("b", 1) is not None
    await bench.driver.close()


async def test_it_waits_also_while_the_end_of_the_round_is_being_written():
    """What is decided counts, not what is on disk by now."""
    bench = await asynchronous_bench()
    bench.journal.hold()
    published = await bench.submit(c.AggregationDone(model_of(2)))
    await bench.journal.writing()
    late = asyncio.create_task(bench.driver.submit_update(update_of("b", 1)))
    await settled()
    for _ in range(4):
        bench.journal.let_go()
    assert await late == r.Done()
    await published
    await bench.driver.close()


async def test_what_nobody_waits_for_is_refused_at_once():
    """Another round than it trains, or one who has its answer already."""
    bench = await asynchronous_bench()
    with pytest.raises(StaleRound):
        await bench.driver.submit_update(update_of("b", 0 + 7))
    assert await bench.driver.submit_update(update_of("a", 1)) == r.Done()
    await bench.driver.close()


async def test_a_stop_ends_the_wait():
    bench = await asynchronous_bench()
    late = asyncio.create_task(bench.driver.submit_update(update_of("b", 1)))
    await settled()
    bench.driver.end_watches()
    await fails(late)
    await fails(bench.driver.changed())
    await bench.driver.close()


async def test_a_slow_journal_does_not_end_the_wait(monkeypatch):
    """What was decided counts, and its sender hears so, however long the writing takes."""
    monkeypatch.setattr(module, "NEXT_ROUND_S", 0.0)
    bench = Bench()
    await begin(bench.driver)
    bench.journal.hold()
    handed_in = asyncio.create_task(bench.driver.submit_update(update_of("a", 0)))
    await bench.journal.writing()
    await settled()
    bench.journal.let_go()
    assert await handed_in == r.Done()
    await bench.driver.close()


async def test_the_wait_ends(monkeypatch):
    """A store that is away for longer is not waited for."""
    monkeypatch.setattr(module, "NEXT_ROUND_S", 0.01)
    bench = await asynchronous_bench()
    with pytest.raises(NotInRound):
        await bench.driver.submit_update(update_of("b", 1))
    await bench.driver.close()


async def test_who_is_late_stands_in_the_log():
    """An operator reads there whom a round goes on without, or waits for."""
    rules = {"min_participants": 1, "fraction_participants": 1, "deadline_s": 5.0}
    bench = Bench(
        CoordinatorConfig.model_validate(
            {"rounds": {**rules, "max_participants": 2, "start_participants": 2}}
        ).rules()
    )
    for name in ("a", "b"):
        await bench.driver.submit(c.Rendezvous(name))
    await bench.driver.submit(c.InitialisationDone(MODEL))
    with capture_logs() as told:
        bench.clock.time_s = 5.0
        await bench.driver.submit(c.Tick())
        await bench.driver.submit(update_of("a", 0))
    overdue = [line for line in told if line["event"] == "round_overdue"]
    assert [sorted(line["participant"]) for line in overdue] == [["a", "b"]]
    with capture_logs() as told:
        await bench.driver.submit(c.AggregationDone(model_of(1)))
        await bench.driver.submit(update_of("b", 1))
        bench.clock.time_s = 10.0
        await bench.driver.submit(c.Tick())
    closed = [line for line in told if line["event"] == "round_closed_at_deadline"]
    assert [line["participant"] for line in closed] == [["a"]]
    await bench.driver.close()


@pytest.mark.parametrize("num_more", [0, 1])
async def test_many_updates_are_one_line_of_the_log(num_more):
    """Those that are committed together; a few have a line each. It comes before what follows from
    them."""
    names = [f"p{i:02}" for i in range(1 + module.MAX_UPDATE_LINES + num_more)]
    bench = Bench(
        CoordinatorConfig.model_validate({"rounds": {"min_participants": len(names)}}).rules()
    )
    for name in names:
        await bench.driver.submit(c.Rendezvous(name))
    await bench.driver.submit(c.InitialisationDone(MODEL))
    bench.journal.hold()
    with capture_logs() as told:
        tasks = [await bench.submit(update_of(name, 0)) for name in names]
        bench.journal.let_go()
        bench.journal.let_go()
        await asyncio.gather(*tasks)
    lines = [(line["event"], line.get("participant")) for line in told if line["round"] == 0]
    single = [("update_accepted", name) for name in names]
    if num_more:
        assert lines[:2] == [single[0], ("updates_accepted", names[1:])]
        assert told[1]["num_updates"] == len(names) - 1
    else:
        assert lines[: len(names)] == single
    await bench.driver.close()


async def test_a_controller_that_fails_ends_the_process_and_not_the_session(bench):
    """Nothing of it is written down, and its caller hears that it should come again: to a process
    whose controller has been mended."""

    class Broken:
        def select(self, candidates, k, chance):
            raise ZeroDivisionError

    bench.driver._controller = Broken()
    for name in "ab":
        await bench.driver.submit(c.Rendezvous(name))
    groups, session = list(bench.journal.groups), bench.driver.session
    await fails(bench.driver.submit(c.InitialisationDone(MODEL)))
    assert isinstance(bench.driver.failure, ControllerFailed)
    assert bench.driver.failed.is_set()
    assert (bench.journal.groups, bench.driver.session) == (groups, session)
