"""Rules that sort each column, so that a few extreme updates do not move the result.

Few rows are sorted by a network, whose every step is one operation on two whole rows. Many rows are
transposed and sorted column by column. Both give the same bits. They may differ in which of 0.0 and
-0.0 comes first, but a sum that begins with 0.0, as all do here, is the same with either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import numpy as np
from pydantic import Field

from xain_coordinator.aggregation.aggregator import (
    AnyNumber,
    Float64,
    RuleFailed,
    Tile,
    Weights,
    average,
)

# Beyond this, O(k log² k) operations on rows take longer than sorting each column.
MAX_NETWORK_ROWS = 40

# Columns that are sorted at a time. In longer rows an operation leaves the processor's cache; in
# shorter ones the call takes longer than the work.
_PIECE_COLUMNS = 1 << 15
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Median(AnyNumber):
    """The median of each coordinate; of an even number of updates, the mean of the middle two.

    Fewer than half of the participants, whatever they send, cannot move it beyond what the others
    sent. Sample counts play no part: they too could be made up.

    Source: Yin et al. 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates, Algorithm 1, option I.
    """

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        k = len(tile)
        return _average_of_ranks(tile, (k - 1) // 2, k // 2 + 1)


@dataclass(frozen=True)
class TrimmedMean(AnyNumber):
    """Trimmed mean: in each coordinate, the mean of what is left without the `trim` least and the
    `trim` greatest values.

    Up to `trim` participants, whatever they send, cannot move it beyond what the others sent.
    Sample counts play no part: they too could be made up.

    Source: Yin et al. 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates, Algorithm 1, option II; its β is trim / n.
    """

    trim: Annotated[int, Field(ge=0)] = 1

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return _average_of_ranks(tile, self.trim, len(tile) - self.trim)

    def check(self, num_updates: int) -> None:
        """Check that some updates are left after trimming. Raises RuleFailed."""
        if num_updates <= 2 * self.trim:
            raise RuleFailed(
                f"rule 'trimmed_mean' with trim = {self.trim} needs more than "
                f"{2 * self.trim} updates, not {num_updates}"
            )


def _average_of_ranks(tile: Tile, first: int, end: int) -> Float64:
    """The mean of the values of each column that have the ranks from `first` to before `end`, added
    from the least to the greatest."""
    k, num_columns = tile.shape
    # numpy has no fast comparison of half floats; each of them is a single float.
    dtype = np.float32 if tile.dtype == np.float16 else tile.dtype.newbyteorder("=")
    weights = np.full(end - first, 1 / (end - first))
    averaged = np.empty(num_columns, np.float64)
    width = min(max(64, _PIECE_BYTES // (k * np.dtype(dtype).itemsize)), _PIECE_COLUMNS)
    rows = np.empty((k + 1, min(width, num_columns)), dtype)
    for start in range(0, num_columns, width):
        piece = tile[:, start : start + width]
        work = rows[:, : piece.shape[1]]
        np.copyto(work[:k], piece)
        if k <= MAX_NETWORK_ROWS:
            ranks = sort_by_network(work, first, end)
        else:
            ranks = sort_by_column(work[:k], first, end)
        averaged[start : start + width] = average(ranks, weights)
    return averaged


def sort_by_column(rows: Tile, first: int, end: int) -> Sequence[Tile]:
    """The rows from `first` to before `end` of the tile with each column sorted: (t,) each."""
    columns = np.sort(np.ascontiguousarray(rows.T), axis=-1)
    return list(np.ascontiguousarray(columns[:, first:end].T))


def sort_by_network(rows: Tile, first: int, end: int) -> Sequence[Tile]:
    """The values with the ranks from `first` to before `end` in each column, sorted by a sorting
    network of whole rows.

    rows: (k + 1, t), of which the last is room to work in. All are overwritten, and the result
    shares their memory.
    """
    k = len(rows) - 1
    positions = list(rows[:k])
    free = rows[k]
    for low, high in sorting_network(k, first, end):
        a, b = positions[low], positions[high]
        np.minimum(a, b, out=free)
        np.maximum(a, b, out=b)
        positions[low], free = free, a
    return positions[first:end]


@cache
def sorting_network(k: int, first: int, end: int) -> tuple[tuple[int, int], ...]:
    """Pairs of positions (low, high) to put in order, one after the other, so that the positions
    from `first` to before `end` hold their values of the sorted order.

    Source: Batcher 1968, Sorting Networks and their Applications: odd-even merging, without the
    steps that would touch positions from k on, where only infinity could be, and without those
    whose result is not used.
    """
    steps = []
    p = 1
    while p < k:
        q = p
        while q >= 1:
            for j in range(q % p, k - q, 2 * q):
                within = range(j, min(j + q, k - q))
                steps += [(i, i + q) for i in within if i // (2 * p) == (i + q) // (2 * p)]
            q //= 2
        p *= 2
    needed = set(range(first, end))
    kept = []
    for low, high in reversed(steps):
        if low in needed or high in needed:
            needed |= {low, high}
            kept.append((low, high))
    return tuple(reversed(kept))
