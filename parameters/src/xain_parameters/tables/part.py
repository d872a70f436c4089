"""The storage of a table's part in a key range, for all kinds: updates, pieces, snapshots.

A row has a number, and the fields of a part are arrays with that row number first: "values", and
the state of the update rule. One thread changes a part; others may pull at the same time.
"""

import contextvars
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xain_foundation.names import shortened
from xain_parameters.errors import Invalid
from xain_parameters.keys import Keys, Range, is_ascending
from xain_parameters.specs import MAX_NAME_BYTES, MAX_SPEC_BYTES, TableSpec, encoded
from xain_parameters.tables import initialisers, rules

MAX_ROW_BYTES = 1 << 30  # a row goes in one message
MAX_TABLE_BYTES = 1 << 50  # the values of a table with a bound

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Rows: TypeAlias = slice | NDArray[np.intp]  # row numbers: a block, or any without duplicates


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece of the state of a replica, as it is sent to learners and written to checkpoints.

    name: "rows", or a name that the replica gives. meta: msgpack.
    """

    name: str
    meta: bytes
    keys: Keys | None
    body: Bytes


class RowsMeta(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one table. The body is the fields, one after the other, "values" first, then by name.

    first: the key of the first row, where the rows are those of consecutive keys; else keys come
    with the piece.
    """

    table: int
    num_rows: int
    first: int


# A context in which numpy does not warn of an overflow. To run a function in a copy of it takes a
# tenth of the time of numpy.errstate, which is longer than a small update.
_UNWARNED = contextvars.Context()
_UNWARNED.run(np.seterr, all="ignore")

_BYTES = np.dtype(np.uint8)
_decode_meta = msgspec.msgpack.Decoder(RowsMeta).decode


def unwarned(update: Callable[..., None], *arguments: object) -> None:
    """Call an update without numpy's warnings."""
    _UNWARNED.copy().run(update, *arguments)


def plugins_of(spec: TableSpec) -> tuple[rules.Rule, initialisers.Initialiser]:
    """Return a table's update rule and initialiser. Raises Invalid for an impossible table."""
    where = f"table {shortened(spec.name, MAX_NAME_BYTES)!r}"
    if not 0 < len(spec.name.encode()) <= MAX_NAME_BYTES or not spec.name.isprintable():
        raise Invalid(
            f"{where}: a name has 1 to {MAX_NAME_BYTES} bytes in UTF-8, and only printable "
            "characters; take another one"
        )
    if (size := len(encoded(spec))) > MAX_SPEC_BYTES:
        raise Invalid(
            f"{where}: its declaration has {size} bytes, and {MAX_SPEC_BYTES} at most are taken; "
            "give fewer or shorter options"
        )
    if spec.dtype not in ("float32", "float64"):
        raise Invalid(f"{where}: no values of dtype {spec.dtype}")
    if spec.dim < 1 or (spec.bound is not None and spec.bound < 1):
        raise Invalid(f"{where}: a table has at least one row of one value")
    if isinstance(spec.staleness, int) and spec.staleness < 0:
        raise Invalid(f"{where}: staleness must not be negative: {spec.staleness}")
    row_bytes = spec.dim * np.dtype(spec.dtype).itemsize
    if row_bytes > MAX_ROW_BYTES:
        raise Invalid(f"{where}: a row of {spec.dim} values is larger than {MAX_ROW_BYTES} bytes")
    if spec.bound is not None and spec.bound * row_bytes > MAX_TABLE_BYTES:
        raise Invalid(
            f"{where}: {spec.bound} rows of {spec.dim} values are more than "
            f"{MAX_TABLE_BYTES} bytes; a table without a bound has the rows only that are used"
        )
    if spec.is_dense and spec.bound is None:
        raise Invalid(f"{where}: a dense array has a number of rows, and none is given")
    if spec.shape and (
        not spec.is_dense
        or min(spec.shape) < 1
        or (spec.shape[0], math.prod(spec.shape[1:])) != (spec.bound, spec.dim)
    ):
        raise Invalid(
            f"{where}: the shape {spec.shape} is none of {spec.bound} rows of {spec.dim} values"
        )
    return rules.made(spec.update), initialisers.made(spec.init)


class Part(ABC):
    """A table's part in a key range."""

    # Values changed at once, so that temporary arrays stay in the processor's cache. A rule without
    # state has one temporary array at most.
    block_values = 1 << 14
    stateless_block_values = 1 << 17
    piece_bytes = 1 << 20
    # The rows of so many short key lists are kept: a worker pushes to the keys that it has pulled,
    # and often comes again with the same ones. To find them takes most of a small request's time.
    max_lists = 16
    max_list_keys = 1024

    def __init__(self, spec: TableSpec, number: int, span: Range) -> None:
        """number: the range's. Raises Invalid as plugins_of() does."""
        self.rule, self.init = plugins_of(spec)
        self.spec = spec
        self._dim = spec.dim
        self.span = span
        self.where = f"table {spec.name!r}, range {number}"
        self.dtype = np.dtype(spec.dtype).newbyteorder("<")
        self.row_bytes = self.dtype.itemsize * spec.dim
        self.names = ("values", *sorted(self.rule.state))
        self.snapshots: list[Snapshot] = []
        self._lists: dict[bytes, Rows] = {}  # rows, which are all there, by unique ascending keys
        block_values = self.block_values if self.rule.state else self.stateless_block_values
        self._block = max(1, block_values // spec.dim)

    # --- requests ---

    @abstractmethod
    def check(self, keys: Keys | None, start: int, stop: int) -> int:
        """Return how many rows keys, or [start, stop), name. Raises Invalid for others' rows."""

    @abstractmethod
    def check_ascending(self, keys: Keys) -> None:
        """Refuse keys that are not unique and ascending: raises Invalid."""

    def pull(self, keys: Keys | None, start: int, stop: int) -> Array:
        """The values of rows, (num_rows, dim), in the order of keys; a row that is not there yet
        has its first values. Safe beside changes by another thread. Raises Invalid as `check`."""
        rows = None if keys is None else self.listed(keys)
        if rows is not None:
            return taken(self.fields["values"], rows)
        return self._pull(keys, start, stop)

    @abstractmethod
    def _pull(self, keys: Keys | None, start: int, stop: int) -> Array:
        """As `pull`, of a key list that is not known."""

    def listed(self, keys: Keys) -> Rows | None:
        """The rows of a key list, which then needs no check; None: the list is not known."""
        return self._lists.get(keys.tobytes()) if len(keys) <= self.max_list_keys else None

    def known_rows(self, keys: Keys | None, start: int, stop: int) -> Rows | None:
        """The rows of a key list, or [start, stop), which are all there and need no check; None:
        they are not known."""
        return None if keys is None else self.listed(keys)

    def _may_list(self, keys: Keys) -> bool:
        """Tell whether a key list of a pull can be kept, if its rows are all there."""
        return len(keys) <= self.max_list_keys and is_ascending(keys)

    def _list(self, keys: Keys, rows: Rows) -> None:
        """Keep the rows of unique ascending keys, which are all there and never move."""
        if len(keys) <= self.max_list_keys:
            if len(self._lists) >= self.max_lists:
                self._lists.clear()  # nothing tells which of them come again
            # A copy: a row number may lie in the memory of its key, which the next message takes.
            self._lists[keys.tobytes()] = rows if isinstance(rows, slice) else rows.copy()

    def push(
        self,
        keys: Keys | None,
        start: int,
        stop: int,
        values: Array,
        rows: Rows | None = None,
    ) -> None:
        """Update rows that `check` has passed. values: (num_rows, dim). rows: as `listed` said."""
        if not len(values):
            return
        if rows is None and keys is not None:
            rows = self.listed(keys)
        if rows is None:
            rows = self._rows(keys, start, stop)
            if keys is not None:
                self._list(keys, rows)
        for snapshot in self.snapshots:
            snapshot.preserve(rows)
        unwarned(self._update, rows, values)

    def _update(self, rows: Rows, values: Array) -> None:
        """Update rows by the rule, a block at a time."""
        fields = self.fields
        size = self._block
        for begin in range(0, len(values), size):
            pushed = values[begin : begin + size]
            if isinstance(rows, slice):
                at = rows.start + begin
                block = {name: fields[name][at : at + len(pushed)] for name in self.names}
                self.rule.update(block, pushed)
                continue
            some = rows[begin : begin + size]
            block = {name: taken(fields[name], some) for name in self.names}
            self.rule.update(block, pushed)
            # Values last: a row that is pulled meanwhile is as before or as after.
            for name in reversed(self.names):
                put(fields[name], some, block[name])

    def shaped(self, num_rows: int, values: Array | None) -> Array:
        """Values of a message, bytes or an array of the table's dtype, as (num_rows, dim). Raises
        Invalid if they are not as many."""
        shape = (num_rows, self._dim)
        given: Any = np.empty(0, np.uint8) if values is None else values
        if given.dtype == _BYTES and given.nbytes == num_rows * self.row_bytes:
            shaped: Array = given.view(self.dtype).reshape(shape)
            return shaped
        if given.dtype == self.dtype and given.size == num_rows * self._dim:
            return np.ascontiguousarray(given).reshape(shape)
        said = f"{given.nbytes} bytes" if given.dtype == _BYTES else f"{given.size} {given.dtype}"
        raise Invalid(
            f"{self.where}: {num_rows} rows of {self.spec.dim} {self.spec.dtype} were announced, "
            f"and {said} came"
        )

    def check_finite(self, values: Array) -> None:
        if not is_finite(values):
            raise Invalid(f"{self.where}: a pushed value is not finite")

    @abstractmethod
    def restricted(
        self, keys: Keys | None, start: int, stop: int, values: Array
    ) -> tuple[Keys | None, int, int, Array]:
        """The rows of a push that lie in this part, as (keys, start, stop, values). The push may be
        for a larger range."""

    # --- rows ---

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Array]:
        """Arrays by name: (capacity, dim) of the dtype, or (capacity,) uint32 for counts."""

    @property
    @abstractmethod
    def items(self) -> Mapping[str, Array]:
        """Views of the fields by name, as items_of() gives them."""

    @abstractmethod
    def _rows(self, keys: Keys | None, start: int, stop: int) -> Rows:
        """Row numbers of a push; rows that are not there yet are made."""

    def _empty(self, capacity: int) -> dict[str, Array]:
        """Make fields of zeros. Memory is taken when a row is first touched."""
        fields: dict[str, Array] = {"values": np.zeros((capacity, self.spec.dim), self.dtype)}
        for name, kind in self.rule.state.items():
            if kind == "count":
                fields[name] = np.zeros(capacity, np.uint32)
            else:
                fields[name] = np.zeros((capacity, self.spec.dim), self.dtype)
        return fields

    # --- pieces ---

    @abstractmethod
    def snapshot(self) -> "Snapshot": ...

    @abstractmethod
    def pieces(self, snapshot: "Snapshot | None" = None) -> Iterator[Piece]:
        """Read all rows, or the rows of the snapshot, step by step. The part may change between two
        steps; each piece is a copy made at its step."""

    def put(self, piece: Piece) -> None:
        """Set the rows of a piece; those outside of this part's keys are left out."""
        keys, fields = self.decoded(piece)
        self._put(keys, fields)

    def decoded(self, piece: Piece) -> tuple[Keys, dict[str, Array]]:
        """Decode a piece of rows into keys and fields."""
        meta = _decode_meta(piece.meta)
        fields = {}
        at = 0
        for name in self.names:
            field = self.fields[name]
            size = meta.num_rows * row_bytes(field)
            flat = piece.body[at : at + size].view(field.dtype)
            fields[name] = flat.reshape(meta.num_rows, *field.shape[1:])
            at += size
        if at != piece.body.nbytes:
            raise ValueError(f"{self.where}: a piece of {piece.body.nbytes} bytes instead of {at}")
        keys = piece.keys
        if keys is None:
            keys = np.arange(meta.first, meta.first + meta.num_rows, dtype=np.uint64)
        return keys, fields

    @abstractmethod
    def _put(self, keys: Keys, fields: Mapping[str, Array]) -> None: ...

    def _piece(
        self,
        rows: Rows,
        snapshot: "Snapshot | None",
        keys: Keys | None,
        first: int,
    ) -> Piece:
        """Copy rows into a piece, changed ones as the snapshot has them. rows: all in it."""
        fields = self.fields
        num_rows = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        saved = NO_ROWS
        if snapshot is not None:
            saved = np.flatnonzero(snapshot.state[rows] == SAVED)
        those = rows.start + saved if isinstance(rows, slice) else rows[saved]
        body = np.empty(num_rows * self._state_bytes, np.uint8)
        at = 0
        for name in self.names:
            field = fields[name]
            size = num_rows * row_bytes(field)
            # Rows are copied once, to where the piece has them.
            array = body[at : at + size].view(field.dtype).reshape(num_rows, *field.shape[1:])
            take_into(field, rows, array)
            if snapshot is not None and len(saved):
                put(array, saved, taken(snapshot.saved[name], those))
            at += size
        meta = RowsMeta(self.spec.number, num_rows, first)
        return Piece("rows", msgspec.msgpack.encode(meta), keys, body)

    @property
    def _state_bytes(self) -> int:
        """Bytes of a row in all fields."""
        return sum(row_bytes(field) for field in self.fields.values())

    @property
    def _piece_rows(self) -> int:
        return max(1, self.piece_bytes // (self._state_bytes + 8))


UNTOUCHED, SAVED, MADE_LATER = 0, 1, 2
NO_ROWS: NDArray[np.intp] = np.empty(0, np.intp)


class Snapshot:
    """The rows of a part as they are now, while pushes go on: a row is saved before it is changed.

    Memory is taken for the saved rows only, and one byte a row. state: of each row, UNTOUCHED,
    SAVED or MADE_LATER. cursor: rows below have been read already. close() ends it.
    """

    def __init__(self, part: Part, num_rows: int) -> None:
        self.num_rows = num_rows
        self.state = np.zeros(num_rows, np.uint8)
        self.cursor = 0
        self.saved = {
            name: np.empty((num_rows, *field.shape[1:]), field.dtype)
            for name, field in part.fields.items()
        }
        self._part = part
        part.snapshots.append(self)

    def preserve(self, rows: Rows) -> None:
        """Save rows that are about to be changed for the first time."""
        if isinstance(rows, slice):
            begin = max(rows.start, self.cursor)
            stop = min(rows.stop, self.num_rows)
            if begin >= stop:
                return
            states = self.state[begin:stop]
            if not states.any():
                for name, field in self._part.fields.items():
                    self.saved[name][begin:stop] = field[begin:stop]
                states[:] = SAVED
                return
            chosen = begin + np.flatnonzero(states == UNTOUCHED)
        else:
            chosen = rows[(rows >= self.cursor) & (rows < self.num_rows)]
            chosen = chosen[self.state[chosen] == UNTOUCHED]
        if len(chosen):
            for name, field in self._part.fields.items():
                put(self.saved[name], chosen, taken(field, chosen))
            self.state[chosen] = SAVED

    def leave_out(self, rows: Rows) -> None:
        """Leave rows that are made now out of the snapshot."""
        if isinstance(rows, slice):
            self.state[rows] = MADE_LATER
        else:
            self.state[rows[rows < self.num_rows]] = MADE_LATER

    def close(self) -> None:
        if self in self._part.snapshots:
            self._part.snapshots.remove(self)
        self.saved = {}


def row_bytes(field: Array) -> int:
    """Bytes of one row of a field."""
    return field.itemsize * (field.size // max(1, len(field)))


def taken(field: Array, rows: Rows) -> Array:
    """Return a copy of the rows."""
    if isinstance(rows, slice):
        return field[rows].copy()
    return field.take(rows, axis=0, mode="clip")


def take_into(field: Array, rows: Rows, out: Array) -> None:
    """Copy rows into out, an array of as many."""
    if isinstance(rows, slice):
        out[...] = field[rows]
    else:
        field.take(rows, 0, out, "clip")


def put(field: Array, rows: Rows, values: Array) -> None:
    """field[rows] = values. numpy's own is up to five times slower where a row is several values:
    a row is moved as one item here."""
    if isinstance(rows, slice):
        field[rows] = values
        return
    items, put = items_of(field), items_of(np.ascontiguousarray(values))
    if items.dtype == field.dtype:
        items[rows] = put
    else:
        items.put(rows, put, mode="clip")


def items_of(field: Array) -> Array:
    """A view of a C-contiguous field that has a row as one item, (num_rows,)."""
    if field.size == len(field):
        return field.reshape(-1)
    return field.view(np.dtype((np.void, row_bytes(field)))).reshape(-1)


def is_block(rows: NDArray[Any]) -> bool:
    """Tell whether rows are consecutive."""
    return bool(
        len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (rows[1:] > rows[:-1]).all()
    )


def is_finite(values: Array) -> bool:
    """Tell whether no value is NaN or infinite; True for an empty array."""
    if not values.size:
        return True
    # The sum of squares reads the values once, and is finite only if all of them are. It may also
    # overflow: then look at the values. (vdot does not warn of that, other than dot.)
    flat = values.reshape(-1)
    if math.isfinite(np.vdot(flat, flat)):
        return True
    # A minimum is NaN where one value is.
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
