"""Corrections that a site makes to a table that was read: units, offsets, and other spellings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.dataset import class_name
from xain_workloads.errors import DataError
from xain_workloads.reading.dialect import Dialect
from xain_workloads.schema import shown
from xain_workloads.table import Table


def corrected(table: Table, dialect: Dialect) -> Table:
    """The table with the factors, offsets and replaced names of a dialect, in this order.

    Raises DataError that names a key whose column is not there or is of another type.
    """
    if not (dialect.factors or dialect.offsets or dialect.replace):
        return table
    values, target = dict(table.values), table.target
    for key, figures in (("factors", dialect.factors), ("offsets", dialect.offsets)):
        for name, figure in figures.items():
            is_target = name == table.target_name
            array: NDArray[Any] = target if is_target else _column(table, values, key, name)
            if array.dtype.kind != "f":
                raise DataError(f"{table.origin}: [data] {key} names {name!r}, which is no number")
            array = array * figure if key == "factors" else array + figure
            if is_target:
                target = array
            else:
                values[name] = array
    classes = table.classes
    for name, names in dialect.replace.items():
        if name == table.target_name and table.task == "classification":
            aliases = {class_name(old): class_name(new) for old, new in names.items()}
            target = np.array([aliases.get(one, one) for one in target.tolist()], dtype=np.str_)
            classes = tuple(dict.fromkeys(aliases.get(one, one) for one in classes))
            continue
        array = _column(table, values, "replace", name)
        if array.dtype.kind == "f":
            raise DataError(f"{table.origin}: [data] replace names {name!r}, which holds numbers")
        values[name] = _replaced(array, names)
    return replace(table, values=values, target=target, classes=classes)


def _replaced(array: NDArray[Any], names: Mapping[str, str]) -> NDArray[Any]:
    new = np.empty(len(array), dtype=object)
    new[:] = [names.get(one, one) for one in array]
    return new


def _column(table: Table, values: Mapping[str, NDArray[Any]], key: str, name: str) -> NDArray[Any]:
    if name not in table.values:
        raise DataError(
            f"{table.origin}: [data] {key} names {name!r}, which is no column; there are:"
            f" {shown(table.values, 20)}"
        )
    return values[name]
