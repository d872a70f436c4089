"""Rules that weigh each update by its distance from the global model and from the other updates.

Whatever these rules iterate towards is a sum of the updates and the global model, each with a
weight. Its distance to any update then follows from the products of the updates' differences to
the global model alone, so one survey answers all that is asked on the way, and the model itself is
made in one more pass.

Sums over columns are those of einsum's own loops. BLAS is faster, but orders its sums by the
processor and by the number of its threads: after a crash, a start on another machine would make
another model, which could not be published.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from xain_coordinator.aggregation.aggregator import (
    AnyNumber,
    Float64,
    RuleFailed,
    Tile,
    Weights,
    average,
    shares,
)


class Weighing(AnyNumber):
    """Base of the rules of this file: the average by the weights that follow from a survey."""

    needs_base: ClassVar[bool] = False

    def survey(self, differences: Float64) -> Float64:
        return gram(differences)

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return average(tile, np.asarray(weights, np.float64))


@dataclass(frozen=True)
class Krum(Weighing):
    """The one update that has the n - f - 2 others nearest to it becomes the model.

    With n >= 2f + 3 updates, f of them from participants that send whatever they like, it is near
    those of the others. Sample counts play no part: they too could be made up.

    num_byzantine: f.
    Source: Blanchard et al. 2017, Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent, section 4.
    """

    num_byzantine: Annotated[int, Field(ge=0)] = 1

    def check(self, num_updates: int) -> None:
        _check_byzantine("krum", self.num_byzantine, num_updates)

    def weigh(self, surveyed: Float64, num_samples: NDArray[np.int64]) -> Float64:
        return _equal_weights(len(surveyed), _by_score(surveyed, self.num_byzantine)[:1])


@dataclass(frozen=True)
class MultiKrum(Weighing):
    """The mean of the updates that Krum would choose first.

    num_byzantine: f, as in Krum.
    num_selected: m, how many, at most n - f: with more, an update of the f would always be among
        them. 0: n - f - 2, the most for which El Mhamdi et al. prove a bound.
    Sources: Blanchard et al. 2017, section 5, whose experiments average n - f; El Mhamdi et al.
    2018, The Hidden Vulnerability of Distributed Learning in Byzantium, for m = n - f - 2.
    """

    num_byzantine: Annotated[int, Field(ge=0)] = 1
    num_selected: Annotated[int, Field(ge=0)] = 0

    def check(self, num_updates: int) -> None:
        """Check that there are enough updates for f, and that no more are to be selected than n -
        f. Raises RuleFailed."""
        _check_byzantine("multi_krum", self.num_byzantine, num_updates)
        most = num_updates - self.num_byzantine
        if self.num_selected > most:
            raise RuleFailed(
                f"rule 'multi_krum' with num_selected = {self.num_selected} can select at most "
                f"n - f = {most} of {num_updates} updates"
            )

    def weigh(self, surveyed: Float64, num_samples: NDArray[np.int64]) -> Float64:
        n = len(surveyed)
        m = self.num_selected or n - self.num_byzantine - 2
        return _equal_weights(n, _by_score(surveyed, self.num_byzantine)[:m])


@dataclass(frozen=True)
class GeometricMedian(Weighing):
    """The point with the least sum of distances to the updates, by smoothed Weiszfeld iterations.

    Fewer than half of the participants, whatever they send, cannot carry it away. Every participant
    counts the same, unlike in the source: who makes up a sample count would be the majority.

    The iterations end long before they arrive if they begin far away, as the mean does where a few
    updates are huge. They are therefore run from two points: the mean, and the mean of the
    n / 2 + 1 updates with the least sums of distances to the others. The better end is kept.

    max_iterations: of each run; it ends earlier where the weights do not change any more.
    smoothing: ν, below which a distance counts as ν, so that nothing is divided by zero; not less
        than 1e-100.
    Source: Pillutla et al. 2022, Robust Aggregation for Federated Learning, Algorithm 2.
    """

    max_iterations: Annotated[int, Field(ge=1, le=10_000)] = 1000
    smoothing: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6

    def __post_init__(self) -> None:
        if self.smoothing < _LEAST_SMOOTHING:
            raise ValueError(f"smoothing must not be less than {_LEAST_SMOOTHING}")

    def weigh(self, surveyed: Float64, num_samples: NDArray[np.int64]) -> Float64:
        """The weights of the geometric median: iterations begin from the majority and from the
        mean, and the better end counts. None for the global model, and for updates whose norm is no
        finite number. Raises RuleFailed if no update has one."""
        usable, products = _usable(surveyed)
        num_usable = len(products)
        majority = np.zeros(num_usable)
        among = _by_distances(products)[: num_usable // 2 + 1]
        majority[among] = 1 / len(among)
        weights = self._descend(products, majority)
        from_mean = self._descend(products, np.full(num_usable, 1 / num_usable))
        # Only if it is clearly better. Beside a huge distance the sum shows nothing of small ones,
        # and a point far off can seem as good.
        least = _distances_to(products, weights).sum() * (1 - _SAME_SUM)
        if _distances_to(products, from_mean).sum() < least:
            weights = from_mean
        return _spread(len(surveyed), usable, weights, of_base=0.0)

    def _descend(self, products: Float64, weights: Float64) -> Float64:
        """The weights at which the iterations end that begin with these weights."""
        for _ in range(self.max_iterations):
            inverse = 1 / np.maximum(self.smoothing, _distances_to(products, weights))
            before, weights = weights, inverse / inverse.sum()
            # Each by itself: the little that is left of an outlier's weight can be what matters.
            if (np.abs(weights - before) <= _SETTLED * before).all():
                break
        return weights


@dataclass(frozen=True)
class NormClipping(Weighing):
    """The weighted average of updates that were each drawn towards the global model, until they lie
    within a radius of it.

    One update then moves the model by no more than its share of the radius, however large it is.

    threshold: the radius, a Euclidean norm; 0: the least that takes in a share `quantile` of this
        round's updates as they are.
    quantile: 0.5 unless it is given, which it cannot be beside a threshold: nothing would read it.
        Unlike in Andrew et al., where the threshold follows a noisy count from round to round,
        because norms are secret there, it is that of the norms themselves.
    Sources: Sun et al. 2019, Can You Really Backdoor Federated Learning?, section 3.2; Andrew et
    al. 2021, Differentially Private Learning with Adaptive Clipping.
    """

    needs_base: ClassVar[bool] = True

    threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    quantile: Annotated[float, Field(gt=0, le=1)] | None = None

    def __post_init__(self) -> None:
        """Check that threshold and quantile are not both set; without either, quantile is 0.5."""
        if self.threshold and self.quantile is not None:
            raise ValueError(
                "nothing would read quantile beside a threshold; leave one of them out"
            )
        if not self.threshold and self.quantile is None:
            # Kept with the session like any other option, so that a later default changes none.
            object.__setattr__(self, "quantile", 0.5)

    def survey(self, differences: Float64) -> Float64:
        return squares(differences)

    def weigh(self, surveyed: Float64, num_samples: NDArray[np.int64]) -> Float64:
        """Each update's share of the samples, less what clipping takes, which the global model
        gets. Raises RuleFailed if no finite threshold follows from the quantile."""
        norms = np.sqrt(surveyed)
        radius = self.threshold
        if not radius:
            assert self.quantile is not None
            radius = float(np.sort(norms)[math.ceil(self.quantile * len(norms)) - 1])
        if not math.isfinite(radius):
            raise RuleFailed(
                f"rule 'norm_clipping' with quantile = {self.quantile} finds no threshold: more "
                "updates than it leaves out have a norm beyond the range of numbers"
            )
        weights = shares(num_samples) * _clipping(norms, radius)
        return np.append(weights, 1 - weights.sum())


@dataclass(frozen=True)
class CentredClipping(Weighing):
    """Centred clipping: from the global model, step after step by the mean of the differences to
    the updates, each clipped to a radius around the point that is reached.

    Every participant counts the same: sample counts too could be made up.

    tau: the radius τ, a Euclidean norm. An update of an honest participant should often lie within.
        0: in each step the median of the distances from the point that is reached to the updates
        (of an even number of updates the lower one). As long as fewer than half of the
        participants lie, it is no larger than the distance to some honest update.
    num_iterations: L; one is often enough, since the global model is a good centre.
    Source: Karimireddy et al. 2021, Learning from History for Byzantine Robust Optimization,
    Algorithm 2, with the global model in the place of the aggregate before.
    """

    needs_base: ClassVar[bool] = True

    tau: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    num_iterations: Annotated[int, Field(ge=1, le=10_000)] = 1

    def weigh(self, surveyed: Float64, num_samples: NDArray[np.int64]) -> Float64:
        """The weights of the point that the steps reach; the global model gets what the updates
        leave of 1. Raises RuleFailed if no update has a finite norm."""
        # An update at an infinite distance would pull with all of τ in an unknown direction: it
        # is left out, and counts as one that lies at the centre.
        usable, products = _usable(surveyed)
        n = len(surveyed)
        weights = np.zeros(len(products))
        for _ in range(self.num_iterations):
            distances = _distances_to(products, weights)
            radius = self.tau or _lower_median(distances, n)
            steps = _clipping(distances, radius) / n
            weights = weights * (1 - steps.sum()) + steps
        return _spread(n, usable, weights, of_base=1 - float(weights.sum()))


_SETTLED = 1e-12  # a change of a weight that no dtype of a model shows
_LEAST_SMOOTHING = 1e-100  # of a smaller one, k times 1/ν could be beyond the range of numbers
_SAME_SUM = 1e-9  # more than the rounding of distances between huge updates and small ones


def squares(differences: Float64) -> Float64:
    """(k, b) -> (k,): the squared norms."""
    with np.errstate(over="ignore"):
        norms: Float64 = np.einsum("kb,kb->k", differences, differences)
    return norms


def gram(differences: Float64) -> Float64:
    """(k, b) -> (k, k): the products of any two."""
    k = len(differences)
    products = np.empty((k, k), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # see _usable
        for i, row in enumerate(differences):
            products[i, : i + 1] = np.einsum("b,kb->k", row, differences[: i + 1])
            products[:i, i] = products[i, :i]
    return products


def _usable(products: Float64) -> tuple[NDArray[np.intp], Float64]:
    """Indices of the updates with a finite norm, and the products of these updates. Raises
    RuleFailed if there is none; a single endless norm would make the rest of the calculation
    meaningless."""
    usable = np.flatnonzero(np.isfinite(products.diagonal()))
    if not len(usable):
        raise RuleFailed("the squared norm of every update is beyond the range of numbers")
    if len(usable) == len(products):
        return usable, products  # as nearly always: no second table
    return usable, products[np.ix_(usable, usable)]


def _distances_to(products: Float64, weights: Float64) -> Float64:
    """Distances from each update to the point Σ weights_i · difference_i: (k,)."""
    to_each = np.einsum("ij,j->i", products, weights)
    of_point = (to_each * weights).sum()
    # Rounding can leave less than nothing of a distance of zero.
    squared = products.diagonal() - 2 * to_each + of_point
    return np.asarray(np.sqrt(np.maximum(squared, 0)))


def _lower_median(distances: Float64, n: int) -> float:
    """The median of n distances, of which those that are not given are infinite; of the given ones
    the largest where it is infinite itself."""
    return float(np.sort(distances)[min((n + 1) // 2, len(distances)) - 1])


def _clipping(norms: Float64, radius: float) -> Float64:
    """The factors by which vectors of these norms are multiplied to fit into the radius."""
    clipped: Float64 = radius / np.maximum(norms, radius) if radius else 1.0 * (norms == 0)
    return clipped


def _by_score(products: Float64, f: int) -> NDArray[np.intp]:
    """Indices of the updates by their sum of squared distances to the n - f - 2 nearest others, the
    least first; equal ones in the order of their names."""
    n = len(products)
    usable, among = _usable(products)
    scores = np.full(n, np.inf)
    num_nearest = n - f - 2
    for i, index in enumerate(usable):
        distances = _squared_distances(among, i)
        distances[i] = np.inf  # not one of the others
        if len(distances) >= num_nearest:
            scores[index] = np.sort(distances)[:num_nearest].sum()
    return np.argsort(scores, kind="stable")


def _by_distances(products: Float64) -> NDArray[np.intp]:
    """Indices of the updates by their sum of distances to the others, the least first; equal ones
    in the order of their names."""
    sums = [np.sqrt(_squared_distances(products, i)).sum() for i in range(len(products))]
    return np.argsort(sums, kind="stable")


def _squared_distances(products: Float64, i: int) -> Float64:
    """Squared distances of update i to each: (k,). Row by row, because a table of them all would be
    as large again as that of the products."""
    norms, row = products.diagonal(), products[i]
    with np.errstate(over="ignore"):
        squared = (norms[i] - row) + (norms - row)
    # Rounding can leave less than nothing of a distance of zero.
    return np.asarray(np.maximum(squared, 0))


def _equal_weights(n: int, chosen: NDArray[np.intp]) -> Float64:
    """Equal weights for the chosen ones of n updates, none for the others and the global model: (n
    + 1,)."""
    return _spread(n, chosen, np.full(len(chosen), 1 / len(chosen)), of_base=0.0)


def _spread(n: int, which: NDArray[Any], weights: Float64, *, of_base: float) -> Float64:
    """(n + 1,): the weights of some updates, none for the others, and that of the global model."""
    spread = np.zeros(n + 1)
    spread[which] = weights
    spread[n] = of_base
    return spread


def _check_byzantine(rule: str, f: int, num_updates: int) -> None:
    """Check that there are enough updates for f from participants that may send anything. Raises
    RuleFailed."""
    least = 2 * f + 3
    if num_updates < least:
        raise RuleFailed(
            f"rule {rule!r} with num_byzantine = {f} needs n >= 2f + 3 = {least} updates, "
            f"not {num_updates}"
        )
