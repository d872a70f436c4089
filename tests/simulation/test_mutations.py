"""The tester is tested: a defect that is put in on purpose is found.

If one is not found any more, then the simulation has lost its eye for it, or the scenarios in which
it matters have become rare.
"""

import re
from dataclasses import replace

import pytest

from simulation.mutations import FIRST_SEED, MUTATIONS, SEEN, SHOWS_IN, TRAVELS
from simulation.network import Noise
from simulation.scenario import Scenario, from_seed
from simulation.world import Failed, simulate

pytestmark = pytest.mark.timeout(600)  # many runs in one test, on whatever machine

NUM_SEEDS = 300  # within which each must be found; most are within a few dozen


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_defect_is_found(name):
    with MUTATIONS[name](), pytest.raises(Failed) as caught:
        _simulate_all(name)
    assert re.search(SEEN[name], caught.value.what)


def _simulate_all(name: str) -> None:
    first = FIRST_SEED.get(name, 0)
    for seed in range(first, first + NUM_SEEDS):
        simulate(_shown(name, from_seed(seed)))


def _shown(name: str, scenario: Scenario) -> Scenario:
    """A scenario in which this defect is to be found."""
    scenario = replace(scenario, **TRAVELS.get(name, {}))
    if name not in SHOWS_IN:
        return scenario
    kind = SHOWS_IN[name]
    if kind is None:
        return replace(scenario, faults=(), gone=(), noise=Noise())
    return replace(scenario, faults=tuple(replace(f, kind=kind) for f in scenario.faults))
