"""Refused updates: counted per participant; three in a row, and others are selected."""

from tests.unit.core.bench import Bench, make_rules, opened_round

from xain_coordinator.core.machine.answers import MAX_NOTED, MAX_REASON
from xain_coordinator.core.parts.selection_state import MAX_DEPARTED, Faults, SelectionState
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase, Rules

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


def test_participant_with_three_refusals_in_a_row_is_replaced() -> None:
    bench = opened_round("a", "b", "c", rules=strict(min_participants=2))
    assert bench.selected == ("a", "b")
    bench.bring_refused("a", LIMIT)
    assert bench.selected == ("b", "c")
    assert bench.notified
    assert bench.heartbeat("a").phase is Phase.STANDBY, "it is connected, and waits"
    assert bench.heartbeat("c").phase is Phase.COLLECTING
    assert bench.happened(e.ParticipantLeftOut) == [e.ParticipantLeftOut("a", until=3)]
    assert faults(bench, "a") == Faults(num_refused=LIMIT, in_a_row=0, left_out_until=3)


def test_participant_that_is_left_out_hears_of_it_at_once() -> None:
    """The notification does not depend on a replacement, without which nothing else changes."""
    rules = strict(min_participants=2, start_participants=3)
    bench = opened_round("a", "b", "c", rules=rules)
    bench.bring_refused("c", LIMIT)
    assert bench.selected == ("a", "b")
    assert bench.notified


def test_round_asks_a_left_out_participant_that_it_needs() -> None:
    """With two of two needed a round asks both, so that it does not wait for ever. A good update is
    taken and clears the faults."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.bring_refused("a", LIMIT)
    assert set(bench.selected) == {"a", "b"}
    assert bench.heartbeat("a").phase is Phase.COLLECTING
    bench.end_all()
    assert bench.session.round == 1
    assert set(bench.selected) == {"a", "b"}
    assert faults(bench, "a") == Faults(num_refused=LIMIT)


def test_round_opens_with_the_left_out_participants_that_it_needs() -> None:
    """The round selects as many of them as min_participants lacks."""
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


def test_accepted_update_counts_whatever_is_refused_later() -> None:
    """A second update for the same round is refused as a duplicate, and is no fault."""
    bench = opened_round("a", "b", rules=strict(min_participants=2))
    bench.end("a")
    for _ in range(LIMIT):
        bench.send(c.NoteRefusedUpdate("a", bench.session.trained_by("a"), "late"))
    assert bench.selected == ("a", "b")
    assert faults(bench, "a") == Faults()


def test_in_asp_the_training_of_a_left_out_participant_is_given_up() -> None:
    """The same holds for an earlier round, and while a model is made."""
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


def test_faults_are_kept_of_the_latest_participants_that_have_left() -> None:
    """Members keep theirs. A participant that leaves after a good update has none to keep."""
    state = SelectionState().with_fault("stays", 0)
    names = [f"p{number}" for number in range(MAX_DEPARTED + 2)]
    for name in names:
        state = state.with_fault(name, 0).without_member(name, 0, members=["stays"])
    assert list(state.faults) == ["stays", *names[2:]]
    state = state.with_good_update("p7").without_member("p7", 0, members=["stays"])
    assert "p7" not in state.faults


def test_refusals_count_for_participants_that_owe_an_update() -> None:
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
    assert len(bench.happened(e.UpdateRefused)[0].reason) == MAX_REASON
