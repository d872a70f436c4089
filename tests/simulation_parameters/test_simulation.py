"""A bounded number of seeds; `python -m simulation_parameters --seeds N` runs more."""

from dataclasses import replace

import pytest

from simulation_parameters.scenario import from_seed
from simulation_parameters.world import simulate

NUM_SEEDS = 30


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_faults_lose_nothing_that_was_acknowledged(seed: int) -> None:
    """Each pull sees what its consistency promises, and the final model is that of an undisturbed
    run; see oracle.py."""
    simulate(from_seed(seed))


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_tenth_of_all_messages_is_lost(
    num_servers: int, num_workers: int, num_replicas: int
) -> None:
    """Each message breaks its connection with a chance of 10 %, from the first clock to the last,
    and the same is promised. A backup is filled over many connections."""
    scenario = replace(
        from_seed(num_servers),
        staleness=0,
        num_servers=num_servers,
        num_workers=num_workers,
        num_replicas=num_replicas,
        num_clocks=5,
        compute_s=0.05,
        loss=0.1,
        events=(),
        quiet_at=1000.0,
    )
    assert simulate(scenario).trained_s < scenario.quiet_at


def test_same_seed_gives_the_same_history() -> None:
    first, second = [], []
    simulate(from_seed(7), show=first.append)
    simulate(from_seed(7), show=second.append)
    assert first == second
