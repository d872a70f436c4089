"""Rules that add up: averages, the sum, and the one update there is."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xain_coordinator.aggregation.aggregator import (
    Float64,
    RuleFailed,
    Tile,
    Weights,
    average,
    shares,
    weighted_sum,
)


@dataclass(frozen=True)
class WeightedAverage:
    """Each update weighs as much as it saw samples; all zero means equal weights.

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from
    Decentralized Data, Algorithm 1.
    """

    takes_stale: ClassVar[bool] = True

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return average(tile, shares(weights))

    def check(self, num_updates: int) -> None:
        pass


@dataclass(frozen=True)
class Mean:
    """Every participant counts the same."""

    takes_stale: ClassVar[bool] = False

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return average(tile, np.full(len(tile), 1 / len(tile)))

    def check(self, num_updates: int) -> None:
        pass


@dataclass(frozen=True)
class Sum:
    """Plain sum, as XAIN's ModelSumAggregator."""

    takes_stale: ClassVar[bool] = False

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return weighted_sum(tile, np.ones(len(tile)))

    def check(self, num_updates: int) -> None:
        pass


@dataclass(frozen=True)
class Identity:
    """The one update there is becomes the model."""

    takes_stale: ClassVar[bool] = False

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return np.asarray(tile[0], np.float64)

    def check(self, num_updates: int) -> None:
        if num_updates != 1:
            raise RuleFailed(f"rule 'identity' takes exactly one update, not {num_updates}")
