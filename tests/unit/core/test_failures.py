"""A participant whose own code fails, whose updates are refused, or that misses its deadlines."""

import pytest
from tests.unit.core.bench import DEADLINE_S, Bench, make_rules, opened_round

from xain_coordinator.core.machine.answers import MAX_KIND, MAX_REASON, MAX_TRACEBACK
from xain_coordinator.core.parts.selection_state import MAX_DEPARTED, Faults, SelectionState
from xain_coordinator.core.view.view import waiting_for
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase, Rules

LIMIT = 3


def strict(**rules: object) -> Rules:
    options = {"rounds": 9, "refused_limit": LIMIT, "refused_rounds": 2, **rules}
    return make_rules(**options)  # type: ignore[arg-type]  # all kinds


def fail(bench: Bench, name: str) -> tuple[e.Event, ...]:
    number = bench.session.trained_by(name)
    return bench.send(c.NoteFailure(name, number, "TypeError", "no columns", "f.py:3 in f")).events


@pytest.fixture
def bench() -> Bench:
    return opened_round("a", "b", rules=strict(min_participants=2))


# --- failures ---


def test_failed_participant_is_replaced_and_not_selected_again_in_the_round():
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    assert bench.selected == ("a", "b")
    fail(bench, "a")
    assert bench.happened(e.TrainingFailed) == [
        e.TrainingFailed("a", 0, "TypeError", "no columns", "f.py:3 in f")
    ]
    assert bench.selected == ("b", "c")
    assert bench.notified
    assert bench.connected == ("a", "b", "c")
    fail(bench, "b")
    assert bench.selected == ("c",), "neither a nor b again"


def test_failed_participant_that_joins_again_within_its_lease_is_selected_in_the_same_round(bench):
    """A process with a state directory takes the place of the one that was killed."""
    fail(bench, "a")
    assert bench.selected == ("b",)
    bench.join("a")
    assert bench.happened(e.ParticipantReturned) == [e.ParticipantReturned("a")]
    assert bench.selected == ("b", "a")
    bench.restart()
    assert bench.selected == ("b", "a")
    bench.join("a")
    assert len(bench.happened(e.ParticipantReturned)) == 1
    bench.end_all()
    assert [update.participant_id for update in bench.aggregates[-1].updates] == ["a", "b"]


def test_failure_of_another_round_changes_nothing(bench):
    assert bench.send(c.NoteFailure("a", 7, "TypeError")).events == ()
    bench.end("a")
    assert fail(bench, "a") == (), "its update counts"
    bench.refuses(c.NoteFailure("unregistered", 0, "TypeError"), errors.NotAMember)


def test_failure_report_is_cut_to_a_bound_and_printable(bench):
    bench.send(c.NoteFailure("a", 0, "E" * 999, "a\nb\x1b[2J" + "m" * 999, "t" * 9999))
    (failed,) = bench.happened(e.TrainingFailed)
    assert len(failed.kind) == MAX_KIND
    assert len(failed.message) == MAX_REASON
    assert len(failed.traceback) == MAX_TRACEBACK
    assert failed.message.isprintable()


def test_failure_report_is_cut_where_a_sentence_ends(bench):
    """Advice of which the end is missing cannot be followed."""
    advice = "The column is in another unit; set data.factors.price = 0.01. "
    bench.send(c.NoteFailure("a", 0, "DataError", advice * 20))
    (failed,) = bench.happened(e.TrainingFailed)
    assert MAX_REASON // 2 < len(failed.message) <= MAX_REASON
    assert failed.message.endswith("data.factors.price = 0.01.")


def test_status_says_who_has_left_after_which_failure_while_others_wait(bench):
    fail(bench, "a")
    bench.leave("a")
    assert waiting_for(bench.session, history=bench.history) == (
        "1 more participant: 1 of 2 connected. a has left. Its last failure: round 0: failed: "
        "TypeError: no columns."
    )
    bench.join("a")
    assert "has left" not in waiting_for(bench.session, history=bench.history)


# --- participants that hang ---


def hang(bench: Bench, name: str) -> None:
    """Hand in for all others, and let the deadline pass."""
    for other in bench.outstanding:
        if other != name:
            bench.end(other)
    bench.pass_time(DEADLINE_S)


def test_participant_that_misses_deadlines_in_a_row_is_left_out_and_comes_back():
    rules = strict(min_participants=1, start_participants=3, deadline_s=DEADLINE_S)
    bench = opened_round("a", "b", "c", rules=rules)
    for number in range(LIMIT):
        assert bench.session.round == number
        assert "a" in bench.selected
        hang(bench, "a")
    assert [closed.missed for closed in bench.happened(e.RoundClosed)] == [("a",)] * LIMIT
    (left_out,) = bench.happened(e.ParticipantLeftOut)
    assert (left_out.participant_id, left_out.until) == ("a", LIMIT + 2)
    for number in (LIMIT, LIMIT + 1):
        assert bench.session.round == number
        assert bench.selected == ("b", "c")
        bench.end_all()
    assert bench.selected == ("a", "b", "c")


# --- fits that were requested ---


def test_requested_fit_ends_with_the_reason_when_too_few_can_train():
    bench = Bench(strict(min_participants=2, start="request"))
    bench.join("a", "b", "c")
    bench.send(c.RequestFit())
    assert bench.session.phase is Phase.COLLECTING
    fail(bench, "a")
    assert bench.session.phase is Phase.COLLECTING, "two others can train"
    fail(bench, "b")
    assert bench.session.phase is Phase.FINISHED
    assert bench.session.cause == "training failed at b: no columns"


def test_session_that_nobody_requested_waits_for_mended_processes(bench):
    fail(bench, "a")
    fail(bench, "b")
    assert bench.session.phase is not Phase.FINISHED


# --- refused updates ---


def test_each_refusal_is_counted_also_of_the_same_update(bench):
    bench.bring_refused("a", 2)
    assert bench.session.selection.faults_of("a") == Faults(num_refused=2, in_a_row=2, last=0)
    noted = bench.happened(e.UpdateRefused)
    assert [(event.participant_id, event.round) for event in noted] == [("a", 0), ("a", 0)]
    assert "first at index 0" in noted[0].reason
    assert bench.selected == ("a", "b")


def test_participant_that_is_left_out_hears_of_it_at_once():
    """The notification does not depend on a replacement, without which nothing else changes."""
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2, start_participants=3))
    bench.bring_refused("c", LIMIT)
    assert bench.selected == ("a", "b")
    assert bench.notified


def test_faults_are_kept_of_the_latest_participants_that_have_left():
    """Members keep theirs. A participant that leaves after a good update has none to keep."""
    state = SelectionState().with_fault("stays", 0)
    names = [f"p{number}" for number in range(MAX_DEPARTED + 2)]
    for name in names:
        state = state.with_fault(name, 0).without_member(name, 0, members=["stays"])
    assert list(state.faults) == ["stays", *names[2:]]
    state = state.with_good_update("p7").without_member("p7", 0, members=["stays"])
    assert "p7" not in state.faults


def test_a_long_reason_is_cut(bench):
    bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "x" * 10_000))
    assert len(bench.happened(e.UpdateRefused)[0].reason) == MAX_REASON
