"""Vectors of the same length, read side by side: some columns of all of them, a tile, at a time.

Each thread reads a tile, computes and hands on what it has made, then takes the next tile that no
thread has taken. Threads meet in two places only. Digests go on, and results are handed on, in the
order of the tiles; both take a small part of the time that a tile takes.

The objects of a store on this machine are read by the thread that computes: the bytes are still in
that processor's cache when it computes. Reads from a store far away are mostly waiting, so a pool
of threads reads the vectors of one tile at the same time, while another tile is computed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.aggregation.aggregator import Stopped
from xain_coordinator.aggregation.sources import Source
from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.ports import WeightsStore

# Columns of a tile at most, where the store is on this machine, and of what is computed at a time.
# More would leave the processor's cache between reading and computing. With fewer the calls into
# numpy are so short that threads spend their time waiting for the interpreter's lock.
MAX_COLUMNS = 1 << 16
MIN_COLUMNS = 1 << 12
# A tile where the store is on this machine. With 8 MiB for each of two threads
# benchmarks/aggregation.py is no faster with 16 and 64 updates, and benchmarks/large_model.py takes
# 5 MB more with 16 participants.
NEAR_TILE_BYTES = 5 << 19

DType = np.dtype[Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vector:
    """A stored vector. kind: for messages."""

    ref: WeightsRef
    kind: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class TileBuffer:
    """Buffers for one tile of w columns.

    rows: (k, w), what is combined. extras: (w,) each, what else is read. made: (w,) each, what is
    made of them.
    """

    rows: NDArray[Any]
    extras: tuple[NDArray[Any], ...]
    made: tuple[NDArray[Any], ...]

    @property
    def num_columns(self) -> int:
        return int(self.rows.shape[1])

    def cut(self, start: int, end: int) -> "TileBuffer":
        """The tile of the columns from `start` to before `end`, which shares the memory."""
        return TileBuffer(
            self.rows[:, start:end],
            tuple(extra[start:end] for extra in self.extras),
            tuple(one[start:end] for one in self.made),
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Reader of vectors, tile by tile.

    rows: of one dtype. made: the dtypes of what is made.
    num_threads: threads that compute; each has a tile of its own.
    tile_bytes: of a tile at most; a block is read at least.
    block: a tile has a multiple of so many columns, the last tile aside.
    max_readers: with more vectors than this, each is opened again for every tile.
    stop: once set, no read is begun any more.
    """

    store: WeightsStore
    length: int
    stop: threading.Event
    rows: Sequence[Vector] = ()
    extras: Sequence[Vector] = ()
    made: Sequence[DType] = ()
    num_threads: int = 1
    tile_bytes: int = 1
    block: int = 1
    max_readers: int = 1

    def work_through(
        self, compute: Callable[[TileBuffer, int], T], hand_on: Callable[[T], object]
    ) -> None:
        """Read all vectors once, front to back, and compare them with their digests.

        compute: called with a tile and its first column, in several threads at once.
        hand_on: called with what compute returned, for one tile after the other, in their order.
            The tile is reused afterwards.
        Raises what they raise, UpdateChanged, Stopped, and the store's errors.
        """
        vectors = [*self.rows, *self.extras]
        width = self._width
        tiles = deque(enumerate(range(0, self.length, width)))
        num_threads = min(self.num_threads, len(tiles), self.max_readers)  # each reads by itself
        digests, results = OrderedLock(), OrderedLock()

        def cancel() -> None:
            """Let no thread wait for another one any more."""
            digests.cancel()
            results.cancel()

        with ExitStack() as stack:
            is_kept = self._keep_open
            sources = [
                Source(self.store, one.ref, one.kind, one.dtype, self.length, keep_open=is_kept)
                for one in vectors
            ]
            for source in sources:
                stack.enter_context(source)
            num_readers = min(self.store.num_parallel, self.max_readers, len(vectors))
            readers = None
            if num_readers > 1:
                readers = stack.enter_context(ThreadPoolExecutor(num_readers, "aggregate-read"))

            def work() -> None:
                """Take tile after tile until none is left: read it, compute, hand on the result."""
                whole = self._tile(width)
                while True:
                    try:
                        number, start = tiles.popleft()  # safe among threads
                    except IndexError:
                        return
                    tile = whole.cut(0, min(width, self.length - start))
                    into = (*tile.rows, *tile.extras)

                    def read(source: Source, row: NDArray[Any], start: int = start) -> None:
                        """Read a tile's columns of one vector. Raises Stopped."""
                        if self.stop.is_set():
                            raise Stopped
                        source.read_into(start, row)

                    for _ in (map if readers is None else readers.map)(read, sources, into):
                        pass
                    with digests.hold(number):
                        for source, row in zip(sources, into, strict=True):
                            source.add_to_digest(row)
                    made = compute(tile, start)
                    with results.hold(number):
                        hand_on(made)

            _run(work, num_threads, cancel)
            for source in sources:
                source.check()

    @property
    def _keep_open(self) -> bool:
        """Whether each vector stays open from tile to tile."""
        return len(self.rows) + len(self.extras) <= self.max_readers

    @property
    def _width(self) -> int:
        """Columns of a tile, from its bytes, the number of threads, and the block."""
        dtypes = [*(one.dtype for one in (*self.rows, *self.extras)), *self.made]
        column_bytes = sum(dtype.itemsize for dtype in dtypes)
        columns = self.tile_bytes // column_bytes
        if self.store.num_parallel == 1 and self._keep_open:
            # Several tiles for each thread, so that all threads end at one time.
            fair = -(-self.length // (4 * self.num_threads))
            fair = min(fair, NEAR_TILE_BYTES // column_bytes)
            columns = min(columns, MAX_COLUMNS, max(fair, MIN_COLUMNS))
        return min(max(columns // self.block, 1) * self.block, max(self.length, 1))

    def _tile(self, width: int) -> TileBuffer:
        """New buffers for a tile of so many columns."""
        dtype = self.rows[0].dtype if self.rows else np.dtype(np.float32)
        return TileBuffer(
            np.empty((len(self.rows), width), dtype),
            tuple(np.empty(width, extra.dtype) for extra in self.extras),
            tuple(np.empty(width, dtype) for dtype in self.made),
        )


class OrderedLock:
    """A lock that number 0 takes first, then 1, and so on, whichever thread asks first.

    A thread that fails before it has held the lock must call cancel(), since all others wait for
    it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._is_cancelled = False

    @contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Hold the lock as soon as all smaller numbers have held it. Raises BrokenBarrierError."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._is_cancelled)
            if self._is_cancelled:
                raise threading.BrokenBarrierError
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def cancel(self) -> None:
        """Raise BrokenBarrierError in every thread that waits, or asks later."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()


def _run(work: Callable[[], None], num_threads: int, cancel: Callable[[], None]) -> None:
    """Call `work` in so many threads, this one among them, and wait for all. Raises what one of
    them has raised; cancel: called then, ends the others."""
    if num_threads <= 1:
        return work()

    def guarded() -> None:
        """Do the work; cancel the others if it fails."""
        try:
            work()
        except BaseException as error:  # whatever it is, the others must not wait for this thread
            cancel()
            if not isinstance(error, threading.BrokenBarrierError):
                raise

    others: list[Future[None]] = []
    try:
        with ThreadPoolExecutor(num_threads - 1, "aggregate") as pool:
            others += [pool.submit(guarded) for _ in range(num_threads - 1)]
            guarded()
        for other in others:
            other.result()
    finally:
        # An error holds the frames that it came through, and what they hold are tiles.
        others.clear()
