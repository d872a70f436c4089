"""The values that the scheduler tells servers and workers: tables, key ranges, servers, workers.

Plain values that msgspec encodes. A newer view has the higher (generation, number); no server goes
back to an older one.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from xain_foundation.names import shortened
from xain_parameters.errors import Invalid
from xain_parameters.keys import Range

T = TypeVar("T")

# A view has all tables, goes to every server and worker after each change, and is a message of gRPC
# (4 MiB); a declaration is a head between servers (messages.MAX_HEAD_BYTES).
MAX_TABLES = 512
# The name of a job of workers that name none: with that of its first table.
OF_TABLE = "table:"
# Ranges have numbers of the whole group: number // RANGES_PER_JOB is that of their job.
RANGES_PER_JOB = 10_000
# The most workers of a job's group: members of a scheduler (MAX_MEMBERS of the Membership service).
MAX_WORKERS = 1_000
MAX_NAME_BYTES = 200  # of a table's name, in UTF-8
MAX_SPEC_BYTES = 4 << 10  # of an encoded TableSpec

# The age in clocks that the rows of a pull may have: 0 is BSP, None ASP. "loop": the staleness of
# the worker's loop over clocks.
Staleness: TypeAlias = int | Literal["loop"] | None


class Plugin(msgspec.Struct, frozen=True):
    """An update rule or an initialiser by name, with its parameters."""

    name: str
    options: dict[str, float | int | str | bool] = {}

    @classmethod
    def of(cls, plugin: Any) -> "Plugin":
        """Describe an update rule or initialiser, which is a dataclass of its parameters. Raises
        Invalid for anything else."""
        try:
            return cls(plugin.name, asdict(plugin))
        except (AttributeError, TypeError):
            raise Invalid(
                f"{plugin!r} is no update rule or initialiser: those are objects of dataclasses "
                "with a name, such as SGD(0.5)"
            ) from None

    def made(self, kind: Callable[..., T], what: str) -> T:
        """Make the update rule or initialiser again. Raises Invalid for wrong parameters."""
        try:
            return kind(**self.options)
        except (TypeError, ValueError) as error:
            raise Invalid(f"{what} {self.name}: {error}") from error


class TableSpec(msgspec.Struct, frozen=True):
    """A declared table.

    number: given by the scheduler, from 1 on; requests carry it.
    bound: keys are 0 to bound - 1; None: any 64-bit key, rows are made when they are first seen.
        A dense array is a table whose bound is its number of rows and whose rows all exist.
    dim: values in a row.
    dtype: "float32" or "float64".
    """

    number: int
    name: str
    bound: int | None
    dim: int
    is_dense: bool
    dtype: str
    update: Plugin
    init: Plugin
    shape: tuple[
        int, ...
    ] = ()  # the shape of a dense array for its caller, of shape[0] rows; (): a table
    staleness: Staleness = "loop"

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of a row."""
        return self.dim * (8 if self.dtype == "float64" else 4)


class RangeView(msgspec.Struct, frozen=True):
    """A key range and the servers that have it.

    number: identifies the range among those of all jobs, see RANGES_PER_JOB.
    start, last: its first and last position; msgpack has no room for a stop of 2**64.
    servers: names; the first is the primary, the others are backups that have everything. Empty:
        the range waits for a server.
    learners: servers that are being filled, and become backups when they have everything.
    epoch: raised whenever servers or learners change. A server refuses what comes with a lower one.
    """

    number: int
    start: int
    last: int
    epoch: int
    servers: tuple[str, ...]
    learners: tuple[str, ...] = ()

    @property
    def stop(self) -> int:
        return self.last + 1

    @property
    def range(self) -> Range:
        return Range(self.start, self.stop)


class Gap(msgspec.Struct, frozen=True):
    """Clocks [start, stop) of a worker that came back after the others had gone on without it. Its
    pushes of these clocks do not count."""

    worker: str
    start: int
    stop: int


class CutView(msgspec.Struct, frozen=True):
    """A checkpoint that is being made.

    workers: the workers whose Mark a range waits for. A worker that has ended meanwhile sends none;
        without any worker a range is cut when its server hears of the checkpoint.
    """

    number: int
    workers: tuple[str, ...]


class View(msgspec.Struct, frozen=True):
    """The state of a job on the servers of the group.

    generation: raised when all tables are rolled back to a checkpoint. A new group begins with the
        time of day in seconds, above the generations of a group that was there before it.
    number: raised by every other change. It leaps by 2**32 when a scheduler starts.
    addresses: "HOST:PORT" of the servers, by name.
    ended: workers that are gone, with the number of clocks that they have completed; their pushes
        of later clocks do not count. Live ones are not listed, since they change with every clock.
    gaps: the gaps of workers that ended and came back. See openings().
    cut: the checkpoint that is being made.
    rolled_back_to: the checkpoint that this generation began from; None: it began empty.
    load_from: the folder of that checkpoint, below `checkpoints`, the fsspec URL for all of them.
    num_replicas: backups that each range should have; it has fewer while there are too few servers.
    has_log: servers write what they acknowledge to a log.
    job: the number of the job; -1: it has not begun.
    ranks: of the workers of the job's group that are there, by name and in the order of ranks.
    num_workers: the size of the group; 0: no worker has given one. num_gone: workers of the group
        that are gone, and have a rank to come back to.
    """

    generation: int
    number: int
    tables: tuple[TableSpec, ...]
    ranges: tuple[RangeView, ...]
    addresses: dict[str, str]
    ended: dict[str, int] = {}
    rolled_back_to: int | None = None
    gaps: tuple[Gap, ...] = ()
    cut: CutView | None = None
    num_replicas: int = 0
    has_log: bool = False
    checkpoints: str = ""
    load_from: str = ""
    job: int = 0
    ranks: dict[str, int] = {}
    num_workers: int = 0
    num_gone: int = 0

    @property
    def cut_folder(self) -> str:
        """The folder of the parts of the open checkpoint, below `checkpoints`."""
        return "" if self.cut is None else cut_folder(self.generation, self.cut.number, self.job)

    @property
    def version(self) -> tuple[int, int]:
        return self.generation, self.number

    def table(self, number: int) -> TableSpec | None:
        return next((each for each in self.tables if each.number == number), None)


def cut_folder(generation: int, number: int, job: int) -> str:
    """The name of a checkpoint's folder. generation: of the job when it was made."""
    return f"cut-{generation}-{number}-{job}" if job else f"cut-{generation}-{number}"


def check_job_name(name: str) -> None:
    """Raises Invalid for a name that no user may give a job."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        raise Invalid(
            f"a job's name has 1 to 64 letters, digits, '_', '-' and '.', and begins with none of "
            f"the last two; not {shortened(name)!r}"
        )


def check_num_workers(num_workers: int) -> None:
    """Raises Invalid for a size that no group of workers may have."""
    if not 1 <= num_workers <= MAX_WORKERS:
        raise Invalid(f"a job has 1 to {MAX_WORKERS} workers, not {num_workers}")


def is_unnamed(job: str) -> bool:
    """Tell whether a job is of workers that name none."""
    return not job or job.startswith(OF_TABLE)


def job_of(range_: int) -> int:
    """The number of the job that a range belongs to."""
    return range_ // RANGES_PER_JOB


def openings(view: View, since: int, opened: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield "open" entries that bring a range from clock `since` to `opened`, as (clock, ended).

    An entry concerns held pushes of clocks below `clock` only. Those of a worker in `ended` count
    below its number of clocks, and are dropped from there up to `clock`. There is an entry for the
    end of each gap, so that one number for each worker is enough.
    """
    ends = {gap.stop for gap in view.gaps if since < gap.stop < opened}
    for clock in sorted(ends | ({opened} if opened > since else set())):
        ended = {name: ticked for name, ticked in view.ended.items() if ticked < clock}
        # Later gaps of a worker last: a range that has opened the earlier has nothing left of it.
        ended |= {gap.worker: gap.start for gap in view.gaps if gap.start < clock <= gap.stop}
        yield clock, ended


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


decode_view = msgspec.msgpack.Decoder(View).decode
decode_table = msgspec.msgpack.Decoder(TableSpec).decode
