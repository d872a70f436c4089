"""Cutting the rows and keys of a request by range, and adding up duplicate keys. No I/O, and no
Python loop over keys."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_parameters.errors import Invalid
from xain_parameters.keys import Keys, Range, is_ascending, owners


def cut_rows(
    start: int, stop: int, ranges: Sequence[Range], bound: int
) -> Iterator[tuple[int, int, int]]:
    """Cut rows [start, stop) of a dense array by range: (index of the range, start, stop)."""
    for index, each in enumerate(ranges):
        low, high = each.indices(bound)
        low, high = max(low, start), min(high, stop)
        if low < high:
            yield index, low, high


def cut_keys(
    keys: Keys, ranges: Sequence[Range], bound: int | None
) -> tuple[NDArray[np.intp] | None, list[tuple[int, int, int]]]:
    """Return the order that has the keys of one range after those of another, ascending, and where
    each range lies in it: (index of the range, start, stop). Order None: the keys have it."""
    if not len(keys):
        return None, []
    if len(ranges) == 1:
        return None, [(0, 0, len(keys))]
    if bound is not None:
        firsts = np.array([each.indices(bound)[0] for each in ranges], np.uint64)
        edges = [*np.searchsorted(keys, firsts).tolist(), len(keys)]
        order = None
    else:
        # A stable sort of small integers is a radix sort, which takes linear time.
        owner = owners(keys, ranges).astype(np.uint16, copy=False)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=len(ranges)).tolist()
        edges = [0, *itertools.accumulate(counts)]
    pairs = enumerate(itertools.pairwise(edges))
    return order, [(index, start, stop) for index, (start, stop) in pairs if start < stop]


def whole_numbers(ids: ArrayLike) -> NDArray[Any]:
    """Return ids as an array of integers, uint64 where one of a list is above 2**63 - 1: numpy
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


def unique(keys: Keys) -> tuple[Keys, NDArray[np.intp] | None]:
    """Return the different keys, ascending, and for each given key the index of its own among
    them; None if they are the given ones."""
    if is_ascending(keys):
        return keys, None
    different, inverse = np.unique(keys, return_inverse=True)
    return different, inverse


def summed(keys: Keys, values: NDArray[Any]) -> tuple[Keys, NDArray[Any]]:
    """Return the different keys, ascending, and for each the sum of its values.

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
