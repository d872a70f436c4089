"""Each defect is found by a seed that the code without it passes."""

import pytest

from simulation_parameters.mutations import FOUND_BY, MUTATIONS
from simulation_parameters.scenario import from_seed
from simulation_parameters.world import Failed, simulate


@pytest.mark.parametrize("name", MUTATIONS)
def test_defect_is_found(name: str) -> None:
    scenario = from_seed(FOUND_BY[name])
    simulate(scenario)
    with MUTATIONS[name](), pytest.raises(Failed):
        simulate(scenario)
