"""Keys, positions and key ranges.

Each table is spread over the same ranges of positions, which cover [0, 2**64) exactly. A table with
a bound (a dense array of n rows, or a table of ids below n) has the keys 0 to n - 1, and its key k
is in the range whose part of n it falls into. A table without a bound takes any 64-bit key, and its
position is the key after a bijective mix, so that small ids are spread as evenly as large ones.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

END = 1 << 64  # one beyond the last position
Keys = NDArray[np.uint64]
KEY_DTYPE = np.dtype(np.uint64)  # comparing with np.uint64 would make it each time

# Constants of SplitMix64. Making a number of numpy takes as long as a step over a hundred keys.
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


class Range(NamedTuple):
    """Positions from start up to stop, which is not in it. 0 <= start < stop <= END."""

    start: int
    stop: int

    def indices(self, bound: int) -> tuple[int, int]:
        """The keys [low, high) of a table with a bound that lie here. The ranges of a cover have
        all keys of every bound exactly once."""
        return (self.start * bound) >> 64, (self.stop * bound) >> 64


def is_cover(ranges: Sequence[Range]) -> bool:
    """Tell whether ranges, in this order, have every position exactly once."""
    starts = [each.start for each in ranges]
    stops = [each.stop for each in ranges]
    return (
        bool(ranges)
        and starts[0] == 0
        and stops[-1] == END
        and starts[1:] == stops[:-1]
        and all(start < stop for start, stop in ranges)
    )


def is_ascending(keys: NDArray[Any]) -> bool:
    """Tell whether each key is above the one before, so that none comes twice."""
    return bool((keys[1:] > keys[:-1]).all())


def even(num_ranges: int) -> list[Range]:
    """A cover of ranges of equal size, up to one position."""
    edges = [END * i // num_ranges for i in range(num_ranges + 1)]
    return [Range(start, stop) for start, stop in itertools.pairwise(edges)]


def mixed(keys: Keys) -> Keys:
    """Positions of the keys of a table without a bound, (n,) -> (n,).

    Source: Steele, Lea and Flood 2014, the finaliser of SplitMix64.
    """
    x = keys >> _SHIFTS[0]
    x ^= keys
    x *= _FACTORS[0]
    shifted = x >> _SHIFTS[1]
    x ^= shifted
    x *= _FACTORS[1]
    np.right_shift(x, _SHIFTS[2], out=shifted)
    x ^= shifted
    return x


def owners(keys: Keys, ranges: Sequence[Range]) -> NDArray[Any]:
    """The index of the range that each key of a table without a bound lies in, (n,) -> (n,) of some
    integer type. ranges: a cover."""
    positions = mixed(keys)
    if len(ranges) > 32 or len(keys) < 8192:
        starts = np.array([each.start for each in ranges[1:]], np.uint64)
        return np.searchsorted(starts, positions, side="right")
    # For few ranges and many keys a comparison with each is faster than a binary search.
    owner = np.zeros(len(keys), np.uint8)
    for each in ranges[1:]:
        owner += positions >= np.uint64(each.start)
    return owner
