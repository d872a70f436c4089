"""Tables without a bound: rows in the order of arrival, found by a hash table over 64-bit keys.

The hash of a key is the first bits of its position (keys.mixed): requests whose keys are sorted by
position walk through the memory in one direction; any order is right. Beside numpy's searchsorted
on sorted keys this is as fast at 1 million rows and ten times faster at 30 million, and it needs no
merging. Collisions are probed linearly, all keys of a batch at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from xain_parameters.errors import Invalid
from xain_parameters.keys import END, Keys, Range, is_ascending, mixed
from xain_parameters.specs import TableSpec
from xain_parameters.tables.part import (
    Array,
    Part,
    Piece,
    Rows,
    Snapshot,
    is_block,
    items_of,
    put,
)

LARGE_ROW_BYTES = 64
Numbers = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Live:
    """The index and the fields that readers see. When it is full another one takes its place.

    slots: row number of the key that hashes here, or further on with no empty slot between; 0:
        empty. keys: of each row, (capacity,). Row 0 has no key, and is all zeros.
    items: see Part.items.
    """

    # Keys looked up at once, so that temporary arrays stay in the processor's cache.
    chunk_keys: ClassVar = 1 << 14
    few_keys: ClassVar = 1 << 8  # in a range, of a small request
    left_keys: ClassVar = 1 << 10  # that have not been found
    window: ClassVar = 8  # slots

    slots: NDArray[np.uint32]
    shift: np.uint64
    start: np.uint64
    keys: Keys
    fields: Mapping[str, Array]
    items: Mapping[str, Array]

    def homes(self, positions: Keys) -> Numbers:
        """Return the slot that the search for each key begins at. positions: overwritten."""
        positions -= self.start
        positions >>= self.shift
        return positions.view(np.intp)

    def find(self, keys: Keys, positions: Keys | None = None) -> Numbers:
        """Find row numbers; 0 where there is no row. positions: mixed(keys); overwritten."""
        if len(keys) <= self.few_keys:
            return self._find_few(keys, self.homes(mixed(keys) if positions is None else positions))
        rows = np.empty(len(keys), np.intp)
        unfinished = []
        for begin in range(0, len(keys), self.chunk_keys):
            some = keys[begin : begin + self.chunk_keys]
            slots = self.homes(mixed(some))
            found = self.slots.take(slots, mode="clip").astype(np.intp)
            rows[begin : begin + self.chunk_keys] = found
            (left,) = (self.keys.take(found, mode="clip") != some).nonzero()
            left = left[found[left] != 0]
            if len(left):
                unfinished.append((left + begin, some[left], slots[left]))
        if unfinished:
            left, some, slots = (np.concatenate(each) for each in zip(*unfinished, strict=True))
            while len(left) > self.left_keys:
                slots = self._next(slots)
                found = self.slots.take(slots, mode="clip").astype(np.intp)
                rows[left] = found
                (go,) = ((self.keys.take(found, mode="clip") != some) & (found != 0)).nonzero()
                left, some, slots = left[go], some[go], slots[go]
            rows[left] = self._find_few(some, slots)
        return rows

    def _find_few(self, keys: Keys, slots: Numbers) -> Numbers:
        """The rows of keys, whose search goes on at these slots. For few keys the calls of numpy
        take the time, so several slots of each are looked at with one."""
        rows, left = self._look_at(keys, slots)
        at = left
        while len(left):
            keys, slots = keys[left], slots[left] + self.window
            rows[at], left = self._look_at(keys, slots)
            at = at[left]
        return rows

    def _look_at(self, keys: Keys, slots: Numbers) -> tuple[Numbers, Numbers]:
        """Look for each key in the slots from its own on; the rows, and the indices of the keys
        whose search goes on."""
        found = self.slots.take(slots[:, None] + _WINDOW, mode="wrap")
        is_end = self.keys.take(found, mode="clip") == keys[:, None]
        is_end |= found == 0
        ends = is_end.argmax(axis=1)
        ends += np.arange(0, found.size, self.window)
        rows = found.reshape(-1).take(ends).astype(np.intp)
        (left,) = (~is_end.reshape(-1).take(ends)).nonzero()
        return rows, left

    def insert(self, rows: Numbers) -> None:
        """Enter rows, whose keys and values are there, into the hash table."""
        slots = self.homes(mixed(self.keys.take(rows, mode="clip")))
        numbers = rows.astype(np.uint32)
        while len(numbers):
            (free,) = (self.slots.take(slots, mode="clip") == 0).nonzero()
            # One of several keys that want the same slot gets it.
            self.slots[slots[free]] = numbers[free]
            (go,) = (self.slots.take(slots, mode="clip") != numbers).nonzero()
            slots, numbers = self._next(slots[go]), numbers[go]

    def _next(self, slots: Numbers) -> Numbers:
        slots = slots + 1
        slots[slots == len(self.slots)] = 0
        return slots


_WINDOW: Final = np.arange(_Live.window)


class OpenPart(Part):
    """The part of a table without a bound. Rows are numbered from 1."""

    first_rows = 1 << 10

    def __init__(self, spec: TableSpec, number: int, span: Range) -> None:
        super().__init__(spec, number, span)
        self.num_rows = 0
        self._live = self._new_index(self.first_rows)

    @property
    def fields(self) -> Mapping[str, Array]:
        return self._live.fields

    @property
    def items(self) -> Mapping[str, Array]:
        return self._live.items

    def check(self, keys: Keys | None, start: int, stop: int) -> int:
        """Return how many keys there are. Raises Invalid for a key outside of this range."""
        if keys is None:
            raise Invalid(f"{self.where}: a table without a bound has no rows by number")
        self._check_positions(keys, mixed(keys))
        return len(keys)

    def _check_positions(self, keys: Keys, positions: Keys) -> None:
        start, stop = self.span
        if not len(keys) or self.span == (0, END):
            return
        if np.minimum.reduce(positions) < start or np.maximum.reduce(positions) > stop - 1:
            key = keys[~self._is_here(keys)][0]
            raise Invalid(f"{self.where}: key {key} is not in this range")

    def check_ascending(self, keys: Keys) -> None:
        """Raises Invalid unless keys ascend by value or, which is faster, by position."""
        if is_ascending(keys):
            return
        positions = mixed(keys)
        if not (positions[1:] > positions[:-1]).all():
            raise Invalid(
                f"{self.where}: keys of a push must be unique and ascending (or their positions)"
            )

    def _pull(self, keys: Keys | None, start: int, stop: int) -> Array:
        if keys is None:
            raise Invalid(f"{self.where}: a table without a bound has no rows by number")
        positions = mixed(keys)
        self._check_positions(keys, positions)
        live = self._live
        rows = live.find(keys, positions)
        out = live.fields["values"].take(rows, axis=0, mode="clip")
        if self._may_list(keys) and rows.all():
            self._list(keys, rows)
        elif not self.init.is_zero:
            new = np.flatnonzero(rows == 0)
            if len(new):
                out[new] = self.init.rows(keys[new], self.spec.dim, self.dtype)
        return out

    def _rows(self, keys: Keys | None, start: int, stop: int) -> Rows:
        assert keys is not None
        rows = self._find_or_make(keys)
        return slice(int(rows[0]), int(rows[-1]) + 1) if is_block(rows) else rows

    def _find_or_make(self, keys: Keys) -> Numbers:
        """Row numbers of keys; rows that are not there yet are made."""
        rows = self._live.find(keys)
        new = np.flatnonzero(rows == 0)
        if len(new):
            rows[new] = self._make(keys[new])
        return rows

    def _make(self, keys: Keys) -> Numbers:
        """Make rows for keys that have none. Returns their numbers."""
        first, stop = self.num_rows + 1, self.num_rows + 1 + len(keys)
        if stop > len(self._live.keys):
            self._grow(stop)
        live = self._live
        live.keys[first:stop] = keys
        if not self.init.is_zero:
            live.fields["values"][first:stop] = self.init.rows(keys, self.spec.dim, self.dtype)
        rows = np.arange(first, stop, dtype=np.intp)
        live.insert(rows)
        self.num_rows += len(keys)
        return rows

    def _new_index(self, capacity: int) -> _Live:
        # Few keys collide where a row is much larger than a slot. Each further probe of a batch is
        # a round of numpy calls, which small batches feel.
        num_slots = capacity * (4 if self.row_bytes >= LARGE_ROW_BYTES else 2)
        positions = self.span.stop - self.span.start
        shift = 0
        while (positions - 1) >> (shift + 1) >= num_slots - 1:
            shift += 1
        fields = self._empty(capacity)
        return _Live(
            np.zeros(((positions - 1) >> shift) + 1, np.uint32),
            np.uint64(shift),
            np.uint64(self.span.start),
            np.zeros(capacity, np.uint64),
            fields,
            {name: items_of(field) for name, field in fields.items()},
        )

    def _grow(self, least: int) -> None:
        """Copy the rows to an index of twice the size."""
        old = self._live
        live = self._new_index(max(least, 2 * len(old.keys)))
        end = self.num_rows + 1
        live.keys[:end] = old.keys[:end]
        for name, field in live.fields.items():
            field[:end] = old.fields[name][:end]
        # The order of the old slots is nearly the order of the new ones.
        for begin in range(0, len(old.slots), old.chunk_keys):
            rows = old.slots[begin : begin + old.chunk_keys].astype(np.intp)
            live.insert(rows[rows != 0])
        self._live = live

    def _is_here(self, keys: Keys) -> NDArray[np.bool_]:
        positions = mixed(keys)
        return (positions >= self.span.start) & (positions <= self.span.stop - 1)

    def restricted(
        self, keys: Keys | None, start: int, stop: int, values: Array
    ) -> tuple[Keys | None, int, int, Array]:
        """Return what of a push lies in this range, as (keys, start, stop, values)."""
        assert keys is not None
        here = np.flatnonzero(self._is_here(keys))
        return keys[here], 0, 0, values[here]

    def snapshot(self) -> Snapshot:
        return Snapshot(self, self.num_rows + 1)

    def pieces(self, snapshot: Snapshot | None = None) -> Iterator[Piece]:
        at = 1
        while at < (end := (self.num_rows + 1) if snapshot is None else snapshot.num_rows):
            stop = min(at + self._piece_rows, end)
            if snapshot is not None:
                snapshot.cursor = stop
            keys = self._live.keys[at:stop].copy()
            yield self._piece(slice(at, stop), snapshot, keys, 0)
            at = stop

    def _put(self, keys: Keys, fields: Mapping[str, Array]) -> None:
        """Set the rows of keys that lie in this range to these fields."""
        here = np.flatnonzero(self._is_here(keys))
        rows = self._find_or_make(keys[here])
        for name, values in fields.items():
            put(self.fields[name], rows, values[here])
