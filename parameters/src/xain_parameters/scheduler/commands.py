"""The commands to the scheduler's decider. Servers report those that are msgspec's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from xain_parameters.scheduler.state import Settings
from xain_parameters.specs import TableSpec


@dataclass(frozen=True, slots=True)
class Start:
    """A scheduler begins, or begins again, with these settings."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class ServerJoined:
    """A server process has joined. incarnation: a later process of the name has a higher one."""

    name: str
    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerReturned:
    """A server tells which of the ranges without a server it has, and which not.

    generation: the generation of the view that it looked at.
    has, lacks: the epoch of each range in that view, by its number.
    """

    name: str
    generation: int
    has: Mapping[int, int] = field(default_factory=dict)
    lacks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerLeft:
    """A server wants to leave. Its ranges move away first; when no range names it, it may go, which
    is ServerDied then."""

    name: str


@dataclass(frozen=True, slots=True)
class ServerDied:
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


@dataclass(frozen=True, slots=True)
class DeclareTable:
    """A worker declares a table. The scheduler gives the table its number."""

    table: TableSpec


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker begins its loop over clocks. staleness: the bound s of its loop; None: no limit."""

    name: str
    incarnation: int
    staleness: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """A worker has completed `clock`: all of its pushes of this clock are acknowledged.

    generation: the generation of the view that it acted on.
    """

    name: str
    incarnation: int
    generation: int
    clock: int


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker has ended its loop over clocks."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker process is gone, and did not end its loop before."""

    name: str


@dataclass(frozen=True, slots=True)
class CheckpointDue:
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


@dataclass(frozen=True, slots=True)
class CutWritten:
    """The manifest of a checkpoint is written, so it is whole."""

    cut: int


@dataclass(frozen=True, slots=True)
class GiveUpLost:
    """An operator waits no longer for servers that have ranges in their logs: roll back."""


Command: TypeAlias = (
    Start
    | ServerJoined
    | ServerReturned
    | ServerLeft
    | ServerDied
    | LearnerWhole
    | DeclareTable
    | WorkerJoined
    | Tick
    | WorkerLeft
    | WorkerDied
    | CheckpointDue
    | RangeSaved
    | SaveFailed
    | CutWritten
    | GiveUpLost
)
