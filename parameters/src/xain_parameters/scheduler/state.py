"""The state of the scheduler, and the events that change it.

A group has servers and settings, and jobs: a job has all the rest, so what befalls one changes
nothing in another.

Folding the events of the journal gives the state back. Pure: no I/O, no clock, no threads.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from xain_foundation.clock_table import ClockTable
from xain_parameters.jobs import slots as p
from xain_parameters.jobs.parts import Data, Part, Source
from xain_parameters.jobs.slots import Slot
from xain_parameters.keys import even, is_cover
from xain_parameters.specs import (
    RANGES_PER_JOB,
    CutView,
    Gap,
    RangeView,
    TableSpec,
    View,
    cut_folder,
    job_of,
)

# The latest workers that have ended, servers that are gone, and gaps of workers that are kept. An
# entry "open" may name each of these workers, and is a head between servers
# (messages.MAX_HEAD_BYTES).
MAX_FORMER = 200

# The number of whole checkpoints that are kept.
NUM_CUTS = 2


class Settings(msgspec.Struct, frozen=True):
    """Settings that an operator chooses.

    num_replicas: backups of each range. has_log: servers write what they acknowledge to disk.
    checkpoint_interval: in clocks; 0: only on demand.
    num_ranges: made with the first table; 0: twice as many as there are servers then, 8 at least.
        A server beyond their number has none.
    max_learners: ranges that are being copied at a time.
    checkpoints: fsspec URL of the folder for checkpoints; "": there are none.
    """

    num_replicas: int = 0
    has_log: bool = False
    checkpoint_interval: int = 0
    num_ranges: int = 0
    max_learners: int = 4
    checkpoints: str = ""


class Server(msgspec.Struct, frozen=True):
    """A server process. is_leaving: its ranges are moved away."""

    address: str
    incarnation: int
    is_live: bool = True
    is_leaving: bool = False


class Worker(msgspec.Struct, frozen=True):
    """A worker that is, or was, in a loop over clocks.

    ticked: clocks that it has completed. is_live: barriers count it. has_left: it ended its loop by
    itself, and some worker has been in a loop ever since.
    """

    ticked: int
    incarnation: int
    staleness: int | None
    is_live: bool = True
    has_left: bool = False


class OpenCut(msgspec.Struct, frozen=True):
    """A checkpoint that is being made.

    clock: `opened` when the checkpoint began. workers: the workers whose marks are awaited.
    ended: the clocks in the checkpoint of each worker that ended before its mark.
    saved: the path of the part of each range. clocks: the clock that each worker began after its
        mark. epochs: by data, the epochs that were over when the checkpoint began.
    """

    number: int
    clock: int
    workers: tuple[str, ...]
    ended: dict[str, int]
    saved: dict[int, str] = {}
    clocks: dict[str, int] = {}
    epochs: dict[str, int] = {}


class Cut(msgspec.Struct, frozen=True):
    """A whole checkpoint, which is also its manifest.

    clock: the clock that the slowest worker goes on from. clocks: the same for each worker.
    ranges: each range with the path of its part. job: its number. epochs: see OpenCut.
    """

    generation: int
    number: int
    clock: int
    clocks: dict[str, int]
    tables: tuple[TableSpec, ...]
    ranges: tuple[tuple[RangeView, str], ...]
    job: int = 0
    epochs: dict[str, int] = {}

    @property
    def folder(self) -> str:
        return cut_folder(self.generation, self.number, self.job)


class Job(msgspec.Struct, frozen=True, dict=True):  # dict: for cached properties
    """One training: its tables on the servers of the group, its workers and their clocks.

    job: its number, which no other job of the group ever has.
    ranges: a cover in the order of their positions, or empty before the first table.
    leaves: by range, the server that its learner will replace.
    lost: by range without a server, the server whose log is awaited; "": none, roll back.
    opened: all pushes of clocks below count.
    gathered: the most workers that were in a loop at a time, since there was none.
    num_workers: the size of the group that the workers gave; 0: none gave one. size: of the group
        in this epoch. slots: of the workers that gave a size, by name.
    data: that workers divide, by name.
    cuts: the last whole checkpoints. cut_clock: `opened` when the last checkpoint began. last_cut:
        the number of the last checkpoint.
    """

    job: int
    generation: int
    number: int = 0
    tables: tuple[TableSpec, ...] = ()
    ranges: tuple[RangeView, ...] = ()
    leaves: dict[int, str] = {}
    lost: dict[int, str] = {}
    workers: dict[str, Worker] = {}
    opened: int = 0
    gathered: int = 0
    num_workers: int = 0
    size: int = 0
    slots: dict[str, Slot] = {}
    data: dict[str, Data] = {}
    gaps: tuple[Gap, ...] = ()
    cut: OpenCut | None = None
    cuts: tuple[Cut, ...] = ()
    cut_clock: int = 0
    last_cut: int = 0
    rolled_back_to: int | None = None
    load_from: str = ""
    num_rollbacks: int = 0

    @property
    def clocks(self) -> dict[str, int]:
        """Clocks that each live worker has completed."""
        return {name: worker.ticked for name, worker in self.workers.items() if worker.is_live}

    @cached_property
    def slowest(self) -> int:
        """Clocks that the slowest live worker has completed; -1: there is no live worker."""
        return min((each.ticked for each in self.workers.values() if each.is_live), default=-1)

    @property
    def gate(self) -> tuple[object, ...]:
        """Changes whenever a worker that waits may go on, `opened` has changed, or the view."""
        return self.generation, self.number, self.slowest, self.gathered, self.opened, self.data

    @property
    def may_replace(self) -> bool:
        """Tell whether ranks may change now. While data are read, they change with an epoch."""
        return not any(
            each.num_begun and each.num_done < each.source.num_epochs for each in self.data.values()
        )

    def is_left(self, worker: str, clock: int) -> bool:
        """Tell whether a worker is gone, so that another one may read its part from a clock on, at
        which all that it has pushed is known to count or not."""
        slot, known = self.slots.get(worker), self.workers.get(worker)
        if slot is not None and not slot.is_gone:
            return False
        if known is None:
            return True
        # Pushes of a bulk synchronous loop count only from the next clock on.
        is_held = known.staleness == 0 and known.ticked > clock
        return not known.is_live and not is_held

    def kept_epoch(self, data: str) -> int:
        """The first epoch that a rollback may go back to, but for one to the beginning."""
        epochs = [cut.epochs.get(data, 0) for cut in self.cuts]
        if self.cut is not None:
            epochs.append(self.cut.epochs.get(data, 0))
        return min(epochs, default=self.data[data].num_done)

    def range(self, number: int) -> RangeView | None:
        return next((each for each in self.ranges if each.number == number), None)

    def may_begin(self, worker: str, num_workers: int = 1, *, all_here: bool = False) -> bool:
        """Tell whether a live worker may work on its clock now, under the staleness of its loop.

        num_workers: wait until as many have joined; workers that have left count. The first clock
        of a job waits for all of its group. all_here: wait for all of the group that are there.
        """
        known = self.workers[worker]
        table = ClockTable({"the slowest": self.slowest}, known.staleness)
        awaited = num_workers if self.opened else max(num_workers, self.num_workers)
        if all_here:
            awaited = max(awaited, len(p.ranks_of(self.slots)))
        return self.gathered >= awaited and table.admits(known.ticked)


class State(msgspec.Struct, frozen=True, dict=True):  # dict: for cached properties
    """The state of a group, as the journal's events make it.

    generation: that jobs begin with. number: of the last change; a job has that of its own last
    one. jobs: by name; "" is always there. last_job: the highest number of a job.
    """

    settings: Settings
    generation: int
    number: int = 0
    servers: dict[str, Server] = {}
    jobs: dict[str, Job] = {}
    last_job: int = 0

    @classmethod
    def first(cls, generation: int, settings: Settings = Settings()) -> "State":  # noqa: B008 - frozen
        """The state of a new group."""
        return cls(settings, generation, jobs={"": Job(0, generation)})

    @property
    def placeable(self) -> list[str]:
        """Servers that ranges may be placed on, by name."""
        return sorted(n for n, s in self.servers.items() if s.is_live and not s.is_leaving)

    @property
    def new_job(self) -> Job:
        """A job that is not there yet."""
        return Job(-1, self.generation, self.number)

    @cached_property
    def ranges(self) -> tuple[RangeView, ...]:
        """The ranges of all jobs."""
        return tuple(each for job in self.jobs.values() for each in job.ranges)

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each job, by its number."""
        return {job.job: name for name, job in self.jobs.items()}

    def name_of(self, range_: int) -> str | None:
        """The name of the job that has, or may have, a range; None: it was removed."""
        return self.names.get(job_of(range_))

    def may_go(self, server: str) -> bool:
        """Tell whether no range names a server any more, or waits for its log."""
        return not any(server in job.lost.values() for job in self.jobs.values()) and not any(
            server in (*each.servers, *each.learners) for each in self.ranges
        )


def view_of(state: State, name: str = "") -> View:
    """The part of the state that servers, and the workers of a job, need. A job that is not there
    yet has a view without tables."""
    job = state.jobs.get(name) or state.new_job
    return View(
        generation=job.generation,
        number=job.number,
        tables=job.tables,
        ranges=job.ranges,
        addresses={n: server.address for n, server in state.servers.items() if server.is_live},
        ended={n: worker.ticked for n, worker in job.workers.items() if not worker.is_live},
        rolled_back_to=job.rolled_back_to,
        gaps=job.gaps,
        cut=None if job.cut is None else CutView(job.cut.number, job.cut.workers),
        num_replicas=state.settings.num_replicas,
        has_log=state.settings.has_log,
        checkpoints=state.settings.checkpoints,
        load_from=job.load_from,
        job=job.job,
        ranks=p.ranks_of(job.slots),
        num_workers=job.size,
        num_gone=sum(slot.is_gone for slot in job.slots.values()),
    )


# --- events ---------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of all events."""


class JobEvent(Event, frozen=True, array_like=True, kw_only=True):
    """Base of the events of one job. job: its name."""

    job: str = ""


class Started(Event, frozen=True, array_like=True, tag="started"):
    settings: Settings


class ServerCame(Event, frozen=True, array_like=True, tag="server-came"):
    name: str
    address: str
    incarnation: int


class ServerLeaving(Event, frozen=True, array_like=True, tag="server-leaving"):
    name: str


class ServerGone(Event, frozen=True, array_like=True, tag="server-gone"):
    name: str


class JobBegun(JobEvent, frozen=True, array_like=True, tag="job"):
    """A job without tables."""


class JobRemoved(JobEvent, frozen=True, array_like=True, tag="job-removed"):
    """A job and its tables are gone; its checkpoints stay."""


class TableDeclared(JobEvent, frozen=True, array_like=True, tag="table"):
    table: TableSpec


class RangesMade(JobEvent, frozen=True, array_like=True, tag="ranges"):
    num_ranges: int


class RangeReconfigured(JobEvent, frozen=True, array_like=True, tag="placed"):
    """A range has these servers and learners, in a new epoch. leaves: the server that the learner
    will replace."""

    range: int
    servers: tuple[str, ...]
    learners: tuple[str, ...] = ()
    leaves: str = ""


class RangeLost(JobEvent, frozen=True, array_like=True, tag="lost"):
    """A range has no server. holder: the server whose log is awaited; "": none."""

    range: int
    holder: str


class RolledBack(JobEvent, frozen=True, array_like=True, tag="rolled-back"):
    """All tables are those of the last whole checkpoint again, or empty if there is none."""


class WorkerBegan(JobEvent, frozen=True, array_like=True, tag="began"):
    """A worker begins its loop over clocks, at `clock`."""

    name: str
    incarnation: int
    staleness: int | None
    clock: int


class Ticked(JobEvent, frozen=True, array_like=True, tag="ticked"):
    """A worker has completed `clocks` clocks."""

    name: str
    clocks: int


class WorkerEnded(JobEvent, frozen=True, array_like=True, tag="ended"):
    """A worker has ended its loop. has_left: by itself; otherwise it died."""

    name: str
    has_left: bool


class WorkerEntered(JobEvent, frozen=True, array_like=True, tag="entered"):
    """A worker takes its slot in the group of a job, which has `num_workers`. wanted: the rank
    that it asks for."""

    name: str
    incarnation: int
    num_workers: int
    wanted: int = p.NO_RANK


class WorkerGone(JobEvent, frozen=True, array_like=True, tag="gone"):
    """A worker with a slot has been no member for a lease."""

    name: str


class DataDeclared(JobEvent, frozen=True, array_like=True, tag="data"):
    """Workers divide data, or read them in more epochs than was known."""

    name: str
    source: Source


class EpochBegun(JobEvent, frozen=True, array_like=True, tag="epoch"):
    """The workers that are there have ranks without a gap, and each the part of its rank."""

    name: str


class PartTaken(JobEvent, frozen=True, array_like=True, tag="part"):
    """A worker reads the rest of a part whose worker is gone."""

    name: str
    epoch: int
    index: int
    worker: str


class PartDone(JobEvent, frozen=True, array_like=True, tag="part-done"):
    """A part of an epoch is read to its end."""

    name: str
    epoch: int
    index: int


class CutBegun(JobEvent, frozen=True, array_like=True, tag="cut"):
    pass


class PartSaved(JobEvent, frozen=True, array_like=True, tag="saved"):
    range: int
    path: str
    clocks: dict[str, int]


class CutWhole(JobEvent, frozen=True, array_like=True, tag="whole"):
    pass


class CutGivenUp(JobEvent, frozen=True, array_like=True, tag="given-up"):
    """The open checkpoint cannot be made. The last whole one stays, and the next one comes when it
    is due."""


AnyEvent: TypeAlias = (
    Started
    | ServerCame
    | ServerLeaving
    | ServerGone
    | JobBegun
    | JobRemoved
    | TableDeclared
    | RangesMade
    | RangeReconfigured
    | RangeLost
    | RolledBack
    | WorkerBegan
    | Ticked
    | WorkerEnded
    | WorkerEntered
    | WorkerGone
    | DataDeclared
    | EpochBegun
    | PartTaken
    | PartDone
    | CutBegun
    | PartSaved
    | CutWhole
    | CutGivenUp
)


# --- what they change -----------------------------------------------------------------------------


def fold(state: State, events: Iterable[AnyEvent]) -> State:
    for event in events:
        state = evolve(state, event)
    return state


def evolve(state: State, event: AnyEvent) -> State:
    """The state after an event. Whatever changes a view gives it a higher number."""
    if isinstance(event, Ticked | PartSaved | DataDeclared | PartTaken | PartDone):
        return _with_job(state, event.job, _evolve(state.jobs[event.job], event))
    is_start = isinstance(event, Started)
    number = ((state.number >> 32) + 1) << 32 if is_start else state.number + 1
    state = replace(state, number=number)
    match event:
        case JobBegun():
            return _with_new_job(state, event.job)
        case JobRemoved():
            if not event.job:
                return _with_new_job(state, "")
            jobs = {name: job for name, job in state.jobs.items() if name != event.job}
            return replace(state, jobs=jobs)
        case JobEvent():
            job = replace(_evolve(state.jobs[event.job], event), number=number)
            return _with_job(state, event.job, job)
        case _:
            jobs = {name: replace(job, number=number) for name, job in state.jobs.items()}
            return replace(_with_servers(state, event), jobs=jobs)


def _with_job(state: State, name: str, job: Job) -> State:
    return replace(state, jobs={**state.jobs, name: job})


def _with_new_job(state: State, name: str) -> State:
    state = replace(state, last_job=state.last_job + 1)
    return _with_job(state, name, Job(state.last_job, state.generation, state.number))


def _with_servers(state: State, event: Started | ServerCame | ServerLeaving | ServerGone) -> State:
    match event:
        case Started():
            return replace(state, settings=event.settings)
        case ServerCame():
            server = Server(event.address, event.incarnation)
            servers = {n: s for n, s in state.servers.items() if n != event.name}
            return replace(state, servers=_latest({**servers, event.name: server}))
        case ServerLeaving():
            return _with_server(state, event.name, is_leaving=True)
        case ServerGone():
            return _with_server(state, event.name, is_live=False, is_leaving=False)


def _evolve(job: Job, event: JobEvent) -> Job:
    """The job after an event."""
    match event:
        case TableDeclared():
            return replace(job, tables=(*job.tables, event.table))
        case RangesMade():
            ranges = tuple(
                RangeView(number, start, stop - 1, epoch=0, servers=())
                for number, (start, stop) in enumerate(
                    even(event.num_ranges), job.job * RANGES_PER_JOB + 1
                )
            )
            return _with_ranges(job, ranges)
        case RangeReconfigured():
            assert event.range not in job.lost or event.servers
            leaves = _without(job.leaves, event.range)
            if event.leaves:
                leaves[event.range] = event.leaves
            lost = _without(job.lost, event.range)
            job = replace(job, leaves=leaves, lost=lost)
            return _reconfigure(job, event.range, event.servers, event.learners)
        case RangeLost():
            leaves = _without(job.leaves, event.range)
            lost = {**job.lost, event.range: event.holder}
            return _reconfigure(replace(job, leaves=leaves, lost=lost), event.range, (), ())
        case RolledBack():
            return _rolled_back(job)
        case WorkerBegan() | Ticked() | WorkerEnded():
            return _with_worker(job, event)
        case WorkerEntered(name, incarnation, num_workers, wanted):
            size = job.size or num_workers
            slots = p.with_entered(
                job.slots, size, name, incarnation, wanted, may_replace=job.may_replace
            )
            return replace(job, num_workers=num_workers, size=size, slots=slots)
        case WorkerGone(name):
            slots = p.with_gone(job.slots, job.size, name, may_replace=job.may_replace)
            return replace(job, slots=slots)
        case DataDeclared() | EpochBegun() | PartTaken() | PartDone():
            return _with_data(job, event)
        case CutBegun():
            cut = OpenCut(
                number=job.last_cut + 1,
                clock=job.opened,
                workers=tuple(sorted(job.clocks)),
                ended={n: w.ticked for n, w in job.workers.items() if not w.is_live},
                epochs={name: data.num_done for name, data in job.data.items()},
            )
            return replace(job, cut=cut, last_cut=cut.number, cut_clock=cut.clock)
        case PartSaved():
            assert job.cut is not None
            cut = replace(
                job.cut,
                saved={**job.cut.saved, event.range: event.path},
                clocks={**job.cut.clocks, **event.clocks},
            )
            return replace(job, cut=cut)
        case CutGivenUp():
            return replace(job, cut=None)
        case CutWhole():
            assert job.cut is not None
            return replace(job, cut=None, cuts=(*job.cuts, manifest_of(job, job.cut))[-NUM_CUTS:])
        case _:
            raise AssertionError(event)


def manifest_of(job: Job, cut: OpenCut) -> Cut:
    """The manifest of a checkpoint, all of whose parts are saved."""
    marked = {name: clock for name, clock in cut.clocks.items() if name not in cut.ended}
    # A worker that marked, went on and then ended: what it pushed after its mark is not in it. One
    # that ended before its mark and came back: what it pushed of the clock it was at is none.
    clocks = cut.ended | cut.clocks
    clocks |= {name: min(clocks[name], ended) for name, ended in cut.ended.items()}
    return Cut(
        generation=job.generation,
        number=cut.number,
        clock=min((marked[name] for name in cut.workers if name in marked), default=cut.clock),
        clocks=clocks,
        tables=job.tables,
        ranges=tuple((each, cut.saved[each.number]) for each in job.ranges),
        job=job.job,
        epochs=cut.epochs,
    )


def _with_data(job: Job, event: DataDeclared | EpochBegun | PartTaken | PartDone) -> Job:
    """Return the job after an event about its data, such as a part that was read."""
    known = job.data.get(event.name)
    match event:
        case DataDeclared(source=source):
            data = Data(source) if known is None else replace(known, source=source)
        case EpochBegun(name):
            assert known is not None
            slots = p.ranked_anew(job.slots)
            job = replace(job, slots=slots, size=len(slots))
            data = known.with_epoch(list(p.ranks_of(slots)), job.kept_epoch(name))
        case PartTaken(_, epoch, index, worker):
            assert known is not None
            data = known.with_part(epoch, index, Part(worker))
        case PartDone(_, epoch, index):
            assert known is not None
            data = known.with_part(epoch, index, replace(known.epochs[epoch][index], is_done=True))
    return replace(job, data={**job.data, event.name: data})


def _rolled_back(job: Job) -> Job:
    """The job at its last checkpoint, or at its beginning, as a new generation."""
    cut = job.cuts[-1] if job.cuts else None
    clock = 0 if cut is None else cut.clock
    clocks = {} if cut is None else cut.clocks
    # A worker that came back while the checkpoint was made may have fewer clocks in it than all.
    workers = {n: replace(w, ticked=clocks.get(n, clock)) for n, w in job.workers.items()}
    behind = {n: w for n, w in workers.items() if w.is_live and w.ticked < clock}
    gaps = tuple(Gap(name, worker.ticked, clock) for name, worker in behind.items())
    workers |= {name: replace(worker, ticked=clock) for name, worker in behind.items()}
    epochs = {} if cut is None else cut.epochs
    data = {
        name: known.reopened(epochs[name]) if name in epochs else Data(known.source)
        for name, known in job.data.items()
    }
    return replace(
        _with_ranges(
            job,
            tuple(replace(each, learners=(), epoch=each.epoch + 1) for each in job.ranges),
        ),
        generation=job.generation + 1,
        leaves={},
        lost={},
        workers=workers,
        data=data,
        opened=clock,
        gaps=gaps,
        cut=None,
        cut_clock=clock,
        rolled_back_to=None if cut is None else cut.number,
        load_from="" if cut is None else cut.folder,
        num_rollbacks=job.num_rollbacks + 1,
    )


def _with_worker(job: Job, event: WorkerBegan | Ticked | WorkerEnded) -> Job:
    """The job after an event of a worker, with the clocks that the event has opened."""
    known = job.workers.get(event.name)
    gaps, cut = job.gaps, job.cut
    match event:
        case WorkerBegan():
            worker = Worker(event.clock, event.incarnation, event.staleness)
            if known is not None and known.ticked < event.clock:
                gaps = (*gaps, Gap(event.name, known.ticked, event.clock))[-MAX_FORMER:]
        case Ticked():
            assert known is not None
            worker = replace(known, ticked=event.clocks)
        case WorkerEnded():
            assert known is not None
            worker = replace(known, is_live=False, has_left=event.has_left)
            if cut is not None and event.name not in cut.clocks:
                cut = replace(cut, ended={event.name: known.ticked, **cut.ended})
    workers = {name: other for name, other in job.workers.items() if name != event.name}
    workers = _latest({**workers, event.name: worker})
    live = [other.ticked for other in workers.values() if other.is_live]
    opened, gathered = job.opened, job.gathered
    if live:
        opened = max(opened, min(live))
        here = sum(other.is_live or other.has_left for other in workers.values())
        gathered = max(gathered, here)
    else:
        gathered = 0
        if worker.has_left:
            # A worker that has left does not come back to these clocks: its pushes count now. A
            # worker that has died may come back, and would find the clock closed.
            opened = max(opened, *(other.ticked for other in workers.values()))
        if all(other.has_left for other in workers.values()):
            workers = {n: replace(other, has_left=False) for n, other in workers.items()}
    return replace(job, workers=workers, opened=opened, gathered=gathered, gaps=gaps, cut=cut)


def _reconfigure(job: Job, number: int, servers: tuple[str, ...], learners: tuple[str, ...]) -> Job:
    """Give a range other servers. With another primary its part of a checkpoint is lost."""
    ranges = (
        replace(each, servers=servers, learners=learners, epoch=each.epoch + 1)
        if each.number == number
        else each
        for each in job.ranges
    )
    before = job.range(number)
    is_saved = job.cut is None or number in job.cut.saved
    if not is_saved and before is not None and before.servers[:1] != servers[:1]:
        # The part of this range went with its primary. The next checkpoint is whole again.
        job = replace(job, cut=None)
    return _with_ranges(job, tuple(ranges))


def _with_ranges(job: Job, ranges: tuple[RangeView, ...]) -> Job:
    assert is_cover([each.range for each in ranges]) or not ranges
    for each in ranges:
        assert len({*each.servers, *each.learners}) == len(each.servers) + len(each.learners)
    return replace(job, ranges=ranges)


def _with_server(state: State, name: str, **changes: bool) -> State:
    server = replace(state.servers[name], **changes)
    return replace(state, servers={**state.servers, name: server})


def _latest(nodes: dict[str, Any]) -> dict[str, Any]:
    """Drop the oldest of the nodes that are not live, if there are too many of these."""
    former = [name for name, node in nodes.items() if not node.is_live]
    for name in former[: max(0, len(former) - MAX_FORMER)]:
        del nodes[name]
    return nodes


def _without(numbered: Mapping[int, str], number: int) -> dict[int, str]:
    return {key: value for key, value in numbered.items() if key != number}
