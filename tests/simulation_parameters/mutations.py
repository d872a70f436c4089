"""Defects, put into the code under test on purpose: what would come of forgetting something. Each
must be found by some seed; see test_mutations.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from msgspec.structs import replace as with_

from simulation_parameters.scenario import Event, Fault, Scenario, from_seed
from xain_parameters.jobs.parts import Data
from xain_parameters.known import Known
from xain_parameters.messages import Begin, Entry, Message, Push
from xain_parameters.node import protocol as protocol_module
from xain_parameters.node.backup import Backup
from xain_parameters.node.copy import Copy, Tail
from xain_parameters.node.fill import Fill
from xain_parameters.node.ports import Source
from xain_parameters.node.primary import Primary
from xain_parameters.node.protocol import ServerNode
from xain_parameters.replica import Replica
from xain_parameters.scheduler.state import Job
from xain_parameters.specs import View

Mutation = Callable[[], AbstractContextManager[Any]]

open_clock = Replica.open
apply_open = Replica._open
prepare = Replica.prepare
takes_at_once = Replica.takes_at_once
begin_stream = Primary._begin
rest = Fill.rest
take = Backup.take
leave = ServerNode._leave
report_returned = ServerNode._report_returned
openings = protocol_module.openings
after = Tail.after
advance = Copy.advance


def _count_only_here(self: Primary) -> int:
    return self.copy.synced


def _not_learners(self: Primary, peer: Any) -> None:
    """A learner that is whole is not waited for."""
    if peer.is_learner:
        peer.whole_at = self.copy.replica.sequence


def _tail_by_number(self: Tail, sequence: int, made_in: int | None) -> list[Message] | None:
    """Entries of two primaries with the same number are taken for the same."""
    for index, message in enumerate(self._entries):
        assert isinstance(message.head, Entry)
        if message.head.sequence == sequence:
            return list(self._entries)[index + 1 :]
    return [] if not self._entries else after(self, sequence, made_in)


def _never_fill(self: Primary, peer: Any, have: Any) -> None:
    """A server that has anything is taken for up to date."""
    if not have.is_whole:
        begin_stream(self, peer, have)
        return
    self._last_probe += 1
    peer.probe, peer.is_streaming, peer.received = self._last_probe, True, have.received
    range_ = self._range
    begin = Begin(range_.number, range_.epoch, peer.probe, 0)
    self._send(peer, begin)
    peer.have = have.sequence
    self._count(peer)


def _without_lost_tiles(self: Fill, received: int) -> list[Message] | None:
    """A fill goes on after the tiles that were sent, not after those that have arrived."""
    return None if rest(self, received) is None else self._copy.tail.after(received, None)


def _take_from_all(self: Backup, source: Source, message: Message) -> None:
    """The entries of a deposed primary are taken too."""
    entry = message.head
    copy = None if self._filling is not None else self.copy
    is_next = (
        isinstance(entry, Entry)
        and copy is not None
        and entry.sequence == copy.replica.sequence + 1
    )
    if is_next and source != self._source and copy is not None:
        copy.advance(message)
        return
    take(self, source, message)


def _push_again(self: Replica, worker: str, push: Push, keys: Any, values: Any) -> Entry | None:
    """A push that is known already is applied once more."""
    with mock.patch.object(Replica, "_is_known", return_value=False):
        return prepare(self, worker, push, keys, values)


def _take_known(self: Replica, worker: str, push: Push) -> bool:
    """A push to several ranges that is known already is applied once more."""
    with mock.patch.object(Known, "has", return_value=False):
        return takes_at_once(self, worker, push)


def _open_unsorted(self: Replica, clock: int, ended: Any) -> None:
    """Held pushes are applied in the order of their arrival."""
    with mock.patch("xain_parameters.replica.sorted", lambda held, key: list(held), create=True):
        apply_open(self, clock, ended)


def _count_the_ended(view: View, since: int, opened: int) -> Iterator[tuple[int, dict[str, int]]]:
    """All pushes of a worker that ended count."""
    for clock, _ in openings(view, since, opened):
        yield clock, {}


def _open_late(view: View, since: int, opened: int) -> Iterator[tuple[int, dict[str, int]]]:
    """The last clock is left held."""
    yield from openings(view, since, opened - 1)


def _synced_at_once(self: Copy, message: Message) -> None:
    """A server acknowledges what is not on its disk yet."""
    advance(self, message)
    assert isinstance(message.head, Entry)
    self.synced = message.head.sequence


def _without_gaps(view: View, since: int, opened: int) -> Iterator[tuple[int, dict[str, int]]]:
    """All pushes of a worker that ended and came back count."""
    yield from openings(with_(view, gaps=()), since, opened)


def _pass_nothing(self: Replica, worker: str, cut: int) -> None:
    """Marks of a checkpoint are answered and forgotten."""


def _hold_nothing(self: Replica, entry: Entry, part: Any, keys: Any, values: Any) -> None:
    part.push(keys, entry.start, entry.stop, values)


def _always(self: Job, worker: str, num_workers: int = 1) -> bool:
    return self.gathered >= num_workers


def _lose_parts(self: Data, is_gone: Callable[[str], bool]) -> tuple[int, int] | None:
    """No other worker reads the rest of a part whose worker is gone."""
    return None


def _left_by_all(self: Job, worker: str, clock: int) -> bool:
    """The part of any worker is handed to another one."""
    return True


def _done_for_good(self: Data, epoch: int) -> Data:
    """A rollback takes rows back, and their parts stay read."""
    return self


def _drop_parked(self: ServerNode, number: int, view: View) -> None:
    """A server throws away what its range waits for."""
    leave(self, number, view)
    for key in [key for key in self._recovered if key[1] == number]:
        self._recovered.pop(key).end()


def _load_without_recorded(self: Replica, piece: Any) -> None:
    pass


def _tell_once(self: ServerNode, view: View) -> None:
    """A server tells of the ranges that it has from before when it starts only."""
    if not hasattr(self, "_has_told"):
        self._has_told = True
        report_returned(self, view)


@contextmanager
def _without_reprobe() -> Iterator[None]:
    """A server whose connection broke gets nothing any more."""
    lost = Primary.lost

    def lose(self: Primary, server: str) -> None:
        lost(self, server)
        for peer in self._peers.values():
            peer.probe = peer.probe or -1
            if peer.name == server:
                peer.probe = -1

    with mock.patch.object(Primary, "lost", lose):
        yield


def _patch(target: Any, name: str, value: Any) -> Mutation:
    return lambda: mock.patch.object(target, name, value)


MUTATIONS: dict[str, Mutation] = {
    "acknowledged before backups have it": _patch(Primary, "_durable", property(_count_only_here)),
    "whole learner is not waited for": _patch(Primary, "_count", _not_learners),
    "entries are told apart by number only": _patch(Tail, "after", _tail_by_number),
    "backup is never filled": _patch(Primary, "_begin", _never_fill),
    "lost tiles are not sent again": _patch(Fill, "rest", _without_lost_tiles),
    "deposed primary is heard": _patch(Backup, "take", _take_from_all),
    "broken connection is not probed": _without_reprobe,
    "known push is applied again": _patch(Replica, "prepare", _push_again),
    "known push to several ranges is applied again": _patch(Replica, "takes_at_once", _take_known),
    "ranges have moved since the last request": _patch(
        ServerNode, "_change_roles", lambda self: None
    ),
    "held pushes in the order of arrival": _patch(Replica, "_open", _open_unsorted),
    "pushes of ended workers count": _patch(protocol_module, "openings", _count_the_ended),
    "clock is opened late": _patch(protocol_module, "openings", _open_late),
    "pushes are not held": _patch(Replica, "_hold_or_apply", _hold_nothing),
    "any clock may begin": _patch(Job, "may_begin", _always),
    "lost range's log is dropped": _patch(ServerNode, "_leave", _drop_parked),
    "recorded pushes are not loaded": _patch(Replica, "_load_recorded", _load_without_recorded),
    "lost ranges are told once": _patch(ServerNode, "_report_returned", _tell_once),
    "acknowledged before it is on disk": _patch(Copy, "advance", _synced_at_once),
    "gaps are forgotten": _patch(protocol_module, "openings", _without_gaps),
    "part of a gone worker is lost": _patch(Data, "part_left", _lose_parts),
    "part is handed out twice": _patch(Job, "is_left", _left_by_all),
    "parts stay read after a rollback": _patch(Data, "reopened", _done_for_good),
    "marks are not taken": _patch(Replica, "_pass_mark", _pass_nothing),
}

# The only server, two workers and a given fault, which random scenarios hit once in thousands.
_SMALL = replace(
    from_seed(0),
    staleness=0,
    num_servers=1,
    num_workers=2,
    num_replicas=0,
    has_log=False,
    num_clocks=10,
    checkpoint_interval=0,
    num_ranges=1,
    compute_s=0.05,
    loss=0.0,
    events=(),
    quiet_at=8.0,
)
_SCHEDULER, _S0, _W0, _W1 = range(4)  # as Fault.PARTITION counts the processes

# The server dies twice while its slow disk is behind.
_SLOW_DISK = replace(
    _SMALL,
    has_log=True,
    sync_s=(0.3, 0.5),
    events=(Event(1.5, Fault.KILL_SERVER, 0, 0, 0.2), Event(3.5, Fault.KILL_SERVER, 0, 0, 0.2)),
)
# The scheduler does not hear w0, which has pushed. It lets w1 into the next clock, but w1 does not
# reach the server. So w0, when it is back, is the first to open that clock.
_AWAY_FOR_A_CLOCK = replace(
    _SMALL,
    events=(
        Event(0.4, Fault.PARTITION, _SCHEDULER, _W0, 1.8),
        Event(1.0, Fault.PARTITION, _S0, _W1, 3.0),
    ),
)
# A checkpoint in the middle, and later the death of the server.
_CHECKPOINT = replace(
    _SMALL,
    num_clocks=40,
    checkpoint_interval=4,
    least_cut=4,
    events=(Event(1.5, Fault.KILL_SERVER, 0, 0, 0.2),),
)

# A seed that finds each, or a scenario, which finds it with some seeds.
FOUND_BY: dict[str, int | Scenario] = {
    "acknowledged before it is on disk": _SLOW_DISK,
    "gaps are forgotten": _AWAY_FOR_A_CLOCK,
    "marks are not taken": _CHECKPOINT,
    "known push to several ranges is applied again": 43,
    "ranges have moved since the last request": 50,
    "acknowledged before backups have it": 22,
    "whole learner is not waited for": 22,
    "entries are told apart by number only": 22,
    "backup is never filled": 1,
    "lost tiles are not sent again": 22,
    "deposed primary is heard": 221,
    "broken connection is not probed": 8,
    "known push is applied again": 1,
    "held pushes in the order of arrival": 4,
    "pushes of ended workers count": 75,
    "clock is opened late": 4,
    "pushes are not held": 4,
    "any clock may begin": 4,
    "lost range's log is dropped": 1146,
    "recorded pushes are not loaded": 518,
    "lost ranges are told once": 1146,
    "part of a gone worker is lost": 114,
    "part is handed out twice": 16,
    "parts stay read after a rollback": 254,
}
