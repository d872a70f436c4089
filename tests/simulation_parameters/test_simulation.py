"""A bounded number of seeds; `python -m simulation_parameters --seeds N` runs more."""

import pytest

from simulation_parameters.scenario import from_seed
from simulation_parameters.world import simulate

NUM_SEEDS = 30


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_faults_lose_nothing_that_was_acknowledged(seed: int) -> None:
    """Each pull sees what its consistency promises, and the final model is that of an undisturbed
    run; see oracle.py."""
    simulate(from_seed(seed))


def test_same_seed_gives_the_same_history() -> None:
    first, second = [], []
    simulate(from_seed(7), show=first.append)
    simulate(from_seed(7), show=second.append)
    assert first == second
