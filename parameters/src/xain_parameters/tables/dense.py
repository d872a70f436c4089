"""Tables with a bound: the row of a key is the key minus the first key of the range."""

from collections.abc import Iterator, Mapping

import numpy as np

from xain_parameters.errors import Invalid
from xain_parameters.keys import Keys, Range, is_ascending
from xain_parameters.specs import TableSpec
from xain_parameters.tables.part import (
    MADE_LATER,
    Array,
    Part,
    Piece,
    Rows,
    Snapshot,
    is_block,
    items_of,
    put,
)


class BoundedPart(Part):
    """The part of a table with a bound.

    Rows of a dense array all exist. Rows of another are made when they are first pushed; declaring
    50 million costs nothing.
    """

    scan_rows = 1 << 20  # looked through at most at once for rows that have been seen

    def __init__(self, spec: TableSpec, number: int, span: Range, is_empty: bool = False) -> None:
        super().__init__(spec, number, span)
        assert spec.bound is not None
        self.low, self.high = span.indices(spec.bound)
        num_rows = self.high - self.low
        self._fields = self._empty(num_rows)
        self._items = {name: items_of(field) for name, field in self._fields.items()}
        self._seen = None if spec.is_dense else np.zeros(num_rows, np.bool_)
        if spec.is_dense and not self.init.is_zero and not is_empty:
            keys = np.arange(self.low, self.high, dtype=np.uint64)
            self._fields["values"][:] = self.init.rows(keys, spec.dim, self.dtype)

    @property
    def fields(self) -> Mapping[str, Array]:
        return self._fields

    @property
    def items(self) -> Mapping[str, Array]:
        return self._items

    def check(self, keys: Keys | None, start: int, stop: int) -> int:
        """Return how many rows are named. Raises Invalid for rows outside of this range."""
        if keys is None:
            if not self.low <= start <= stop <= self.high:
                raise self._error_outside(f"rows {start} to {stop - 1}")
            return stop - start
        if len(keys):
            least, most = int(keys.min()), int(keys.max())
            if least < self.low or most >= self.high:
                raise self._error_outside(f"key {least if least < self.low else most}")
        return len(keys)

    def known_rows(self, keys: Keys | None, start: int, stop: int) -> Rows | None:
        if keys is None and self._seen is None and self.low <= start <= stop <= self.high:
            return slice(start - self.low, stop - self.low)
        return super().known_rows(keys, start, stop)

    def check_ascending(self, keys: Keys) -> None:
        if not is_ascending(keys):
            raise Invalid(f"{self.where}: keys of a push must be unique and ascending")

    def _error_outside(self, said: str) -> Invalid:
        return Invalid(
            f"{self.where}: {said}: the table has keys below {self.spec.bound}, and this range "
            f"those from {self.low} to below {self.high}"
        )

    def _pull(self, keys: Keys | None, start: int, stop: int) -> Array:
        """Return rows; a block of a dense array comes as a read-only view, not a copy."""
        self.check(keys, start, stop)
        values = self._fields["values"]
        if keys is None:
            block = values[start - self.low : stop - self.low]
            if self._seen is not None and not self.init.is_zero:
                keys = np.arange(start, stop, dtype=np.uint64)
            else:
                block.flags.writeable = False
                return block
        rows = self._numbers(keys)
        if self._may_list(keys) and (
            self._seen is None or self._seen.take(rows, mode="clip").all()
        ):
            self._list(keys, rows)
        if self._seen is None or self.init.is_zero:
            return values.take(rows, axis=0, mode="clip")
        # A row is seen after its first values are written: look at this first.
        is_new = ~self._seen.take(rows, mode="clip")
        out = values.take(rows, axis=0, mode="clip")
        if is_new.any():
            out[is_new] = self.init.rows(keys[is_new], self.spec.dim, self.dtype)
        return out

    def _numbers(self, keys: Keys) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        shifted = keys - np.uint64(self.low) if self.low else keys
        return shifted.view(np.intp)

    def _rows(self, keys: Keys | None, start: int, stop: int) -> Rows:
        """Return the numbers of rows, which are made if they are not there."""
        rows: Rows
        if keys is None:
            rows = slice(start - self.low, stop - self.low)
        else:
            rows = self._numbers(keys)
            if is_block(rows):
                rows = slice(int(rows[0]), int(rows[-1]) + 1)
        self._make(rows)
        return rows

    def _make(self, rows: Rows) -> None:
        """Give first values to rows that have not been seen."""
        seen = self._seen
        if seen is None:
            return
        is_seen = seen[rows] if isinstance(rows, slice) else seen.take(rows, mode="clip")
        if is_seen.all():
            return
        new = np.flatnonzero(~is_seen)
        new = rows.start + new if isinstance(rows, slice) else rows[new]
        for snapshot in self.snapshots:
            snapshot.leave_out(new)
        if not self.init.is_zero:
            keys = new.astype(np.uint64) + np.uint64(self.low)
            put(self._fields["values"], new, self.init.rows(keys, self.spec.dim, self.dtype))
        seen[new] = True

    def restricted(
        self, keys: Keys | None, start: int, stop: int, values: Array
    ) -> tuple[Keys | None, int, int, Array]:
        """Return what of a push lies in this range, as (keys, start, stop, values)."""
        if keys is None:
            first = max(start, self.low)
            last = max(first, min(stop, self.high))
            return None, first, last, values[first - start : last - start]
        here = slice(*np.searchsorted(keys, np.array([self.low, self.high], np.uint64)))
        return keys[here], 0, 0, values[here]

    def snapshot(self) -> Snapshot:
        return Snapshot(self, self.high - self.low)

    def pieces(self, snapshot: Snapshot | None = None) -> Iterator[Piece]:
        num_rows = self.high - self.low
        at = 0
        while at < num_rows:
            rows, at = self._present(at, num_rows, snapshot)
            if snapshot is not None:
                snapshot.cursor = at
            keys, first = None, self.low
            if isinstance(rows, slice):
                first += rows.start
            else:
                keys = rows.astype(np.uint64) + np.uint64(self.low)
            yield self._piece(rows, snapshot, keys, first)

    def _present(self, at: int, num_rows: int, snapshot: Snapshot | None) -> tuple[Rows, int]:
        """The next rows from row `at` on that exist, and the row to go on from."""
        size = self._piece_rows
        if self._seen is None:
            stop = min(at + size, num_rows)
            return slice(at, stop), stop
        num_scanned = size
        while at < num_rows:
            # A few pieces far at first: what is looked through beyond the piece is looked through
            # again for the next one. Further, where there are no rows.
            num_scanned = min(2 * num_scanned, max(self.scan_rows, 2 * size))
            stop = min(at + num_scanned, num_rows)
            is_there = self._seen[at:stop]
            if snapshot is not None:
                is_there = is_there & (snapshot.state[at:stop] != MADE_LATER)
            rows = at + np.flatnonzero(is_there)
            if len(rows) > size:
                rows, stop = rows[:size], int(rows[size])
            if len(rows):
                return slice(int(rows[0]), int(rows[-1]) + 1) if is_block(rows) else rows, stop
            at = stop
        return slice(num_rows, num_rows), num_rows

    def _put(self, keys: Keys, fields: Mapping[str, Array]) -> None:
        """Set the rows of keys that lie in this range to these fields."""
        # Keys of a table with a bound ascend.
        begin = int(np.searchsorted(keys, np.uint64(self.low)))
        stop = (
            int(np.searchsorted(keys, np.uint64(self.high))) if self.high < 1 << 64 else len(keys)
        )
        rows = self._numbers(keys[begin:stop])
        chosen: Rows = rows
        if is_block(rows):
            chosen = slice(int(rows[0]), int(rows[-1]) + 1)
        for name, values in fields.items():
            put(self._fields[name], chosen, values[begin:stop])
        if self._seen is not None:
            self._seen[chosen] = True
