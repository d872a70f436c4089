"""Averaging rules: weighted average, gradient step, mean, sum, and the single update of
`identity`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from xain_coordinator.aggregation.aggregator import (
    AnyNumber,
    Float64,
    RuleFailed,
    Tile,
    Weights,
    average,
    shares,
    weighted_sum,
)


@dataclass(frozen=True)
class WeightedAverage(AnyNumber):
    """Each update weighs as much as it saw samples; all zero means equal weights.

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from
    Decentralized Data, Algorithm 1.
    """

    takes_stale: ClassVar[bool] = True

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return average(tile, shares(weights))


@dataclass(frozen=True)
class Gradient(WeightedAverage):
    """Updates are gradients of the loss at the global model. Their mean, weighted by samples, is
    the gradient over all rows, and the model after a round is x - η g. One round is one step.

    learning_rate: η of the t-th step, from 1: eta0 ("constant"), eta0 / t**power_t ("invscaling"),
        1 / (alpha * (t0 + t - 1)) ("optimal"), or eta0 divided by 5 whenever the loss has not
        fallen by tol in n_iter_no_change steps ("adaptive").
    tol: the session ends when the loss has not fallen by so much in n_iter_no_change steps; 0: the
        loss ends no session. With "adaptive" it ends when the rate has become 1e-6.
    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD; the schedules are those of
    scikit-learn's SGDClassifier.
    """

    takes_stale: ClassVar[bool] = False

    learning_rate: Literal["constant", "invscaling", "optimal", "adaptive"] = "constant"
    eta0: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    power_t: Annotated[float, Field(ge=0, le=100)] = 0.25
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 1e-4
    tol: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    n_iter_no_change: Annotated[int, Field(ge=1, le=1_000_000)] = 5


@dataclass(frozen=True)
class Mean(AnyNumber):
    """Unweighted mean: each update has the same weight."""

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return average(tile, np.full(len(tile), 1 / len(tile)))


@dataclass(frozen=True)
class Sum(AnyNumber):
    """Plain sum, as XAIN's ModelSumAggregator."""

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return weighted_sum(tile, np.ones(len(tile)))


@dataclass(frozen=True)
class Identity(AnyNumber):
    """The one update there is becomes the model."""

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return np.asarray(tile[0], np.float64)

    def check(self, num_updates: int) -> None:
        if num_updates != 1:
            raise RuleFailed(f"rule 'identity' takes exactly one update, not {num_updates}")
