"""Vectors read side by side, tile after tile: while one is worked on, the next is read and what
came of the one before is written, in memory that is used over and over."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.aggregation.crew import Crew, Job
from xain_coordinator.aggregation.sources import Source
from xain_coordinator.core.values import WeightsRef
from xain_coordinator.ports import WeightsStore

SPAN_COLUMNS = 32768  # at most; a job that takes a moment, so that all threads end at one time
MIN_SPAN_COLUMNS = 256  # in fewer, the calls would take longer than the work

DType = np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Vector:
    """What is to be read. kind: for messages."""

    ref: WeightsRef
    kind: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one tile of w columns.

    rows: (k, w), what is combined. extras: (w,) each, what else is read. made: (w,) each, what
    comes of it.
    """

    rows: NDArray[Any]
    extras: tuple[NDArray[Any], ...]
    made: tuple[NDArray[Any], ...]

    def cut(self, start: int, end: int) -> "Slot":
        """Some of its columns."""
        return Slot(
            self.rows[:, start:end],
            tuple(extra[start:end] for extra in self.extras),
            tuple(one[start:end] for one in self.made),
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """How vectors of the same length are read.

    rows: of one dtype. made: the dtypes of what is made.
    tile_bytes: of a slot; there are two. At least a block is read all the same.
    block: a tile has a multiple of so many columns, the last one aside.
    max_readers: with more vectors than this, each is opened again for every tile.
    """

    store: WeightsStore
    crew: Crew
    length: int
    rows: Sequence[Vector]
    extras: Sequence[Vector] = ()
    made: Sequence[DType] = ()
    tile_bytes: int = 1
    block: int = 1
    max_readers: int = 1

    @property
    def width(self) -> int:
        """Columns of a tile."""
        dtypes = [*(one.dtype for one in (*self.rows, *self.extras)), *self.made]
        fitting = self.tile_bytes // sum(dtype.itemsize for dtype in dtypes)
        return min(max(fitting // self.block, 1) * self.block, max(self.length, 1))

    def work_through(
        self,
        compute: Callable[[Slot, int], Iterable[Job]],
        write: Callable[[Slot], Iterable[Job]] = lambda slot: (),
    ) -> None:
        """Read all of it once, front to back.

        compute: the jobs for a tile that begins at this column. write: those for what was made of
        one; they see the tiles in order, and each job runs before the next tile's.
        Raises what they raise, UpdateChanged, Stopped, and the store's errors.
        """
        width = self.width
        starts = range(0, self.length, width)
        slots = [self._slot(width) for _ in starts[:2]]
        vectors = [*self.rows, *self.extras]
        keep_open = len(vectors) <= self.max_readers
        sources = [
            Source(
                self.store,
                one.ref,
                one.kind,
                one.dtype,
                self.length,
                keep_open=keep_open,
            )
            for one in vectors
        ]

        def tile(i: int) -> Slot:
            return slots[i % 2].cut(0, min(width, self.length - starts[i]))

        def reading(i: int) -> list[Job]:
            if i >= len(starts):
                return []
            slot = tile(i)
            rows = (*slot.rows, *slot.extras)
            return [_Reading(*pair) for pair in zip(sources, rows, strict=True)]

        with ExitStack() as stack:
            for source in sources:
                stack.callback(source.close)
            self.crew.do([], reading(0))
            for i, start in enumerate(starts):
                writing = write(tile(i - 1)) if i else ()
                self.crew.do([*writing, *compute(tile(i), start)], reading(i + 1))
            if starts:
                self.crew.do(write(tile(len(starts) - 1)))
            for source in sources:
                source.check()

    def _slot(self, width: int) -> Slot:
        dtype = self.rows[0].dtype if self.rows else np.dtype(np.float32)
        return Slot(
            np.empty((len(self.rows), width), dtype),
            tuple(np.empty(width, extra.dtype) for extra in self.extras),
            tuple(np.empty(width, dtype) for dtype in self.made),
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    source: Source
    row: NDArray[Any]

    def __call__(self) -> None:
        self.source.read_into(self.row)


def spans(num_columns: int, num_threads: int) -> Iterable[tuple[int, int]]:
    """(start, end) of pieces of a tile, some for each thread."""
    fair = -(-num_columns // (2 * num_threads))
    width = min(max(fair, MIN_SPAN_COLUMNS), SPAN_COLUMNS)
    for start in range(0, num_columns, width):
        yield start, min(start + width, num_columns)
