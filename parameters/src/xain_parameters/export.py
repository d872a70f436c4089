"""Export of a table of a checkpoint as arrays."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_parameters.errors import Invalid
from xain_parameters.node.cuts import load
from xain_parameters.replica import Replica
from xain_parameters.scheduler.manifests import read_manifest


def read_table(checkpoint: str, name: str) -> dict[str, NDArray[Any]]:
    """Arrays of a table: "values" and the state of its update rule, in the shape of a dense array;
    of another table "keys", ascending, and a row for each in the others.

    checkpoint: folder or fsspec URL. Raises Invalid for an unknown table, OSError, and Damaged.
    """
    url, _, folder = checkpoint.rstrip("/").rpartition("/")
    url = url or ("/" if checkpoint.startswith("/") else ".")
    cut = read_manifest(url, folder)
    spec = next((each for each in cut.tables if each.name == name), None)
    if spec is None:
        known = ", ".join(repr(each.name) for each in cut.tables)
        raise Invalid(f"the checkpoint has no table {name!r}; it has {known}")
    # Pushes of clocks that are complete may be held still. A live worker has completed them all.
    ended = {worker: clock for worker, clock in cut.clocks.items() if clock < cut.clock}
    found: dict[str, list[NDArray[Any]]] = {}
    for range_, _ in cut.ranges:
        replica = Replica(range_, [spec], cut.generation)
        load(url, folder, replica, range_)
        opening = replica.open(cut.clock, ended)
        if opening is not None:
            replica.apply(opening, None, None)
        for keys, arrays in replica.rows(spec.number):
            for what, array in {"keys": keys, **arrays}.items():
                found.setdefault(what, []).append(array)
    whole = {what: np.concatenate(arrays) for what, arrays in found.items()}
    if not whole:
        return {"keys": np.empty(0, np.uint64), "values": np.empty((0, spec.dim), spec.dtype)}
    order = np.argsort(whole["keys"])
    ordered = {what: array[order] for what, array in whole.items()}
    if spec.is_dense:
        del ordered["keys"]
        num_values = np.prod(spec.shape, dtype=np.int64)
        return {
            what: array.reshape(spec.shape) if array.size == num_values else array
            for what, array in ordered.items()
        }
    return ordered


SUFFIXES = (".npz", ".parquet")


def export(checkpoint: str, name: str, to: Path) -> int:
    """Write the arrays of a table to an .npz or .parquet file; returns the number of values.

    A .parquet file has a row for each row of the table, and a column for each array, whose values
    are lists of a fixed length where a row has several. Raises Invalid for it without pyarrow.
    """
    arrays: dict[str, Any] = read_table(checkpoint, name)
    if to.suffix == ".parquet":
        _write_parquet(arrays, to)
    else:
        with to.open("wb") as file:
            np.savez(file, **arrays)
    return int(arrays["values"].size)


def _write_parquet(arrays: dict[str, NDArray[Any]], to: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        text = "a .parquet file takes pyarrow: pip install pyarrow"
        raise Invalid(text) from None
    columns = {}
    for what, array in arrays.items():
        rows = np.atleast_1d(array)
        column = pyarrow.array(rows.reshape(-1))
        for size in reversed(rows.shape[1:]):
            column = pyarrow.FixedSizeListArray.from_arrays(column, size)
        columns[what] = column
    pyarrow.parquet.write_table(pyarrow.table(columns), to)
