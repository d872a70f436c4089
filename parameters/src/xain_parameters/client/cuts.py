"""Which rows and keys of a request belong to which range, and duplicate keys. No I/O, and no loop
over keys."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xain_parameters.keys import Keys, Range, mixed, owners

# A slice of the keys where their ranges are in their order, an array of indices otherwise.
Selection: TypeAlias = slice | NDArray[np.intp]


def cut_rows(
    start: int, stop: int, ranges: Sequence[Range], bound: int
) -> Iterator[tuple[int, int, int]]:
    """The rows [start, stop) of a dense array as (index of the range, start, stop)."""
    for index, each in enumerate(ranges):
        low, high = each.indices(bound)
        low, high = max(low, start), min(high, stop)
        if low < high:
            yield index, low, high


def cut_keys(
    keys: Keys, ranges: Sequence[Range], bound: int | None
) -> Iterator[tuple[int, Selection]]:
    """Ascending keys as (index of the range, which of the keys); each selection is ascending."""
    if not len(keys):
        return
    if len(ranges) == 1:
        yield 0, slice(0, len(keys))
        return
    if bound is not None:
        firsts = np.array([each.indices(bound)[0] for each in ranges], np.uint64)
        edges = [*np.searchsorted(keys, firsts).tolist(), len(keys)]
        for index in range(len(ranges)):
            if edges[index] < edges[index + 1]:
                yield index, slice(edges[index], edges[index + 1])
        return
    # A stable sort of small integers is a radix sort, which takes linear time.
    small = np.uint8 if len(ranges) <= 256 else np.uint16
    owner = _owners(keys, ranges) if len(ranges) <= 32 else owners(keys, ranges, None).astype(small)
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(ranges))).tolist()
    start = 0
    for index, end in enumerate(ends):
        if start < end:
            yield index, order[start:end]
        start = end


def _owners(keys: Keys, ranges: Sequence[Range]) -> NDArray[np.uint8]:
    """As keys.owners, for few ranges: a comparison with each is faster than a binary search."""
    positions = mixed(keys)
    owner = np.zeros(len(keys), np.uint8)
    for each in ranges[1:]:
        owner += positions >= np.uint64(each.start)
    return owner


def is_ascending(keys: Keys) -> bool:
    """Whether no key comes twice and each is above the one before."""
    return bool((keys[1:] > keys[:-1]).all())


def unique(keys: Keys) -> tuple[Keys, NDArray[np.intp] | None]:
    """The different keys, ascending, and for each given key the index of its own among them; None
    if they are the given ones."""
    if is_ascending(keys):
        return keys, None
    different, inverse = np.unique(keys, return_inverse=True)
    return different, inverse


def summed(keys: Keys, values: NDArray[Any]) -> tuple[Keys, NDArray[Any]]:
    """The different keys, ascending, and for each the sum of its values.

    keys: (n,). values: (n, dim). Values of one key are added in their order.
    """
    if is_ascending(keys):
        return keys, values
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    values = values[order]
    is_first = np.empty(len(keys), bool)
    is_first[0] = True
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    if is_first.all():
        return keys, values
    firsts = np.flatnonzero(is_first)
    with np.errstate(over="ignore", invalid="ignore"):  # sums are checked before they are sent
        return keys[firsts], np.add.reduceat(values, firsts, axis=0)
