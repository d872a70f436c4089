"""An accepted update that is damaged in the store counts no more, and is asked for again."""

from tests.unit.core.bench import (
    DEADLINE_S,
    IDLE_S,
    Bench,
    answer_to,
    make_rules,
    opened_round,
    timed_round,
)

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase

REASON = "0/b has the digest 1 in the store, not 2"


def damage(bench: Bench, *names: str) -> None:
    """The updates of these turn out to be damaged."""
    updates = bench.session.opened.updates
    keys = [updates[name].weights.ref.key for name in names]
    bench.send(c.NoteDamagedUpdates(dict.fromkeys(keys, REASON)))


def closed_round(*names: str) -> Bench:
    """A round in which all have handed in, and the model is being made."""
    bench = opened_round(*names, answers=False)
    bench.end_all()
    assert bench.phase is Phase.AGGREGATING
    bench.owed.clear()
    return bench


def test_only_the_sender_is_asked_again():
    bench = closed_round("a", "b", "c")
    damage(bench, "b")
    assert bench.notified
    assert (bench.phase, bench.session.round) == (Phase.COLLECTING, 0)
    told = {name: bench.heartbeat(name) for name in "abc"}
    assert [one.phase for one in told.values()] == 3 * [Phase.COLLECTING]
    assert [name for name, one in told.items() if one.update_damaged] == ["b"]
    assert [name for name, one in told.items() if not one.update_accepted] == ["b"]
    assert not bench.start("b").update_accepted


def test_same_update_makes_the_same_model():
    """The aggregation is given the same work, whatever happens in between."""
    bench = closed_round("a", "b", "c")
    before = bench.aggregates[-1]
    damage(bench, "b")
    bench.end("b", "b@0")
    assert bench.phase is Phase.AGGREGATING
    assert bench.aggregates[-1] == before
    assert not bench.heartbeat("b").update_damaged


def test_update_that_was_replaced_meanwhile_counts():
    """The news of the damage may be old, or come twice."""
    bench = closed_round("a", "b")
    key = bench.session.opened.updates["b"].weights.ref.key
    bench.send(c.NoteDamagedUpdates({f"{key}.another": REASON}))
    assert bench.phase is Phase.AGGREGATING
    assert not bench.happened(e.UpdateDamaged)
    bench.send(answer_to(bench.aggregates[-1]))
    bench.send(c.NoteDamagedUpdates({key: REASON}))
    assert not bench.happened(e.UpdateDamaged)


def test_damage_in_an_overdue_round_does_not_put_off_the_end_of_its_wait():
    """Otherwise updates that are damaged again and again would keep a session waiting for ever."""
    bench = timed_round("a", "b", min_participants=2)
    bench.answers = False
    bench.end_all()
    damage(bench, "b")
    bench.pass_time(DEADLINE_S)
    bench.pass_time(50.0)
    assert bench.session.gives_up_at == DEADLINE_S + IDLE_S
    bench.end("b", "another")
    assert bench.phase is Phase.AGGREGATING
    damage(bench, "b")
    assert bench.phase is Phase.COLLECTING
    assert bench.session.gives_up_at == DEADLINE_S + IDLE_S


def test_late_update_of_an_asynchronous_session_is_asked_for_of_its_own_round():
    rules = make_rules(
        rounds=9,
        start_participants=3,
        min_participants=2,
        consistency="ssp",
        staleness=2,
        buffer_size=2,
    )
    bench = Bench(rules)
    bench.join("a", "b", "c")
    bench.end("a")
    bench.end("b")
    assert bench.session.round == 1
    bench.answers = False
    bench.end("c")
    bench.end("a")
    assert bench.phase is Phase.AGGREGATING
    damage(bench, "c")
    assert bench.start("c").round == 0
    assert bench.heartbeat("c").update_damaged
    bench.end("c")
    assert bench.aggregates[-1].staleness == (0, 1)


def test_reason_stands_in_the_record_of_the_round():
    """The reason stays after a second update, and the first contribution counts no more."""
    bench = closed_round("a", "b", "c")
    damage(bench, "b")
    history = bench.history
    record = history.rounds[-1]
    assert record.contributors == ("a", "c")
    assert (record.damaged, record.num_samples) == ({"b": REASON}, 2)
    assert history.accounts.by_name["b"].num_counted == 0
    bench.end("b", "b@0")
    bench.send(answer_to(bench.aggregates[-1]))
    history = bench.history
    record = history.rounds[0]
    assert set(record.contributors) == {"a", "b", "c"}
    assert (record.damaged, record.num_samples) == ({"b": REASON}, 3)
    assert history.accounts.by_name["b"].num_counted == 1
