"""Rounds from their opening to their model, with participants going and coming back."""

from dataclasses import replace

import pytest
from tests.unit.core.bench import (
    PROFILE,
    SHAPE,
    Bench,
    answer_to,
    make_rules,
    model_from,
    opened_round,
    replay,
)

from xain_coordinator.core.machine.decider import effect_that_made, resume
from xain_coordinator.core.machine.evolve import TRANSITIONS
from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import Aggregate, InitialiseModel
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import ParticipantState, Phase


def test_a_whole_session() -> None:
    """Every event of two rounds by two participants, in order."""
    bench = Bench(make_rules(rounds=2, min_participants=2))
    bench.join("a", "b")
    bench.end_all()
    bench.end_all()
    assert [type(event).__name__ for event in bench.journal] == [
        "SessionOpened",
        "ParticipantJoined",
        "ParticipantJoined",
        "ParticipantsGathered",
        "ModelRequested",
        "ModelInitialised",
        "RoundOpened",
        "UpdateAccepted",
        "UpdateAccepted",
        "RoundClosed",
        "ModelPublished",
        "RoundOpened",
        "UpdateAccepted",
        "UpdateAccepted",
        "RoundClosed",
        "ModelPublished",
        "SessionFinished",
    ]


def test_the_selected_get_their_assignment() -> None:
    bench = opened_round("a", "b", rules=make_rules(min_participants=2, epochs=5))
    assignment = bench.start("a")
    assert (assignment.round, assignment.epochs, assignment.epoch_base) == (0, 5, 0)
    assert assignment.model == bench.session.model
    assert not assignment.update_accepted
    bench.end("a")
    assert bench.start("a").update_accepted, "asking again is answered, and says that it is done"


# --- the numbers ---


def test_rounds_epochs_and_models_are_numbered_as_in_xain() -> None:
    """epoch_base grows by the epochs of each round; the round number stays at rounds - 1; the last
    model is number `rounds`."""
    bench = Bench(make_rules(rounds=3, epochs=5))
    bench.join("a")
    seen = []
    while bench.phase is not Phase.FINISHED:
        assignment = bench.start("a")
        seen.append((assignment.round, assignment.epoch_base, assignment.model.round))
        bench.end_all()
    assert seen == [(0, 0, 0), (1, 5, 1), (2, 10, 2)]
    assert bench.session.round == 2
    assert bench.session.epoch_base == 15
    assert bench.session.model is not None
    assert bench.session.model.round == 3
    assert [aggregate.round for aggregate in bench.aggregates] == [0, 1, 2]


def test_an_empty_model_makes_round_0_an_initialisation() -> None:
    """Epochs 0, equal weights whatever was claimed, and one of the `rounds`."""
    bench = Bench(make_rules(rounds=2, epochs=5, min_participants=2, initial="empty"))
    bench.join("a", "b")
    assignment = bench.start("a")
    assert (assignment.epochs, assignment.epoch_base) == (0, 0)
    assert assignment.model.is_empty
    bench.end("a", "first", shape=(7,), dtype="float64", num_samples=1000)
    bench.end("b", "second", shape=(7,), dtype="float64", num_samples=1)
    assert [update.num_samples for update in bench.aggregates[0].updates] == [0, 0]
    assert bench.session.model is not None
    assert bench.session.model.shape == (7,)
    assignment = bench.start("a")
    assert (assignment.round, assignment.epochs, assignment.epoch_base) == (1, 5, 0)
    bench.end("a", shape=(7,), dtype="float64", num_samples=1000)
    bench.end("b", shape=(7,), dtype="float64", num_samples=1)
    assert [update.num_samples for update in bench.aggregates[1].updates] == [1000, 1]
    assert bench.phase is Phase.FINISHED
    assert bench.session.epoch_base == 5


def test_the_initial_model_asked_for_is_the_one_of_the_rules() -> None:
    bench = Bench(make_rules(initial="empty"), answers=False)
    bench.join("a")
    assert bench.owed == [InitialiseModel("empty", (PROFILE,), names=("a",))]


def test_no_round_opens_before_the_initial_model_is_there() -> None:
    bench = Bench(make_rules(), answers=False)
    bench.join("a")
    assert bench.phase is Phase.STANDBY
    bench.refuses(AssignmentFor("a"), errors.NotInRound)
    bench.answer()
    assert bench.phase is Phase.COLLECTING


# --- closing ---


def test_updates_are_aggregated_in_the_order_of_names() -> None:
    """The sum of the floats depends on neither the order of selection nor that of arrival."""
    bench = opened_round("c", "a", "b", answers=False)
    for name in ("b", "c", "a"):
        bench.end(name, f"of {name}", num_samples=ord(name))
    (aggregate,) = bench.aggregates
    assert [update.participant_id for update in aggregate.updates] == ["a", "b", "c"]
    assert [update.num_samples for update in aggregate.updates] == [97, 98, 99]
    assert aggregate.rule == "weighted_average"
    assert aggregate.base == bench.session.model


@pytest.mark.parametrize("gone", ["leaves", "expires"])
def test_a_departure_can_complete_the_round(gone: str) -> None:
    """a has submitted, b goes and owes: what remains is complete, and 1 is enough."""
    bench = opened_round("a", "b", rules=make_rules(start_participants=2), answers=False)
    bench.end("a")
    bench.leave("b") if gone == "leaves" else bench.expire("b")
    assert bench.phase is Phase.AGGREGATING
    assert [update.participant_id for update in bench.aggregates[0].updates] == ["a"]


def test_a_departure_does_not_complete_a_round_that_has_too_few() -> None:
    """min_participants must have submitted, however few remain."""
    bench = opened_round("a", "b", "c", rules=make_rules(min_participants=2, start_participants=3))
    bench.end("a")
    bench.leave("b", "c")
    assert bench.phase is Phase.STANDBY
    assert bench.aggregates == []


def test_a_departure_while_aggregating_changes_nothing_in_the_round() -> None:
    bench = opened_round("a", "b", answers=False)
    bench.end_all()
    owed = list(bench.owed)
    bench.leave("a", "b")
    assert bench.phase is Phase.AGGREGATING
    assert resume(bench.session) == tuple(owed)
    bench.answer()
    assert bench.phase is Phase.STANDBY
    assert bench.session.round == 1


# --- too few ---


def test_too_few_connected_pause_the_round_and_keep_it() -> None:
    """Number, selection and accepted updates stay; when enough are back it goes on."""
    bench = opened_round("a", "b", "c")
    bench.end("a", "of a")
    bench.leave("a")
    assert bench.phase is Phase.STANDBY
    assert bench.notified
    assert bench.selected == ("a", "b", "c")
    assert bench.heartbeat("b") == r.Advertisement(Phase.STANDBY, 0, False)
    bench.refuses(AssignmentFor("b"), errors.NotInRound)
    bench.refuses_end(errors.NotInRound, "b")
    bench.join("d")
    assert bench.phase is Phase.COLLECTING
    assert bench.notified
    assert bench.selected == ("a", "b", "c"), "a's update fills its place, d is not needed"
    bench.end("b", "of b")
    bench.end("c", "of c")
    assert [u.weights.ref.digest for u in bench.aggregates[0].updates] == ["of a", "of b", "of c"]
    assert len(bench.happened(e.RoundOpened)) == 2, "round 0 was opened once"


def test_too_few_after_a_round_wait_for_the_next() -> None:
    """The next round is not opened, keeps its number and opens as soon as N are there."""
    bench = opened_round("a", "b", answers=False)
    bench.end_all()
    bench.leave("b")
    bench.answer()
    assert bench.phase is Phase.STANDBY
    assert bench.heartbeat("a") == r.Advertisement(Phase.STANDBY, 1, False)
    bench.refuses(AssignmentFor("a"), errors.NotInRound)
    bench.join("c")
    assert bench.phase is Phase.COLLECTING
    assert bench.selected == ("a", "c")


# --- the end ---


def finished() -> Bench:
    """One round by a and b, done."""
    bench = opened_round("a", "b", rules=make_rules(rounds=1, min_participants=2))
    bench.end_all()
    assert bench.phase is Phase.FINISHED
    return bench


@pytest.mark.parametrize(
    "command",
    [
        c.Rendezvous("a", PROFILE),
        c.Rendezvous("new", PROFILE),
        c.Rendezvous("../new", PROFILE),
        c.Heartbeat("a"),
        c.Heartbeat("a", ParticipantState.FINISHED),
        c.Heartbeat("unregistered"),
        c.Tick(),
        c.EffectFailed("too late"),
    ],
)
def test_finished_is_final(command: c.Command) -> None:
    """Each command is answered and changes nothing, however late it is."""
    bench = finished()
    session, journal = bench.session, list(bench.journal)
    bench.send(command, at=10_000.0)
    assert bench.session == session
    assert bench.journal == journal
    assert bench.owed == []


@pytest.mark.parametrize("name", ["a", "unregistered"])
def test_finished_is_served_to_anybody(name: str) -> None:
    advertisement = finished().heartbeat(name)
    assert (advertisement.phase, advertisement.round) == (Phase.FINISHED, 0)


@pytest.mark.parametrize("name", ["a", "unregistered"])
def test_after_the_end_nothing_is_trained(name: str) -> None:
    bench = finished()
    bench.refuses(AssignmentFor(name), errors.RoundAlreadyClosed)
    bench.refuses(MayUpload(name, 0, "new"), errors.RoundAlreadyClosed)
    bench.refuses_end(errors.RoundAlreadyClosed, name, "new")


def test_an_effect_that_fails_for_good_ends_the_session_with_its_cause() -> None:
    """The effect may fail at any time; the session ends once."""
    bench = opened_round("a", "b", answers=False)
    bench.end_all()
    bench.send(c.EffectFailed("the disk is gone"))
    assert bench.phase is Phase.FINISHED
    assert bench.notified
    assert resume(bench.session) == ()
    bench.send(c.EffectFailed("another"))
    assert bench.session.cause == "the disk is gone"
    bench.refuses(answer_to(bench.aggregates[0]), errors.StaleModel)


def test_a_failure_before_the_first_model_is_final_too() -> None:
    """The initial model that comes late must not wake a finished session."""
    bench = Bench(make_rules(), answers=False)
    bench.join("a")
    bench.send(c.EffectFailed("no data"))
    late = answer_to(bench.owed.pop())
    bench.refuses(late, errors.StaleModel)
    assert bench.session.model is None
    assert resume(bench.session) == ()


# --- restarts ---


def test_the_updates_of_a_round_without_a_model_make_no_earlier_model() -> None:
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


def test_the_transition_table_says_all_that_can_happen() -> None:
    """FINISHED leads nowhere, and everything leads to FINISHED."""
    before = {phase for phase, _ in TRANSITIONS}
    assert before == set(Phase) - {Phase.FINISHED}
    assert all(TRANSITIONS[phase, e.SessionFinished] is Phase.FINISHED for phase in before)


def test_an_event_that_breaks_the_table_is_a_broken_invariant() -> None:
    """A journal that says so is wrong, and folding it must not go on silently."""
    bench = finished()
    for event in (
        e.RoundOpened(1, ("a",), 5, 0.0),
        e.SessionFinished("again", 0.0),
        e.RoundResumed(0),
    ):
        with pytest.raises(AssertionError):
            replay([*bench.journal, event])


def test_an_update_is_folded_once_and_only_from_the_selection() -> None:
    bench = opened_round("a", "b")
    bench.end("a")
    (accepted,) = bench.happened(e.UpdateAccepted)
    with pytest.raises(AssertionError):
        replay([*bench.journal, accepted])
    bench.join("c")
    strange = replace(accepted, update=replace(accepted.update, participant_id="c"))
    with pytest.raises(AssertionError):
        replay([*bench.journal, strange])


def test_effects_name_the_model_they_start_from() -> None:
    """The base of each aggregation is the model that the one before gave."""
    bench = Bench(make_rules(rounds=3))
    bench.join("a")
    while bench.phase is not Phase.FINISHED:
        bench.end_all()
    first, second, third = bench.aggregates
    assert isinstance(first, Aggregate)
    assert (first.base.round, first.base.shape) == (0, SHAPE)
    assert second.base == model_from(first)
    assert third.base == model_from(second)


def test_watchers_are_woken_by_what_changes_for_them() -> None:
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


def test_watchers_are_woken_when_a_round_opens_without_a_new_model() -> None:
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
