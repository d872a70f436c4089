"""The driver writes before it answers, and tells no caller of an event that is not durable."""

import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from support.clock import HeldClock
from support.driver import MODEL, RULES, Bench, HeldJournal, Recorder, fails, model, settled, update
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload, Question
from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.rules.pacing import WantedUpdates
from xain_coordinator.core.rules.selection import PluginFailed
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.errors import NotAMember, Refusal
from xain_coordinator.core.vocabulary.values import Phase, Task
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import JournalError, Record


async def test_a_reply_waits_for_the_commit(bench):
    """Durable before acknowledged: while the disk is at work no caller hears anything, and the
    session that others see does not know of it."""
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


async def test_replies_that_depend_on_uncommitted_events_wait_too(bench):
    """A refusal, and a reply without events of its own, that were decided on a state which is not
    durable yet must not tell of it."""
    await bench.join("a")
    bench.journal.hold()
    leaving = await bench.submit(c.Heartbeat("a", c.ParticipantState.FINISHED))
    await bench.journal.writing()
    refused = await bench.submit(c.Heartbeat("a"))
    unregistered = await bench.submit(AssignmentFor("b"))
    await settled()
    assert not any(task.done() for task in (leaving, refused, unregistered))
    bench.journal.let_go()
    await leaving
    for task in (refused, unregistered):
        with pytest.raises(NotAMember):
            await task


async def test_a_sign_of_life_does_not_wait_for_the_disk(bench):
    """The round that is being opened is not durable, so that no watcher is told of it; and the
    lease that the sign of life renews counts at once."""
    opening = await bench.opening()
    bench.clock.time_s = RULES.lease_s - 1
    assert await bench.driver.submit(c.Heartbeat("a")) == r.Heard()
    assert bench.driver.session.phase is Phase.STANDBY
    leaving = await bench.submit(c.Heartbeat("b", c.ParticipantState.FINISHED))
    assert not leaving.done()
    bench.clock.time_s = RULES.lease_s + 1
    ticking = await bench.submit(c.Tick())
    for _ in range(3):
        bench.journal.let_go()
    for task in (opening, leaving, ticking):
        await task
    assert list(bench.driver.session.members) == ["a"]


async def test_assignment_does_not_wait_for_the_disk(bench):
    """An assignment of a durable round is given while its first updates are being written. No
    assignment of a round that is not durable is given."""
    opening = await bench.opening()
    early = await bench.submit(AssignmentFor("a"))
    await settled()
    assert not early.done()
    bench.journal.let_go()
    await opening
    assert isinstance(await early, r.Assignment)
    handing_in = await bench.submit(update("a", 0))
    await bench.journal.writing()
    asking = await bench.submit(AssignmentFor("b"))
    assert asking.done()
    initialise = r.Assignment(0, 0, 0, MODEL, update_accepted=False, task=Task.INITIALISE)
    assert await asking == initialise
    told_of_it = await bench.submit(AssignmentFor("a"))
    assert not handing_in.done()
    assert not told_of_it.done(), "that its update is accepted is not durable yet"
    bench.journal.let_go()
    await handing_in
    assert (await told_of_it).update_accepted


async def test_permission_to_upload_waits_for_the_events_that_it_tells(bench):
    """A round that is durable takes uploads while its first update is being written. That this
    update was accepted, or that a round has opened, is not told before it is durable."""
    opening = await bench.opening()
    early = await bench.submit(MayUpload("a", 0, "digest 0"))
    assert not early.done()
    bench.journal.let_go()
    await opening
    assert (await early).key == "0/a."
    handing_in = await bench.submit(update("a", 0))
    await bench.journal.writing()
    other = await bench.submit(MayUpload("b", 0, "digest 0"))
    assert other.done()
    assert (await other).key == "0/b."
    again = await bench.submit(MayUpload("a", 0, "digest 0"))
    assert not again.done()
    bench.journal.let_go()
    await handing_in
    assert isinstance(await again, r.AlreadyUploaded)


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


async def test_a_failing_append_fails_all_waiting_callers(bench):
    """Lost events are never told, then or later; the process is to end."""
    await bench.join("a")
    before, effects = bench.driver.session, list(bench.worker.effects)
    bench.journal.hold()
    waiting = [await bench.submit(c.Rendezvous("b"))]
    await bench.journal.writing()
    waiting += [
        await bench.submit(c.Rendezvous("c")),
        await bench.submit(c.Heartbeat("unregistered")),
    ]
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


async def test_watchers_see_durable_events_only(bench):
    """A round is announced when it is on the disk, not when it is decided."""
    await bench.join("a", "b")
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


async def test_participants_that_wait_are_not_told_of_every_round():
    """A fleet of which a few are selected would hear of each round for nothing."""
    rounds = {
        "rounds": 2,
        "min_participants": 1,
        "fraction_participants": 0.5,
        "start_participants": 2,
        "controller": "ordered",
        "initial_weights": "average",
    }
    bench = Bench(CoordinatorConfig.model_validate({"rounds": rounds}).rules())
    driver = bench.driver
    await driver.submit(c.Rendezvous("a"))
    await driver.submit(c.Rendezvous("b"))

    async def watch():
        return [(seen.phase, seen.round) async for seen in driver.watch("b")]

    watching = asyncio.create_task(watch())
    await driver.submit(c.InitialisationDone(MODEL))
    for number in range(2):
        assert driver.session.round == number
        await driver.submit(update("a", number))
        await driver.submit(c.AggregationDone(model(number + 1)))
    assert await watching == [(Phase.STANDBY, 0), (Phase.FINISHED, 1)]
    await driver.close()


async def test_a_caller_that_goes_away_disturbs_nobody(bench):
    """The caller's command is carried out all the same, and callers beside it are answered."""
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


async def test_close_waits_for_the_running_append(bench):
    """Callers whose command was decided get their answer; later callers are refused; the
    journal is closed once, however often it is asked for."""
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
    """No caller waits for a tick, so its error must not vanish with it: leases would never end."""
    bench.journal.hold()
    joining = await bench.submit(c.Rendezvous("a"))
    await bench.journal.writing()
    bench.clock.time_s += RULES.lease_s  # so that the tick is due as soon as this is written

    def broken(*_):
        raise RuntimeError("broken invariant")

    monkeypatch.setattr("xain_coordinator.driver.driver.decide", broken)
    bench.journal.let_go()
    await joining
    await asyncio.wait_for(bench.driver.failed.wait(), 30)
    assert isinstance(bench.driver.failure, RuntimeError)
    await fails(bench.driver.submit(c.Heartbeat("a")))


async def test_a_new_session_is_written_when_it_starts():
    """The session before is the latest until then, although the new one is prepared."""
    journal = HeldJournal()
    driver = Driver.open(journal, lambda _: HeldClock(), RULES, lambda: "s", new_session=True)
    assert driver.session.session_id == "s"
    assert journal.groups == []
    driver.start(Recorder())
    assert journal.groups == [["SessionOpened"]]
    await driver.close()


async def test_commands_before_the_start_are_refused():
    """A server whose start fails may take a call while it gives its port back."""
    journal = HeldJournal()
    driver = Driver.open(journal, lambda _: HeldClock(), RULES, lambda: "s")
    await fails(driver.submit(c.Rendezvous("a")))
    driver.start(Recorder())
    assert await driver.submit(c.Rendezvous("a")) == r.Accepted(RULES.heartbeat_time_s)
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


async def test_a_controller_that_fails_ends_the_process_and_not_the_session(bench):
    """Nothing of it is written down, and its caller hears that it should come again: to a process
    whose controller has been mended."""

    class Broken:
        def select(self, candidates, k, chance):
            raise ZeroDivisionError

    bench.driver.strategy = Strategy(Broken(), WantedUpdates())
    await bench.join("a", "b")
    groups, session = list(bench.journal.groups), bench.driver.session
    await fails(bench.driver.submit(c.InitialisationDone(MODEL)))
    assert isinstance(bench.driver.failure, PluginFailed)
    assert bench.driver.failed.is_set()
    assert (bench.journal.groups, bench.driver.session) == (groups, session)


class Request:
    """An object that a caller holds while its command is decided."""


async def refused(driver: Driver, sent: c.Command | Question) -> "weakref.ref[Request]":
    request = Request()
    with suppress(Refusal):
        if isinstance(sent, Question):
            await driver.ask(sent)
        else:
            await driver.submit(sent)
    return weakref.ref(request)


@pytest.mark.parametrize("waits", [False, True])
async def test_refused_commands_hold_nothing_of_their_callers(bench, waits):
    """A refusal that is part of a reference cycle keeps the caller's request in memory until the
    next garbage collection. waits: for the commit of what was decided before."""
    await bench.join("a")
    if waits:
        bench.journal.hold()
        joining = await bench.submit(c.Heartbeat("a", c.ParticipantState.FINISHED))
        await bench.journal.writing()
    commands = (c.Heartbeat("b"), MayUpload("b", 0, ""), update("b", 0))
    gc.disable()
    try:
        tasks = [asyncio.create_task(refused(bench.driver, command)) for command in commands]
        await settled()
        if waits:
            bench.journal.let_go()
            await joining
        requests = await asyncio.gather(*tasks)
        del tasks
        assert [request() for request in requests] == [None] * len(commands)
    finally:
        gc.enable()
