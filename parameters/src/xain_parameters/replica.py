"""The state of a key range at one server, as a deterministic state machine over entries.

The primary makes entries out of requests (`prepare`, `open`, `mark`, `cut`) and applies each before
it makes the next; backups, learners and a replay of the log apply the same entries in the same
order, and then have the same bits. There is no network, no file, no clock and no thread here. One
thread at a time may call, but for `pull`, which may run beside the others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from xain_foundation.logs.logger import get_logger
from xain_parameters.cut import Cut, CutHead
from xain_parameters.errors import Damaged, Invalid
from xain_parameters.keys import Keys, Range
from xain_parameters.known import Known
from xain_parameters.messages import (
    NO_KEYS,
    Entry,
    Mark,
    Pull,
    Push,
    Tile,
    Values,
    decode_head,
)
from xain_parameters.specs import RangeView, TableSpec
from xain_parameters.tables.dense import BoundedPart
from xain_parameters.tables.part import Array, Bytes, Piece, Rows
from xain_parameters.tables.sparse import OpenPart

log = get_logger(__name__)

AnyPart = BoundedPart | OpenPart


class _State(msgspec.Struct):
    """The state of a replica without its rows and held pushes."""

    sequence: int
    opened: int
    last_cut: int
    known: dict[str, Known]
    tables: list[int]


class _HeldMeta(msgspec.Struct, frozen=True, array_like=True):
    clock: int
    worker: str
    table: int
    part: int
    start: int
    stop: int
    has_keys: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A push that is applied when the clock after its own is opened."""

    meta: _HeldMeta
    keys: Keys | None
    values: Array  # (num_rows, dim)

    @property
    def order(self) -> tuple[int, str, int, int]:
        meta = self.meta
        return meta.clock, meta.worker, meta.table, meta.part

    def piece(self) -> Piece:
        body = np.ascontiguousarray(self.values).reshape(-1).view(np.uint8)
        return Piece("held", msgspec.msgpack.encode(self.meta), self.keys, body)


class _Prepared(NamedTuple):
    """An entry of a push, and what was found when it was prepared or received.

    rows: as Part.listed says. values: (num_rows, dim).
    """

    entry: Entry
    part: AnyPart
    keys: Keys | None
    rows: Rows | None
    values: Array


_decode_state = msgspec.msgpack.Decoder(_State).decode
_decode_held = msgspec.msgpack.Decoder(_HeldMeta).decode


class Replica:
    """A key range at one server.

    sequence: the last entry that was applied; 0: none.
    opened: held pushes of clocks below have been applied.
    epoch: the range's; the owner sets it, and entries and tiles carry it.
    is_whole: False for a learner that still lacks tiles.
    keeps_cuts: whether a mark begins a checkpoint here; on at the primary, which writes them. The
        others only remember who has passed which mark.
    cuts: the checkpoints that have begun, by number, until `end_cut`.
    """

    def __init__(
        self,
        range_: RangeView,
        tables: Iterable[TableSpec],
        generation: int,
        *,
        is_whole: bool = True,
    ) -> None:
        """is_whole: False for a learner, which is filled by `take`."""
        self.number = range_.number
        self.span = Range(range_.start, range_.stop)
        self.generation = generation
        self.epoch = range_.epoch
        self.sequence = 0
        self.opened = 0
        self.is_whole = is_whole
        self.keeps_cuts = False
        self.cuts: dict[int, Cut] = {}
        self._has_state = is_whole
        self._last_cut = 0
        self._parts: dict[int, AnyPart] = {}
        self._refused: dict[int, Invalid] = {}  # tables that are left out
        self._known: dict[str, Known] = {}
        self._held: list[_Held] = []
        self._prepared: _Prepared | None = None  # the last one, until it is applied
        for table in tables:
            self.declare(table)

    def declare(self, table: TableSpec) -> bool:
        """Make room for a table; returns whether there was none before. A table that cannot be kept
        here (no memory, or no such update rule) is left out, and its requests are Invalid."""
        if table.number in self._parts or table.number in self._refused:
            return False
        try:
            self._parts[table.number] = self._part(table, is_empty=not self._has_state)
        except Invalid as error:
            self._refused[table.number] = error
            log.error("table_refused", table=table.name, range=self.number, why=str(error))
            return False
        return True

    def _part(self, table: TableSpec, *, is_empty: bool) -> AnyPart:
        """Make the part of a table. is_empty: tiles bring its rows; no first values are made."""
        try:
            if table.bound is None:
                return OpenPart(table, self.number, self.span)
            return BoundedPart(table, self.number, self.span, is_empty)
        except (MemoryError, ValueError):  # numpy raises either
            raise Invalid(
                f"table {table.name!r}, range {self.number}: no memory for {table.bound} rows"
            ) from None

    def rows(self, table: int) -> Iterator[tuple[Keys, Mapping[str, Array]]]:
        """Read all rows of a table: keys, and "values" and the state of its update rule."""
        part = self._parts[table]
        return (part.decoded(piece) for piece in part.pieces())

    @property
    def tables(self) -> list[TableSpec]:
        return [part.spec for part in self._parts.values()]

    def row_bytes(self, table: int) -> int:
        """Bytes of the values of a row; 0: there is no such table. Safe for any thread."""
        part = self._parts.get(table)
        return 0 if part is None else part.row_bytes

    @property
    def num_bytes(self) -> int:
        """Memory of the rows: values and the state of update rules. Safe for any thread."""
        parts = list(self._parts.values())
        return sum(field.nbytes for part in parts for field in part.fields.values())

    # --- requests: the primary makes entries, which change nothing until they are applied ---

    def prepare(
        self, worker: str, push: Push, keys: Keys | None, values: Values | None
    ) -> Entry | None:
        """Check a push, and make its entry; None if it is known already (it may still be on its way
        to the backups: answer it when they have everything up to `sequence`). Raises Invalid.

        keys: None or empty where the push names rows by start and stop. values: bytes, or an array
        of the table's dtype. A push outside of clocks of an older process of the worker than one
        that has been heard (with a lower incarnation) is Invalid.
        """
        part = self._part_of(push.table)
        if self._is_known(worker, push):
            return None
        if push.clock < 0 and push.is_held:
            raise Invalid(f"{part.where}: a push outside of clocks cannot be held")
        keys = _none_if_block(push, keys)
        rows = None if keys is None else part.listed(keys)
        if keys is not None and rows is not None:
            num_rows = len(keys)
        else:
            num_rows = part.check(keys, push.start, push.stop)
            if keys is not None:
                part.check_ascending(keys)
        shaped = part.shaped(num_rows, values)
        part.check_finite(shaped)
        entry = Entry(
            self.number,
            self.epoch,
            self.sequence + 1,
            "push",
            push.clock,
            worker,
            push.incarnation,
            push.table,
            push.part,
            push.settled,
            push.is_held,
            push.cut,
            push.start,
            push.stop,
        )
        self._prepared = _Prepared(entry, part, keys, rows, shaped)
        return entry

    def takes_at_once(self, worker: str, push: Push) -> bool:
        """Tell whether a push changes its rows and what is known of its worker, and nothing else:
        it is new, is not held, passes no mark, and no checkpoint is being made."""
        if push.opened > self.opened or push.is_held or self.cuts:
            return False
        known = self._known.get(worker)
        if push.clock >= 0:
            if push.clock < self.opened:
                return False
        elif known is not None and push.incarnation < known.incarnation:
            return False
        if known is None:
            return not push.cut
        return push.cut <= known.cut and not known.has(push)

    def pushed(self, worker: str, push: Push) -> None:
        """Record a push that `takes_at_once`, whose rows have been updated."""
        if (known := self._known.get(worker)) is None:
            known = self._known[worker] = Known()
        known.add(push)
        self.sequence += 1

    def known_rows(
        self, table: int, keys: Keys | None, start: int, stop: int
    ) -> tuple[AnyPart, Rows] | None:
        """Return a table's part and the rows; None: they have to be looked up or checked."""
        part = self._parts.get(table)
        rows = None if part is None else part.known_rows(keys, start, stop)
        return None if part is None or rows is None else (part, rows)

    def open(self, clock: int, ended: Mapping[str, int]) -> Entry | None:
        """Make the entry that applies held pushes of clocks below `clock`; None if it is open.

        ended: how many clocks of each worker that has ended count.
        """
        if clock <= self.opened:
            return None
        held = {each.meta.worker for each in self._held}
        relevant = {worker: ticked for worker, ticked in ended.items() if worker in held}
        return self._entry("open", clock=clock, ended=relevant)

    def mark(self, worker: str, mark: Mark) -> Entry | None:
        """Make the entry of a worker's mark; None if it has passed it already."""
        known = self._known.get(worker)
        if known is not None and known.cut >= mark.cut:
            return None
        return self._entry("mark", clock=mark.clock, worker=worker, cut=mark.cut)

    def cut(self, number: int) -> Entry | None:
        """Make the entry that begins a checkpoint without a mark; None if it has begun."""
        if number <= self._last_cut:
            return None
        return self._entry("cut", cut=number)

    def pull(self, pull: Pull, keys: Keys | None) -> Array:
        """Rows, (num_rows, dim), in the order of keys. Raises Invalid. Safe beside `apply` in
        another thread. Rows [start, stop) of a dense array are a view of the state itself, which
        later pushes change: send it soon, or copy it."""
        return self.rows_of(pull.table, keys, pull.start, pull.stop)

    def rows_of(self, table: int, keys: Keys | None, start: int, stop: int) -> Array:
        """Return rows, (num_rows, dim), in the order of keys; see pull()."""
        part = self._part_of(table)
        if stop > start:
            keys = None
        elif keys is None:
            keys = NO_KEYS
        return part.pull(keys, start, stop)

    def _part_of(self, table: int) -> AnyPart:
        if (part := self._parts.get(table)) is not None:
            return part
        why = self._refused.get(table, "no such table")
        raise Invalid(f"table number {table}, range {self.number}: {why}")

    def _is_known(self, worker: str, push: Push) -> bool:
        """Whether a push was taken. Raises Invalid for one of a replaced process."""
        known = self._known.get(worker)
        if known is None:
            return False
        if push.clock < 0 and push.incarnation < known.incarnation:
            raise Invalid(
                f"range {self.number}: a push of a process of {worker} that another has replaced"
            )
        return known.has(push)

    def _entry(self, kind: str, **fields: Any) -> Entry:
        return Entry(self.number, self.epoch, self.sequence + 1, kind, **fields)

    # --- entries ---

    def apply(self, entry: Entry, keys: Keys | None = None, values: Values | None = None) -> None:
        """Apply the next entry. Primary, backup, learner and replay come to the same bits.

        Arrays may be kept: do not change them afterwards. Raises Damaged; nothing has changed
        then. A learner takes entries from its first tile on.
        """
        if entry.sequence != self.sequence + 1 or not self._has_state:
            raise Damaged(f"range {self.number}: entry {entry.sequence} came after {self.sequence}")
        match entry.kind:
            case "push":
                prepared, self._prepared = self._prepared, None
                if prepared is None or prepared.entry is not entry:
                    prepared = self._find_part(entry, keys, values)
                self._push(prepared)
            case "open":
                self._open(entry.clock, entry.ended)
            case "mark":
                self._pass_mark(entry.worker, entry.cut)
            case "cut":
                self._begin_cut(entry.cut)
            case _:
                raise ValueError(f"no such entry: {entry.kind}")
        self.sequence = entry.sequence

    def _find_part(self, entry: Entry, keys: Keys | None, values: Values | None) -> "_Prepared":
        """The part, keys and values of an entry that another replica has prepared."""
        part = self._parts.get(entry.table)
        if part is None:
            raise Damaged(f"table {entry.table} has not been declared")
        keys = _none_if_block(entry, keys)
        num_rows = entry.stop - entry.start if keys is None else len(keys)
        return _Prepared(entry, part, keys, None, part.shaped(num_rows, values))

    def _push(self, prepared: "_Prepared") -> None:
        """Record a push as known and in open checkpoints, and apply it, or hold it."""
        entry, part, keys, rows, values = prepared
        if entry.cut:
            self._pass_mark(entry.worker, entry.cut)
        known = self._known.get(entry.worker)
        if known is None:
            known = self._known[entry.worker] = Known()
        known.add(entry)
        # A push outside of clocks that came after the first mark is not in the checkpoint: its
        # sender passes no mark, and the pushes would have no bound.
        for cut in self.cuts.values() if entry.clock >= 0 else ():
            if known.cut < cut.number:
                cut.record(entry, keys, values)
        self._hold_or_apply(entry, part, keys, values, rows)

    def _hold_or_apply(
        self,
        entry: Entry,
        part: AnyPart,
        keys: Keys | None,
        values: Array,
        rows: Rows | None = None,
    ) -> None:
        if entry.is_held and entry.clock >= self.opened:
            meta = _HeldMeta(
                entry.clock,
                entry.worker,
                entry.table,
                entry.part,
                entry.start,
                entry.stop,
                keys is not None,
            )
            self._held.append(_Held(meta, keys, values))
        else:
            part.push(keys, entry.start, entry.stop, values, rows)

    def _open(self, clock: int, ended: Mapping[str, int]) -> None:
        """Apply the held pushes of clocks below `clock`; of an ended worker, those of the clocks
        that it completed."""
        due = sorted(
            (held for held in self._held if held.meta.clock < clock), key=lambda held: held.order
        )
        self._held = [held for held in self._held if held.meta.clock >= clock]
        for held in due:
            meta = held.meta
            if meta.clock < ended.get(meta.worker, clock):
                self._parts[meta.table].push(held.keys, meta.start, meta.stop, held.values)
        self._known = {
            worker: known for worker, known in self._known.items() if known.is_recent(clock)
        }
        self.opened = clock

    def _pass_mark(self, worker: str, cut: int) -> None:
        """Record that a worker passes the mark of a checkpoint; the first mark begins it."""
        self._begin_cut(cut)
        known = self._known.setdefault(worker, Known())
        known.cut = max(known.cut, cut)
        for each in self.cuts.values():
            if each.number <= cut:
                each.marked.add(worker)

    def _begin_cut(self, cut: int) -> None:
        if cut <= self._last_cut:
            return
        if self.keeps_cuts and self.is_whole:
            head = CutHead(
                cut,
                self.generation,
                self.number,
                self.span.start,
                self.span.stop - 1,
                self.sequence,
                self.tables,
            )
            state = [self._state_piece(list(self._parts)), *(held.piece() for held in self._held)]
            self.cuts[cut] = Cut(head, state, list(self._parts.values()))
        self._last_cut = cut

    def end_cut(self, number: int) -> None:
        """Forget a checkpoint: it is written, or given up."""
        cut = self.cuts.pop(number, None)
        if cut is not None:
            cut.close()

    def load(self, files: Iterable[Iterable[Piece]], *, with_recorded: bool = True) -> None:
        """Fill this new replica with the checkpoints of ranges that together have all of its own.

        Rows, held pushes and recorded pushes outside of this range are left out, and tables that
        are not declared here. with_recorded: False for a replay of a log, which has these pushes.
        Raises Invalid if a table cannot be kept here.
        """
        opened = []
        for pieces in files:
            recorded = []
            for piece in pieces:
                match piece.name:
                    case "cut":
                        pass
                    case "state":
                        state = _decode_state(piece.body.tobytes())
                        for refused in (self._refused.get(number) for number in state.tables):
                            if refused is not None:
                                raise refused  # the next checkpoint would be without the table
                        opened.append(state.opened)
                        self.opened = state.opened
                        self._merge_state(state)
                    case "recorded":
                        recorded.append(piece)
                    case _:
                        self._take_piece(piece)
            for piece in recorded if with_recorded else ():
                self._load_recorded(piece)
        # The ranges may differ in the clocks that they have opened. Pushes that one of them still
        # held are held here again, so the lowest clock counts.
        self.opened = min(opened, default=0)

    def _merge_state(self, state: _State) -> None:
        """Take in the state of one of several checkpoints."""
        self.sequence = max(self.sequence, state.sequence)
        self._last_cut = max(self._last_cut, state.last_cut)
        for worker, other in state.known.items():
            self._known.setdefault(worker, other).merge(other)

    def _load_recorded(self, piece: Piece) -> None:
        """Apply the rows of a recorded push that lie in this range, or hold them."""
        entry = decode_head(piece.meta)
        assert isinstance(entry, Entry)
        self._known.setdefault(entry.worker, Known()).add(entry)
        part = self._parts.get(entry.table)
        if part is None:
            return
        keys = _none_if_block(entry, piece.keys)
        num_rows = entry.stop - entry.start if keys is None else len(keys)
        keys, start, stop, values = part.restricted(
            keys, entry.start, entry.stop, part.shaped(num_rows, piece.body)
        )
        if len(values):
            entry = msgspec.structs.replace(entry, start=start, stop=stop)
            self._hold_or_apply(entry, part, keys, values)

    def _hold(self, meta: _HeldMeta, keys: Keys | None, values: Array) -> None:
        """Hold what of a push lies in this range."""
        part = self._parts[meta.table]
        keys, start, stop, values = part.restricted(keys, meta.start, meta.stop, values)
        if len(values):
            meta = msgspec.structs.replace(meta, start=start, stop=stop)
            self._held.append(_Held(meta, keys, values))

    # --- learners ---

    def tiles(self) -> Iterator[tuple[Tile, Keys | None, Bytes]]:
        """Read the whole state for a learner, step by step. Entries may be applied between two
        steps; the learner takes tiles and entries in the order in which they come from here. A
        tile includes the effect of the entries before it, and replaces the rows that the learner
        has."""
        tables = list(self._parts)
        held = list(self._held)
        yield self._tile(self._state_piece(tables), is_last=False)
        for each in held:
            if each in self._held:  # not opened meanwhile: then later tiles have its effect
                yield self._tile(each.piece(), is_last=False)
        for table in tables:
            for piece in self._parts[table].pieces():
                yield self._tile(piece, is_last=False)
        yield self._tile(Piece("end", b"", None, np.empty(0, np.uint8)), is_last=True)

    def _tile(self, piece: Piece, is_last: bool) -> tuple[Tile, Keys | None, Bytes]:
        tile = Tile(self.number, self.epoch, self.sequence, piece.name, piece.meta, is_last)
        return tile, piece.keys, piece.body

    def _state_piece(self, tables: list[int]) -> Piece:
        state = _State(self.sequence, self.opened, self._last_cut, self._known, tables)
        encoded = np.frombuffer(msgspec.msgpack.encode(state), np.uint8)
        return Piece("state", b"", None, encoded)

    def take(self, tile: Tile, keys: Keys | None, body: Values | None) -> None:
        """Take the next tile. The first one empties this replica; all tables that it names must be
        declared. Raises Damaged; nothing has changed then."""
        body = np.empty(0, np.uint8) if body is None else body
        if tile.name == "state":
            state = _decode_state(body.tobytes())
            for number in state.tables:
                if number not in self._parts:
                    raise Damaged(f"table {number} has not been declared")
            self._parts = {
                number: self._part(part.spec, is_empty=number in state.tables)
                for number, part in self._parts.items()
            }
            self.sequence, self.opened = state.sequence, state.opened
            self._last_cut, self._known = state.last_cut, state.known
            self._held = []
            self.is_whole, self._has_state = False, True
            return
        if self.is_whole or not self._has_state or tile.sequence != self.sequence:
            raise Damaged(
                f"range {self.number}: a tile at {tile.sequence} came after {self.sequence}"
            )
        self._take_piece(Piece(tile.name, tile.meta, keys, body))
        if tile.is_last:
            self.is_whole = True

    def _take_piece(self, piece: Piece) -> None:
        match piece.name:
            case "rows":
                part = self._parts.get(msgspec.msgpack.decode(piece.meta)[0])
                if part is not None:
                    part.put(piece)
            case "held":
                meta = _decode_held(piece.meta)
                part = self._parts.get(meta.table)
                keys = piece.keys if meta.has_keys else None
                num_rows = meta.stop - meta.start if keys is None else len(keys)
                if part is not None:
                    self._hold(meta, keys, part.shaped(num_rows, piece.body))


def _none_if_block(request: Push | Pull | Entry, keys: Keys | None) -> Keys | None:
    """The keys of a request or entry; None if it names rows by start and stop."""
    if request.stop > request.start:
        return None
    return np.empty(0, np.uint64) if keys is None else keys
