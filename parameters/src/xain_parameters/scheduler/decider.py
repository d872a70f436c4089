"""The decisions of the scheduler.

    decide(state, command) -> the events, and the state that they lead to; or raises

A decision has the events of the command itself, and then the placements and the checkpoint that
follow from the state that is reached, whichever command led to it. Pure: no I/O, no clock, no
threads.
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from xain_foundation.names import shortened
from xain_parameters.errors import Evicted, Invalid, RolledBack, TableConflict
from xain_parameters.jobs.parts import Data, Part
from xain_parameters.jobs.slots import ranks_of
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler import state as e
from xain_parameters.scheduler.placement import next_placement, with_whole
from xain_parameters.scheduler.state import AnyEvent, Job, State, evolve, fold
from xain_parameters.specs import (
    MAX_NAME_BYTES,
    MAX_TABLES,
    OF_TABLE,
    TableSpec,
    check_job_name,
    check_num_workers,
    is_unnamed,
)
from xain_parameters.tables.part import plugins_of

# Data of a job, each under a name.
MAX_DATA = 64
# Each costs every server a view, and requests a few more ranges.
MAX_JOBS = 64


class Decision(NamedTuple):
    """events: to be journalled before anybody hears of them. state: what they lead to."""

    events: tuple[AnyEvent, ...]
    state: State


def decide(state: State, command: c.Command) -> Decision:
    """Decide a command. The same command again changes nothing.

    Raises Evicted if the sender is no member, or another process has its name; RolledBack if it
    acted on an older generation; TableConflict; Invalid. Then nothing has changed.
    """
    events: list[AnyEvent] = []
    if isinstance(command, c.ServerJoined):
        known = state.servers.get(command.name)
        if known is not None and known.is_live and known.incarnation < command.incarnation:
            # The process before this one is gone, and its memory with it.
            events, state = _decide_with_steps(state, c.ServerDied(command.name))
    if isinstance(command, c.DeclareTable) and is_unnamed(command.job):
        _check_job(state, command)
    beginning = c.DeclareTable | c.WorkerJoined | c.WorkerEntered
    if isinstance(command, beginning) and command.job not in state.jobs:
        if not is_unnamed(command.job):
            check_job_name(command.job)
        events = [*_room_for_job(state, command.job), e.JobBegun(job=command.job)]
        state = fold(state, events)
    more, state = _decide_with_steps(state, command)
    return Decision((*events, *more), state)


def _decide_with_steps(state: State, command: c.Command) -> tuple[list[AnyEvent], State]:
    """Return the events of a command and of what follows from it, and the state after them."""
    events = list(_answer(state, command))
    for event in events:
        state = evolve(state, event)
    # Ticks are many, and no placement follows from one.
    has_ticked = isinstance(command, c.Tick)
    while True:
        step = (None if has_ticked else next_placement(state)) or _next_cut(state)
        if step is None:
            return events, state
        state = evolve(state, step)
        events.append(step)


def _answer(state: State, command: c.Command) -> Iterable[AnyEvent]:
    """The events that a command alone leads to. Raises Invalid and Evicted."""
    match command:
        case c.Start(settings):
            if settings.checkpoint_interval and not settings.checkpoints:
                raise Invalid("checkpoint_interval is given, and no folder for checkpoints")
            # Without a log no server brings a range back.
            lost = () if settings.has_log else _give_up_lost(state)
            return (e.Started(settings), *lost)
        case c.ServerJoined() | c.ServerReturned() | c.ServerLeft() | c.ServerDied():
            return _answer_server(state, command)
        case c.LearnerWhole(number, epoch, server):
            each = next((each for each in state.ranges if each.number == number), None)
            if each is None or each.epoch != epoch or server not in each.learners:
                return ()
            return (with_whole(state, each, server),)
        case c.RangeSaved(range=number) | c.SaveFailed(range=number):
            name = state.name_of(number)
            return () if name is None else _answer_job(state.jobs[name], name, command)
        case c.GiveUpLost():
            return _give_up_lost(state)
        case c.OfJob():
            job = state.jobs.get(command.job)
            if job is None:
                raise Evicted(f"there is no job {command.job!r}, or not any more")
            return _answer_job(job, command.job, command)
    raise AssertionError(command)


def _answer_job(job: Job, name: str, command: c.Command) -> Iterable[AnyEvent]:
    """Return the events that a command about one job leads to. Raises Invalid."""
    match command:
        case c.DeclareTable(table):
            return _declare_table(job, name, replace(table, number=len(job.tables) + 1))
        case c.RemoveJob():
            if job.clocks:
                workers = ", ".join(sorted(job.clocks)[:3])
                raise Invalid(f"job {name!r} has workers in its loop: {workers}; stop them first")
            return (e.JobRemoved(job=name),)
        case c.WorkerJoined() | c.Tick() | c.WorkerLeft() | c.WorkerDied():
            return _answer_worker(job, name, command)
        case c.WorkerEntered():
            return _enter_worker(job, name, command)
        case c.PartWanted():
            return _give_part(job, name, command)
        case c.WorkerGone(worker):
            slot = job.slots.get(worker)
            return () if slot is None or slot.is_gone else (e.WorkerGone(worker, job=name),)
        case c.CheckpointDue():
            if job.cut is not None:
                return ()
            if not can_cut(job):
                raise Invalid("there is nothing to save yet: no table, or ranges without a server")
            return (e.CutBegun(job=name),)
        case c.RangeSaved(generation, cut, number, path, clocks):
            if job.cut is None or (job.generation, job.cut.number) != (generation, cut):
                return ()
            if job.range(number) is None or number in job.cut.saved:
                return ()
            return (e.PartSaved(number, path, dict(clocks), job=name),)
        case c.SaveFailed(generation, cut, number, _):
            if job.cut is None or (job.generation, job.cut.number) != (generation, cut):
                return ()
            return () if number in job.cut.saved else (e.CutGivenUp(job=name),)
        case c.CutWritten(cut):
            is_open = job.cut is not None and job.cut.number == cut
            return (e.CutWhole(job=name),) if is_open and is_saved(job) else ()
    raise AssertionError(command)


def job_with(state: State, table: str) -> str:
    """The job of a worker that names none, and whose first table this is: the one of such workers
    that has the table, or one that is named after it."""
    having = (
        name
        for name, job in state.jobs.items()
        if is_unnamed(name) and any(each.name == table for each in job.tables)
    )
    return next(having, f"{OF_TABLE}{table}")


def _room_for_job(state: State, new: str) -> list[AnyEvent]:
    """Where a group has as many jobs as there may be, remove one that has no tables, and no workers
    in a loop or with a rank. Not before: a worker may end a loop, and declare its first table
    then."""
    if len(state.jobs) <= MAX_JOBS:
        return []
    for name, job in state.jobs.items():
        if name and not job.tables and not job.clocks and not ranks_of(job.slots):
            return [e.JobRemoved(job=name)]
    raise Invalid(
        f"job {shortened(new)!r}: the group has {MAX_JOBS} jobs, the most that there may be; "
        "remove one that is over: xain-parameter-server jobs remove NAME"
    )


def _check_job(state: State, command: c.DeclareTable) -> None:
    """Refuse a table that workers of another job have: whether they are to share it is not known
    where no job was named."""
    name = command.table.name
    other = job_with(state, name)
    if other != command.job and other in state.jobs:
        raise Invalid(
            f"table {name!r} belongs to the job {shortened(other)!r}, and this worker takes part "
            f"in {shortened(command.job)!r}, that of its first table. Name the job of both: "
            'connect(..., job="NAME")'
        )


def _give_up_lost(state: State) -> list[AnyEvent]:
    """Return events by which no lost range waits for a server with its log any more."""
    return [
        e.RangeLost(number, "", job=name)
        for name, job in state.jobs.items()
        for number, holder in job.lost.items()
        if holder
    ]


def _answer_server(
    state: State, command: c.ServerJoined | c.ServerReturned | c.ServerLeft | c.ServerDied
) -> Iterable[AnyEvent]:
    """The events of a server that came, came back with its ranges, leaves, or has died. Raises
    Evicted for a process that a later one has replaced."""
    known = state.servers.get(command.name)
    if isinstance(command, c.ServerJoined):
        name, address, incarnation = command.name, command.address, command.incarnation
        if known is not None and incarnation < known.incarnation:
            raise Evicted(f"a later process has the name of the server {name!r}")
        if known is not None and known.is_live and known.address == address:
            return ()
        return (e.ServerCame(name, address, incarnation),)
    if known is None or not known.is_live:
        return ()
    match command:
        case c.ServerReturned(name, generation, has, lacks):
            epochs = {each.number: each.epoch for each in state.ranges}
            mine = [
                (job_name, number)
                for job_name, job in state.jobs.items()
                for number, holder in job.lost.items()
                # A report of an older generation is ignored: the server reports again with the
                # newer view.
                if holder == name and generation == job.generation
            ]
            return [
                e.RangeReconfigured(number, (name,), job=job_name)
                if number in has
                else e.RangeLost(number, "", job=job_name)
                for job_name, number in mine
                if epochs[number] in (has.get(number), lacks.get(number))
            ]
        case c.ServerLeft(name):
            return () if known.is_leaving else (e.ServerLeaving(name),)
        case c.ServerDied(name):
            return (e.ServerGone(name),)


def _declare_table(job: Job, name: str, table: TableSpec) -> Iterable[AnyEvent]:
    known = next((each for each in job.tables if each.name == table.name), None)
    if known is None:
        plugins_of(table)  # refused here, before the journal has it for good
        if len(job.tables) >= MAX_TABLES:
            raise Invalid(
                f"table {table.name!r}: the job has {MAX_TABLES} tables, the most that there may "
                "be; declare fewer, larger ones"
            )
        return (e.TableDeclared(table, job=name),)
    if replace(known, number=table.number) != table:
        raise TableConflict(f"there is a table {table.name!r} already, which is {_in_words(known)}")
    return ()


def _in_words(table: TableSpec) -> str:
    size = f"shape {table.shape}" if table.is_dense else f"dim {table.dim}, bound {table.bound}"
    return (
        f"{size}, {table.dtype}, update {table.update.name} {table.update.options}, "
        f"init {table.init.name} {table.init.options}, staleness {table.staleness}"
    )


def _answer_worker(
    job: Job, job_name: str, command: c.WorkerJoined | c.Tick | c.WorkerLeft | c.WorkerDied
) -> Iterable[AnyEvent]:
    """The events of a worker that begins its clocks, ticks, leaves, or has died. Raises Evicted for
    a process that a later one has replaced, and Invalid."""
    name = command.name
    known = job.workers.get(name)
    incarnation = None if isinstance(command, c.WorkerDied) else command.incarnation
    if known is not None and incarnation is not None and incarnation < known.incarnation:
        raise Evicted(f"a later process has the name of the worker {name!r}")
    match command:
        case c.WorkerJoined(_, incarnation, staleness, stop):
            if known is None and stop is not None and 0 < stop <= job.opened:
                raise Invalid(
                    f"the worker {name!r} would have no clock: its loop ends before clock {stop}, "
                    f"and its job is at clock {job.opened}. Clocks belong to a job: give another "
                    'training another one, connect(..., job="NAME"), or this one a later stop'
                )
            clock = job.opened if known is None else max(known.ticked, job.opened)
            if known is not None and known.is_live:
                clock = known.ticked  # it was not missed, and goes on
                if (known.incarnation, known.staleness) == (incarnation, staleness):
                    return ()
            return (e.WorkerBegan(name, incarnation, staleness, clock, job=job_name),)
        case c.WorkerDied():
            return (
                (e.WorkerEnded(name, False, job=job_name),)
                if known is not None and known.is_live
                else ()
            )
        case c.WorkerLeft(_, incarnation):
            if known is None or not known.is_live or known.incarnation != incarnation:
                return ()
            return (e.WorkerEnded(name, True, job=job_name),)
        case c.Tick(_, incarnation, generation, clock):
            if known is None or not known.is_live or known.incarnation != incarnation:
                raise Evicted(f"the worker {name!r} was taken for dead, or has not begun")
            if generation != job.generation:
                raise RolledBack(f"the tick of {name!r} is of an older generation")
            # More than one clock later: a power cut has taken ticks from the journal, which is not
            # waited for with each.
            return (e.Ticked(name, clock + 1, job=job_name),) if clock >= known.ticked else ()


def _enter_worker(job: Job, name: str, command: c.WorkerEntered) -> Iterable[AnyEvent]:
    """Give a worker a slot. Raises Invalid for another size of the group, and Evicted."""
    worker, incarnation, num_workers = command.name, command.incarnation, command.num_workers
    check_num_workers(num_workers)
    if job.num_workers not in (0, num_workers):
        called = f"job {shortened(name)!r}" if name else "the job without a name"
        raise Invalid(
            f"{called} has {job.num_workers} workers, as those before said, and the worker "
            f"{worker!r} says workers={num_workers}; give all of them the same number"
        )
    known = job.slots.get(worker)
    if known is not None:
        if incarnation < known.incarnation:
            raise Evicted(f"a later process has the name of the worker {worker!r}")
        if (known.incarnation, known.is_gone) == (incarnation, False):
            return ()
    return (e.WorkerEntered(worker, incarnation, num_workers, command.wanted, job=name),)


def _give_part(job: Job, name: str, command: c.PartWanted) -> Iterable[AnyEvent]:
    """The events by which a worker gets a part of the data: the one before is done, a part that is
    left is taken, or the next epoch begins. Raises Evicted and RolledBack."""
    worker, called = command.name, command.data
    slot = job.slots.get(worker)
    if slot is None or slot.is_gone or slot.incarnation != command.incarnation:
        raise Evicted(f"the worker {worker!r} has no slot in its job, or not any more")
    data, events = _declare_data(job, name, command)
    if command.clock < 0:
        return events
    if command.generation != job.generation:
        raise RolledBack(f"{worker!r} acts on an older generation")
    if command.done is not None:
        epoch, index = command.done
        parts = data.epochs.get(epoch, ())
        if index < len(parts) and parts[index] == Part(worker):
            data = data.with_part(epoch, index, Part(worker, is_done=True))
            events.append(e.PartDone(called, epoch, index, job=name))
    if data.part_of(worker) is None:
        left = data.part_left(lambda holder: job.is_left(holder, command.clock))
        if left is not None:
            events.append(e.PartTaken(called, *left, worker, job=name))
        elif data.may_begin() and data.num_begun < command.source.num_epochs:
            events.append(e.EpochBegun(called, job=name))
    return events


def _declare_data(job: Job, name: str, command: c.PartWanted) -> tuple[Data, list[AnyEvent]]:
    """Return the data that a worker reads, and the event if it declares something new."""
    known, source = job.data.get(command.data), command.source
    if known is None:
        if not 0 < len(command.data.encode()) <= MAX_NAME_BYTES:
            raise Invalid(f"the name of data has {MAX_NAME_BYTES} bytes at most")
        if source.size < 0 or source.num_epochs < 1:
            raise Invalid("data have a size, and are read in one epoch at least")
        if len(job.data) >= MAX_DATA:
            raise Invalid(
                f"job {shortened(name)!r} has {MAX_DATA} data already, the most there may be"
            )
    elif (known.source.size, known.source.fingerprint) != (source.size, source.fingerprint):
        raise Invalid(
            f"the worker {command.name!r} reads data of size {source.size:,}, and the workers "
            f"before it data of size {known.source.size:,}, or files with other names or sizes: "
            "their parts would not have each row once; give all workers the same data, and other "
            "data another job"
        )
    elif source.num_epochs <= known.source.num_epochs:
        return known, []
    data = Data(source) if known is None else replace(known, source=source)
    return data, [e.DataDeclared(command.data, source, job=name)]


def has_part(job: Job, command: c.PartWanted) -> bool:
    """Tell whether there is a part for a worker that is in no loop."""
    data = job.data[command.data]
    may_begin = data.may_begin() and data.num_begun < command.source.num_epochs
    part = data.part_of(command.name)
    is_its = part is not None and part[0] < command.source.num_epochs
    return is_its or may_begin or has_left(job, data)


def has_left(job: Job, data: Data) -> bool:
    """Tell whether a part waits for another worker."""
    return data.part_left(lambda holder: job.is_left(holder, job.opened)) is not None


# --- checkpoints ----------------------------------------------------------------------------------


def can_cut(job: Job) -> bool:
    return bool(job.ranges) and all(each.servers for each in job.ranges)


def is_saved(job: Job) -> bool:
    """Tell whether all parts of the open checkpoint are written, so that its manifest follows."""
    return job.cut is not None and all(r.number in job.cut.saved for r in job.ranges)


def _next_cut(state: State) -> AnyEvent | None:
    """Begin a checkpoint for every interval of clocks, unless one is still being made."""
    every = state.settings.checkpoint_interval
    for name, job in state.jobs.items() if every else ():
        if job.opened // every > job.cut_clock // every and job.cut is None and can_cut(job):
            return e.CutBegun(job=name)
    return None
