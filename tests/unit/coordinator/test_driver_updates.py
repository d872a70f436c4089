"""Updates at the driver: too late, while a model is being made, and in its log."""

import asyncio
import logging

import pytest

from support.driver import MODEL, Bench, begin, fails, model, play, settled, update
from support.logs import capture_logs
from support.refusals import refused_as
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload, Question
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import RecordMetrics
from xain_coordinator.core.vocabulary.errors import LateUpdate
from xain_coordinator.core.vocabulary.values import ParticipantState, Phase, Point
from xain_coordinator.telemetry.log_lines import MAX_UPDATE_LINES


def bench_of(**rounds: object) -> Bench:
    given = {"initial_weights": "average", **rounds}
    return Bench(CoordinatorConfig.model_validate({"rounds": given}).rules())


# --- late updates ---


async def late(bench: Bench, sent: c.Command | Question) -> LateUpdate:
    with pytest.raises(LateUpdate) as caught:
        await (await bench.submit(sent))
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
    assert (await late(bench, update("a", 0, 1))).code == "STALE_ROUND"
    await late(bench, update("a", 0, 1))
    await late(bench, MayUpload("a", 0, "digest 2"))
    assert bench.driver.num_late == 1
    await late(bench, MayUpload("b", 0, "digest 2"))
    for participant_id in ("a", "b"):
        await bench.driver.submit(update(participant_id, 1))
    assert (await late(bench, update("b", 1, 3))).code == "ROUND_CLOSED"
    assert (await late(bench, update("b", 2))).code == "STALE_ROUND"  # too early
    assert bench.driver.num_late == 3
    assert late_points(bench) == [
        Point("late_update", {"round": round_}, {"id": participant_id})
        for round_, participant_id in ((0, "a"), (0, "b"), (1, "b"))
    ]


async def test_updates_that_are_not_late(bench):
    """An assignment that comes too late, a resend of an accepted update, and an update of an
    unregistered client after the end do not count as late updates."""
    await begin(bench.driver)
    await play(bench.driver, range(1))
    await bench.driver.submit(update("a", 0))
    with refused_as("UPLOAD_MISSING"):
        await bench.driver.submit(c.EndTrainingRound("a", 1, 1, None))
    await bench.driver.submit(c.EffectFailed("over"))
    await late(bench, AssignmentFor("a"))
    await late(bench, update("unregistered", 0))
    assert bench.driver.num_late == 0
    assert late_points(bench) == []


# --- updates that come while a model is made ---


async def asynchronous_bench() -> Bench:
    """Round 1 of an ASP session is being aggregated with the update of a, and b trains on."""
    bench = bench_of(min_participants=1, max_participants=2, consistency="asp")
    await bench.join("a", "b")
    await bench.driver.submit(c.InitialisationDone(MODEL))
    for round_ in (0, 1):
        for name in ("a", "b")[: 2 - round_]:
            await bench.driver.submit(update(name, round_))
        if round_ == 0:
            await bench.driver.submit(c.AggregationDone(model(1)))
    assert bench.driver.session.phase is Phase.AGGREGATING
    return bench


async def test_update_during_an_aggregation_goes_into_the_next_model():
    """The sender hears no refusal, on which some participants give up."""
    bench = await asynchronous_bench()
    late = asyncio.create_task(bench.driver.submit(update("b", 1)))
    await settled()
    assert not late.done()
    await bench.driver.submit(c.AggregationDone(model(2)))
    assert await late == r.Done()
    assert bench.driver.session.round == 2
    assert bench.driver.session.accepted("b", 1) is not None
    await bench.driver.close()


async def test_late_update_waits_while_the_end_of_the_round_is_written():
    """The decided state counts, not the one on disk."""
    bench = await asynchronous_bench()
    bench.journal.hold()
    published = await bench.submit(c.AggregationDone(model(2)))
    await bench.journal.writing()
    late = asyncio.create_task(bench.driver.submit(update("b", 1)))
    await settled()
    for _ in range(4):
        bench.journal.let_go()
    assert await late == r.Done()
    await published
    await bench.driver.close()


async def test_update_is_taken_by_the_round_that_opens_while_its_refusal_is_written():
    """A refusal waits for the disk. When the next round is decided by then, it takes the update."""
    bench = await asynchronous_bench()
    bench.journal.hold()
    leaving = await bench.submit(c.Heartbeat("a", ParticipantState.FINISHED))
    await bench.journal.writing()
    late = asyncio.create_task(bench.driver.submit(update("b", 1)))
    await settled()
    published = await bench.submit(c.AggregationDone(model(2)))
    for _ in range(4):
        bench.journal.let_go()
    assert await late == r.Done()
    await asyncio.gather(leaving, published)
    await bench.driver.close()


async def test_a_stop_ends_the_wait():
    bench = await asynchronous_bench()
    late = asyncio.create_task(bench.driver.submit(update("b", 1)))
    await settled()
    bench.driver.end_watches()
    await fails(late)
    await fails(bench.driver.wait_for_change())
    await bench.driver.close()


async def test_a_slow_journal_does_not_end_the_wait():
    """A decided update counts, and its sender hears so, however long the writing takes."""
    bench = Bench()
    bench.driver.next_round_s = 1e-9
    await begin(bench.driver)
    bench.journal.hold()
    handed_in = asyncio.create_task(bench.driver.submit(update("a", 0)))
    await bench.journal.writing()
    await settled()
    bench.journal.let_go()
    assert await handed_in == r.Done()
    await bench.driver.close()


async def test_the_wait_ends():
    """A store that is away for longer is not waited for."""
    bench = await asynchronous_bench()
    bench.driver.next_round_s = 0.01
    with refused_as("NOT_IN_ROUND"):
        await bench.driver.submit(update("b", 1))
    await bench.driver.close()


# --- commits of several ---


@pytest.fixture
def patient(bench) -> Bench:
    """A driver whose updates wait for others for longer than any test takes."""
    bench.driver.gather_s = 3600.0
    return bench


async def test_update_is_committed_with_the_one_that_closes_its_round(patient):
    """A round whose updates come one after the other takes one transaction. Neither update is
    answered before it."""
    await begin(patient.driver)
    patient.journal.hold()
    first = await patient.submit(update("a", 0))
    last = await patient.submit(update("b", 0))
    await patient.journal.writing()
    assert not first.done()
    assert not last.done()
    patient.journal.let_go()
    assert await first == await last == r.Done()
    assert patient.journal.groups[-1] == ["UpdateAccepted", "UpdateAccepted", "RoundClosed"]


async def test_update_is_committed_with_any_other_decision(patient):
    """A participant that leaves, and all that is told of it, wait for no update."""
    await begin(patient.driver)
    handed_in = await patient.submit(update("a", 0))
    assert await patient.driver.submit(c.Heartbeat("b", ParticipantState.FINISHED))
    assert await handed_in == r.Done()
    assert patient.journal.groups[-1] == ["UpdateAccepted", "ParticipantLeft", "RoundPaused"]


async def test_stop_commits_an_update_that_waits_for_others(patient):
    """An update that was decided is answered before the driver ends."""
    await begin(patient.driver)
    handed_in = await patient.submit(update("a", 0))
    assert not handed_in.done()
    await patient.driver.close()
    assert await handed_in == r.Done()
    assert patient.journal.groups[-1] == ["UpdateAccepted"]


# --- what the log says of them ---


async def test_late_updates_are_logged():
    """An operator reads there whom a round goes on without, or waits for."""
    numbers = {"min_participants": 1, "max_participants": 2, "start_participants": 2}
    bench = bench_of(fraction_participants=1, deadline_s=5.0, **numbers)
    await bench.join("a", "b")
    await bench.driver.submit(c.InitialisationDone(MODEL))
    with capture_logs() as told:
        bench.clock.time_s = 5.0
        await bench.driver.submit(c.Tick())
        await bench.driver.submit(update("a", 0))
    overdue = [line for line in told if line["event"] == "round_overdue"]
    assert [sorted(line["participant"]) for line in overdue] == [["a", "b"]]
    with capture_logs() as told:
        await bench.driver.submit(c.AggregationDone(model(1)))
        await bench.driver.submit(update("b", 1))
        bench.clock.time_s = 10.0
        await bench.driver.submit(c.Tick())
    closed = [line for line in told if line["event"] == "round_closed_at_deadline"]
    assert [line["participant"] for line in closed] == [["a"]]
    await bench.driver.close()


@pytest.mark.parametrize("num_more", [0, 1])
async def test_many_updates_are_one_line_of_the_log(num_more):
    """Updates that are committed together have one line, a few have a line each. It comes before
    the lines of their effects."""
    names = [f"p{i:02}" for i in range(MAX_UPDATE_LINES + num_more)]
    bench = bench_of(min_participants=len(names))
    await bench.join(*names)
    await bench.driver.submit(c.InitialisationDone(MODEL))
    with capture_logs(logging.INFO) as told:
        await asyncio.gather(*(bench.driver.submit(update(name, 0)) for name in names))
    lines = [(line["event"], line.get("participant")) for line in told if line["round"] == 0]
    single = [("update_accepted", name) for name in names]
    if num_more:
        assert lines[0] == ("updates_accepted", names)
        assert told[0]["num_updates"] == len(names)
    else:
        assert lines[: len(names)] == single
    await bench.driver.close()
