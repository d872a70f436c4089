"""The batches of a job's data, one in each clock of a worker.

How far each part of an epoch is read is kept in a table beside the model, and pushed in the clock
of the batch that it counts: under BSP the batch is read where its gradients count, and nowhere
else; with staleness those of the batch at which a worker died may count twice. So a worker that was
killed, another one that takes its part over, and all of them after a rollback go on with the first
batch that does not count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from xain_foundation.logs.logger import get_logger
from xain_parameters.client.core import Core
from xain_parameters.errors import Invalid
from xain_parameters.jobs.parts import Source, parts_in
from xain_parameters.specs import Plugin, TableSpec
from xain_parameters.tables.initialisers import Zeros
from xain_parameters.tables.rules import Assign

# A key of the table of parts is epoch * MAX_PARTS + index.
MAX_PARTS: Final = 1 << 20
# The clock of the batch plus 1, the worker, batches, rows and size before it and with it, 1 at the
# end of the part.
NOTE_DIM: Final = 9

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch as a reader gives it.

    size: of its rows, in the unit of the data's size. A reader that knows the sizes of parts only
    may give all of it with the last batch of a part; a part without rows may have one batch without
    rows, to say its size.
    """

    data: Any
    num_rows: int
    size: int


class Divisible(Protocol):
    """Data that workers divide.

    size: of all of them, in bytes or rows. fingerprint: below 2**53; equal for equal data.
    """

    @property
    def size(self) -> int: ...

    @property
    def fingerprint(self) -> int: ...

    def read(self, part: int, num_parts: int, start: int) -> Iterator[Piece]:
        """The batches of a part, from batch `start` on: the same ones each time. All parts of a
        division together have each row once, and the size of all of the data."""
        ...


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """Data of which each worker can read any row: batches are slices of row numbers.

    num_rows: of all data. batch_rows: of a batch; the last one of a part may have fewer.
    """

    num_rows: int
    batch_rows: int = 100
    fingerprint: int = 0

    @property
    def size(self) -> int:
        return self.num_rows

    def read(self, part: int, num_parts: int, start: int) -> Iterator[Piece]:
        """Yield the batches of a part, as slices of row numbers, from batch `start` on."""
        first = self.num_rows * part // num_parts + start * self.batch_rows
        stop = self.num_rows * (part + 1) // num_parts
        for begin in range(first, stop, self.batch_rows):
            end = min(begin + self.batch_rows, stop)
            yield Piece(slice(begin, end), end - begin, end - begin)


@dataclass(frozen=True, slots=True)
class Batch:
    """data: as the reader gave it. epoch, part: from 0 on. num_parts: of this epoch."""

    data: Any
    num_rows: int
    clock: int
    epoch: int
    part: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Rows that the workers of a job have read, and their size in the unit of the data, by epoch.

    expected: the size of the data.
    """

    rows: Sequence[int]
    sizes: Sequence[int]
    expected: int

    @property
    def is_whole(self) -> bool:
        """Whether each epoch has read the data as they are, and as many rows as the others."""
        return set(self.sizes) <= {self.expected} and len(set(self.rows)) <= 1


@dataclass(slots=True)
class _Position:
    """The part that is being read: what is read of it, and what comes next."""

    epoch: int
    index: int
    num_parts: int
    pieces: Iterator[Piece] = field(default_factory=lambda: iter(()))
    following: Piece | None = None
    batches: int = 0
    rows: int = 0
    size: int = 0

    @property
    def key(self) -> int:
        return self.epoch * MAX_PARTS + self.index

    @property
    def part(self) -> tuple[int, int]:
        return self.epoch, self.index

    def close(self) -> None:
        close = getattr(self.pieces, "close", None)
        if close is not None:
            close()


class Batches:
    """The batches that this worker reads, in clocks of their own loop. For one thread at a time.

    num_batches: batches so far. was_over: no part was left when this worker came.
    """

    def __init__(
        self,
        core: Core,
        data: Divisible,
        epochs: int,
        staleness: int | None,
        name: str | None,
    ) -> None:
        if epochs < 1:
            raise Invalid(f"epochs must be positive: {epochs}")
        if staleness is not None and staleness < 0:
            raise Invalid(f"staleness must not be negative: {staleness}")
        tables = core.scheduler.view.tables
        if not tables:
            raise Invalid("declare a table before the batches: nothing is trained without one")
        self._core = core
        self._data = data
        self._name = tables[0].name if name is None else name
        self._source = Source(data.size, data.fingerprint, epochs)
        self._staleness = staleness
        self._me = crc32(core.scheduler.worker.encode())
        self._loop = 0
        self._clock = self._generation = -1
        self._position: _Position | None = None
        self._given: Piece | None = None  # the batch of this clock
        self._done: tuple[int, int] | None = None
        self._divisions: tuple[tuple[int, int], ...] = ()
        self._has_ended = False
        self.num_batches = 0
        self.was_over = False
        self._notes = core.declare(
            TableSpec(
                number=0,
                name=f"{self._name}.parts",
                bound=None,
                dim=NOTE_DIM,
                is_dense=False,
                dtype="float64",
                update=Plugin.of(Assign()),
                init=Plugin.of(Zeros()),
            )
        )

    def next(self) -> Batch | None:
        """Complete the clock of the last batch, and return the next batch in a new clock; None: all
        workers have read all epochs. After an error the loop has ended."""
        try:
            while not self._has_ended:
                batch = self._step()
                if self._has_ended:
                    self.leave()
                elif batch is not None:
                    self.num_batches += 1
                    return batch
        except BaseException:  # on Ctrl-C, too, the loop is left
            self.leave()
            raise
        return None

    def leave(self) -> None:
        """End the loop. The clock of the last batch is not complete, unless it is the end."""
        self._has_ended = True
        self._drop_part()
        self._core.end_clocks(self._loop)

    def abandon(self) -> bool:
        """End the loop as leave() does, asking nobody; from any thread. Returns whether
        Core.tell_end() must follow."""
        self._has_ended = True
        return self._core.leave_clocks(self._loop)

    def _is_over(self) -> bool:
        return self._has_ended or self._core.is_closed

    def reading(self) -> Reading:
        """Return what all workers have read, by epoch, once the batches are over."""
        rows, sizes = [], []
        self._core.look_again()
        for epoch in range(self._source.num_epochs if self._divisions else 0):
            keys = epoch * MAX_PARTS + np.arange(parts_in(self._divisions, epoch))
            notes = self._pull(keys)
            rows.append(int(notes[:, 6].sum()))
            sizes.append(int(notes[:, 7].sum()))
        return Reading(rows, sizes, self._source.size)

    # --- a clock ---

    def _step(self) -> Batch | None:
        """Go on to the next clock, and return its batch; None when the batches are over. The
        first step waits for a slot and enters the clocks; after a rollback the position is
        sought anew."""
        core = self._core
        if not self._loop:
            worker = core.scheduler
            waited = worker.wait_part(self._name, self._source, self._is_over)
            self._divisions = waited.divisions
            if waited.is_over:
                self._has_ended = True
                self.was_over = self._clock < 0
                self._warn_of_missed_rows()
                return None
            self._loop = core.enter_clocks(self._staleness)
            clock = core.begin_clocks(self._loop, self._staleness, 1, None, all_here=waited.is_new)
        else:
            if self._given is not None:
                self._note(self._given)
                self._given = None
            clock = core.next_clock(self._loop)
        generation = core.generation
        goes_on = clock == self._clock + 1 and generation == self._generation
        self._clock, self._generation = clock, generation
        if not goes_on:
            self._drop_part()
        if self._position is None:
            is_void = self._seek()
            if self._position is None:
                if not is_void:
                    core.end_clocks(self._loop)
                    self._loop = 0
                return None
        return self._next_batch()

    def _seek(self) -> bool:
        """Find the next part, and where to go on in it. Returns whether this clock has no batch,
        and another clock follows."""
        while True:
            done, self._done = self._done, None
            taken = self._core.scheduler.take(
                self._name,
                self._source,
                self._clock,
                self._generation,
                done,
                self._is_over,
            )
            if taken.is_void or taken.part is None:
                return taken.is_void
            position = _Position(*taken.part)
            note = self._pull(np.array([position.key]))[0]
            # A batch that was begun in this clock comes again: its pushes are known.
            comes_again = note[0] == self._clock + 1 and note[1] == self._me
            first = 2 if comes_again else 5
            position.batches, position.rows, position.size = map(int, note[first : first + 3])
            if note[8] and not comes_again:
                self._done = position.part
                continue
            position.pieces = self._data.read(position.index, position.num_parts, position.batches)
            self._position = position
            first_piece = next(position.pieces, None)
            if first_piece is not None and first_piece.num_rows:
                position.following = first_piece
                return False
            # A part without rows.
            self._note(Piece(None, 0, 0 if first_piece is None else first_piece.size))
            return True

    def _next_batch(self) -> Batch:
        position = self._position
        assert position is not None
        assert position.following is not None
        self._given = position.following
        position.following = next(position.pieces, None)
        return Batch(
            self._given.data,
            self._given.num_rows,
            self._clock,
            position.epoch,
            position.index,
            position.num_parts,
        )

    def _note(self, piece: Piece) -> None:
        """Note at the servers that the batch of this clock is read."""
        position = self._position
        assert position is not None
        before = (position.batches, position.rows, position.size)
        position.batches += 1
        position.rows += piece.num_rows
        position.size += piece.size
        after = (position.batches, position.rows, position.size)
        is_end = position.following is None
        note = np.array([[self._clock + 1, self._me, *before, *after, is_end]], np.float64)
        ticket = self._core.push_ticket(self._notes)
        self._core.push_keys(self._notes, ticket, np.array([position.key]), note)
        if is_end:
            self._done = position.part
            self._drop_part(keep_done=True)

    def _pull(self, keys: NDArray[Any]) -> NDArray[Any]:
        return self._core.pull_keys(self._notes, self._core.pull_ticket(), keys)

    def _drop_part(self, *, keep_done: bool = False) -> None:
        if self._position is not None:
            self._position.close()
        self._position = self._given = None
        if not keep_done:
            self._done = None

    def _warn_of_missed_rows(self) -> None:
        worker = self._core.scheduler.worker
        if not self.num_batches and not self.was_over:
            log.warning("no_batches", worker=worker, data=self._name)
        reading = self.reading()
        if not reading.is_whole:
            log.warning(
                "rows_missed",
                worker=worker,
                data=self._name,
                rows=list(reading.rows),
                sizes=list(reading.sizes),
                expected=reading.expected,
            )

    # --- for a loop ---

    def __iter__(self) -> Iterator[Batch]:
        try:
            while (batch := self.next()) is not None:
                yield batch
        finally:
            self.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
