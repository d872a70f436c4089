"""Corrections that a site makes to a table that was read: units, offsets, and other spellings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.names import class_name
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
            if is_target and target.dtype.kind == "f":
                continue
            array: NDArray[Any] = target if is_target else _column(table, values, key, name)
            if array.dtype.kind != "f":
                raise DataError(f"{table.origin}: [data] {key} names {name!r}, which is no number")
            values[name] = array * figure if key == "factors" else array + figure
    classes = table.classes
    for name, names in dialect.replace.items():
        if name == table.target_name and table.task == "classification":
            aliases = {class_name(old): class_name(new) for old, new in names.items()}
            classes = tuple(dict.fromkeys(aliases.get(one, one) for one in classes))
            continue
        array = _column(table, values, "replace", name)
        if array.dtype.kind == "f":
            raise DataError(f"{table.origin}: [data] replace names {name!r}, which holds numbers")
        values[name] = _replaced(array, names)
    target = corrected_target(target, table.target_name, dialect)
    return replace(table, values=values, target=target, classes=classes)


def corrected_target(target: NDArray[Any], name: str, dialect: Dialect) -> NDArray[Any]:
    """Class names or numbers of a target, (n,), with its corrections."""
    if name in dialect.replace:
        aliases = _replaced(target, dialect.replace[name])
        target = aliases.astype(np.str_) if target.dtype.kind == "U" else aliases
    target = target * dialect.factors[name] if name in dialect.factors else target
    return target + dialect.offsets[name] if name in dialect.offsets else target


def _replaced(array: NDArray[Any], names: Mapping[str, str]) -> NDArray[Any]:
    aliases = {class_name(old): class_name(new) for old, new in names.items()}
    new = np.empty(len(array), dtype=object)
    new[:] = [aliases.get(one, one) for one in array.tolist()]
    return new


def _column(table: Table, values: Mapping[str, NDArray[Any]], key: str, name: str) -> NDArray[Any]:
    if name not in table.values:
        raise DataError(
            f"{table.origin}: [data] {key} names {name!r}, which is no column; there are:"
            f" {shown(table.values, 20)}"
        )
    return values[name]
