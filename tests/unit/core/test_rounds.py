"""Rounds from their opening to their model, with participants going and coming back."""

from dataclasses import replace

import pytest
from tests.unit.core.bench import PROFILE, Bench, make_rules, opened_round, replay

from xain_coordinator.core.machine.decider import effect_that_made
from xain_coordinator.core.machine.evolve import TRANSITIONS
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import Phase


def test_a_whole_session():
    """Every event of two rounds by two participants, in order."""
    bench = Bench(make_rules(rounds=2, min_participants=2))
    bench.join("a", "b")
    bench.end_all()
    bench.end_all()
    round_ = [e.RoundOpened, e.UpdateAccepted, e.UpdateAccepted, e.RoundClosed, e.ModelPublished]
    assert [type(event) for event in bench.journal] == [
        *(e.SessionOpened, e.ParticipantJoined, e.ParticipantJoined, e.ParticipantsGathered),
        *(e.ModelRequested, e.ModelInitialised),
        *(2 * round_),
        e.SessionFinished,
    ]


# --- the numbers ---


def test_the_initial_model_asked_for_is_the_one_of_the_rules():
    bench = Bench(make_rules(initial="empty"), answers=False)
    bench.join("a")
    assert bench.owed == [InitialiseModel("empty", (PROFILE,), names=("a",))]


def test_the_updates_of_a_round_without_a_model_make_no_earlier_model():
    """A session that ends while round 1 is open knows the updates of round 0 no more, of which its
    last model was made."""
    bench = opened_round("a", "b", rules=make_rules(rounds=3, min_participants=2))
    first = bench.session.model
    assert first is not None
    bench.end_all()
    models = {model_key(0): first}
    assert effect_that_made(bench.session, models) == bench.aggregates[0]
    bench.end("a")
    bench.send(c.EffectFailed("the disk is gone"))
    assert bench.phase is Phase.FINISHED
    assert effect_that_made(bench.session, models) is None


def test_the_transition_table_says_all_that_can_happen():
    """FINISHED leads nowhere, and everything leads to FINISHED."""
    before = {phase for phase, _ in TRANSITIONS}
    assert before == set(Phase) - {Phase.FINISHED}
    assert all(TRANSITIONS[phase, e.SessionFinished] is Phase.FINISHED for phase in before)


def test_an_event_that_breaks_the_table_is_a_broken_invariant():
    """A journal that says so is wrong, and folding it must not go on silently."""
    bench = opened_round("a", "b", rules=make_rules(rounds=1, min_participants=2))
    bench.end_all()
    assert bench.phase is Phase.FINISHED
    for event in (
        e.RoundOpened(1, ("a",), 5, 0.0),
        e.SessionFinished("again", 0.0),
        e.RoundResumed(0),
    ):
        with pytest.raises(AssertionError):
            replay([*bench.journal, event])


def test_an_update_is_folded_once_and_only_from_the_selection():
    bench = opened_round("a", "b")
    bench.end("a")
    (accepted,) = bench.happened(e.UpdateAccepted)
    bench.join("c")
    strange = replace(accepted, update=replace(accepted.update, participant_id="c"))
    for event in (accepted, strange):
        with pytest.raises(AssertionError):
            replay([*bench.journal, event])


def test_watchers_are_woken_by_what_changes_for_them():
    """The first round, a new model, a round that opens later and the end wake them; heartbeats and
    updates of others do not."""
    bench = Bench(make_rules(min_participants=2), answers=False)
    bench.join("a", "b")
    assert not bench.notified
    bench.answer()
    assert bench.notified
    bench.heartbeat("a")
    assert not bench.notified
    bench.end("a")
    assert not bench.notified
    bench.end("b")
    bench.answer()
    assert bench.notified
    bench.end_all()
    bench.answer()
    assert bench.phase is Phase.FINISHED
    assert bench.notified


def test_watchers_are_woken_when_a_round_opens_without_a_new_model():
    """Too few were connected between the rounds; the participant that makes N opens the next."""
    bench = opened_round("a", "b", answers=False)
    bench.end_all()
    bench.leave("b")
    bench.answer()
    assert bench.phase is Phase.STANDBY
    assert bench.notified, "the round is over, and the selected must hear it"
    bench.join("c")
    assert bench.phase is Phase.COLLECTING
    assert bench.notified
