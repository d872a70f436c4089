"""Nothing waits for ever: deadlines, overdue rounds, the idle timeout."""

from dataclasses import replace

import pytest
from tests.unit.core.bench import (
    DEADLINE_S,
    IDLE_S,
    START_TIMEOUT_S,
    TIMED,
    Bench,
    closing,
    counted,
    make_rules,
    timed_round,
)

from xain_coordinator.core.machine.decider import next_deadline
from xain_coordinator.core.rules.pacing import WantedUpdates, noted_every_s
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import DataProfile, Phase

JUST = 1 / 1024  # exact in binary

# --- the deadline ---------------------------------------------------------------------------------


def test_idle_timeout_closes_a_paused_round_with_its_updates():
    """An idle timeout before the deadline closes the round; if it is the last, all is well."""
    bench = timed_round("a", "b", "c", rounds=1, min_participants=2, deadline_s=10 * IDLE_S)
    bench.end("a")
    bench.end("b")
    bench.leave("a", "b")
    assert bench.phase is Phase.STANDBY
    bench.pass_time(IDLE_S - JUST)
    assert bench.phase is Phase.STANDBY
    bench.pass_time(JUST)
    assert closing(bench) == (IDLE_S, "deadline")
    assert counted(bench) == ("a", "b")
    assert bench.session.cause == "completed"


# --- the idle timeout -----------------------------------------------------------------------------

WAITED = "for rounds.idle_timeout_s = 400 s"
ALONE = f"the session has waited for participants {WAITED}: 1 of 2 are connected"


def before_the_start() -> Bench:
    bench = Bench(make_rules(min_participants=2, **TIMED))
    bench.join("a")
    return bench


def while_the_model_is_made() -> Bench:
    bench = Bench(make_rules(min_participants=2, **TIMED), answers=False)
    bench.join("a", "b")
    return bench


def without_a_model() -> Bench:
    bench = while_the_model_is_made()
    bench.owed.clear()
    bench.send(c.InitialisationFailed("one class only"))
    return bench


def between_rounds() -> Bench:
    bench = timed_round("a", "b", min_participants=2)
    bench.answers = False
    bench.end_all()
    bench.leave("b")
    bench.pass_time(20.0)
    bench.answer()
    return bench


def paused() -> Bench:
    bench = timed_round("a", "b", min_participants=2)
    bench.pass_time(30.0)
    bench.leave("b")
    return bench


def overdue() -> Bench:
    bench = timed_round("a", "b", min_participants=2)
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert bench.happened(e.RoundOverdue)
    return bench


def aggregating() -> Bench:
    bench = timed_round("a", "b", min_participants=2)
    bench.answers = False
    bench.end_all()
    return bench


@pytest.mark.parametrize(
    ("reach", "phase", "cause"),
    [
        (before_the_start, Phase.STANDBY, ALONE),
        (
            while_the_model_is_made,
            Phase.STANDBY,
            f"no initial model could be made {WAITED}: it took too long",
        ),
        (
            without_a_model,
            Phase.STANDBY,
            f"no initial model could be made {WAITED}: one class only",
        ),
        (between_rounds, Phase.STANDBY, ALONE),
        (paused, Phase.STANDBY, ALONE),
        (
            overdue,
            Phase.COLLECTING,
            f"round 0 had too few updates at its deadline, and {WAITED} after it: 1 of 2",
        ),
        (aggregating, Phase.AGGREGATING, f"the model of round 0 could not be made {WAITED}"),
    ],
)
def test_every_wait_ends(reach, phase, cause):
    """The session ends exactly after idle_timeout_s, with a cause that names the key. Later calls
    have no consequences, and a restart knows of the end."""
    bench = reach()
    began = bench.now
    assert bench.phase is phase
    bench.pass_time(IDLE_S - JUST)
    assert bench.phase is phase
    bench.pass_time(JUST)
    assert bench.happened(e.SessionFinished) == [e.SessionFinished(cause, began + IDLE_S)]
    assert (bench.phase, bench.session.cause) == (Phase.FINISHED, cause)
    assert next_deadline(bench.session) is None
    over = bench.session
    for owed in list(bench.owed):
        with pytest.raises(errors.StaleModel):
            bench.answer()
        assert owed not in bench.owed
    bench.send(c.EffectFailed("the store is away"))
    bench.join("z")
    bench.pass_time(2 * IDLE_S)
    assert bench.session == over
    assert bench.restart() == ()


def test_enough_rather_start_than_end():
    """With N connected, an idle timeout that comes before the start timeout starts the session: it
    has all that it needs."""
    bench = Bench(make_rules(min_participants=2, start_participants=3, idle_timeout_s=50.0))
    bench.join("a", at=20.0)
    bench.join("b")
    assert 20.0 + START_TIMEOUT_S > 50.0
    bench.pass_time(30.0 - JUST)
    assert bench.phase is Phase.STANDBY
    bench.pass_time(JUST)
    assert bench.phase is Phase.COLLECTING
    assert bench.happened(e.ParticipantsGathered) == [e.ParticipantsGathered(50.0)]


def test_profiles_that_come_and_go_do_not_prolong_the_wait_for_a_model():
    """Each set of profiles is asked for anew, but the wait goes on."""
    bench = Bench(make_rules(**TIMED), answers=False)
    bench.join("a")
    for i in range(21):
        assert bench.now < IDLE_S
        bench.owed.clear()
        bench.send(c.InitialisationFailed("one class only"))
        bench.pass_time(IDLE_S / 20)
        bench.join(f"b{i}", profile=DataProfile(10 + i, 4))
        if bench.phase is Phase.FINISHED:
            break
    assert bench.session.cause.startswith("no initial model could be made")
    assert bench.happened(e.SessionFinished)[0].at == IDLE_S


def test_pauses_do_not_add_up_for_ever():
    """A participant that comes and goes keeps a round from its updates, but not from its end: after
    the deadline the next resumption begins the last wait."""
    bench = timed_round("a", "b", min_participants=2)
    for _ in range(40):
        bench.leave("b")
        bench.pass_time(15.0)
        if bench.phase is not Phase.FINISHED:
            bench.join("b")
            bench.pass_time(15.0)
    (finished,) = bench.happened(e.SessionFinished)
    assert DEADLINE_S + IDLE_S <= finished.at <= DEADLINE_S + IDLE_S + 30.0


# --- restarts -------------------------------------------------------------------------------------


def test_a_restart_keeps_the_deadline():
    """The deadline counts from the opening in the journal, whenever the coordinator came back."""
    bench = timed_round("a", "b", "c")
    bench.end("a")
    for _ in range(9):
        bench.pass_time(DEADLINE_S / 10)
        bench.restart()
    bench.pass_time(DEADLINE_S / 10 - JUST)
    assert bench.phase is Phase.COLLECTING
    bench.pass_time(2 * JUST)
    at, cause = closing(bench)
    assert at == pytest.approx(DEADLINE_S, abs=2 * JUST)
    assert cause == "deadline"


@pytest.mark.parametrize(
    ("deadline_s", "idle_s", "every_s"),
    [
        (None, None, None),
        (100.0, None, 10.0),
        (None, 100.0, 10.0),
        (100.0, 1000.0, 10.0),
        (1000.0, 100.0, 10.0),
        (1.0, 1000.0, 1.0),
        (86400.0, 604800.0, 60.0),
    ],
)
def test_how_often_time_is_written_down(deadline_s, idle_s, every_s):
    """A tenth of the shortest wait; not more often than a disk should work for nothing, nor so
    seldom that an operator sees a crash in it."""
    rules = make_rules(deadline_s=deadline_s, idle_timeout_s=idle_s)
    assert noted_every_s(rules, WantedUpdates()) == every_s


def test_each_crash_delays_the_deadline_by_at_most_a_tenth():
    """Session time goes on from the last time in the journal, so that a coordinator that dies over
    and over still comes to the deadline of a round without durable events."""
    bench = timed_round("a", "b", "c")
    bench.end("a")
    num_deaths, waited = 0, 0.0
    while not bench.happened(e.RoundClosed):
        began = bench.now
        bench.pass_time(0.19 * DEADLINE_S)
        waited += bench.now - began
        num_deaths += 1
        bench.restart()
        # The clock of a new process begins where the journal ends.
        bench.now = max([0.0, *(passed.at for passed in bench.happened(e.TimePassed))])
    assert num_deaths > 5
    assert waited <= DEADLINE_S + num_deaths * DEADLINE_S / 10


def test_time_is_not_written_down_after_the_end():
    """A finished session costs nothing."""
    bench = aggregating()
    bench.pass_time(IDLE_S)
    written = len(bench.journal)
    bench.tick(at=bench.now + IDLE_S)
    assert len(bench.journal) == written


def test_time_that_is_written_down_changes_nothing_else():
    """TimePassed is no sign of life, and no progress."""
    bench = timed_round("a", "b", min_participants=2)
    before = bench.session
    bench.tick(at=10.0)
    assert bench.journal[-1] == e.TimePassed(10.0)
    assert replace(bench.session, noted_at=0.0) == before
    assert not bench.notified
