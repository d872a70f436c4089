"""Cutting the rows and keys of a request by range, and adding up duplicate keys. No I/O, and no
Python loop over keys."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_parameters.errors import Invalid
from xain_parameters.keys import Keys, Range, owners

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
    owner = owners(keys, ranges).astype(np.uint16, copy=False)
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(ranges))).tolist()
    start = 0
    for index, end in enumerate(ends):
        if start < end:
            yield index, order[start:end]
        start = end


def whole_numbers(ids: ArrayLike) -> NDArray[Any]:
    """ids as an array of integers, which are uint64 where one of a list is above 2**63 - 1: numpy
    makes a list of such and smaller ones an array of floats. Raises Invalid."""
    array = np.asarray(ids)
    if array.dtype.kind in "iu" or not array.size:
        return array
    if not isinstance(ids, np.ndarray):
        objects = np.asarray(ids, object)
        if all(isinstance(each, int | np.integer) for each in objects.flat):
            try:
                return objects.astype(np.uint64)
            except OverflowError as error:
                raise Invalid(f"keys are 0 to 2**64 - 1: {error}") from None
    raise Invalid(f"keys are whole numbers, not {array.dtype}")


def is_ascending(keys: Keys) -> bool:
    """Tell whether each key is above the one before, so that none comes twice."""
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
