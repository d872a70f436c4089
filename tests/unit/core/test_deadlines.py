"""Nothing waits for ever: deadlines, overdue rounds, the idle timeout."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.core.bench import (
    DEADLINE_S,
    IDLE_S,
    LEASE_S,
    START_TIMEOUT_S,
    TIMED,
    Bench,
    closing,
    counted,
    make_rules,
    replay,
    timed_round,
)

from xain_coordinator.core import commands as c
from xain_coordinator.core import errors
from xain_coordinator.core import events as e
from xain_coordinator.core.decider import next_deadline
from xain_coordinator.core.pacing import noted_every_s
from xain_coordinator.core.questions import MayUpload
from xain_coordinator.core.values import DataProfile, Phase

JUST = 1 / 1024  # exact in binary

# --- the deadline ---------------------------------------------------------------------------------


def test_at_its_deadline_a_round_closes_with_what_it_has() -> None:
    """Two stragglers hold up nobody for longer than deadline_s, exactly."""
    bench = timed_round("a", "b", "c")
    bench.end("a")
    bench.pass_time(DEADLINE_S - JUST)
    assert bench.phase is Phase.COLLECTING
    bench.pass_time(JUST)
    assert closing(bench) == (DEADLINE_S, "deadline")
    assert counted(bench) == ("a",)
    assert (bench.session.round, bench.phase) == (1, Phase.COLLECTING)


def test_a_round_that_has_all_does_not_wait_for_its_deadline() -> None:
    bench = timed_round("a", "b")
    bench.pass_time(30.0)
    bench.end_all()
    assert closing(bench) == (30.0, "complete")


def test_each_round_has_its_own_deadline() -> None:
    """It counts from the opening of that round."""
    bench = timed_round("a", "b")
    bench.pass_time(30.0)
    bench.end_all()
    bench.end("a")
    bench.pass_time(DEADLINE_S - JUST)
    assert bench.phase is Phase.COLLECTING
    bench.pass_time(JUST)
    assert closing(bench) == (30.0 + DEADLINE_S, "deadline")


def test_a_tick_is_due_at_the_deadline() -> None:
    """Not only when somebody says something, or time is written down."""
    bench = Bench(make_rules(min_participants=2, start_participants=3, **TIMED))
    bench.join("a", "b", "c", at=3.0)
    bench.pass_time(DEADLINE_S - 2.0)
    assert next_deadline(bench.session) == 3.0 + DEADLINE_S
    bench.end("a")
    bench.end("b")
    bench.leave("a", "b")
    assert bench.phase is Phase.STANDBY
    assert next_deadline(bench.session) == 3.0 + DEADLINE_S, "it has enough, and closes there"


def test_a_straggler_is_late() -> None:
    """What it brings after the deadline is refused as late, in every state that the session can
    then be in, and whatever it asks for."""
    bench = timed_round("a", "b", rounds=2)
    bench.answers = False
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert bench.phase is Phase.AGGREGATING
    bench.refuses_end(errors.RoundAlreadyClosed, "b", round_=0)
    bench.refuses(MayUpload("b", 0, "x"), errors.RoundAlreadyClosed)
    bench.answer()
    assert bench.session.round == 1
    bench.refuses_end(errors.StaleRound, "b", round_=0)
    bench.end_all()
    bench.answer()
    assert bench.phase is Phase.FINISHED
    bench.refuses_end(errors.RoundAlreadyClosed, "b", round_=0)
    assert issubclass(errors.RoundAlreadyClosed, errors.LateUpdate)
    assert issubclass(errors.StaleRound, errors.LateUpdate)
    assert counted(bench) == ("a", "b"), "of round 1"


def test_a_straggler_may_train_the_next_round() -> None:
    """It is late, not banned."""
    bench = timed_round("a", "b")
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert bench.heartbeat("b").round == 1
    assert bench.start("b").round == 1
    bench.end("b", round_=1)


def test_with_too_few_updates_others_are_asked_besides() -> None:
    """An overdue round keeps its selection, since the late may still come, and asks everybody else
    as well. The update that makes enough closes it."""
    bench = timed_round("a", "b", "c", "d", "e", min_participants=2, fraction="0.5")
    assert bench.selected == ("a", "b", "c")
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert bench.happened(e.RoundOverdue) == [e.RoundOverdue(0, DEADLINE_S, ("b", "c"))]
    assert bench.phase is Phase.COLLECTING
    assert bench.selected == ("a", "b", "c", "d", "e")
    assert bench.start("b").round == bench.start("d").round == 0
    bench.end("d")
    assert closing(bench) == (DEADLINE_S, "complete")
    assert counted(bench) == ("a", "d")
    bench.refuses_end(errors.StaleRound, "b", round_=0)


def test_who_is_late_may_still_make_an_overdue_round_complete() -> None:
    bench = timed_round("a", "b", "c", "d", "e", min_participants=2, fraction="0.5")
    bench.end("a")
    bench.pass_time(DEADLINE_S + 50)
    bench.end("c")
    assert counted(bench) == ("a", "c")


def test_whoever_comes_later_helps_an_overdue_round() -> None:
    """With nobody in the pool it waits for whoever comes."""
    bench = timed_round("a", "b", min_participants=2)
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert bench.selected == ("a", "b")
    bench.join("c", "d")
    assert bench.selected == ("a", "b", "c", "d")
    bench.leave("c")
    bench.join("c")
    bench.end("c")
    assert counted(bench) == ("a", "c")


def test_a_round_is_overdue_once() -> None:
    """Else the wait for its updates would begin again and again."""
    bench = timed_round("a", "b", min_participants=2)
    bench.pass_time(DEADLINE_S + IDLE_S / 2)
    assert len(bench.happened(e.RoundOverdue)) == 1


def test_a_paused_round_closes_at_its_deadline_if_it_has_enough() -> None:
    """Updates are enough for a model, connected participants are needed to train."""
    bench = timed_round("a", "b", "c", min_participants=2)
    bench.end("a")
    bench.end("b")
    bench.leave("a", "b")
    assert bench.phase is Phase.STANDBY
    bench.pass_time(DEADLINE_S)
    assert closing(bench) == (DEADLINE_S, "deadline")
    assert counted(bench) == ("a", "b")


def test_what_a_paused_round_has_is_not_thrown_away() -> None:
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


def test_a_round_that_is_resumed_after_its_deadline_is_overdue() -> None:
    """Nobody could be late while it was paused."""
    bench = timed_round("a", "b", min_participants=2)
    bench.end("a")
    bench.leave("b")
    bench.pass_time(DEADLINE_S + 50)
    assert bench.happened(e.RoundOverdue) == []
    bench.join("c")
    assert bench.happened(e.RoundOverdue) == [e.RoundOverdue(0, DEADLINE_S + 50, ("c",))]
    bench.end("c")
    assert counted(bench) == ("a", "c")


def test_without_a_deadline_a_round_waits() -> None:
    """As a session of an earlier version does."""
    bench = timed_round("a", "b", deadline_s=None, idle_timeout_s=None)
    bench.end("a")
    bench.pass_time(10 * DEADLINE_S)
    assert bench.phase is Phase.COLLECTING
    assert bench.happened(e.TimePassed) == []


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
def test_every_wait_ends(reach: Callable[[], Bench], phase: Phase, cause: str) -> None:
    """After idle_timeout_s, not a moment earlier or later, and with a cause that names the key.
    What is brought for it afterwards has no consequences, and a restart knows of the end."""
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


@pytest.mark.parametrize("reach", [before_the_start, paused, between_rounds])
def test_those_who_are_waited_for_may_come_at_the_last_moment(reach: Callable[[], Bench]) -> None:
    bench = reach()
    bench.answers = True
    bench.pass_time(IDLE_S - JUST)
    bench.join("z")
    assert bench.phase is Phase.COLLECTING


def test_enough_rather_start_than_end() -> None:
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


def test_the_wait_for_a_model_is_its_own() -> None:
    """It is as long if the participants gathered at the last moment."""
    bench = Bench(make_rules(**TIMED), answers=False)
    bench.pass_time(IDLE_S - JUST)
    bench.join("a")
    bench.pass_time(IDLE_S - JUST)
    assert bench.phase is Phase.STANDBY
    bench.pass_time(2 * JUST)
    assert bench.session.cause.startswith("no initial model could be made")


def test_the_wait_for_those_who_left_while_it_was_made_is_its_own() -> None:
    bench = while_the_model_is_made()
    bench.pass_time(IDLE_S - JUST)
    bench.leave("b")
    bench.answer()
    bench.pass_time(IDLE_S - JUST)
    assert bench.phase is Phase.STANDBY
    bench.pass_time(JUST)
    assert bench.session.cause == ALONE


def test_the_wait_for_overdue_updates_goes_on_in_a_pause() -> None:
    """Else whoever comes back at its end would end the session by that."""
    bench = overdue()
    began = bench.now
    bench.pass_time(IDLE_S / 2)
    bench.leave("b")
    bench.pass_time(IDLE_S / 2 - JUST)
    assert bench.phase is Phase.STANDBY
    bench.pass_time(JUST)
    (finished,) = bench.happened(e.SessionFinished)
    assert finished.at == began + IDLE_S
    assert finished.cause.startswith("round 0 had too few updates at its deadline")


def test_the_wait_for_the_model_of_an_overdue_round_is_its_own() -> None:
    bench = overdue()
    bench.answers = False
    bench.pass_time(IDLE_S - JUST)
    bench.end("b")
    assert bench.phase is Phase.AGGREGATING
    bench.pass_time(IDLE_S - JUST)
    assert bench.phase is Phase.AGGREGATING
    bench.pass_time(JUST)
    assert bench.session.cause == f"the model of round 0 could not be made {WAITED}"


def test_profiles_that_come_and_go_do_not_prolong_the_wait_for_a_model() -> None:
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


def test_pauses_do_not_add_up_for_ever() -> None:
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


def test_a_tick_is_due_when_the_idle_timeout_ends() -> None:
    bench = Bench(make_rules(min_participants=2, **TIMED))
    bench.pass_time(3.0)
    bench.join("a", "b")
    bench.leave("b")
    bench.pass_time(IDLE_S - 2.0)
    assert next_deadline(bench.session) == 3.0 + IDLE_S


def test_a_round_that_goes_well_is_not_ended_by_the_idle_timeout() -> None:
    """A deadline longer than it is kept: to wait for those who train is not to be idle."""
    bench = timed_round("a", "b", deadline_s=10 * IDLE_S)
    bench.pass_time(9 * IDLE_S)
    assert bench.phase is Phase.COLLECTING
    bench.end_all()
    assert bench.session.round == 1


# --- restarts -------------------------------------------------------------------------------------


def test_a_restart_keeps_the_deadline() -> None:
    """It counts from the opening that the journal tells, whenever the coordinator came back."""
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
    "reach",
    [
        before_the_start,
        while_the_model_is_made,
        without_a_model,
        paused,
        between_rounds,
        overdue,
        aggregating,
    ],
)
def test_a_restart_keeps_the_idle_timeout(reach: Callable[[], Bench]) -> None:
    """What was waited for is waited for as long as if nothing had been."""
    bench = reach()
    bench.pass_time(IDLE_S / 2)
    bench.restart()
    bench.pass_time(IDLE_S / 2 - JUST)
    assert bench.phase is not Phase.FINISHED
    bench.pass_time(JUST)
    assert bench.phase is Phase.FINISHED


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
def test_how_often_time_is_written_down(
    deadline_s: float | None, idle_s: float | None, every_s: float | None
) -> None:
    """A tenth of the shortest wait; not more often than a disk should work for nothing, nor so
    seldom that an operator sees a crash in it."""
    rules = make_rules(deadline_s=deadline_s, idle_timeout_s=idle_s)
    assert noted_every_s(rules) == every_s


def test_what_a_crash_costs_is_bounded() -> None:
    """Session time goes on from what was written down last. A coordinator that dies over and over
    in a round where nobody says anything durable still comes to its deadline, and each death has
    put it off by at most a tenth."""
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


def test_time_is_not_written_down_after_the_end() -> None:
    """A finished session costs nothing."""
    bench = aggregating()
    bench.pass_time(IDLE_S)
    written = len(bench.journal)
    bench.tick(at=bench.now + IDLE_S)
    assert len(bench.journal) == written


def test_time_that_is_written_down_changes_nothing_else() -> None:
    """It is no sign of life, and no progress."""
    bench = timed_round("a", "b", min_participants=2)
    before = bench.session
    bench.tick(at=10.0)
    assert bench.journal[-1] == e.TimePassed(10.0)
    assert replace(bench.session, noted_at=0.0) == before
    assert not bench.notified


# --- journals of before ---------------------------------------------------------------------------


def test_an_old_journal_goes_on_as_it_began() -> None:
    """Without the fields that came later there are no deadlines, a round wants all of its
    selection, and nobody is carried from one round into the next."""
    bench = Bench(make_rules(min_participants=2))
    bench.join("a", "b", "c")
    bench.leave("c")
    bench.end("a")
    bench.leave("b")
    bench.join("b")
    bench.end_all()
    old: list[e.DurableEvent] = []
    for event in bench.journal:
        match event:
            case e.RoundOpened(number, selected, epochs, at):
                old.append(e.RoundOpened(number, selected, epochs, at))
            case e.RoundPaused(number) | e.RoundClosed(number):
                old.append(type(event)(number))
            case e.ParticipantsGathered():
                old.append(e.ParticipantsGathered())
            case e.UpdateAccepted(number, update):
                old.append(e.UpdateAccepted(number, update))
            case _:
                old.append(event)
    assert old != bench.journal
    session = replay(old)
    assert session.open_round is not None
    assert session.open_round.num_wanted == 2
    assert (session.buffered.carried, session.buffered.bases, session.gives_up_at) == ({}, {}, None)
    same = ("phase", "round", "epoch_base", "model", "members", "open_round", "selection")
    assert [getattr(session, name) for name in same] == [
        getattr(bench.session, name) for name in same
    ]
    assert next_deadline(session) == LEASE_S


def test_how_old_a_round_was_when_it_closed_may_be_unknown() -> None:
    """A closing without its time is folded, and the wait for the model has an end all the same."""
    bench = aggregating()
    bench.journal[-1] = e.RoundClosed(0)
    session = replay(bench.journal)
    assert session.phase is Phase.AGGREGATING
    assert session.gives_up_at == IDLE_S
