"""Metric points of a session."""

from tests.unit.core.bench import Bench, make_rules, opened_round

from xain_coordinator.core.vocabulary.values import Point

OF_A_ROUND = {"round_seconds", "num_updates", "update_bytes", "aggregation_seconds"}


def of_rounds(bench: Bench) -> list[Point]:
    """The points that tell of a round."""
    return [point for point in bench.points if OF_A_ROUND & point.fields.keys()]


def test_a_round_is_measured_when_its_model_is_published():
    """In one point with the state that it leads to, so that both have one time."""
    bench = opened_round("a", "b", rules=make_rules(rounds=2, min_participants=2), answers=False)
    opened_at = bench.now
    bench.now += 2.0
    bench.end("a")
    bench.now += 0.5
    bench.end("b")
    assert of_rounds(bench) == []
    bench.now += 0.25
    bench.answer()
    (point,) = of_rounds(bench)
    assert bench.now - opened_at == 2.75
    assert point == Point(
        "coordinator",
        {
            "state": 1,
            "round": 1,
            "connected": 2,
            "selected": 2,
            "number_of_selected_participants": 2,
            "model": 1,
            "round_seconds": 2.75,
            "num_updates": 2,
            "update_bytes": 256,
            "aggregation_seconds": 0.25,
        },
    )
    assert bench.points.count(point) == 1


def test_aggregation_is_timed_over_a_restart():
    """The times are in the journal: a later reader measures the same."""
    bench = opened_round("a", rules=make_rules(rounds=1), answers=False)
    bench.now += 1.0
    bench.end("a")
    bench.restart()
    bench.now += 4.0
    bench.answer()
    (point,) = of_rounds(bench)
    assert (point.fields["round_seconds"], point.fields["aggregation_seconds"]) == (5.0, 4.0)
