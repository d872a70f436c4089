"""Cut the layers of a network into stages of balanced cost."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import inf

from xain_workloads.errors import DataError


def stages_of(cuts: Sequence[int], num_layers: int) -> list[slice]:
    """The layers of each stage. cuts: position of the first layer of each stage but the first."""
    return [slice(first, last) for first, last in zip([0, *cuts], [*cuts, num_layers], strict=True)]


def require_weights(cuts: Sequence[int], has_weights: Sequence[bool]) -> None:
    """Raise DataError if a stage has no weights, since its participant would hand in nothing."""
    for number, layers in enumerate(stages_of(cuts, len(has_weights))):
        if not any(has_weights[layers]):
            raise DataError(
                f"stage {number}, layers {layers.start} to {layers.stop - 1}, has no weights;"
                f" the network has {len(has_weights)} layers, {sum(has_weights)} of them with"
                " weights: choose other cuts, or fewer stages"
            )


def balanced_cuts(
    costs: Sequence[float], has_weights: Sequence[bool], num_stages: int
) -> tuple[int, ...]:
    """The cuts with the smallest cost of the most expensive stage.

    costs: of each layer. Each stage gets a layer with weights. Of cuts that are as good as each
    other the first ones are taken, so that equal costs give equal cuts.
    Raises DataError if the layers with weights are fewer than the stages.
    """
    if num_stages > sum(has_weights):
        raise DataError(
            f"the network has {sum(has_weights)} layers with weights, and cannot be cut into"
            f" {num_stages} stages"
        )
    num_layers = len(costs)
    cost_before = [0.0, *accumulate(costs)]
    weights_before = [0, *accumulate(map(int, has_weights))]

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Cost and cuts of the layers from `first` on."""
        if weights_before[-1] == weights_before[first]:
            return inf, ()
        if stages == 1:
            return cost_before[-1] - cost_before[first], ()
        found: tuple[float, tuple[int, ...]] = (inf, ())
        for cut in range(first + 1, num_layers):
            if weights_before[cut] == weights_before[first]:
                continue
            rest, cuts = best(cut, stages - 1)
            cost = max(cost_before[cut] - cost_before[first], rest)
            if cost < found[0]:
                found = cost, (cut, *cuts)
        return found

    return best(0, num_stages)[1]
