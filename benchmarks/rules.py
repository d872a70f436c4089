"""Rules of aggregation for the benchmarks, each beside numpy doing the same in memory.

The numpy versions are what one would write on arrays that are there: plain expressions on whole
arrays, float64 where the rules use it, no thought of memory. They must come to the same model.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.aggregation.optimizers import OPTIMIZERS
from xain_coordinator.aggregation.rules import RULES

Array = NDArray[Any]
# updates (k, d), num_samples (k,), base (d,) -> (d,)
InMemory = Callable[[Array, Array, Array], Array]

NUM_BYZANTINE = 1
TRIM = 1
TAU = 10.0
QUANTILE = 0.5
SETTLED = 1e-12


@dataclass(frozen=True, slots=True)
class Case:
    """A rule, perhaps with an optimiser over it.

    in_memory: None for what this script does not know.
    participants: how many it takes, if not any number. least_updates: how many at least.
    is_linear: a weighted sum, which need not look at several updates at once.
    """

    name: str
    rule: str
    in_memory: InMemory | None = None
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    optimizer: str = ""
    participants: int | None = None
    least_updates: int = 1
    is_linear: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """Settings of the coordinator, by dotted key."""
        chosen: dict[str, object] = {"aggregation.rule": self.rule}
        chosen.update({f"aggregation.options.{key}": one for key, one in self.options.items()})
        if self.optimizer:
            chosen["aggregation.optimizer"] = self.optimizer
        return chosen


def cases() -> Iterator[Case]:
    """Every rule, and every optimiser over the weighted average."""
    known = {case.rule: case for case in _RULES}
    for name in sorted(RULES):
        yield known.get(name, Case(name, name))
    for name in sorted(OPTIMIZERS):
        step = _STEPS.get(name)
        in_memory = None if step is None else _stepping(step)
        yield Case(
            f"weighted_average, {name}",
            "weighted_average",
            in_memory,
            optimizer=name,
            is_linear=True,
        )


def weighted_average(updates: Array, num_samples: Array, base: Array) -> Array:
    total = np.zeros(updates.shape[1])
    for row, share in zip(updates, num_samples / num_samples.sum(), strict=True):
        total += share * row.astype(np.float64)
    return total


def mean(updates: Array, num_samples: Array, base: Array) -> Array:
    return updates.mean(axis=0, dtype=np.float64)


def plain_sum(updates: Array, num_samples: Array, base: Array) -> Array:
    return updates.sum(axis=0, dtype=np.float64)


def identity(updates: Array, num_samples: Array, base: Array) -> Array:
    return updates[0].copy()


def median(updates: Array, num_samples: Array, base: Array) -> Array:
    return np.median(updates, axis=0)


def trimmed_mean(updates: Array, num_samples: Array, base: Array) -> Array:
    return np.sort(updates, axis=0)[TRIM:-TRIM].mean(axis=0, dtype=np.float64)


def _by_score(updates: Array) -> Array:
    rows = updates.astype(np.float64)
    products = rows @ rows.T
    norms = products.diagonal()
    distances = norms + norms[:, np.newaxis] - 2 * products
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : len(rows) - NUM_BYZANTINE - 2]
    return np.argsort(nearest.sum(axis=1), kind="stable")


def krum(updates: Array, num_samples: Array, base: Array) -> Array:
    return updates[_by_score(updates)[0]]


def multi_krum(updates: Array, num_samples: Array, base: Array) -> Array:
    chosen = _by_score(updates)[: len(updates) - NUM_BYZANTINE - 2]
    return updates[chosen].mean(axis=0, dtype=np.float64)


def geometric_median(updates: Array, num_samples: Array, base: Array) -> Array:
    """The distances of one iteration from those of the updates to each other."""
    rows = updates - base.astype(np.float64)
    products = rows @ rows.T
    weights = np.full(len(rows), 1 / len(rows))
    for _ in range(100):
        to_each = products @ weights
        distances = np.sqrt(products.diagonal() - 2 * to_each + weights @ to_each)
        before, weights = weights, (1 / distances) / (1 / distances).sum()
        if np.abs(weights - before).max() < SETTLED:
            break
    return weights @ updates.astype(np.float64)


def norm_clipping(updates: Array, num_samples: Array, base: Array) -> Array:
    differences = updates - base.astype(np.float64)
    norms = np.linalg.norm(differences, axis=1)
    radius = np.sort(norms)[math.ceil(QUANTILE * len(norms)) - 1]
    shares = num_samples / num_samples.sum() * np.minimum(1, radius / norms)
    return base + shares @ differences


def centred_clipping(updates: Array, num_samples: Array, base: Array) -> Array:
    differences = updates - base.astype(np.float64)
    norms = np.linalg.norm(differences, axis=1)
    return base + (np.minimum(1, TAU / norms) / len(norms)) @ differences


_BYZANTINE = {"num_byzantine": NUM_BYZANTINE}
_RULES = (
    Case("centred_clipping", "centred_clipping", centred_clipping, {"tau": TAU}),
    Case("geometric_median", "geometric_median", geometric_median),
    # The mean of the gradients; the step is not of the rule.
    Case("gradient", "gradient", weighted_average, is_linear=True),
    Case("identity", "identity", identity, participants=1),
    Case("krum", "krum", krum, _BYZANTINE, least_updates=2 * NUM_BYZANTINE + 3),
    Case("mean", "mean", mean, is_linear=True),
    Case("median", "median", median),
    Case("multi_krum", "multi_krum", multi_krum, _BYZANTINE, least_updates=2 * NUM_BYZANTINE + 3),
    Case("norm_clipping", "norm_clipping", norm_clipping, {"quantile": QUANTILE}),
    Case("sum", "sum", plain_sum, is_linear=True),
    Case("trimmed_mean", "trimmed_mean", trimmed_mean, {"trim": TRIM}, least_updates=2 * TRIM + 1),
    Case("weighted_average", "weighted_average", weighted_average, is_linear=True),
)

# The first step from a model, with all defaults: what it makes of Δ.
_TAU2 = 1e-6  # τ²
_STEPS: Mapping[str, Callable[[Array], Array]] = {
    "fedavgm": lambda delta: delta,
    "fedadagrad": lambda delta: 0.1 * delta / (np.sqrt(_TAU2 + delta**2) + 1e-3),
    "fedadam": lambda delta: 0.1 * 0.1 * delta / (np.sqrt(0.99 * _TAU2 + 0.01 * delta**2) + 1e-3),
    "fedyogi": lambda delta: (
        0.1 * 0.1 * delta / (np.sqrt(_TAU2 - 0.01 * delta**2 * np.sign(_TAU2 - delta**2)) + 1e-3)
    ),
}


def _stepping(step: Callable[[Array], Array]) -> InMemory:
    def in_memory(updates: Array, num_samples: Array, base: Array) -> Array:
        return base + step(weighted_average(updates, num_samples, base) - base)

    return in_memory
