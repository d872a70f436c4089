"""The simulation with scenarios that hypothesis draws, so that a failure shrinks to the few faults
that it takes."""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulation.network import Noise
from simulation.scenario import EVERYBODY, Fault, Kind, Scenario
from simulation.world import simulate

pytestmark = pytest.mark.timeout(600)  # many runs in one test, on whatever machine

HORIZON_S = 30.0


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small sessions; the simplest has one round, one participant and no faults."""
    n = draw(st.integers(1, 3))
    least = draw(st.integers(1, n))
    faults = draw(
        st.lists(
            st.builds(
                Fault,
                kind=st.sampled_from(Kind),
                at=st.floats(0.0, HORIZON_S),
                seconds=st.sampled_from((0.1, 1.0, 10.0)),
                count=st.integers(0, 30),
                who=st.integers(EVERYBODY, n - 1),
            ),
            max_size=6,
        )
    )
    return Scenario(
        seed=draw(st.integers(0, 3)),
        rounds=draw(st.integers(1, 3)),
        num_participants=n,
        min_participants=least,
        start_participants=draw(st.integers(least, n)),
        fraction=Fraction(1),
        initial=draw(st.sampled_from(("empty", "workload"))),
        train_s=tuple(draw(st.sampled_from((1.0, 0.1, 8.0))) for _ in range(n)),
        is_inline=draw(st.booleans()),
        keeps_results=draw(st.booleans()),
        noise=Noise(lost=draw(st.sampled_from((0.0, 0.1))), slow_s=1.0),
        faults=tuple(faults),
        quiet_at=HORIZON_S + 10.0,
    )


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(scenarios())
def test_nothing_acknowledged_is_lost_in_any_plan_of_faults(scenario: Scenario) -> None:
    simulate(scenario)
