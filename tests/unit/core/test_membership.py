"""Membership: rendezvous, heartbeats, leases."""

import pytest
from tests.unit.core.bench import (
    HEARTBEAT_TIME_S,
    LEASE_S,
    PROFILE,
    Bench,
    make_rules,
    opened_round,
)

from xain_coordinator.core.parts.membership import MAX_NOT_ADMITTED
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.values import DataProfile, ParticipantState, Phase


def waiting(*names: str) -> Bench:
    """A session that these participants have joined, and that needs more."""
    bench = Bench(make_rules(min_participants=len(names) + 5))
    bench.join(*names)
    return bench


# --- rendezvous ---


def test_participant_that_joins_is_told_the_heartbeat_time():
    bench = Bench(make_rules(min_participants=2))
    assert bench.join("a") == r.Accepted(HEARTBEAT_TIME_S)


def test_end_of_the_session_has_everybody_that_was_never_let_in():
    """With the reason; whoever was let in later, or is there already, is not among them."""
    bench = Bench(make_rules(min_participants=2, max_participants=2))
    bench.join("a", "b", "c", "d")
    bench.send(c.NoteRefusedParticipant("e", "no column 'x'"))
    bench.send(c.NoteRefusedParticipant("b", "a second process with other columns"))
    bench.leave("a")
    bench.join("d")
    bench.send(c.EffectFailed("the store is gone"))
    full = "rounds.max_participants, 2, were connected"
    expected = {"c": full, "e": "no column 'x'"}
    (end,) = (event for event in bench.journal if isinstance(event, e.SessionFinished))
    assert end.not_admitted == expected
    assert bench.session.members.not_admitted == expected
    bench.send(c.NoteRefusedParticipant("f", "too late to be left out"))
    assert bench.session.members.not_admitted == expected


def test_reason_of_a_participant_that_is_not_let_in_keeps_its_end():
    """The settings that let it in stand there."""
    bench = Bench(make_rules(min_participants=2, max_participants=2))
    reason = f"columns {', '.join(['a long name'] * 50)}; set data.task = 'regression'"
    bench.send(c.NoteRefusedParticipant("e", reason))
    assert bench.session.members.not_admitted == {"e": reason}


def test_names_of_those_that_are_not_let_in_are_bounded():
    """Anybody can ask to join, under any number of names: the first ones are kept."""
    bench = Bench(make_rules(min_participants=1, max_participants=1))
    bench.join("a", *(f"p{number}" for number in range(2 * MAX_NOT_ADMITTED)))
    kept = list(bench.session.members.not_admitted)
    assert kept == [f"p{number}" for number in range(MAX_NOT_ADMITTED)]


# --- profiles ---


def test_an_empty_partition_says_nothing_about_the_width():
    """Where no model is made from profiles, 0 samples are passed over: neither refused, nor binding
    for later participants."""
    bench = Bench(make_rules(min_participants=9, initial="empty"))
    bench.join("empty", profile=DataProfile(0, 99))
    bench.join("a", profile=DataProfile(100, 4))
    bench.join("empty too", profile=DataProfile(0, 7))
    bench.refuses(c.Rendezvous("b", DataProfile(100, 5)), errors.ProfileMismatch)


@pytest.mark.parametrize("profile", [DataProfile(-1, 4), DataProfile(10, -4), DataProfile(0, -1)])
def test_negative_sizes_are_refused(profile):
    waiting("a").refuses(c.Rendezvous("b", profile), errors.ProfileMismatch)


def test_initial_model_is_made_once_from_the_profiles_of_the_gathered():
    """A participant that joins or leaves meanwhile changes nothing in the request."""
    bench = Bench(make_rules(min_participants=2), answers=False)
    bench.join("a", profile=DataProfile(100, 4, ("x",)))
    bench.join("b", profile=DataProfile(50, 4, ("y",)))
    asked = InitialiseModel(
        "workload", (DataProfile(100, 4, ("x",)), DataProfile(50, 4, ("y",))), names=("a", "b")
    )
    assert bench.owed == [asked]
    bench.join("c", profile=DataProfile(10, 4))
    bench.leave("a")
    assert bench.owed == [asked]
    assert bench.restart() == (asked,)


# --- leases ---


def test_leaving_takes_effect_at_once():
    """A heartbeat that says FINISHED is a goodbye, answered with STANDBY."""
    bench = waiting("a", "b")
    decision = bench.send(c.Heartbeat("a", ParticipantState.FINISHED, 3))
    assert decision.reply == r.Advertisement(Phase.STANDBY, 0, False)
    assert bench.connected == ("b",)
    assert bench.happened(e.ParticipantLeft) == [e.ParticipantLeft("a", "left")]


def test_lateness_of_the_coordinator_ends_no_lease():
    """Deadlines do not move: they are times of the coordinator's own."""
    bench = waiting("a", "b")
    bench.heartbeat("b", at=2.0)
    bench.send(c.Tick(late_s=5.0), at=LEASE_S + 4.999)
    assert bench.connected == ("a", "b")
    bench.send(c.Tick(late_s=5.0), at=LEASE_S + 5.0)
    assert bench.connected == ("b",)


# --- what participants are told ---


def test_heartbeats_departures_and_the_coordinators_state_are_measured():
    """The three series of XAIN, with connected and selected told apart."""
    bench = opened_round("a", "b")
    bench.points.clear()
    bench.send(c.Heartbeat("a", ParticipantState.TRAINING, 0))
    (beat,) = bench.points
    assert (beat.measurement, beat.fields, beat.tags) == (
        "participant",
        {"state": 4, "round": 0},
        {"id": "a"},
    )
    bench.points.clear()
    bench.expire("b")
    departure, coordinator = bench.points[-2:]
    assert (departure.fields, departure.tags) == ({"state": 2}, {"id": "b"})
    selected = dict.fromkeys(("selected", "number_of_selected_participants"), 1)
    assert coordinator.fields == {"state": 0, "round": 0, "connected": 1, **selected}


# --- the initial model ---


@pytest.mark.parametrize(
    "profile",
    [
        None,
        DataProfile(0, 4, ("no", "yes")),
        DataProfile(10, 2_000_000),
        DataProfile(10, 4, tuple(str(i) for i in range(20_000))),
        DataProfile(10, 500_000, tuple(str(i) for i in range(1_000))),
        DataProfile(10, 4, ("x" * 300_000, "y")),
        DataProfile(10, 4, ("bell\a", "y")),
    ],
    ids=["none", "no rows", "wide", "classes", "weights", "names", "bell"],
)
def test_a_profile_that_no_model_can_be_made_from_is_refused(profile):
    """Only the sender is harmed: no model is asked for, and others start the session."""
    bench = Bench(make_rules(min_participants=1), answers=False)
    bench.refuses(c.Rendezvous("odd", profile), errors.ProfileMismatch)
    assert bench.owed == []
    bench.join("a")
    assert bench.owed == [InitialiseModel("workload", (PROFILE,), names=("a",))]


def test_profiles_are_bounded_together():
    """The model has the classes of all: each profile may be small and their union too large."""
    bench = Bench(make_rules(min_participants=9), answers=False)
    bench.join("a", profile=DataProfile(10, 10_000, tuple(f"a{i}" for i in range(6_000))))
    second = DataProfile(10, 10_000, tuple(f"b{i}" for i in range(6_000)))
    bench.refuses(c.Rendezvous("b", second), errors.ProfileMismatch)
    bench.join("c", profile=DataProfile(10, 10_000, ("a1", "a2")))


def test_profiles_that_do_not_suffice_wait_for_others():
    """One class only: no model. The session asks again when a participant joins."""
    bench = Bench(make_rules(min_participants=1), answers=False)
    bench.join("a", profile=DataProfile(10, 4, ("yes",)))
    assert len(bench.owed) == 1
    bench.owed.clear()
    bench.send(c.InitialisationFailed("only one class"))
    assert bench.session.trouble == "only one class"
    assert (bench.phase, bench.owed) == (Phase.STANDBY, [])
    bench.tick(at=1.0)
    bench.restart()
    assert bench.owed == []  # the same profiles would be refused again
    bench.join("b", profile=DataProfile(10, 4, ("no",)))
    assert [len(work.profiles) for work in bench.owed] == [2]
    bench.answer()
    assert bench.session.trouble == ""
    assert bench.phase is Phase.COLLECTING


def test_a_refusal_of_profiles_without_a_request_is_stale():
    """A late answer does not undo a model that is there."""
    bench = Bench(make_rules(min_participants=1))
    bench.join("a")
    bench.refuses(c.InitialisationFailed("late"), errors.StaleModel)
