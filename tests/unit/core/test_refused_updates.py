"""Refused updates: counted per participant; three in a row, and others are selected."""

import pytest
from tests.unit.core.bench import Bench, make_rules, opened_round

from xain_coordinator.core import commands as c
from xain_coordinator.core import events as e
from xain_coordinator.core import selection_state
from xain_coordinator.core.answers import MAX_NOTED
from xain_coordinator.core.selection_state import Faults
from xain_coordinator.core.values import Phase, Rules

LIMIT = 3


def strict(**rules: object) -> Rules:
    """Out for two rounds after the one in which it happens."""
    return make_rules(  # type: ignore[arg-type]  # all kinds
        **{"rounds": 9, "refused_limit": LIMIT, "refused_rounds": 2, **rules}
    )


def faults(bench: Bench, name: str) -> Faults:
    return bench.session.selection.faults_of(name)


def left_out(bench: Bench) -> list[str]:
    return [event.participant_id for event in bench.happened(e.ParticipantLeftOut)]


def test_each_refusal_is_counted_also_of_the_same_update() -> None:
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.bring_refused("a", 2)
    assert faults(bench, "a") == Faults(num_refused=2, in_a_row=2, last=0)
    noted = bench.happened(e.UpdateRefused)
    assert [(event.participant_id, event.round) for event in noted] == [("a", 0), ("a", 0)]
    assert "first at index 0" in noted[0].reason
    assert bench.selected == ("a", "b")


def test_an_accepted_update_ends_the_row() -> None:
    bench = opened_round("a", rules=strict())
    for _ in range(4):
        bench.bring_refused("a", LIMIT - 1)
        bench.end_all()
    assert faults(bench, "a") == Faults(num_refused=4 * (LIMIT - 1), in_a_row=0)
    assert left_out(bench) == []


def test_a_row_goes_on_over_rounds() -> None:
    """What ends it is a good update, not another round."""
    bench = opened_round(
        "a", "b", "c", rules=strict(min_participants=2, start_participants=3, deadline_s=5.0)
    )
    bench.bring_refused("a", LIMIT - 1)
    bench.end("b")
    bench.end("c")
    bench.tick(at=5.0)
    assert bench.session.round == 1
    bench.bring_refused("a")
    assert left_out(bench) == ["a"]


def test_three_in_a_row_and_somebody_else_takes_the_place() -> None:
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    assert bench.selected == ("a", "b")
    bench.bring_refused("a", LIMIT)
    assert bench.selected == ("b", "c")
    assert bench.notified
    assert bench.heartbeat("a").phase is Phase.STANDBY, "it is connected, and waits"
    assert bench.heartbeat("c").phase is Phase.COLLECTING
    assert bench.happened(e.ParticipantLeftOut) == [e.ParticipantLeftOut("a", until=3)]
    assert faults(bench, "a") == Faults(num_refused=LIMIT, in_a_row=0, left_out_until=3)


def test_it_is_left_out_of_the_next_rounds_and_then_selected_again() -> None:
    """Of so many as the rules say; "ordered" would take it first."""
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    bench.bring_refused("a", LIMIT)
    selections = []
    for _ in range(4):
        selections.append(bench.selected)
        bench.end_all()
    assert selections == [("b", "c"), ("b", "c"), ("b", "c"), ("a", "b", "c")]
    assert faults(bench, "a").num_refused == LIMIT, "they are still told of"


def test_k_is_of_those_who_are_not_left_out() -> None:
    """As if the others had gone: half of six are three, half of four are two."""
    bench = opened_round(*"abcdef", rules=strict(fraction="0.5", start_participants=6))
    assert bench.selected == ("a", "b", "c")
    bench.bring_refused("a", LIMIT)
    bench.bring_refused("b", LIMIT)
    assert bench.selected == ("c", "d", "e")
    bench.end_all()
    assert bench.selected == ("c", "d")


def test_who_is_left_out_hears_of_it_at_once() -> None:
    """Also when there is nobody to take its place, so that nothing else has changed."""
    rules = strict(min_participants=2, start_participants=3)
    bench = opened_round("a", "b", "c", rules=rules)
    bench.bring_refused("c", LIMIT)
    assert bench.selected == ("a", "b")
    assert bench.notified


def test_one_that_is_needed_is_asked_all_the_same() -> None:
    """A round never waits for ever because somebody is left out: with two of two needed it goes on
    asking both, and a good update is taken, and makes all well again."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.bring_refused("a", LIMIT)
    assert set(bench.selected) == {"a", "b"}
    assert bench.heartbeat("a").phase is Phase.COLLECTING
    bench.end_all()
    assert bench.session.round == 1
    assert set(bench.selected) == {"a", "b"}
    assert faults(bench, "a") == Faults(num_refused=LIMIT)


def test_a_fraction_selects_nobody_who_is_left_out_while_others_are_enough() -> None:
    """Half of the two others would be one, and the second place would go to a."""
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2, fraction="0.5"))
    bench.bring_refused("a", LIMIT)
    bench.end_all()
    assert bench.happened(e.RoundOpened)[-1].selected == ("b", "c")
    assert left_out(bench) == ["a"]


def test_a_round_opens_with_those_whom_it_needs() -> None:
    """Of those who are left out as many as min_participants lacks, from the beginning."""
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    bench.bring_refused("a", LIMIT)
    bench.answers = False
    bench.end_all()
    bench.leave("c")
    bench.answer()
    assert bench.happened(e.RoundOpened)[-1].selected == ("b", "a")
    assert bench.session.opened.target == 2


def test_refusals_of_one_that_is_asked_all_the_same_do_not_fill_the_journal() -> None:
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.bring_refused("a", LIMIT)
    events = len(bench.journal)
    bench.bring_refused("a", 10)
    assert len(bench.journal) == events
    assert set(bench.selected) == {"a", "b"}


def test_one_that_is_asked_for_want_of_others_gives_way_to_who_comes() -> None:
    """The round must not wait for it then."""
    bench = opened_round("a", "b", rules=strict(min_participants=2, max_participants=9))
    bench.bring_refused("a", LIMIT)
    bench.join("c")
    assert bench.selected == ("b", "c")
    bench.end_all()
    assert bench.session.round == 1
    assert bench.selected == ("b", "c")
    assert faults(bench, "a").left_out_until == 3, "no longer than it was"


def test_only_as_many_are_asked_all_the_same_as_are_needed() -> None:
    rules = strict(min_participants=2, start_participants=4)
    bench = opened_round("a", "b", "c", "d", rules=rules)
    for name in "abc":
        bench.bring_refused(name, LIMIT)
    assert len(bench.selected) == 2
    assert "d" in bench.selected
    bench.end_all()
    assert len(bench.selected) == 2
    assert "d" in bench.selected


def test_what_was_accepted_of_it_counts() -> None:
    """Another one of the same round is refused as a duplicate, and no refusal comes of it."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.end("a")
    for _ in range(LIMIT):
        bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "late"))
    assert bench.selected == ("a", "b")
    assert faults(bench, "a") == Faults()


def test_what_came_too_late_is_no_fault() -> None:
    """Its sender began to bring it for a round that is over."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.end_all()
    assert bench.session.trained_by("a") == 1
    assert bench.send(c.NoteRefusedUpdate("a", 0, "late")).events == ()
    assert faults(bench, "a") == Faults()


def test_an_overdue_round_takes_help_from_everybody() -> None:
    rules = strict(min_participants=2, start_participants=3, fraction="0.6", deadline_s=5.0)
    bench = opened_round("a", "b", "c", rules=rules)
    bench.bring_refused("a", LIMIT)
    assert bench.selected == ("b", "c")
    bench.tick(at=5.0)
    assert bench.selected == ("b", "c", "a")
    bench.end("a")
    bench.end("b")
    assert bench.session.round == 1


def test_the_last_but_one_round_is_over_without_it() -> None:
    """What remains is complete, and closes at once, whoever's refusal made it so."""
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2, start_participants=3))
    bench.end("a")
    bench.end("b")
    bench.bring_refused("c", LIMIT)
    assert bench.session.round == 1
    assert bench.selected == ("a", "b")


def test_in_asp_what_it_trains_is_given_up() -> None:
    """Also if it trains an earlier round, and also while a model is made."""
    rules = strict(
        consistency="asp", staleness=None, buffer_size=1, start_participants=3, fraction="0.6"
    )
    bench = opened_round("a", "b", "c", rules=rules)
    assert bench.selected == ("a", "b")
    bench.end("b")
    assert bench.session.opened.carried == {"a": 0}
    bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "1"))
    bench.answers = False
    bench.end("b")
    assert bench.phase is Phase.AGGREGATING
    bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "2"))
    bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "3"))
    bench.answers = True
    bench.answer()
    assert left_out(bench) == ["a"]
    assert bench.session.opened.carried == {}
    assert bench.selected == ("b", "c")
    assert [event.round for event in bench.happened(e.UpdateRefused)] == [0, 0, 0]


def test_leaving_and_coming_back_changes_nothing() -> None:
    """The row goes on, and so does the time for which it is left out."""
    rules = strict(min_participants=2, start_participants=3)
    bench = opened_round("a", "b", "c", rules=rules)
    bench.bring_refused("a", LIMIT - 1)
    bench.leave("a")
    bench.join("a")
    assert bench.selected == ("b", "c", "a")
    bench.bring_refused("a")
    assert left_out(bench) == ["a"]
    bench.leave("a")
    bench.join("a")
    assert bench.selected == ("b", "c")
    bench.end_all()
    assert bench.selected == ("b", "c")


def test_of_those_who_have_left_not_too_many_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The latest."""
    monkeypatch.setattr(selection_state, "MAX_DEPARTED", 2)
    bench = opened_round("z", rules=strict(max_participants=9))
    for name in "abcd":
        bench.leave(*bench.selected)
        bench.join(name)
        bench.bring_refused(name)
    bench.leave("d")
    assert list(bench.session.selection.faults) == ["c", "d"]
    bench.join("c")
    bench.end_all()
    bench.leave("c")
    assert list(bench.session.selection.faults) == ["d"], "its last one was good"


def test_unregistered_clients_and_those_who_owe_nothing_are_not_counted() -> None:
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    events = len(bench.journal)
    bench.send(
        c.NoteRefusedUpdate("unregistered", bench.session.trained_by("unregistered"), "whatever")
    )
    bench.send(c.NoteRefusedUpdate("c", bench.session.trained_by("c"), "it is not selected"))
    assert len(bench.journal) == events


def test_limit_of_0_notes_refusals_up_to_a_bound_and_leaves_nobody_out() -> None:
    bench = opened_round("a", "b", rules=make_rules(min_participants=1, start_participants=2))
    bench.bring_refused("a", MAX_NOTED + 5)
    assert len(bench.happened(e.UpdateRefused)) == MAX_NOTED
    assert left_out(bench) == []
    assert bench.selected == ("a", "b")


def test_after_the_end_nothing_is_counted() -> None:
    bench = opened_round("a", rules=strict(rounds=1))
    bench.end_all()
    assert bench.phase is Phase.FINISHED
    assert bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "late")).events == ()


def test_a_restart_forgets_no_refusal() -> None:
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    bench.bring_refused("a", LIMIT - 1)
    bench.restart()
    bench.bring_refused("a")
    bench.restart()
    assert bench.selected == ("b", "c")
    bench.end_all()
    assert bench.selected == ("b", "c")


def test_a_long_reason_is_cut() -> None:
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "x" * 10_000))
    assert len(bench.happened(e.UpdateRefused)[0].reason) == 200
