"""A worker of the parameter server that trains a sparse model on the rows that it is handed.

The workers of a model divide the rows by rank, anew in each epoch; each clock is one batch. The
servers keep how far each part is read beside the model: a worker that was killed goes on with the
batch that it had not completed, others read the rest of one that does not come back, and after a
rollback of the servers the batches that were lost come again.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xain_parameters.client.batches import Piece
from xain_parameters.client.sync import Server, Table
from xain_parameters.errors import Invalid
from xain_parameters.tables.initialisers import Uniform, Zeros
from xain_parameters.tables.rules import Adagrad, Assign
from xain_workloads.errors import DataError
from xain_workloads.sources.shares import Share
from xain_workloads.sparse.models import (
    BIAS,
    FactorisationMachine,
    LogisticRegression,
    area_under_curve,
    classes_of,
    log_losses,
)
from xain_workloads.sparse.rows import Rows, Source, batches_of

NUM_AHEAD: Final = 3  # batches that are prepared while one is trained
REPORT_S: Final = 5.0
CLASSES: Final = (-1.0, 0.0, 1.0)
FACTOR_SCALE: Final = 0.05  # of the first values of a factorisation machine


@dataclass(frozen=True, slots=True)
class Job:
    """A model, and how it is trained. All workers of a model have the same.

    table: name of the model at the servers.
    staleness: clocks that a worker may be ahead of the slowest; 0: BSP, None: ASP.
    batch_rows: rows of a batch, the last one of a part may have fewer.
    bound: columns are 0 to bound - 1, and rows are found faster; None: any column.
    """

    table: str
    model: LogisticRegression | FactorisationMachine
    staleness: int | None = 0
    batch_rows: int = 1_000
    num_epochs: int = 1
    learning_rate: float = 0.1
    bound: int | None = None
    seed: int = 0

    @property
    def bias_key(self) -> np.uint64:
        """The key of the intercept, beyond those of the columns."""
        return BIAS if self.bound is None else np.uint64(self.bound)


@dataclass(frozen=True, slots=True)
class Outcome:
    """num_batches: that this worker has trained. was_over: no rows were left when it came.
    is_whole: the workers together have read each row once in each epoch."""

    num_batches: int
    was_over: bool
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """The work since the last progress, up to a clock.

    num_keys: pulled, and pushed afterwards. loss: mean log loss of the rows, each before the step
    that it was in. accuracy: likewise.
    """

    clock: int
    num_rows: int
    num_keys: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Score:
    """Quality of a model on rows that it was not trained on. auc: nan if all have one class."""

    num_rows: int
    loss: float
    accuracy: float
    auc: float


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """keys: (m + 1,) uint64, of the m columns of features, and last that of the intercept."""

    keys: NDArray[np.uint64]
    features: Any  # csr_matrix
    classes: NDArray[np.float64]


def declare(server: Server, job: Job) -> Table:
    """Declare the table of a model at the servers, and return it. Raises TableConflict where it was
    declared otherwise."""
    is_linear = isinstance(job.model, LogisticRegression)
    return server.table(
        job.table,
        dim=job.model.dim,
        update=Adagrad(job.learning_rate),
        # Factors that are all the same would stay the same.
        init=Zeros() if is_linear else Uniform(FACTOR_SCALE, job.seed),
        bound=None if job.bound is None else job.bound + 1,
    )


def train(
    server: Server,
    job: Job,
    source: Source,
    report: Callable[[Progress], None] = lambda progress: None,
    report_s: float = REPORT_S,
) -> Outcome:
    """Train until all workers of the job have read all epochs. Raises DataError, ParameterError."""
    table = declare(server, job)
    _note_rows(server, job, source)
    meter = _Meter(report, report_s)
    data = Shares(source, job)
    with server.batches(data, job.num_epochs, job.staleness, name=job.table) as batches:
        for each in batches:
            batch: Batch = each.data
            rows = table.pull(batch.keys).astype(np.float64)
            step = job.model.step(batch.features, batch.classes, rows[:-1], rows[-1, 0])
            gradient = np.zeros_like(rows, np.float32)
            gradient[:-1] = step.gradient
            gradient[-1, 0] = step.bias
            table.push(batch.keys, gradient)
            meter.count(each.clock, batch, step.loss, step.num_right)
        meter.flush()
        return Outcome(batches.num_batches, batches.was_over, batches.reading().is_whole)


def _note_rows(server: Server, job: Job, source: Source) -> None:
    """Note the columns and the batches of a model's rows beside the model. Raises DataError if it
    has been trained with others."""
    notes = server.table(f"{job.table}.rows", dim=2, update=Assign(), dtype=np.float64)
    (note,) = notes.pull([0])
    if not note.any():
        notes.push([0], np.array([[1.0 + source.encoding, job.batch_rows]]))
        return
    _require_columns(note, job, source)
    if note[1] != job.batch_rows:
        raise DataError(
            f"--batch is {job.batch_rows}, and {note[1]:.0f} for the workers that train "
            f"{job.table!r}: a part that one leaves could not be read on by another; give all "
            "workers the same, and another training another --table"
        )


def _require_columns(note: NDArray[np.float64], job: Job, source: Source) -> None:
    """Check that a model was trained on rows with the columns of this source. note: what is kept
    beside the model. Raises DataError."""
    if note[0] != 1.0 + source.encoding:
        raise DataError(
            f"{job.table!r} was trained on rows with other columns, another target or other "
            "categories"
        )


def score(server: Server, job: Job, source: Source) -> Score:
    """Score the model as it is now on all rows of files, a batch at a time.

    Raises DataError, also if the model was trained on other columns, and Invalid if there is no
    such model.
    """
    table = server.find(job.table)
    if not isinstance(table, Table) or table.spec.dim != job.model.dim:
        raise DataError(f"{job.table!r} is no table of rows of {job.model.dim} values")
    try:
        notes = server.find(f"{job.table}.rows")
    except Invalid:  # another program has trained it
        pass
    else:
        assert isinstance(notes, Table)
        (note,) = notes.pull([0])
        if note.any():  # empty after a rollback to the beginning, from where all was read again
            _require_columns(note, job, source)
    scores, classes = [], []
    for rows in batches_of(source.read(source.shares(1)[0]), job.batch_rows):
        batch = _prepare(rows, job)
        values = table.pull(batch.keys).astype(np.float64)
        scores.append(job.model.scores(batch.features, values[:-1], values[-1, 0]))
        classes.append(batch.classes)
    if not scores:
        raise DataError("there are no rows to score")
    all_scores, all_classes = np.concatenate(scores), np.concatenate(classes)
    return Score(
        len(all_scores),
        float(log_losses(all_scores, all_classes).mean()),
        float(((all_scores > 0) == (all_classes > 0)).mean()),
        area_under_curve(all_scores, all_classes),
    )


class Shares:
    """The rows of a source as workers divide them, into ranges of bytes, in batches. A thread
    prepares the next ones.

    size: in bytes.
    """

    def __init__(self, source: Source, job: Job) -> None:
        self._source = source
        self._job = job
        self.size = source.num_bytes
        about = (source.fingerprint, source.encoding, job.batch_rows)
        self.fingerprint = zlib.crc32(repr(about).encode())

    def read(self, part: int, num_parts: int, start: int) -> Iterator[Piece]:
        """The batches of a part, from batch `start` on, and the bytes of the part with the last."""
        share = self._source.shares(num_parts)[part]
        num_bytes = sum(each.stop - each.start for each in share)
        stream = self._batches(share, start)
        thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            ahead = deque(thread.submit(next, stream, None) for _ in range(1 + NUM_AHEAD))
            batch = ahead.popleft().result()
            if batch is None:
                yield Piece(None, 0, num_bytes)
            while batch is not None:
                ahead.append(thread.submit(next, stream, None))
                following = ahead.popleft().result()
                yield Piece(batch, len(batch.classes), 0 if following else num_bytes)
                batch = following
        finally:
            thread.shutdown(cancel_futures=True)

    def _batches(self, share: Share, start: int) -> Iterator["Batch | None"]:
        """The prepared batches of a share, from batch `start` on. Raises DataError."""
        blocks = self._source.read(share)
        for number, rows in enumerate(batches_of(blocks, self._job.batch_rows)):
            if number >= start:
                yield _prepare(rows, self._job)


def _prepare(rows: Rows, job: Job) -> Batch:
    """Prepare a batch of rows. Raises DataError for a column beyond the bound, and for a target
    that is no class."""
    if len(others := rows.targets[~np.isin(rows.targets, CLASSES)]):
        raise DataError(f"targets are 0 and 1, or -1 and 1; there is a {others[0]:g}")
    if job.bound is not None and len(rows.keys) and rows.keys[-1] >= job.bound:
        raise DataError(
            f"there is a column {rows.keys[-1]}; with this bound they are 0 to {job.bound - 1}"
        )
    return Batch(np.append(rows.keys, job.bias_key), rows.features, classes_of(rows.targets))


class _Meter:
    """Sums of the results of batches, reported from time to time."""

    def __init__(self, report: Callable[[Progress], None], every_s: float) -> None:
        self._report = report
        self._every_s = every_s
        self._reset()

    def _reset(self) -> None:
        """Begin new sums."""
        self._clock = -1
        self._num_rows = self._num_keys = self._num_right = 0
        self._loss = 0.0
        self._began = time.monotonic()

    def count(self, clock: int, batch: Batch, loss: float, num_right: int) -> None:
        """Add the results of a batch, and report all sums every every_s."""
        self._clock = clock
        self._num_rows += len(batch.classes)
        self._num_keys += len(batch.keys)
        self._num_right += num_right
        self._loss += loss * len(batch.classes)
        if time.monotonic() - self._began >= self._every_s:
            self.flush()

    def flush(self) -> None:
        """Report the sums since the last report, if there is any row, and begin new ones."""
        if not self._num_rows:
            return
        self._report(
            Progress(
                self._clock,
                self._num_rows,
                self._num_keys,
                self._loss / self._num_rows,
                self._num_right / self._num_rows,
                time.monotonic() - self._began,
            )
        )
        self._reset()
