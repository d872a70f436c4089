"""The state of the scheduler, and the events that change it.

Folding the events of the journal gives the state back. Pure: no I/O, no clock, no threads.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from xain_foundation.clock_table import ClockTable
from xain_parameters.keys import even, is_cover
from xain_parameters.specs import CutView, Gap, RangeView, TableSpec, View, cut_folder

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
        mark.
    """

    number: int
    clock: int
    workers: tuple[str, ...]
    ended: dict[str, int]
    saved: dict[int, str] = {}
    clocks: dict[str, int] = {}


class Cut(msgspec.Struct, frozen=True):
    """A whole checkpoint, which is also its manifest.

    clock: the clock that the slowest worker goes on from. clocks: the same for each worker.
    ranges: each range with the path of its part.
    """

    generation: int
    number: int
    clock: int
    clocks: dict[str, int]
    tables: tuple[TableSpec, ...]
    ranges: tuple[tuple[RangeView, str], ...]

    @property
    def folder(self) -> str:
        return cut_folder(self.generation, self.number)


class State(msgspec.Struct, frozen=True, dict=True):  # dict: for cached properties
    """The state of a group, as the journal's events make it.

    ranges: a cover in the order of their positions, or empty before the first table.
    leaves: by range, the server that its learner will replace.
    lost: by range without a server, the server whose log is awaited; "": none, roll back.
    opened: all pushes of clocks below count.
    gathered: the most workers that were in a loop at a time, since there was none.
    cuts: the last whole checkpoints. cut_clock: `opened` when the last checkpoint began. last_cut:
        the number of the last checkpoint.
    """

    settings: Settings
    generation: int
    number: int = 0
    tables: tuple[TableSpec, ...] = ()
    ranges: tuple[RangeView, ...] = ()
    leaves: dict[int, str] = {}
    lost: dict[int, str] = {}
    servers: dict[str, Server] = {}
    workers: dict[str, Worker] = {}
    opened: int = 0
    gathered: int = 0
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
    def gate(self) -> tuple[int, ...]:
        """Changes whenever a worker that waits may go on, `opened` has changed, or the view."""
        return self.generation, self.number, self.slowest, self.gathered, self.opened

    @property
    def placeable(self) -> list[str]:
        """Servers that ranges may be placed on, by name."""
        return sorted(n for n, s in self.servers.items() if s.is_live and not s.is_leaving)

    def range(self, number: int) -> RangeView | None:
        return next((each for each in self.ranges if each.number == number), None)

    def may_begin(self, worker: str, num_workers: int = 1) -> bool:
        """Tell whether a live worker may work on its clock now, under the staleness of its loop.

        num_workers: wait until as many have joined; workers that have left count.
        """
        known = self.workers[worker]
        table = ClockTable({"the slowest": self.slowest}, known.staleness)
        return self.gathered >= num_workers and table.admits(known.ticked)

    def may_go(self, server: str) -> bool:
        """Tell whether no range names a server any more, or waits for its log."""
        return server not in self.lost.values() and not any(
            server in (*each.servers, *each.learners) for each in self.ranges
        )


def view_of(state: State) -> View:
    """The part of the state that servers and workers need."""
    return View(
        generation=state.generation,
        number=state.number,
        tables=state.tables,
        ranges=state.ranges,
        addresses={n: server.address for n, server in state.servers.items() if server.is_live},
        ended={n: worker.ticked for n, worker in state.workers.items() if not worker.is_live},
        rolled_back_to=state.rolled_back_to,
        gaps=state.gaps,
        cut=None if state.cut is None else CutView(state.cut.number, state.cut.workers),
        num_replicas=state.settings.num_replicas,
        has_log=state.settings.has_log,
        checkpoints=state.settings.checkpoints,
        load_from=state.load_from,
    )


# --- events ---------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of all events."""


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


class TableDeclared(Event, frozen=True, array_like=True, tag="table"):
    table: TableSpec


class RangesMade(Event, frozen=True, array_like=True, tag="ranges"):
    num_ranges: int


class RangeReconfigured(Event, frozen=True, array_like=True, tag="placed"):
    """A range has these servers and learners, in a new epoch. leaves: the server that the learner
    will replace."""

    range: int
    servers: tuple[str, ...]
    learners: tuple[str, ...] = ()
    leaves: str = ""


class RangeLost(Event, frozen=True, array_like=True, tag="lost"):
    """A range has no server. holder: the server whose log is awaited; "": none."""

    range: int
    holder: str


class RolledBack(Event, frozen=True, array_like=True, tag="rolled-back"):
    """All tables are those of the last whole checkpoint again, or empty if there is none."""


class WorkerBegan(Event, frozen=True, array_like=True, tag="began"):
    """A worker begins its loop over clocks, at `clock`."""

    name: str
    incarnation: int
    staleness: int | None
    clock: int


class Ticked(Event, frozen=True, array_like=True, tag="ticked"):
    """A worker has completed `clocks` clocks."""

    name: str
    clocks: int


class WorkerEnded(Event, frozen=True, array_like=True, tag="ended"):
    """A worker has ended its loop. has_left: by itself; otherwise it died."""

    name: str
    has_left: bool


class CutBegun(Event, frozen=True, array_like=True, tag="cut"):
    pass


class PartSaved(Event, frozen=True, array_like=True, tag="saved"):
    range: int
    path: str
    clocks: dict[str, int]


class CutWhole(Event, frozen=True, array_like=True, tag="whole"):
    pass


class CutGivenUp(Event, frozen=True, array_like=True, tag="given-up"):
    """The open checkpoint cannot be made. The last whole one stays, and the next one comes when it
    is due."""


AnyEvent: TypeAlias = (
    Started
    | ServerCame
    | ServerLeaving
    | ServerGone
    | TableDeclared
    | RangesMade
    | RangeReconfigured
    | RangeLost
    | RolledBack
    | WorkerBegan
    | Ticked
    | WorkerEnded
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
    """The state after an event. Whatever changes the view gives it a higher number."""
    after = _evolve(state, event)
    if isinstance(event, Started):
        return replace(after, number=((state.number >> 32) + 1) << 32)
    if isinstance(event, Ticked | PartSaved):
        return after
    return replace(after, number=state.number + 1)


def _evolve(state: State, event: AnyEvent) -> State:
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
        case TableDeclared():
            return replace(state, tables=(*state.tables, event.table))
        case RangesMade():
            ranges = tuple(
                RangeView(number, start, stop - 1, epoch=0, servers=())
                for number, (start, stop) in enumerate(even(event.num_ranges), 1)
            )
            return _with_ranges(state, ranges)
        case RangeReconfigured():
            assert event.range not in state.lost or event.servers
            leaves = _without(state.leaves, event.range)
            if event.leaves:
                leaves[event.range] = event.leaves
            lost = _without(state.lost, event.range)
            state = replace(state, leaves=leaves, lost=lost)
            return _reconfigured(state, event.range, event.servers, event.learners)
        case RangeLost():
            leaves = _without(state.leaves, event.range)
            lost = {**state.lost, event.range: event.holder}
            return _reconfigured(replace(state, leaves=leaves, lost=lost), event.range, (), ())
        case RolledBack():
            return _rolled_back(state)
        case WorkerBegan() | Ticked() | WorkerEnded():
            return _with_worker(state, event)
        case CutBegun():
            cut = OpenCut(
                number=state.last_cut + 1,
                clock=state.opened,
                workers=tuple(sorted(state.clocks)),
                ended={n: w.ticked for n, w in state.workers.items() if not w.is_live},
            )
            return replace(state, cut=cut, last_cut=cut.number, cut_clock=cut.clock)
        case PartSaved():
            assert state.cut is not None
            cut = replace(
                state.cut,
                saved={**state.cut.saved, event.range: event.path},
                clocks={**state.cut.clocks, **event.clocks},
            )
            return replace(state, cut=cut)
        case CutGivenUp():
            return replace(state, cut=None)
        case CutWhole():
            assert state.cut is not None
            return replace(
                state, cut=None, cuts=(*state.cuts, manifest_of(state, state.cut))[-NUM_CUTS:]
            )


def manifest_of(state: State, cut: OpenCut) -> Cut:
    """The manifest of a checkpoint, all of whose parts are saved."""
    marked = {name: clock for name, clock in cut.clocks.items() if name not in cut.ended}
    # A worker that marked, went on and then ended: what it pushed after its mark is not in it. One
    # that ended before its mark and came back: what it pushed of the clock it was at is none.
    clocks = cut.ended | cut.clocks
    clocks |= {name: min(clocks[name], ended) for name, ended in cut.ended.items()}
    return Cut(
        generation=state.generation,
        number=cut.number,
        clock=min((marked[name] for name in cut.workers if name in marked), default=cut.clock),
        clocks=clocks,
        tables=state.tables,
        ranges=tuple((each, cut.saved[each.number]) for each in state.ranges),
    )


def _rolled_back(state: State) -> State:
    cut = state.cuts[-1] if state.cuts else None
    clock = 0 if cut is None else cut.clock
    clocks = {} if cut is None else cut.clocks
    # A worker that came back while the checkpoint was made may have fewer clocks in it than all.
    workers = {n: replace(w, ticked=clocks.get(n, clock)) for n, w in state.workers.items()}
    behind = {n: w for n, w in workers.items() if w.is_live and w.ticked < clock}
    gaps = tuple(Gap(name, worker.ticked, clock) for name, worker in behind.items())
    workers |= {name: replace(worker, ticked=clock) for name, worker in behind.items()}
    return replace(
        _with_ranges(
            state,
            tuple(replace(each, learners=(), epoch=each.epoch + 1) for each in state.ranges),
        ),
        generation=state.generation + 1,
        leaves={},
        lost={},
        workers=workers,
        opened=clock,
        gaps=gaps,
        cut=None,
        cut_clock=clock,
        rolled_back_to=None if cut is None else cut.number,
        load_from="" if cut is None else cut.folder,
        num_rollbacks=state.num_rollbacks + 1,
    )


def _with_worker(state: State, event: WorkerBegan | Ticked | WorkerEnded) -> State:
    """The state after an event of a worker, with the clocks that the event has opened."""
    known = state.workers.get(event.name)
    gaps, cut = state.gaps, state.cut
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
    workers = {name: other for name, other in state.workers.items() if name != event.name}
    workers = _latest({**workers, event.name: worker})
    live = [other.ticked for other in workers.values() if other.is_live]
    opened, gathered = state.opened, state.gathered
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
    return replace(state, workers=workers, opened=opened, gathered=gathered, gaps=gaps, cut=cut)


def _reconfigured(
    state: State, number: int, servers: tuple[str, ...], learners: tuple[str, ...]
) -> State:
    ranges = (
        replace(each, servers=servers, learners=learners, epoch=each.epoch + 1)
        if each.number == number
        else each
        for each in state.ranges
    )
    before = state.range(number)
    is_saved = state.cut is None or number in state.cut.saved
    if not is_saved and before is not None and before.servers[:1] != servers[:1]:
        # The part of this range went with its primary. The next checkpoint is whole again.
        state = replace(state, cut=None)
    return _with_ranges(state, tuple(ranges))


def _with_ranges(state: State, ranges: tuple[RangeView, ...]) -> State:
    assert is_cover([each.range for each in ranges]) or not ranges
    for each in ranges:
        assert len({*each.servers, *each.learners}) == len(each.servers) + len(each.learners)
    return replace(state, ranges=ranges)


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
