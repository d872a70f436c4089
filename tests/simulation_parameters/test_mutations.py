"""Each defect is found by a scenario that the code without it passes."""

from dataclasses import replace

import pytest

from simulation_parameters.mutations import FOUND_BY, MUTATIONS
from simulation_parameters.scenario import Scenario, from_seed
from simulation_parameters.world import Failed, simulate

NUM_SEEDS = 8  # of a scenario that is made for a defect


@pytest.mark.parametrize("name", MUTATIONS)
def test_defect_is_found(name):
    found_by = FOUND_BY[name]
    if isinstance(found_by, Scenario):
        scenarios = [replace(found_by, seed=seed) for seed in range(NUM_SEEDS)]
    else:
        scenarios = [from_seed(found_by)]
    for scenario in scenarios:
        simulate(scenario)
    with MUTATIONS[name]():
        assert any(fails(scenario) for scenario in scenarios)


def fails(scenario: Scenario) -> bool:
    try:
        simulate(scenario)
    except Failed:
        return True
    return False
