"""A worker of the parameter server that trains a sparse model on its share of the rows.

Each clock is one batch. The servers keep the number of a worker's last batch beside the model, so a
worker that was killed and comes back under its name goes on with the batch that it had not
completed, and after a rollback of the servers it repeats the batches that were lost.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xain_parameters.client.sync import Server, Table
from xain_parameters.errors import Invalid
from xain_parameters.tables.initialisers import Uniform, Zeros
from xain_parameters.tables.rules import Adagrad, Assign
from xain_workloads.errors import DataError, NoData
from xain_workloads.sparse.models import (
    BIAS,
    FactorisationMachine,
    LogisticRegression,
    area_under_curve,
    classes_of,
    log_losses,
)
from xain_workloads.sparse.rows import Rows, Source, batches_of

NUM_AHEAD: Final = 2  # batches that are prepared while one is trained
REPORT_S: Final = 5.0
CLASSES: Final = (-1.0, 0.0, 1.0)
FACTOR_SCALE: Final = 0.05  # of the first values of a factorisation machine


@dataclass(frozen=True, slots=True)
class Job:
    """A model, and how it is trained. All workers of a model have the same, up to index.

    table: name of the model at the servers.
    index: the part of the data, of num_workers.
    staleness: clocks that a worker may be ahead of the slowest; 0: BSP, None: ASP.
    batch_rows: rows of a batch, the last one of an epoch may have fewer.
    bound: columns are 0 to bound - 1, and rows are found faster; None: any column.
    """

    table: str
    model: LogisticRegression | FactorisationMachine
    index: int = 0
    num_workers: int = 1
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
    """The table of a model. Raises TableConflict where it was declared otherwise."""
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
) -> bool:
    """Train until the epochs of this worker are over. Returns whether its part had rows.

    Raises DataError and ParameterError.
    """
    table = declare(server, job)
    done = _Done(server, job)
    if done.is_done():
        return True  # in an earlier process
    declare_source(server, job, source)
    with closing(Batches(job, source)) as batches:
        meter = _Meter(report, report_s)
        cursor = _Cursor(server, job)
        # A worker without rows begins too: the others wait until all workers are there.
        is_empty = batches.is_empty
        for clock in server.clocks(job.staleness, workers=done.num_awaited()):
            batch = None if is_empty else batches.batch(cursor.batch(clock))
            if batch is None:
                break
            rows = table.pull(batch.keys).astype(np.float64)
            step = job.model.step(batch.features, batch.classes, rows[:-1], rows[-1, 0])
            gradient = np.zeros_like(rows, np.float32)
            gradient[:-1] = step.gradient
            gradient[-1, 0] = step.bias
            table.push(batch.keys, gradient)
            cursor.keep()
            meter.count(clock, batch, step.loss, step.num_right)
        meter.flush()
    done.tell()
    return not is_empty


def declare_source(server: Server, job: Job, source: Source) -> None:
    """Raise DataError unless all workers of a model divide the same files into as many shares, and
    take the same columns.

    Shares are ranges of bytes: only then they have each row once. Each worker notes its own
    source before it reads the notes of the others, so of two that differ one at least is refused.
    """
    notes = server.table(f"{job.table}.source", dim=4, update=Assign(), dtype=np.float64)
    about = (job.num_workers, source.num_bytes, source.fingerprint, source.encoding)
    own = np.array(about, np.float64)
    notes.push([job.index], own[np.newaxis])
    for index, note in enumerate(notes.pull(np.arange(job.num_workers))):
        if note.any() and (note != own).any():
            raise DataError(
                f"worker {index} divides {note[1]:,.0f} bytes among {note[0]:.0f} workers, and "
                f"worker {job.index} {own[1]:,.0f} bytes among {own[0]:.0f}, or files with other "
                "names, sizes or columns: their shares do not have each row once; give all workers "
                "the same --data, --target, --categories and --workers, and other data another "
                "--table"
            )


def _require_trained_on_like(server: Server, job: Job, source: Source) -> None:
    """Raise DataError if worker 0 of a model has had rows with other keys than a source has."""
    try:
        notes = server.find(f"{job.table}.source")
    except Invalid:  # another program has trained it
        return
    assert isinstance(notes, Table)
    (note,) = notes.pull([0])
    if note.any() and note[3] != source.encoding:
        raise DataError(
            f"{job.table!r} was trained on rows with other columns, another target or other "
            "categories than those that it is to be scored with"
        )


class _Cursor:
    """The number of this worker's next batch, counted over all epochs.

    The number and the clock of the last batch are kept in a table beside the model, where a restart
    and a rollback find them. Clocks alone do not tell: a group of servers may have trained other
    models in between, and a worker may join late.
    """

    def __init__(self, server: Server, job: Job) -> None:
        self._table = server.table(f"{job.table}.batch", dim=2, update=Assign(), dtype=np.float64)
        self._index = [job.index]
        self._clock = self._number = -1

    def batch(self, clock: int) -> int:
        """The number of the batch of a clock. Called once in each clock."""
        if self._clock >= 0 and clock == self._clock + 1:
            self._number += 1
        else:  # the first clock, or one after a rollback
            self._number = self._after(clock)
        self._clock = clock
        return self._number

    def keep(self) -> None:
        """Note that the gradient of the batch was pushed."""
        self._table.push(self._index, np.array([[self._clock + 1.0, self._number]]))

    def _after(self, clock: int) -> int:
        kept, number = (int(value) for value in self._table.pull(self._index)[0])
        if not kept:
            return 0
        # With staleness the servers may have batches of this clock and later ones: they come again.
        return max(0, number - max(-1, kept - 1 - clock))


class _Done:
    """The epochs that each worker of a model has completed, in a table beside the model.

    A worker whose epochs are over does not come back, and is not waited for: one that was stopped
    and is started again after that would wait for ever.
    """

    def __init__(self, server: Server, job: Job) -> None:
        self._table = server.table(f"{job.table}.done", dim=1, update=Assign(), dtype=np.float64)
        self._job = job

    def num_awaited(self) -> int:
        """Number of workers that must have joined before the first clock, this one included."""
        is_done = self._are_done()
        is_done[self._job.index] = False
        return int((~is_done).sum())

    def is_done(self) -> bool:
        """Whether the epochs of this worker were over in an earlier process."""
        return bool(self._are_done()[self._job.index])

    def _are_done(self) -> NDArray[np.bool_]:
        return self._table.pull(np.arange(self._job.num_workers))[:, 0] >= self._job.num_epochs

    def tell(self) -> None:
        """Note that the epochs of this worker are over."""
        self._table.push([self._job.index], np.array([[float(self._job.num_epochs)]]))


def score(server: Server, job: Job, source: Source) -> Score:
    """Score the model as it is now on all rows of files, a batch at a time.

    Raises DataError, also if the model was trained on other columns, and Invalid if there is no
    such model.
    """
    table = server.find(job.table)
    if not isinstance(table, Table) or table.spec.dim != job.model.dim:
        raise DataError(f"{job.table!r} is no table of rows of {job.model.dim} values")
    _require_trained_on_like(server, job, source)
    scores, classes = [], []
    for rows in batches_of(source.read(source.shares(1)[0]), job.batch_rows):
        batch = _prepared(rows, job)
        values = table.pull(batch.keys).astype(np.float64)
        scores.append(job.model.scores(batch.features, values[:-1], values[-1, 0]))
        classes.append(batch.classes)
    if not scores:
        raise NoData("there are no rows to score")
    all_scores, all_classes = np.concatenate(scores), np.concatenate(classes)
    return Score(
        len(all_scores),
        float(log_losses(all_scores, all_classes).mean()),
        float(((all_scores > 0) == (all_classes > 0)).mean()),
        area_under_curve(all_scores, all_classes),
    )


class Batches:
    """The batches of a part over all epochs, by number; the next ones are prepared in a thread."""

    def __init__(self, job: Job, source: Source) -> None:
        self._job = job
        self._source = source
        self._share = source.shares(job.num_workers)[job.index]
        self._in_epoch: int | None = None  # batches of an epoch, once it is known
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: deque[Future[Batch | None]] = deque()  # the first is that of _number
        self._number = 0
        self._stream: Iterator[Batch] = iter(())
        self._seek(0)

    @property
    def is_empty(self) -> bool:
        """Whether the part has no rows."""
        return self.batch(0) is None

    def batch(self, number: int) -> Batch | None:
        """The batch of this number, from 0, or None after the last epoch. The same number again and
        the next one are read ahead; any other one reads the part from its beginning."""
        if number == self._number + 1 and self._ahead[0].result() is not None:
            self._ahead.popleft()
            self._number = number
            self._ahead.append(self._thread.submit(next, self._stream, None))
        elif number != self._number:
            self._seek(number)
        return self._ahead[0].result()

    def _seek(self, number: int) -> None:
        for each in self._ahead:
            each.cancel()
        self._number = number
        self._stream = self._from(number)
        self._ahead.clear()
        self._ahead.extend(
            self._thread.submit(next, self._stream, None) for _ in range(1 + NUM_AHEAD)
        )

    def _from(self, number: int) -> Iterator[Batch]:
        first = number
        for _ in range(self._job.num_epochs):
            if self._in_epoch is not None and first >= self._in_epoch:
                first -= self._in_epoch
                continue
            count = 0
            blocks = self._source.read(self._share)
            for count, rows in enumerate(batches_of(blocks, self._job.batch_rows), 1):
                if count > first:
                    yield _prepared(rows, self._job)
            self._in_epoch = count
            first = max(0, first - count)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _prepared(rows: Rows, job: Job) -> Batch:
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
        self._clock = -1
        self._num_rows = self._num_keys = self._num_right = 0
        self._loss = 0.0
        self._began = time.monotonic()

    def count(self, clock: int, batch: Batch, loss: float, num_right: int) -> None:
        self._clock = clock
        self._num_rows += len(batch.classes)
        self._num_keys += len(batch.keys)
        self._num_right += num_right
        self._loss += loss * len(batch.classes)
        if time.monotonic() - self._began >= self._every_s:
            self.flush()

    def flush(self) -> None:
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
