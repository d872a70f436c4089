"""A participant whose own code fails, and one that misses its deadlines."""

from tests.unit.core.bench import DEADLINE_S, Bench, make_rules, opened_round

from xain_coordinator.core.machine.answers import MAX_KIND, MAX_REASON, MAX_TRACEBACK
from xain_coordinator.core.view.history import History
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


def left_out(bench: Bench) -> list[tuple[str, int]]:
    return [(event.participant_id, event.until) for event in bench.happened(e.ParticipantLeftOut)]


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


def test_failed_participant_that_joins_again_within_its_lease_is_selected_in_the_same_round():
    """A process with a state directory takes the place of the one that was killed."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
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


def test_failure_of_another_round_changes_nothing():
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    assert bench.send(c.NoteFailure("a", 7, "TypeError")).events == ()
    bench.end("a")
    assert fail(bench, "a") == (), "its update counts"
    bench.refuses(c.NoteFailure("unregistered", 0, "TypeError"), errors.NotAMember)


def test_failure_report_is_cut_to_a_bound_and_printable():
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.send(c.NoteFailure("a", 0, "E" * 999, "a\nb\x1b[2J" + "m" * 999, "t" * 9999))
    (failed,) = bench.happened(e.TrainingFailed)
    assert len(failed.kind) == MAX_KIND
    assert len(failed.message) == MAX_REASON
    assert len(failed.traceback) == MAX_TRACEBACK
    assert failed.message.isprintable()


def test_failure_report_is_cut_where_a_sentence_ends():
    """Advice of which the end is missing cannot be followed."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    advice = "The column is in another unit; set data.factors.price = 0.01. "
    bench.send(c.NoteFailure("a", 0, "DataError", advice * 20))
    (failed,) = bench.happened(e.TrainingFailed)
    assert MAX_REASON // 2 < len(failed.message) <= MAX_REASON
    assert failed.message.endswith("data.factors.price = 0.01.")


def test_status_says_who_has_left_after_which_failure_while_others_wait():
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    history = History()
    fail(bench, "a")
    bench.leave("a")
    for event in bench.journal:
        history.apply(event)
    told = waiting_for(bench.session, history=history)
    assert told == (
        "1 more participant: 1 of 2 connected. a has left. Its last failure: round 0: failed: "
        "TypeError: no columns."
    )
    bench.join("a")
    for event in bench.happened(e.ParticipantJoined)[-1:]:
        history.apply(event)
    assert "has left" not in waiting_for(bench.session, history=history)


# --- participants that hang ---


def hang(bench: Bench, name: str) -> None:
    """Hand in for all others, and let the deadline pass."""
    for other in bench.outstanding:
        if other != name:
            bench.end(other)
    bench.pass_time(DEADLINE_S)


def hanging(**rules: object) -> Bench:
    wanted = {"min_participants": 1, "start_participants": 3, "deadline_s": DEADLINE_S, **rules}
    return opened_round("a", "b", "c", rules=strict(**wanted))


def test_participant_that_misses_deadlines_in_a_row_is_left_out_and_comes_back():
    bench = hanging()
    for number in range(LIMIT):
        assert bench.session.round == number
        assert "a" in bench.selected
        hang(bench, "a")
    assert [closed.missed for closed in bench.happened(e.RoundClosed)] == [("a",)] * LIMIT
    assert left_out(bench) == [("a", LIMIT + 2)]
    for number in (LIMIT, LIMIT + 1):
        assert bench.session.round == number
        assert bench.selected == ("b", "c")
        bench.end_all()
    assert bench.selected == ("a", "b", "c")


# --- fits that were requested ---


def requested_fit(*names: str) -> Bench:
    bench = Bench(strict(min_participants=2, start="request"))
    bench.join(*names)
    bench.send(c.RequestFit())
    return bench


def test_requested_fit_ends_with_the_reason_when_too_few_can_train():
    bench = requested_fit("a", "b", "c")
    assert bench.session.phase is Phase.COLLECTING
    fail(bench, "a")
    assert bench.session.phase is Phase.COLLECTING, "two others can train"
    fail(bench, "b")
    assert bench.session.phase is Phase.FINISHED
    assert bench.session.cause == "training failed at b: no columns"


def test_session_that_nobody_requested_waits_for_mended_processes():
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    fail(bench, "a")
    fail(bench, "b")
    assert bench.session.phase is not Phase.FINISHED
