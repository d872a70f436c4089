"""Corrections that a site makes to a table that was read: units, offsets, and other spellings."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.names import class_name
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.schema import shown
from xain_workloads.tables.table import Table

KEYS = ("factors", "offsets", "replace")  # in the order in which they are made


def corrected(table: Table, dialect: Dialect) -> Table:
    """Apply a dialect's factors, offsets and replaced names, in this order, to a copy of a table.
    Raises DataError that names a key whose column is not there or is of another type."""
    values, classes = dict(table.values), table.classes
    for key in KEYS:
        for name, change in getattr(dialect, key).items():
            array = table.target if name == table.target_name else values.get(name)
            if array is None:
                raise DataError(
                    f"{table.origin}: [data] {key} names {name!r}, which is no column; there are:"
                    f" {shown(table.values, 20)}"
                )
            if (array.dtype.kind == "f") != (key != "replace"):
                what = "holds numbers" if key == "replace" else "is no number"
                raise DataError(f"{table.origin}: [data] {key} names {name!r}, which {what}")
            if name != table.target_name:
                values[name] = _changed(array, key, change)
            elif key == "replace":
                classes = tuple(dict.fromkeys(_changed(np.array(classes), key, change).tolist()))
    target = corrected_target(table.target, table.target_name, dialect)
    return replace(table, values=values, target=target, classes=classes)


def corrected_target(target: NDArray[Any], name: str, dialect: Dialect) -> NDArray[Any]:
    """Apply the corrections of a dialect to the class names or numbers, (n,), of a target."""
    for key in KEYS:
        if name in getattr(dialect, key):
            target = _changed(target, key, getattr(dialect, key)[name])
    return target


def _changed(array: NDArray[Any], key: str, change: Any) -> NDArray[Any]:
    """Multiply numbers ("factors"), add to them ("offsets") or rename categories ("replace")."""
    if key != "replace":
        return np.asarray(array * change if key == "factors" else array + change)
    names = {class_name(old): class_name(new) for old, new in change.items()}
    kind = np.str_ if array.dtype.kind == "U" else object
    return np.array([names.get(one, one) for one in array.tolist()], dtype=kind)
