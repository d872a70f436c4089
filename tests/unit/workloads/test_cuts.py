"""Cuts of a network into stages."""

from itertools import combinations, pairwise
from random import Random

import pytest

from xain_workloads.errors import DataError
from xain_workloads.tables.cuts import balanced_cuts, require_weights, stages_of


def test_stages_are_the_layers_between_the_cuts():
    assert stages_of((2, 3), 5) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert stages_of((), 5) == [slice(0, 5)]


def test_stage_without_weights_is_refused():
    require_weights((2,), [True, False, True])
    with pytest.raises(DataError, match="stage 1, layers 1 to 1, "):
        require_weights((1, 2), [True, False, True])


@pytest.mark.parametrize("seed", range(30))
def test_most_expensive_stage_of_balanced_cuts_is_as_cheap_as_that_of_any_others(seed):
    chance = Random(seed)
    num_layers = chance.randint(2, 8)
    costs = [float(chance.randint(1, 9)) for _ in range(num_layers)]
    has_weights = [chance.random() < 0.6 for _ in range(num_layers)]
    for num_stages in range(1, sum(has_weights) + 1):
        cuts = balanced_cuts(costs, has_weights, num_stages)
        assert len(cuts) == num_stages - 1
        require_weights(cuts, has_weights)
        possible = [
            max(sum(costs[first:last]) for first, last in pairwise((0, *others, num_layers)))
            for others in combinations(range(1, num_layers), num_stages - 1)
            if all(any(has_weights[a:b]) for a, b in pairwise((0, *others, num_layers)))
        ]
        dearest = max(sum(costs[one]) for one in stages_of(cuts, num_layers))
        assert dearest == min(possible)


def test_more_stages_than_layers_with_weights_are_refused():
    with pytest.raises(DataError, match="2 layers with weights"):
        balanced_cuts([1.0, 1.0, 1.0], [True, False, True], 3)
