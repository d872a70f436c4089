"""Rows that are to be predicted, as a program gives them: named columns and plain values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.names import class_name, folded
from xain_workloads.tables.data import MISSING
from xain_workloads.tables.preprocessing import preprocessing_of
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table


def table_of_rows(
    metadata: Mapping[str, str], columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> Table:
    """The rows as a table with the types of the columns that a model takes.

    metadata: of the model. rows: numbers, texts and None, in the order of the columns; a text in a
        column of numbers is read as a number.
    Raises DataError that names the column, and the row if there is one.
    """
    if len(set(columns)) != len(columns):
        twice = next(name for name in columns if list(columns).count(name) > 1)
        raise DataError(f"more than one column is called {twice!r}")
    for at, row in enumerate(rows):
        if len(row) != len(columns):
            raise DataError(f"row {at + 1} has {len(row)} values, there are {len(columns)} columns")
    preprocessing = preprocessing_of(metadata)
    types = {} if preprocessing is None else preprocessing.types
    columns = [name if name in types else folded(name) for name in columns]
    for name in columns:
        if types and name not in types:
            raise DataError(f"no column {name!r} in the model; it takes: {', '.join(types)}")
    kinds = tuple(Column(name, types.get(name, "number")) for name in columns)
    values = {
        column.name: _values(column, [row[at] for row in rows]) for at, column in enumerate(kinds)
    }
    return Table(kinds, values, np.full(len(rows), np.nan), target_name="", origin="the rows")


def _values(column: Column, cells: Sequence[Any]) -> NDArray[Any]:
    """Convert the cells of a column to its type. Raises DataError that names column and row."""
    convert = _number if column.type == "number" else _category
    converted = []
    for at, cell in enumerate(cells):
        try:
            converted.append(convert(cell))
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"column {column.name!r}, row {at + 1}: {str(cell)[:40]!r} is no {column.type}"
            ) from None
    return np.array(converted, dtype=np.float64 if column.type == "number" else object)


def _number(cell: Any) -> float:
    """Convert a cell to a number; a missing one is NaN. Raises TypeError or ValueError."""
    if cell is None or (isinstance(cell, str) and cell.strip() in MISSING):
        return math.nan
    if not isinstance(cell, str | int | float):
        raise TypeError
    return float(cell)


def _category(cell: Any) -> str | None:
    """Convert a cell to a category's name; a missing one is None. Raises TypeError."""
    if cell is None or (isinstance(cell, str) and cell in MISSING):
        return None
    if not isinstance(cell, str | int | float):
        raise TypeError
    if isinstance(cell, float) and math.isnan(cell):
        return None
    return cell if isinstance(cell, str) else class_name(cell)
