"""How the updates of a round become one model, chosen by name in `[aggregation]`.

A rule sees one tile, the same slice of every update, and knows nothing of files or rounds. It must
treat each column by itself, so that the result does not depend on where tiles begin.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Tile = NDArray[np.floating[Any]]
Float64 = NDArray[np.float64]
Weights = NDArray[np.int64] | Float64


class RuleFailed(ValueError):
    """A rule cannot make a model of these updates, however often it is tried."""


class Aggregator(Protocol):
    """A rule.

    takes_stale: it is an average by the weights it is given, so that a stale update may weigh less
        and the global model may be one of its rows.
    """

    takes_stale: ClassVar[bool]

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        """Combine a slice of every update.

        tile: (k, t), one row per participant, in the order of their names.
        weights: (k,), non-negative: n_k, or what staleness.py makes of it.
        Returns (t,) float64.
        """

    def check(self, num_updates: int) -> None:
        """Raises RuleFailed if the rule cannot work with so many updates."""


class WeightedAverage:
    """Each update weighs as much as it saw samples; all zero means equal weights.

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from
    Decentralized Data, Algorithm 1.
    """

    takes_stale: ClassVar[bool] = True

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        total = weights.sum(dtype=np.float64)  # of n_k exact below 2^53, and never too large
        k = len(tile)
        shares = weights / total if total else np.full(k, 1 / k)
        return _average(tile, shares)

    def check(self, num_updates: int) -> None:
        pass


class Mean:
    """Every participant counts the same."""

    takes_stale: ClassVar[bool] = False

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return _average(tile, np.full(len(tile), 1 / len(tile)))

    def check(self, num_updates: int) -> None:
        pass


class Sum:
    """Plain sum, as XAIN's ModelSumAggregator."""

    takes_stale: ClassVar[bool] = False

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return _weighted_sum(tile, np.ones(len(tile)))

    def check(self, num_updates: int) -> None:
        pass


class Identity:
    """The one update there is becomes the model."""

    takes_stale: ClassVar[bool] = False

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return np.asarray(tile[0], np.float64)

    def check(self, num_updates: int) -> None:
        if num_updates != 1:
            raise RuleFailed(f"rule 'identity' takes exactly one update, not {num_updates}")


def _average(tile: Tile, shares: Float64) -> Float64:
    """shares: (k,), non-negative, of sum 1."""
    total = _weighted_sum(tile, shares)
    # An average lies between the values it is made of. Where they are the largest there are, the
    # rounding of weights and sums can lead out of the dtype all the same.
    largest = np.finfo(tile.dtype).max
    return np.clip(total, -largest, largest, out=total, dtype=np.float64)


def _weighted_sum(tile: Tile, weights: Float64) -> Float64:
    # Row by row: a matrix product would sum in an order that depends on the shape of the tile, and
    # the result must be the same to the bit wherever tiles begin.
    total = np.zeros(tile.shape[1], np.float64)
    scaled = np.empty_like(total)
    with np.errstate(over="ignore", invalid="ignore"):  # the engine looks at what comes out
        for row, weight in zip(tile, weights, strict=True):
            np.multiply(row, weight, out=scaled, dtype=np.float64)
            total += scaled
    return total


RULES: Mapping[str, type[Aggregator]] = {
    "identity": Identity,
    "mean": Mean,
    "sum": Sum,
    "weighted_average": WeightedAverage,
}
