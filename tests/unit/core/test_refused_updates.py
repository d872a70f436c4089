"""Refused updates: counted per participant; three in a row, and others are selected."""

from tests.unit.core.bench import Bench, make_rules, opened_round

from xain_coordinator.core.machine.answers import MAX_REASON
from xain_coordinator.core.parts.selection_state import MAX_DEPARTED, Faults, SelectionState
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Rules

LIMIT = 3


def strict(**rules: object) -> Rules:
    """Out for two rounds after the one in which it happens."""
    return make_rules(  # type: ignore[arg-type]  # all kinds
        **{"rounds": 9, "refused_limit": LIMIT, "refused_rounds": 2, **rules}
    )


def faults(bench: Bench, name: str) -> Faults:
    return bench.session.selection.faults_of(name)


def test_each_refusal_is_counted_also_of_the_same_update():
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.bring_refused("a", 2)
    assert faults(bench, "a") == Faults(num_refused=2, in_a_row=2, last=0)
    noted = bench.happened(e.UpdateRefused)
    assert [(event.participant_id, event.round) for event in noted] == [("a", 0), ("a", 0)]
    assert "first at index 0" in noted[0].reason
    assert bench.selected == ("a", "b")


def test_participant_that_is_left_out_hears_of_it_at_once():
    """The notification does not depend on a replacement, without which nothing else changes."""
    rules = strict(min_participants=2, start_participants=3)
    bench = opened_round("a", "b", "c", rules=rules)
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


def test_a_long_reason_is_cut():
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "x" * 10_000))
    assert len(bench.happened(e.UpdateRefused)[0].reason) == MAX_REASON
