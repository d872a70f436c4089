"""The commands to the scheduler's decider. Servers report those that have a tag."""

from typing import TypeAlias

import msgspec

from xain_parameters.jobs.parts import Source
from xain_parameters.jobs.slots import NO_RANK
from xain_parameters.scheduler.state import Settings
from xain_parameters.specs import TableSpec


class OfJob(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the commands that concern one job. job: its name."""

    job: str = ""


class Start(msgspec.Struct, frozen=True):
    """A scheduler begins, or begins again, with these settings."""

    settings: Settings


class ServerJoined(msgspec.Struct, frozen=True):
    """A server process has joined. incarnation: a later process of the name has a higher one."""

    name: str
    address: str
    incarnation: int


class ServerReturned(msgspec.Struct, frozen=True):
    """A server tells which of the ranges without a server it has, and which not.

    generation: the generation of the view of the job that it looked at.
    has, lacks: the epoch of each range in that view, by its number.
    """

    name: str
    generation: int
    has: dict[int, int] = {}
    lacks: dict[int, int] = {}


class ServerLeft(msgspec.Struct, frozen=True):
    """A server wants to leave. Its ranges move away first; when no range names it, it may go, which
    is ServerDied then."""

    name: str


class ServerDied(msgspec.Struct, frozen=True):
    """A server process is gone: it left, or its lease is over."""

    name: str


class LearnerWhole(msgspec.Struct, frozen=True, tag=True):
    """A learner has everything.

    The primary says so, after it has begun to wait for the learner's Have before each
    acknowledgement. So the learner has whatever was acknowledged, and may become primary at once.
    epoch: the epoch of the range at the primary.
    """

    range: int
    epoch: int
    server: str


class DeclareTable(OfJob, frozen=True):
    """A worker declares a table, the first one of its job or another. The scheduler gives the table
    its number."""

    table: TableSpec


class RemoveJob(OfJob, frozen=True):
    """An operator removes a job that no worker is in, and its tables."""


class WorkerJoined(OfJob, frozen=True):
    """A worker begins its loop over clocks.

    staleness: the bound s of its loop; None: no limit. stop: the loop ends before this clock; None:
    it has no end.
    """

    name: str
    incarnation: int
    staleness: int | None
    stop: int | None = None


class WorkerEntered(OfJob, frozen=True):
    """A worker takes its slot in the group of a job. num_workers: the size of the group. wanted:
    the rank that it asks for."""

    name: str
    incarnation: int
    num_workers: int
    wanted: int = NO_RANK


class WorkerGone(OfJob, frozen=True):
    """The process of a worker with a slot has been no member for a lease."""

    name: str


class PartWanted(OfJob, frozen=True):
    """A worker has no part of the data to read, and wants the next.

    data: their name. clock: of its loop; -1: it is in none, and says what its data are.
    done: epoch and index of the part that it has read, in clocks that are complete.
    """

    name: str
    incarnation: int
    generation: int
    clock: int
    data: str
    source: Source
    done: tuple[int, int] | None = None


class Tick(OfJob, frozen=True):
    """A worker has completed `clock`: all of its pushes of this clock are acknowledged.

    generation: the generation of the view that it acted on.
    """

    name: str
    incarnation: int
    generation: int
    clock: int


class WorkerLeft(OfJob, frozen=True):
    """A worker has ended its loop over clocks."""

    name: str
    incarnation: int


class WorkerDied(OfJob, frozen=True):
    """A worker process is gone, and did not end its loop before."""

    name: str


class CheckpointDue(OfJob, frozen=True):
    """A user asks for a checkpoint now. A checkpoint that is under way is the answer too."""


class RangeSaved(msgspec.Struct, frozen=True, tag=True):
    """The primary of a range has written its part of a checkpoint.

    path: the path of the file, below the folder of the checkpoint.
    clocks: the clock that each worker began after it passed the mark.
    """

    generation: int
    cut: int
    range: int
    path: str
    clocks: dict[str, int] = {}


class SaveFailed(msgspec.Struct, frozen=True, tag=True):
    """The primary of a range cannot write its part of a checkpoint."""

    generation: int
    cut: int
    range: int
    why: str


class CutWritten(OfJob, frozen=True):
    """The manifest of a checkpoint is written, so it is whole."""

    cut: int


class GiveUpLost(msgspec.Struct, frozen=True):
    """An operator waits no longer for servers that have ranges in their logs: the jobs of these
    ranges roll back."""


Command: TypeAlias = (
    Start
    | ServerJoined
    | ServerReturned
    | ServerLeft
    | ServerDied
    | LearnerWhole
    | DeclareTable
    | RemoveJob
    | WorkerJoined
    | Tick
    | WorkerLeft
    | WorkerDied
    | WorkerEntered
    | WorkerGone
    | PartWanted
    | CheckpointDue
    | RangeSaved
    | SaveFailed
    | CutWritten
    | GiveUpLost
)
