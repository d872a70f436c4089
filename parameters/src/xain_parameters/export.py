"""A table of a checkpoint as arrays."""

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


def export(checkpoint: str, name: str, to: Path) -> int:
    """Write the arrays of a table to an .npz file; returns the number of values."""
    arrays: dict[str, Any] = read_table(checkpoint, name)
    with to.open("wb") as file:
        np.savez(file, **arrays)
    return int(arrays["values"].size)
