"""A few rows of several parts of one table, read and updated with one call of the update rule."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xain_parameters.tables.part import Array, Part, Rows, items_of, take_into, unwarned


class RowsOfPart(NamedTuple):
    """Rows of a part, which are all there, and which ones [begin, stop) of the joined rows they
    are."""

    part: Part
    rows: Rows
    begin: int
    stop: int


class JoinedRows:
    """Rows of parts of one table, one after the other. For many rows a part does better alone."""

    def __init__(self, parts: Sequence[RowsOfPart]) -> None:
        first, num_rows = parts[0].part, parts[-1].stop
        self._parts = parts
        self._shape = num_rows, first.spec.dim
        self._dtype = first.dtype
        self._rule = first.rule
        # The rows that an update changes, by field: used again, as they are few.
        self._block = {
            name: np.empty((num_rows, *field.shape[1:]), field.dtype)
            for name, field in ((name, first.fields[name]) for name in first.names)
        }
        # Where the rows of each part are in them, by item. The part's own arrays are not kept: a
        # part that grows has others.
        self._views = {
            name: [(each.part, each.rows, items_of(some)[each.begin : each.stop]) for each in parts]
            for name, some in self._block.items()
        }

    def values(self) -> Array:
        """A copy of the values, (num_rows, dim). Safe beside `update` in another thread."""
        out = np.empty(self._shape, self._dtype)
        for part, rows, begin, stop in self._parts:
            take_into(part.fields["values"], rows, out[begin:stop])
        return out

    def update(self, pushed: Array) -> None:
        """Push values, (num_rows, dim). Called by the thread that may change these parts, none of
        which has a snapshot."""
        unwarned(self._update, pushed)

    def _update(self, pushed: Array) -> None:
        """Copy the rows together, update them by the rule, and copy them back."""
        for name, views in self._views.items():
            for part, rows, here in views:
                if isinstance(rows, slice):
                    here[...] = part.items[name][rows]
                else:
                    part.items[name].take(rows, 0, here, "clip")
        self._rule.update(self._block, pushed)
        # Values last, as in Part.
        for name, views in reversed(self._views.items()):
            for part, rows, here in views:
                part.items[name][rows] = here
