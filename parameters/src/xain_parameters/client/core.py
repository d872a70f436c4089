"""The core of the client, for all its faces: numbered pushes, clocks, checks, pulls in the caller's
order."""

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.logs.logger import get_logger
from xain_foundation.security.tls import Certificates
from xain_parameters.client.cuts import summed, unique, whole_numbers
from xain_parameters.client.requests import KnownMessages, Piece, Requests
from xain_parameters.errors import (
    Closed,
    Invalid,
    ParameterError,
    RequestFailed,
    RolledBack,
    Unavailable,
)
from xain_parameters.handlers import ALL, SERVERS, check_request
from xain_parameters.keys import KEY_DTYPE, Keys
from xain_parameters.messages import Command, Mark, Pull, Push
from xain_parameters.scheduler.client import Among
from xain_parameters.scheduler.worker_client import Progress, WorkerScheduler
from xain_parameters.specs import TableSpec, View
from xain_parameters.tables.part import is_finite
from xain_parameters.transport.connection import Request

# Requests are cut into pieces of this size. While one is on its way the server applies the one
# before, and a small request of another worker never waits for a large one.
PIECE_BYTES: Final = 2 << 20
# Parts of a push: its number among the pushes of a clock to a table, and that of the piece.
PIECES: Final = 1 << 20
KEY_BYTES: Final = 8
# A piece of open keys is cut again, by range, and a group has at least 8 of them by default: so
# many times as large, it makes messages of PIECE_BYTES. MAX_OPEN_KEYS limits it, so that servers
# begin while the client still cuts.
OPEN_PIECES: Final = 8
MAX_OPEN_KEYS: Final = 1 << 17
# How long the end of a loop over clocks may wait for servers.
END_S: Final = 5.0

# Comparing with a name would make the dtype first.
_DTYPES: Final = {name: np.dtype(name) for name in ("float32", "float64")}

Array: TypeAlias = NDArray[Any]

log = get_logger(__name__)


class Ticket(NamedTuple):
    """A push or pull as it was asked for: its clock, and its number among the pushes.

    clock: -1 outside of clocks. opened: valid in this generation only. loop: see enter_clocks.
    """

    generation: int
    opened: int
    clock: int = -1
    is_held: bool = False
    cut: int = 0
    number: int = 0
    loop: int = 0


class Core:
    """One worker. Its methods may be called from any thread, those of clocks by one at a time.

    tls: of the connections to servers; None: nothing is encrypted.
    """

    # Larger than PIECE_BYTES: a piece of a dense array is cut again, by range, for several servers.
    dense_piece_bytes = 4 << 20

    def __init__(
        self, scheduler: WorkerScheduler, timeout_s: float, tls: Certificates | None = None
    ) -> None:
        self.scheduler = scheduler
        self._requests = Requests(scheduler, timeout_s, tls)
        self._timeout_s = timeout_s
        # Reentrant: a loop that is collected as garbage ends in whatever thread is running.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # of the same lock
        self._asking = threading.Lock()  # held while the scheduler is asked about clocks
        self._job = scheduler.job
        generation, opened = scheduler.opened
        self._progress = Progress(-1, opened, 0, generation)
        self._is_held = False
        self._has_ticked = False  # a clock of the present loop over clocks is complete
        self._numbers: Counter[int] = Counter()  # next push number of this clock, by table
        self._requests_sent = itertools.count(1)  # the number of the next request to handlers
        self._num_free = 0  # pushes outside of clocks so far, to all tables
        self._open: set[int] = set()  # their numbers that are not answered yet
        self._num_open = 0  # pushes of this clock that are not answered
        self._failure: ParameterError | None = None  # the error of a push of this clock
        self._loop = 0  # the number of the loop over clocks that this worker is in; 0: none
        self._num_loops = 0
        self._is_ending = False  # the scheduler has not been told of the end of the last loop
        self._is_closed = False

    @property
    def timeout_s(self) -> float:
        """The longest time that a push or a pull takes."""
        return self._requests.timeout_s

    def close(self) -> None:
        """Fail waiting calls, end the loop over clocks, and close all connections."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.end_clocks(self._loop)
        with self._changed:  # another thread may be telling the end of a loop
            self._changed.wait_for(lambda: not self._is_ending, END_S)
        self._requests.close()
        self.scheduler.close()

    def barrier(self, among: Among, timeout_s: float | None) -> None:
        self.scheduler.barrier(among, timeout_s, lambda: self._is_closed)

    # --- tables ---

    def declare(self, table: TableSpec) -> TableSpec:
        return self._enter_job(self.scheduler.declare(table, self._timeout_s))

    def find(self, name: str) -> TableSpec:
        return self._enter_job(self.scheduler.find(name, self._timeout_s))

    def _enter_job(self, table: TableSpec) -> TableSpec:
        """Return the table, and go on in its job if this worker has named none."""
        with self._changed:
            if self._job != self.scheduler.job:
                self._job = self.scheduler.job
                generation, opened = self.scheduler.opened
                self._progress = Progress(-1, opened, 0, generation)
        return table

    def checkpoint(self) -> int:
        return self.scheduler.checkpoint(self._timeout_s)

    # --- clocks ---

    def enter_clocks(self, staleness: int | None) -> int:
        """Enter a loop over clocks; returns its number. Asks nobody."""
        if staleness is not None and staleness < 0:
            raise Invalid(f"staleness must not be negative: {staleness}")
        with self._changed:
            if self._loop:
                raise Invalid("this worker is in a loop over clocks already")
            self._num_loops += 1
            self._loop = self._num_loops
            return self._loop

    def begin_clocks(
        self,
        loop: int,
        staleness: int | None,
        num_workers: int,
        stop: int | None = None,
        *,
        all_here: bool = False,
    ) -> int:
        """Begin a loop that ends before the clock `stop`; returns its first clock. all_here: when
        all of the job's group that are there begin theirs. After an error it has ended."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_ending or self._is_over(loop))
                self._has_ticked = False
            with self._asking:
                progress = self.scheduler.begin(
                    staleness, num_workers, lambda: self._is_over(loop), stop, all_here=all_here
                )
            if stop is not None and 0 < stop <= progress.clock:
                worker = self.scheduler.worker
                log.warning("no_clocks", worker=worker, clock=progress.clock, stop=stop)
            return self._begin(loop, progress, is_held=staleness == 0)
        except BaseException:  # on Ctrl-C, too, the loop is left
            self.end_clocks(loop)
            raise

    def next_clock(self, loop: int) -> int:
        """Complete the clock when all of its pushes are acknowledged; returns the next one, which
        is an earlier one after a rollback. Raises what one of the pushes failed with."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open or self._is_over(loop))
            self._check_loop(loop)
            if self._failure is not None:
                raise self._failure
            clock, generation = self._progress.clock, self._progress.generation
        with self._asking:
            progress = self.scheduler.tick(clock, generation, lambda: self._is_over(loop))
        self._has_ticked = True
        if progress.generation != generation:
            log.warning("rolled_back", clock=clock, goes_on_at=progress.clock)
        return self._begin(loop, progress, is_held=self._is_held)

    def end_clocks(self, loop: int) -> None:
        """End a loop, also while it waits in another thread. Harmless after its end."""
        if self.leave_clocks(loop):
            self.tell_end()

    def leave_clocks(self, loop: int) -> bool:
        """End a loop in this process: what is pushed from now on is outside of clocks. Asks nobody.
        Returns whether tell_end() must follow; no other loop begins before."""
        with self._changed:
            if not loop or loop != self._loop:
                return False
            self._loop = 0
            self._is_ending = True
            self._progress = self._progress._replace(clock=-1)
            self._num_open = 0
            self._changed.notify_all()
            return True

    def tell_end(self) -> None:
        """Tell the scheduler that the loop has ended, so that nobody waits for this worker."""
        try:
            with self._asking:  # a question that comes after the end would begin the loop again
                self.scheduler.end()
            if self._has_ticked and any(map(self._holds, self.scheduler.view.tables)):
                self._open_last()
        except ParameterError as error:  # the scheduler notices by itself, when the lease is over
            log.info("loop_ended_unheard", worker=self.scheduler.worker, error=str(error))
        finally:
            with self._changed:
                self._is_ending = False
                self._changed.notify_all()

    @property
    def generation(self) -> int:
        """The generation of the present clock."""
        return self._progress.generation

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def look_again(self) -> None:
        """Have the next pulls outside of clocks see all pushes that count by now."""
        generation, opened = self.scheduler.opened_now(self._timeout_s)
        with self._changed:
            self._progress = Progress(-1, opened, self._progress.cut, generation)

    def _open_last(self) -> None:
        """Have all ranges apply what they hold of complete clocks. While workers train, their next
        pulls do; workers that only read, and connected earlier, do not know the last clock."""
        generation, opened = self.scheduler.opened_now(END_S)
        with self._changed:
            self._progress = Progress(-1, opened, self._progress.cut, generation)
        if not (tables := self.scheduler.view.tables):
            return

        def head(piece: Piece, view: View, range_: int, start: int, stop: int) -> Pull:
            return Pull(0, view.version, range_, tables[0].number, opened)

        self._requests.run_ranges(head, generation=generation, timeout_s=END_S)

    def _is_over(self, loop: int) -> bool:
        return self._is_closed or loop != self._loop

    def _check_loop(self, loop: int) -> None:
        if self._is_over(loop):
            raise Closed("the loop over clocks has ended")

    def _begin(self, loop: int, progress: Progress, *, is_held: bool) -> int:
        """Take over the progress at the begin of a clock, and return the clock."""
        with self._changed:
            self._check_loop(loop)
            last_cut = self._progress.cut
            self._progress = progress
            self._is_held = is_held
            self._numbers.clear()
            self._failure = None
        if progress.cut > last_cut:
            self._send_marks(progress)
        return progress.clock

    def _send_marks(self, progress: Progress) -> None:
        """Tell all ranges that this worker has passed the mark of a checkpoint."""

        def head(piece: Piece, view: View, range_: int, start: int, stop: int) -> Mark:
            return Mark(0, view.version, range_, progress.opened, progress.cut, progress.clock)

        try:
            self._requests.run_ranges(head, generation=progress.generation)
        except RolledBack:
            log.info("checkpoint_abandoned", cut=progress.cut)  # the next tick tells the clock

    def _holds(self, table: TableSpec) -> bool:
        """Tell whether pushes to a table count only from the next clock on."""
        return self._is_held if table.staleness == "loop" else table.staleness == 0

    def known_messages(self, table: TableSpec, keys: Keys) -> KnownMessages | None:
        """See Requests.known_messages. Its caller may pass them on with the keys."""
        return self._requests.known_messages(table, keys)

    # --- pushes ---

    def push_ticket(self, table: TableSpec) -> Ticket:
        """Number a push, in the order of the calls, and return the ticket to push it with."""
        with self._lock:
            progress = self._progress
            if progress.clock >= 0:
                number = self._numbers[table.number]
                self._numbers[table.number] += 1
                self._num_open += 1
            else:
                number = self._num_free
                self._num_free += 1
                self._open.add(number)
            return Ticket(
                progress.generation,
                progress.opened,
                progress.clock,
                self._holds(table) and progress.clock >= 0,
                progress.cut,
                number,
                self._loop,
            )

    def answered(self, ticket: Ticket, error: BaseException | None) -> None:
        """Record that a push has ended, or will never begin. Errors but Invalid fail the clock."""
        with self._lock:
            if ticket.clock < 0:
                self._open.discard(ticket.number)
                return
            if ticket.loop != self._loop:
                return  # its clock was left
            self._num_open -= 1
            # Invalid pushes have changed nothing; others may be at some servers only.
            if isinstance(error, ParameterError) and not isinstance(error, Invalid):
                self._failure = error
            self._changed.notify_all()

    def push_rows(self, table: TableSpec, ticket: Ticket, values: Array) -> None:
        """Push to all rows of a dense array."""
        try:
            checked = _checked(table, values, table.shape).reshape(-1, table.dim)
            _check_finite(table, checked)
            size = self._rows_in(table.dim * checked.itemsize)
            pieces = [
                Piece(
                    ticket.number * PIECES + index,
                    start,
                    min(start + size, len(checked)),
                    values=checked[start : start + size],
                )
                for index, start in enumerate(range(0, len(checked), size))
            ]
            self._push(table, ticket, pieces)
        except BaseException as error:  # whatever it is, the push is open no longer
            self.answered(ticket, error)
            raise
        self.answered(ticket, None)

    def push_keys(
        self,
        table: TableSpec,
        ticket: Ticket,
        ids: ArrayLike,
        values: Array,
        known: KnownMessages | None = None,
    ) -> None:
        """Push values to rows by key; those of one key are added. known: see known_messages."""
        try:
            keys = _keys_of(table, ids)
            shape = _shape_of(ids)
            if table.dim > 1 or _shape_of(values) != shape:
                shape = (*shape, table.dim)
            checked = _checked(table, values, shape).reshape(-1, table.dim)
            given = len(keys)
            known = known or self._requests.known_messages(table, keys)
            if known is None:
                keys, checked = summed(keys, checked)
            _check_finite(table, checked)
            if table.update.name == "assign" and len(keys) < given:
                raise Invalid(f"table {table.name!r}: a key is assigned twice in one push")
            first = ticket.number * PIECES
            if 0 < keys.nbytes + checked.nbytes <= PIECE_BYTES:
                pieces = [Piece(first, keys=keys, values=checked, known=known)]
            else:
                size = _keys_in(table)
                pieces = [
                    Piece(
                        first + index,
                        keys=keys[start : start + size],
                        values=checked[start : start + size],
                    )
                    for index, start in enumerate(range(0, len(keys), size))
                ]
            self._push(table, ticket, pieces)
        except BaseException as error:  # whatever it is, the push is open no longer
            self.answered(ticket, error)
            raise
        self.answered(ticket, None)

    def _push(self, table: TableSpec, ticket: Ticket, pieces: Sequence[Piece]) -> None:
        """Send the pieces of a push. Servers that have them already know it by the ticket."""
        is_clocked = ticket.clock >= 0
        settled = 0
        if not is_clocked:
            with self._lock:
                settled = min(self._open) * PIECES

        def head(piece: Piece, view: View, range_: int, start: int, stop: int) -> Request:
            return Push(
                0,
                view.version,
                range_,
                table.number,
                ticket.opened if view.generation == ticket.generation else 0,
                ticket.clock,
                piece.part,
                ticket.is_held,
                0 if is_clocked else self.scheduler.incarnation,
                settled,
                ticket.cut if view.generation == ticket.generation else 0,
                start,
                stop,
            )

        try:
            generation = ticket.generation if is_clocked else None
            self._requests.run(table, pieces, head, generation=generation)
        except RolledBack:
            # The worker repeats this clock or an earlier one: see next_clock.
            log.info("push_dropped", table=table.name, clock=ticket.clock, reason="rolled back")

    # --- pulls ---

    def pull_ticket(self) -> Ticket:
        with self._lock:
            progress = self._progress
            return Ticket(progress.generation, progress.opened, progress.clock, loop=self._loop)

    def pull_rows(self, table: TableSpec, ticket: Ticket, out: Array | None) -> Array:
        """Pull all rows of a dense array into `out`, or into a new array."""
        if out is None:
            out = np.empty(table.shape, table.dtype)
        elif not (isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable):
            raise Invalid(f"table {table.name!r}: out must be a writable C-contiguous array")
        else:
            _checked(table, out, table.shape)
        rows = out.reshape(-1, table.dim)
        size = self._rows_in(rows.itemsize * table.dim)
        pieces = [
            Piece(start=start, stop=min(start + size, len(rows)), out=rows[start : start + size])
            for start in range(0, len(rows), size)
        ]
        self._pull(table, ticket, pieces)
        return out

    def pull_keys(
        self, table: TableSpec, ticket: Ticket, ids: ArrayLike, known: KnownMessages | None = None
    ) -> Array:
        """Pull the rows of ids, in any order and repeated; returns (*ids.shape, dim). known: of ids
        that are unique and ascending, see known_messages."""
        keys, inverse = _keys_of(table, ids), None
        known = known or self._requests.known_messages(table, keys)
        if known is None:
            keys, inverse = unique(keys)
        rows = np.empty((len(keys), table.dim), table.dtype)
        if 0 < keys.nbytes + rows.nbytes <= PIECE_BYTES:
            pieces = [Piece(keys=keys, out=rows, known=known)]
        else:
            size = _keys_in(table)
            pieces = [
                Piece(keys=keys[start : start + size], out=rows[start : start + size])
                for start in range(0, len(keys), size)
            ]
        self._pull(table, ticket, pieces)
        if inverse is not None:
            rows = rows.take(inverse, axis=0)
        return rows.reshape(*_shape_of(ids), table.dim)

    def _pull(self, table: TableSpec, ticket: Ticket, pieces: Sequence[Piece]) -> None:
        """Pull pieces; wait before for clocks that the table needs and the loop does not."""
        generation, opened = ticket.generation, ticket.opened
        if ticket.clock >= 0 and isinstance(table.staleness, int):
            least = ticket.clock - table.staleness
            if opened < least:  # the table is to be fresher than the loop is
                is_over = functools.partial(self._is_over, ticket.loop)
                generation, opened = self.scheduler.wait_opened(least, generation, is_over)

        def head(piece: Piece, view: View, range_: int, start: int, stop: int) -> Request:
            since = opened if view.generation == generation else 0
            return Pull(0, view.version, range_, table.number, since, start, stop)

        self._requests.run(table, pieces, head)

    # --- requests to handlers ---

    def send(self, to: str | int, head: int, body: str, timeout_s: float | None) -> dict[str, str]:
        """Send a request to handlers, and return answers by name; see sync.Server.send."""
        check_request(head, body)
        if isinstance(to, int):
            to = self._worker_at(to)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        number = next(self._requests_sent)
        there = sorted(self.scheduler.view.addresses)
        servers = there if to in (SERVERS, ALL) else [to] if to in there else []
        if to == SERVERS and not servers:
            raise Unavailable("the group has no servers")
        command = Command(0, head, body, number)
        if to == ALL:
            pool = ThreadPoolExecutor(1, "send")
            try:
                passed = pool.submit(self.scheduler.send, number, to, head, body, timeout_s)
                replies = self._requests.send(servers, command, timeout_s) | passed.result()
            finally:  # after an error the thread ends with its time, or with the client
                pool.shutdown(wait=False)
        elif servers:
            replies = self._requests.send(servers, command, timeout_s)
        else:
            replies = self.scheduler.send(number, to, head, body, timeout_s)
        by_name = sorted(replies.items())
        failures = {name: reply.error for name, reply in by_name if reply.error}
        answers = {name: reply.body for name, reply in by_name if not reply.error}
        if failures:
            raise RequestFailed(answers, failures)
        return answers

    def _worker_at(self, rank: int) -> str:
        """The name of the worker with a rank. Raises Invalid."""
        ranks = self.scheduler.view.ranks
        for name, its in ranks.items():
            if its == rank:
                return name
        there = ", ".join(str(each) for each in sorted(ranks.values())) or "none"
        raise Invalid(f"no worker of the job has the rank {rank}; there are: {there}")

    def _rows_in(self, row_bytes: int) -> int:
        """The number of rows in a piece of a dense array."""
        return max(1, self.dense_piece_bytes // row_bytes)


def _keys_in(table: TableSpec) -> int:
    """The number of keys in a piece."""
    num = max(1, PIECE_BYTES // (table.row_bytes + KEY_BYTES))
    return num if table.bound is not None else max(num, min(OPEN_PIECES * num, MAX_OPEN_KEYS))


def _checked(table: TableSpec, values: object, shape: tuple[int, ...]) -> Array:
    """Return the values as a C-contiguous array. Raises Invalid, which names the table, the dtype
    and the shape that it takes."""
    array = np.asarray(values)
    if array.dtype != _DTYPES[table.dtype]:
        raise Invalid(f"table {table.name!r} has {table.dtype}, not {array.dtype}")
    if array.shape != shape:
        raise Invalid(f"table {table.name!r}: values of shape {array.shape} instead of {shape}")
    return np.ascontiguousarray(array)


def _check_finite(table: TableSpec, values: Array) -> None:
    """Refuse values that are not finite: raises Invalid. Servers check too, but each one only its
    own part of a push, when others may have applied theirs."""
    if not is_finite(values):
        raise Invalid(f"table {table.name!r}: a pushed value is not finite")


def _shape_of(array: ArrayLike) -> tuple[int, ...]:
    return array.shape if isinstance(array, np.ndarray) else np.shape(array)


def _keys_of(table: TableSpec, ids: ArrayLike) -> Keys:
    """Return ids as keys of a table, (n,) uint64. Raises Invalid."""
    if isinstance(ids, np.ndarray) and ids.dtype == KEY_DTYPE and ids.ndim == 1:
        keys = np.ascontiguousarray(ids)
    else:
        try:
            array = whole_numbers(ids)
        except Invalid as error:
            raise Invalid(f"table {table.name!r}: {error}") from None
        flat = array.reshape(-1)
        if array.dtype.kind == "i" and len(flat) and int(flat.min()) < 0:
            raise Invalid(f"table {table.name!r}: key {flat.min()} is negative")
        keys = np.ascontiguousarray(flat.astype(np.uint64, copy=False))
    if table.bound is not None and len(keys) and int(keys.max()) >= table.bound:
        raise Invalid(f"table {table.name!r}: key {keys.max()}; keys are below {table.bound}")
    return keys
