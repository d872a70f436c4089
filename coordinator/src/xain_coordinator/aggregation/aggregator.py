"""The protocol of a rule of aggregation, and its promises.

A rule sees slices of the updates of a round, and knows nothing of files or rounds. It promises two
things, on which it rests that a model can be made again after a crash, on any number of threads:

- What it makes of a column depends on that column alone. Where slices begin must not matter.
- It is deterministic, to the bit. A product of matrices is not, in general: the library behind it
  chooses its order of summation by the shape, the machine and the number of its threads.

What a rule must know of the updates as a whole it asks for in a survey, which the engine makes over
blocks that are the same however the work is spread.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

Tile = NDArray[np.floating[Any]]
Float64 = NDArray[np.float64]
Weights = NDArray[np.int64] | Float64


class RuleFailed(ValueError):
    """A rule cannot make a model of these updates, however often it is tried."""


class Stopped(Exception):
    """The process is to end; nothing was written."""


class Aggregator(Protocol):
    """A rule that looks at each column by itself.

    takes_stale: it is an average by the weights it is given, so that a stale update may weigh less
        and the global model may be one of its rows.
    """

    takes_stale: ClassVar[bool]

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        """Combine a slice of every update. Runs in several threads at once.

        tile: (k, t), one row per participant, in the order of their names; to be left as it is.
        weights: (k,), non-negative: n_k, or what staleness.py makes of it.
        Returns (t,) float64.
        """

    def check(self, num_updates: int) -> None:
        """Check that the rule can work with so many updates. Raises RuleFailed."""


class Surveyor(Aggregator, Protocol):
    """A rule that weighs each update as a whole, by where it lies: the updates are read twice.

    The second time, `combine` gets the rows that `weigh` gave a weight, with those weights. Such a
    rule cannot take stale updates, whose weights follow from their age.

    needs_base: it moves updates towards the global model. In a round that initialises there is
        none, and the updates are averaged instead.
    """

    needs_base: ClassVar[bool]

    def survey(self, differences: Float64) -> Float64:
        """Measure a block of columns. Runs in several threads at once.

        differences: (k, b), of each update to the global model, or to zero if there is none; b is
            the same for all blocks but the last.
        Returns an array of any shape, the same for all blocks. They are added in order.
        """

    def weigh(self, surveyed: Float64, num_samples: NDArray[np.int64]) -> Float64:
        """The weights that `combine` gets.

        surveyed: the sum of what the blocks have given.
        num_samples: (k,), n_k.
        Returns (k + 1,): of the updates, and behind them that of the global model, which is 0 in a
        round that initialises: there is none.
        Raises RuleFailed.
        """


class AnyNumber:
    """Base of the built-in rules: any number of updates, and no stale ones."""

    takes_stale: ClassVar[bool] = False

    def check(self, num_updates: int) -> None:
        pass


class Joining(AnyNumber):
    """Base of the rules that join whole updates, and do not go through the tile engine."""

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        raise RuleFailed(f"{type(self).__name__} joins updates and cannot combine columns")


def is_surveyor(rule: Aggregator) -> TypeGuard[Surveyor]:
    """Whether a rule is a Surveyor; a plug-in need not derive from it."""
    return hasattr(rule, "survey")


def shares(weights: Weights) -> Float64:
    """Weights of sum 1, in proportion to the given ones; all zero means equal weights."""
    total = weights.sum(dtype=np.float64)  # of n_k exact below 2^53, and never too large
    k = len(weights)
    return weights / total if total else np.full(k, 1 / k)


def average(rows: Tile | Sequence[Tile], weights: Float64) -> Float64:
    """The average of rows in float64, within the range of their dtype. rows: k of (t,) each.
    weights: (k,), non-negative, of sum 1."""
    total = weighted_sum(rows, weights)
    # An average lies between the values it is made of. Where they are the largest there are, the
    # rounding of weights and sums can lead out of the dtype all the same.
    largest = np.finfo(rows[0].dtype).max
    return np.clip(total, -largest, largest, out=total, dtype=np.float64)


def weighted_sum(rows: Tile | Sequence[Tile], weights: Float64) -> Float64:
    """Σ weights_k · rows_k in float64, added in the order of the rows."""
    # Row by row: a matrix product would sum in an order that depends on the shape of the tile, and
    # the result must be the same to the bit wherever tiles begin.
    total = np.zeros(len(rows[0]), np.float64)
    term = np.empty_like(total)
    with np.errstate(over="ignore", invalid="ignore"):  # the engine looks at what comes out
        for row, weight in zip(rows, weights, strict=True):
            # Two steps are faster here than one product that converts its operands.
            np.copyto(term, row)
            term *= weight
            total += term
    return total
