"""Server optimisers: they take a rule's result as a pseudo-gradient and step from the present
model.

Their step is x' = x + η · m', or one scaled by coordinate, along the pseudo-gradient
Δ = result - x. What they remember, m and v, are vectors as long as the model, kept and recovered
like models.

Sources: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2; Hsu et al. 2019, Measuring
the Effects of Non-Identical Data Distribution for Federated Visual Classification, for FedAvgM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field

from xain_coordinator.aggregation.aggregator import Float64

MOMENTUM = "momentum"  # m
SECOND_MOMENT = "second_moment"  # v

# Float32 cannot hold the square of a larger difference. A second moment that is cut off is too
# small for its momentum, and the steps of many rounds are too large.
MAX_DIFFERENCE = 1e19

LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Adaptivity = Annotated[float, Field(gt=0, allow_inf_nan=False)]

State = Mapping[str, Float64]


class Optimizer(Protocol):
    """A step on the server. Like a rule, an optimiser computes each column by itself.

    The engine takes no step where the result is further than MAX_DIFFERENCE from the model: one
    hostile update must not determine the steps of many rounds. Statistics take no step either.
    """

    def begin(self) -> Mapping[str, float]:
        """The vectors of the state by name, and the value with which each begins."""

    def step(self, base: Float64, result: Float64, state: State) -> tuple[Float64, State]:
        """Make the next model and state of some columns.

        base: of the global model. result: of the rule. state: with the names of begin(), as the
        returned one. All are (t,) float64 and stay as they are; values that leave the range of the
        dtype in which they are kept stay at the end of the range.
        Runs in several threads at once.
        """


@dataclass(frozen=True)
class FedAvgM:
    """m' = β m + Δ; x' = x + η m'.

    Source: Hsu et al. 2019, section 4.3, with η = 1.
    """

    learning_rate: LearningRate = 1.0  # η
    beta: Decay = 0.9  # β

    def begin(self) -> Mapping[str, float]:
        return {MOMENTUM: 0.0}

    def step(self, base: Float64, result: Float64, state: State) -> tuple[Float64, State]:
        momentum = self.beta * state[MOMENTUM] + _difference(base, result)
        return base + self.learning_rate * momentum, {MOMENTUM: momentum}


@dataclass(frozen=True)
class _Adaptive:
    """m' = β₁ m + (1 - β₁) Δ; v' by the kind; x' = x + η m' / (√v' + τ).

    v begins with τ², as line 1 of Algorithm 2 asks at the least. No correction of the bias, as in
    the source. The learning rate is to be tuned; the source tries 10⁻³ to 10 for each task.
    """

    learning_rate: LearningRate = 0.1  # η
    beta1: Decay = 0.9  # β₁
    tau: Adaptivity = 1e-3  # τ, the degree of adaptivity

    def begin(self) -> Mapping[str, float]:
        begins = {SECOND_MOMENT: self.tau**2}
        return {MOMENTUM: 0.0, **begins} if self.beta1 else begins

    def step(self, base: Float64, result: Float64, state: State) -> tuple[Float64, State]:
        """The model and the moments after one step, which is scaled for each coordinate."""
        delta = _difference(base, result)
        second = self._second_moment(state[SECOND_MOMENT], delta * delta)
        after = {SECOND_MOMENT: second}
        momentum = delta
        if self.beta1:  # without, m' is Δ and nothing need be remembered
            momentum = self.beta1 * state[MOMENTUM] + (1 - self.beta1) * delta
            after[MOMENTUM] = momentum
        # Divided first, so that the learning rate leads to no quotient of two infinite numbers.
        return base + self.learning_rate * (momentum / (np.sqrt(second) + self.tau)), after

    def _second_moment(self, v: Float64, squared: Float64) -> Float64:
        """v' of v and Δ²."""
        raise NotImplementedError


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """v' = v + Δ². As in Adagrad, without momentum unless β₁ is given."""

    beta1: Decay = 0.0

    def _second_moment(self, v: Float64, squared: Float64) -> Float64:
        return v + squared


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """v' = β₂ v + (1 - β₂) Δ²."""

    beta2: Decay = 0.99  # β₂

    def _second_moment(self, v: Float64, squared: Float64) -> Float64:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """v' = v - (1 - β₂) Δ² sign(v - Δ²)."""

    beta2: Decay = 0.99  # β₂

    def _second_moment(self, v: Float64, squared: Float64) -> Float64:
        return v - (1 - self.beta2) * squared * np.sign(v - squared)


def _difference(base: Float64, result: Float64) -> Float64:
    """The difference Δ of result and base, clipped to finite numbers: steps with an infinite one
    would make NaN."""
    largest = np.finfo(np.float64).max
    difference = result - base
    return np.clip(difference, -largest, largest, out=difference)


OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedavgm": FedAvgM,
    "fedyogi": FedYogi,
}
