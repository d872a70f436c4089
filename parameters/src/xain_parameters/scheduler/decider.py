"""The decisions of the scheduler.

    decide(state, command) -> the events, and the state that they lead to; or raises

A decision has the events of the command itself, and then the placements and the checkpoint that
follow from the state that is reached, whichever command led to it. Pure: no I/O, no clock, no
threads.
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from xain_parameters.errors import Evicted, Invalid, RolledBack, TableConflict
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler import state as e
from xain_parameters.scheduler.placement import next_placement, with_whole
from xain_parameters.scheduler.state import AnyEvent, State, evolve
from xain_parameters.specs import MAX_TABLES, TableSpec
from xain_parameters.tables.part import plugins_of


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
            events, state = _decided(state, c.ServerDied(command.name))
    more, state = _decided(state, command)
    return Decision((*events, *more), state)


def _decided(state: State, command: c.Command) -> tuple[list[AnyEvent], State]:
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
    match command:
        case c.Start(settings):
            if settings.checkpoint_interval and not settings.checkpoints:
                raise Invalid("checkpoint_interval is given, and no folder for checkpoints")
            # Without a log no server brings a range back.
            lost = () if settings.has_log else _given_up(state)
            return (e.Started(settings), *lost)
        case c.ServerJoined() | c.ServerReturned() | c.ServerLeft() | c.ServerDied():
            return _answer_server(state, command)
        case c.LearnerWhole(number, epoch, server):
            each = state.range(number)
            if each is None or each.epoch != epoch or server not in each.learners:
                return ()
            return (with_whole(state, each, server),)
        case c.DeclareTable(table):
            return _declared(state, replace(table, number=len(state.tables) + 1))
        case c.WorkerJoined() | c.Tick() | c.WorkerLeft() | c.WorkerDied():
            return _answer_worker(state, command)
        case c.CheckpointDue():
            if state.cut is not None:
                return ()
            if not can_cut(state):
                raise Invalid("there is nothing to save yet: no table, or ranges without a server")
            return (e.CutBegun(),)
        case c.RangeSaved(generation, cut, number, path, clocks):
            if state.cut is None or (state.generation, state.cut.number) != (generation, cut):
                return ()
            if state.range(number) is None or number in state.cut.saved:
                return ()
            return (e.PartSaved(number, path, dict(clocks)),)
        case c.SaveFailed(generation, cut, number, _):
            if state.cut is None or (state.generation, state.cut.number) != (generation, cut):
                return ()
            return () if number in state.cut.saved else (e.CutGivenUp(),)
        case c.CutWritten(cut):
            is_open = state.cut is not None and state.cut.number == cut
            return (e.CutWhole(),) if is_open and is_saved(state) else ()
        case c.GiveUpLost():
            return _given_up(state)


def _given_up(state: State) -> list[AnyEvent]:
    return [e.RangeLost(number, "") for number, holder in state.lost.items() if holder]


def _answer_server(
    state: State, command: c.ServerJoined | c.ServerReturned | c.ServerLeft | c.ServerDied
) -> Iterable[AnyEvent]:
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
            if generation != state.generation:
                return ()  # the server tells again when it has the newer view
            epochs = {each.number: each.epoch for each in state.ranges}
            mine = [number for number, holder in state.lost.items() if holder == name]
            return [
                e.RangeReconfigured(number, (name,)) if number in has else e.RangeLost(number, "")
                for number in mine
                if epochs[number] in (has.get(number), lacks.get(number))
            ]
        case c.ServerLeft(name):
            return () if known.is_leaving else (e.ServerLeaving(name),)
        case c.ServerDied(name):
            return (e.ServerGone(name),)


def _declared(state: State, table: TableSpec) -> Iterable[AnyEvent]:
    known = next((each for each in state.tables if each.name == table.name), None)
    if known is None:
        plugins_of(table)  # refused here, before the journal has it for good
        if len(state.tables) >= MAX_TABLES:
            raise Invalid(
                f"table {table.name!r}: the group has {MAX_TABLES} tables, the most that there may "
                "be; declare fewer, larger ones"
            )
        return (e.TableDeclared(table),)
    if replace(known, number=table.number) != table:
        raise TableConflict(f"there is a table {table.name!r} already, which is {_text(known)}")
    return ()


def _text(table: TableSpec) -> str:
    size = f"shape {table.shape}" if table.is_dense else f"dim {table.dim}, bound {table.bound}"
    return (
        f"{size}, {table.dtype}, update {table.update.name} {table.update.options}, "
        f"init {table.init.name} {table.init.options}, staleness {table.staleness}"
    )


def _answer_worker(
    state: State, command: c.WorkerJoined | c.Tick | c.WorkerLeft | c.WorkerDied
) -> Iterable[AnyEvent]:
    name = command.name
    known = state.workers.get(name)
    incarnation = None if isinstance(command, c.WorkerDied) else command.incarnation
    if known is not None and incarnation is not None and incarnation < known.incarnation:
        raise Evicted(f"a later process has the name of the worker {name!r}")
    match command:
        case c.WorkerJoined(_, incarnation, staleness, stop):
            if known is None and stop is not None and 0 < stop <= state.opened:
                raise Invalid(
                    f"the worker {name!r} would have no clock: its loop ends before clock {stop}, "
                    f"and the group is at clock {state.opened}. Clocks belong to the group: give a "
                    "second job a group of its own, or a later stop"
                )
            clock = state.opened if known is None else max(known.ticked, state.opened)
            if known is not None and known.is_live:
                clock = known.ticked  # it was not missed, and goes on
                if (known.incarnation, known.staleness) == (incarnation, staleness):
                    return ()
            return (e.WorkerBegan(name, incarnation, staleness, clock),)
        case c.WorkerDied():
            return (e.WorkerEnded(name, False),) if known is not None and known.is_live else ()
        case c.WorkerLeft(_, incarnation):
            if known is None or not known.is_live or known.incarnation != incarnation:
                return ()
            return (e.WorkerEnded(name, True),)
        case c.Tick(_, incarnation, generation, clock):
            if known is None or not known.is_live or known.incarnation != incarnation:
                raise Evicted(f"the worker {name!r} was taken for dead, or has not begun")
            if generation != state.generation:
                raise RolledBack(f"the tick of {name!r} is of an older generation")
            # More than one clock later: a power cut has taken ticks from the journal, which is not
            # waited for with each.
            return (e.Ticked(name, clock + 1),) if clock >= known.ticked else ()


# --- checkpoints ----------------------------------------------------------------------------------


def can_cut(state: State) -> bool:
    return bool(state.ranges) and all(each.servers for each in state.ranges)


def is_saved(state: State) -> bool:
    """Tell whether all parts of the open checkpoint are written, so that its manifest follows."""
    return state.cut is not None and all(r.number in state.cut.saved for r in state.ranges)


def _next_cut(state: State) -> AnyEvent | None:
    """Begin a checkpoint for every interval of clocks; a checkpoint that takes longer delays the
    next."""
    every = state.settings.checkpoint_interval
    if not every or state.cut is not None or not can_cut(state):
        return None
    return e.CutBegun() if state.opened // every > state.cut_clock // every else None
