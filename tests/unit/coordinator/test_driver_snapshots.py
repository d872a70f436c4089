"""The driver's snapshots: when one is due, what it holds, and what it costs."""

import asyncio
from collections.abc import Sequence

import pytest

from support.clock import HeldClock
from support.driver import RULES, Recorder, begin, model, play, settled, update
from support.memory_journal import MemoryJournal
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import JournalError, Record, Snapshot


class Disk(MemoryJournal):
    """Survives its driver. num_loaded: records that were read."""

    def __init__(self, records: Sequence[Record] = (), saved: Snapshot | None = None) -> None:
        super().__init__()
        self.num_loaded = 0
        self.append(records)
        if saved is not None:
            self.save(saved)

    def load(self, after: int = 0) -> Sequence[Record]:
        records = super().load(after)
        self.num_loaded += len(records)
        return records

    def close(self) -> None:
        pass


async def saved(driver: Driver) -> None:
    """No snapshot is being written any more."""
    await asyncio.gather(*driver._tasks)


async def test_a_snapshot_is_due_at_the_end_of_a_round(bench):
    """A round's end makes one only when many records have come since the last one."""
    journal, driver = bench.journal, bench.driver
    driver.snapshot_records = 9
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


async def test_snapshot_has_durable_events_only(bench):
    """Events that are decided and not written yet may be lost."""
    bench.driver.snapshot_records = 1
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


async def test_session_time_goes_on_after_the_last_record_of_a_group(bench):
    """Records that are written together keep their own times, and a snapshot has the last one's:
    with the first one's, session time would go back at a restart."""
    bench.journal.hold()
    joining = [await bench.submit(c.Rendezvous("a"))]
    await bench.journal.writing()
    for name in "bcd":
        bench.clock.time_s += 1.0
        joining.append(await bench.submit(c.Rendezvous(name)))
    bench.journal.let_go()
    await bench.journal.writing()
    bench.driver.max_unsaved_records = 1
    bench.journal.let_go()
    await asyncio.gather(*joining)
    await saved(bench.driver)
    records = bench.journal.load()
    joined = [record for record in records if isinstance(record.event, e.ParticipantJoined)]
    assert [record.at for record in joined] == [0.0, 1.0, 2.0, 3.0]
    (snapshot,) = bench.journal.saved
    assert snapshot.num_records == len(records)
    times = []

    def made_clock(start_s):
        times.append(start_s)
        return HeldClock(start_s)

    for disk in (Disk(records), Disk(records, snapshot)):
        await Driver.open(disk, made_clock, RULES, lambda: "s").close()
    assert times == [3.0, 3.0]


async def test_rounds_are_not_waited_for_for_ever(bench):
    """Participants who come and go for days make no round, but records all the same."""
    bench.driver.snapshot_records = 3
    bench.driver.max_unsaved_records = 7
    for _ in range(6):
        await bench.join("a")
        await bench.driver.submit(c.Heartbeat("a", c.ParticipantState.FINISHED))
        await saved(bench.driver)
    assert [snapshot.num_records for snapshot in bench.journal.saved] == [7]


async def test_no_call_waits_for_a_snapshot(bench):
    """While it is being written, the session goes on, and what it contains does not change. Only
    who closes the journal waits."""
    bench.driver.snapshot_records = 1
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
async def test_a_snapshot_that_fails_costs_nothing(bench, error):
    """The records are there. It is tried again, when as many have come again."""
    bench.driver.snapshot_records = 6
    bench.journal.save_error = error
    await begin(bench.driver)
    for round_ in range(4):
        await play(bench.driver, range(round_, round_ + 1))
        await saved(bench.driver)
    assert [snapshot.num_records for snapshot in bench.journal.saved] == [12, 22]
    assert not bench.driver.failed.is_set()
    await bench.driver.submit(c.Heartbeat("a"))
    assert bench.driver.session.phase is Phase.COLLECTING


async def test_a_start_that_read_much_leaves_a_snapshot():
    """The next one need not read it again; not even if the session is over."""
    disk = Disk()
    disk.append([Record(0.0, e.SessionOpened("s", RULES, 0.0))])
    for number in range(Driver.snapshot_records // 2):
        name = f"p{number}"
        joined = Record(1.0, e.ParticipantJoined(name, None, 1.0))
        disk.append([joined, Record(1.0, e.ParticipantLeft(name, "left"))])
    disk.append([Record(9.0, e.SessionFinished("nobody stays", 9.0))])
    for num_loaded in (Driver.snapshot_records + 2, 0):
        disk.num_loaded = 0
        driver = Driver.open(disk, lambda _: HeldClock(), RULES, lambda: "s")
        driver.start(Recorder())
        await driver.close()
        assert driver.session.cause == "nobody stays"
        assert disk.num_loaded == num_loaded
