"""Pacing rules with a name: they close a round that has enough updates."""

import pytest
from tests.unit.core.bench import Bench, closing, counted, make_rules

from xain_coordinator.core.machine.decider import next_deadline
from xain_coordinator.core.rules.pacing import AfterFirst, noted_every_s
from xain_coordinator.core.view.view import waiting_for
from xain_coordinator.core.vocabulary.values import Phase

JUST = 1e-3
SECONDS = 60.0
DEADLINE_S = 1000.0


def bench_of(*names: str, min_participants: int = 1, **rules: object) -> Bench:
    """A round of these participants that closes 60 s after its first update."""
    chosen = make_rules(
        min_participants=min_participants,
        start_participants=len(names),
        pacing="after_first",
        pacing_options={"seconds": SECONDS},
        deadline_s=DEADLINE_S,
        **rules,  # type: ignore[arg-type]  # fields by name
    )
    bench = Bench(chosen)
    bench.join(*names)
    assert bench.phase is Phase.COLLECTING
    return bench


def test_a_round_closes_a_while_after_its_first_update():
    bench = bench_of("a", "b", "c")
    bench.pass_time(100.0)
    bench.end("b")
    assert next_deadline(bench.session) <= 100.0 + SECONDS
    bench.pass_time(SECONDS / 2)
    bench.end("a")
    bench.pass_time(SECONDS / 2 - 2 * JUST)
    assert bench.session.round == 0
    bench.pass_time(2 * JUST)
    assert closing(bench) == (100.0 + SECONDS, "complete")
    assert counted(bench) == ("a", "b")


def test_initial_weights_are_awaited_from_all():
    """The rule is asked from the first model on."""
    bench = bench_of("a", "b", "c", initial="empty")
    bench.end("a")
    bench.end("b")
    bench.pass_time(2 * SECONDS)
    assert bench.phase is Phase.COLLECTING
    bench.end("c")
    assert counted(bench) == ("a", "b", "c")
    bench.end("a")
    bench.pass_time(SECONDS)
    assert counted(bench) == ("a",)


def test_a_rule_sees_when_each_update_was_accepted():
    bench = bench_of("a", "b", "c")
    for name, at in (("a", 5.0), ("b", 12.0)):
        bench.pass_time(at - bench.now)
        bench.end(name)
    bench.restart()
    updates = bench.session.opened.updates
    assert {name: one.accepted_at for name, one in updates.items()} == {"a": 5.0, "b": 12.0}


def test_session_time_is_recorded_while_the_wait_lasts():
    """A crash puts the closing off by a tenth of the wait."""
    rules = bench_of("a", "b").session.rules
    assert noted_every_s(rules, AfterFirst(SECONDS)) == SECONDS / 10


def test_status_tells_what_the_round_waits_for():
    bench = bench_of("a", "b", "c")
    bench.end("a")
    told = waiting_for(bench.session)
    assert "2 of 3 updates: b, c" in told
    assert "60 s" in told


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wait_must_be_a_positive_number(seconds):
    with pytest.raises(ValueError, match="seconds must be"):
        AfterFirst(seconds)
