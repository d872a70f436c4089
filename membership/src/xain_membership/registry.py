"""Members of groups: what a discovery has to decide, without the ways to ask it.

A member has a lease, which it renews. A member whose lease is over has gone, and its name is free
for another process. Where a Watch stream stands to a member, its end says sooner that the process
may have died: the lease is cut short then, but for what a living one takes to be back.

A rank is the lowest that is free in its role, or the one that the name had last.

Of two processes with one name the later one stays, which is the one of the higher incarnation. The
other has lost its membership, also where it comes back when the later one has left: peers that have
heard of that one do not listen to it any more.

The state is plain data. A service keeps it in memory, and nothing for the next process: the
members come back to that one with what they were told here, and are the same members again. So that
no other process has their names and ranks by then, newcomers are let in a moment later. Until
`settled_at`, when all have had the time for it, a member that has never stood in its rosters has
not gone therefore. A Redis keeps the state as JSON, and each member decides by a registry of its
own.

Pure: times are seconds on any clock that does not go back.
"""

from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from xain_foundation.names import shortened, why_not
from xain_foundation.net.errors import MessagingError
from xain_membership.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_membership.ports import Member, Roster

Key = TypeVar("Key")
Value = TypeVar("Value")

LEASE_S = 10.0

# How long a member may be without a stream before it is taken for dead. One that has lost it for
# another reason is back by then.
GRACE_S = 2.0

# How long newcomers wait after the start of a service, for the members of the one before it. Those
# look for it all the time, and are back within half of that.
SETTLE_S = 2.0

# Former members that are remembered: their ranks, in each group, and their incarnations, in all.
MAX_FORMER = 4096

# Openings of barriers that are remembered, each for each who waited there, of all groups together.
MAX_OPENED = 16_384

# Barriers that a member may wait at, at the same time. Each wait holds a call of the service.
MAX_BARRIERS = 4

MAX_ADDRESS_BYTES = 256

# Over a network a member at a barrier gives up so long before its time is over, a tenth of it at
# most: so it hears in time whether it was counted.
WORD_S = 0.25


class Waiting(NamedTuple):
    """A member that waits at a barrier.

    call: the number of its call; a newer call has a higher one.
    until: when it has given up, though no word of that came.
    """

    call: int
    until: float


@dataclass(slots=True)
class _Entry:
    member: Member
    expires_at: float


@dataclass(slots=True)
class _Group:
    """ranks: of former members, by "role/name". waiting: by barrier and name."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, dict[str, Waiting]] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """Members, former members and barriers of a registry.

    incarnations: the last one of each name that has left, by "group/name"; it outlives the group.
    opened: by "group/barrier/name" the incarnation and the number of the call for which the barrier
        opened last, until forget_opened(). It outlives the group, too: all connections may break
        while answers are on them.
    last_incarnation: the last that was given.
    """

    groups: dict[str, _Group] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    opened: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_incarnation: int = 0


class Registry:
    """Groups, their members, and the barriers that they wait at. Not for several threads.

    new_incarnation: gives higher numbers from call to call, and from process to process.
    on_change: called with the name of a group whose members are others or somewhere else by now.
    on_barrier: called with the name of a group whose members at barriers have changed.
    settle_s: for how long only members of before are let in.
    grace_s: for how long a member without a Watch stream is still taken for alive.
    max_barriers: at which a member may wait at the same time.
    """

    max_former = MAX_FORMER

    def __init__(
        self,
        now: float,
        new_incarnation: Callable[[], int],
        on_change: Callable[[str], None],
        lease_s: float = LEASE_S,
        settle_s: float = 0.0,
        grace_s: float = GRACE_S,
        *,
        on_barrier: Callable[[str], None] = lambda group: None,
        max_barriers: int = MAX_BARRIERS,
    ) -> None:
        self.state = State()
        self.lease_s = lease_s
        self._on_barrier = on_barrier
        self._max_barriers = max_barriers
        self._grace_s = grace_s
        self._open_at = now + settle_s
        self.settled_at = now + lease_s
        self._new_incarnation = new_incarnation
        self._on_change = on_change
        self._streams: dict[tuple[str, str], object] = {}  # the newest stream of each member

    def roster(self, group: str) -> Roster:
        """The members of a group, by name."""
        entries = self.state.groups[group].entries if group in self.state.groups else {}
        return {name: entry.member for name, entry in entries.items()}

    @property
    def num_members(self) -> int:
        """The number of members of all groups."""
        return sum(len(group.entries) for group in self.state.groups.values())

    def num_other_groups(self, name: str, group: str) -> int:
        """The number of groups that have a member of this name, beside the group that is given."""
        return sum(name in g.entries for other, g in self.state.groups.items() if other != group)

    def is_member(self, group: str, name: str, incarnation: int) -> bool:
        """Whether this process is a member."""
        return self._entry(group, name, incarnation) is not None

    # --- to come and to go ---

    def join(
        self, group: str, role: str, name: str, address: str, now: float, former: Member | None
    ) -> Member:
        """Add a member to a group, or let one come back as `former`, what it was told here or by
        the registry before. Returns the member. A newcomer may be faster than a timer: expire()
        first.

        Raises MessagingError for a name or address that no member has, NameTaken if another process
        has the name, MembershipLost if one has it, or has had it, instead of this one, and
        DiscoveryUnavailable if it is too early for a newcomer.
        """
        _check_member(group, role, name, address)
        if former is None and now < self._open_at:
            raise DiscoveryUnavailable(
                f"members of before may be coming back; newcomers are let in in "
                f"{self._open_at - now:.1f} s"
            )
        self._claim_name(group, name, now, former)
        found = self.state.groups.setdefault(group, _Group())
        entry = found.entries.get(name)
        if former is None:
            incarnation, wanted = self._new_incarnation(), found.ranks.get(f"{role}/{name}")
        else:
            incarnation, wanted = former.incarnation, former.rank
        taken = {
            other.member.rank
            for other in found.entries.values()
            if other.member.role == role and other.member.name != name
        }
        rank = wanted if wanted is not None and wanted not in taken else _lowest(taken)
        member = Member(name, role, rank, address, incarnation)
        is_new = entry is None or entry.member != member
        if entry is None:
            found.entries[name] = _Entry(member, now + self.lease_s)
        else:
            entry.member, entry.expires_at = member, now + self.lease_s  # its streams stand
        found.ranks.pop(f"{role}/{name}", None)
        self.state.incarnations.pop(f"{group}/{name}", None)
        if is_new:
            self._on_change(group)
        return member

    def _claim_name(self, group: str, name: str, now: float, former: Member | None) -> None:
        """Free a name of a process that `former` has replaced. Raises NameTaken, MembershipLost."""
        last = self.state.incarnations.get(f"{group}/{name}", 0)
        entry = self.state.groups[group].entries.get(name) if group in self.state.groups else None
        if entry is not None:
            last = entry.member.incarnation
            if former is None:
                left_s = max(0.0, entry.expires_at - now)
                raise NameTaken(
                    f"there is a {name!r} in the group {group!r} already, at "
                    f"{entry.member.address}; it is heard of within {left_s:.1f} s, or gone"
                )
        if former is not None and former.incarnation < last:
            raise MembershipLost(
                f"{name!r} was taken for dead, and another process has come for its name in "
                f"{group!r}"
            )
        if former is not None and entry is not None and former.incarnation > last:
            self._remove(group, name)  # it had been replaced, and was back before the other

    def renew(self, group: str, name: str, incarnation: int, now: float) -> bool:
        """Renew the lease of a member. Returns False if this process is no member."""
        entry = self._entry(group, name, incarnation)
        if entry is None:
            return False
        entry.expires_at = max(entry.expires_at, now + self.lease_s)
        return True

    def leave(self, group: str, name: str, incarnation: int) -> None:
        """Remove a member that says so. Another process is ignored."""
        if self._entry(group, name, incarnation) is not None:
            self._remove(group, name)

    def stream_begun(
        self, group: str, name: str, incarnation: int, now: float, stream: object
    ) -> bool:
        """Note a new stream to a member, and renew its lease. Returns whether it is a member."""
        entry = self._entry(group, name, incarnation)
        if entry is None:
            return False
        self._streams[group, name] = stream
        return self.renew(group, name, incarnation, now)

    def stream_ended(
        self, group: str, name: str, incarnation: int, now: float, stream: object
    ) -> None:
        """Note that the newest stream of a member has ended, and shorten its lease."""
        entry = self._entry(group, name, incarnation)
        if entry is not None and self._streams.get((group, name)) is stream:
            del self._streams[group, name]
            entry.expires_at = min(entry.expires_at, now + self._grace_s)

    def expire(self, now: float) -> float | None:
        """Remove members whose lease is over. Returns when the next one ends, or None."""
        expirations = []
        for group, found in list(self.state.groups.items()):
            for name, entry in list(found.entries.items()):
                if entry.expires_at <= now:
                    self._remove(group, name)
                else:
                    expirations.append(entry.expires_at)
        return min(expirations, default=None)

    def _entry(self, group: str, name: str, incarnation: int) -> _Entry | None:
        """Return the entry of a member; None if another process has the name, or none."""
        entry = self.state.groups[group].entries.get(name) if group in self.state.groups else None
        if entry is None or entry.member.incarnation != incarnation:
            return None
        return entry

    def _remove(self, group: str, name: str) -> None:
        """Remove a member from its group and its barriers, and report the change."""
        state, found = self.state, self.state.groups[group]
        member = found.entries.pop(name).member
        self._streams.pop((group, name), None)
        note_latest(found.ranks, f"{member.role}/{name}", member.rank, self.max_former)
        note_latest(state.incarnations, f"{group}/{name}", member.incarnation, self.max_former)
        for barrier in list(found.waiting):
            self._stop_waiting(found, barrier, name)
        if not found.entries:
            del state.groups[group]  # with its ranks: the next members begin anew
        self._on_barrier(group)
        self._on_change(group)

    # --- barriers ---

    def arrive(
        self,
        group: str,
        barrier: str,
        name: str,
        num_members: int,
        call: int,
        now: float,
        until: float,
    ) -> bool:
        """Let a member wait at a barrier. Returns whether the barrier has opened for this call; if
        not, the member waits until give_up(), and the call comes again after on_barrier().

        Raises ValueError as check_barrier() does, MessagingError if a newer call of the member
        waits there, and DiscoveryUnavailable for a member that waits at too many others.
        """
        check_barrier(barrier, num_members)
        found = self.state.groups[group]
        if self._has_opened(group, barrier, name, call):
            return True
        waiting = found.waiting.setdefault(barrier, {})
        before = waiting.get(name)
        if before is not None and before.call > call:
            raise replaced(barrier)
        if before is None and sum(name in names for names in found.waiting.values()) >= (
            self._max_barriers
        ):
            self._stop_waiting(found, barrier, name)
            raise DiscoveryUnavailable(f"{name!r} waits at {self._max_barriers} barriers already")
        for other in [other for other, one in waiting.items() if one.until < now]:
            del waiting[other]
        kept = waiting.get(name)
        if kept is None or kept.call != call:  # a call that comes again changes nothing
            waiting[name] = Waiting(call, until)
        if len(waiting) >= num_members:
            for other, one in waiting.items():
                incarnation = found.entries[other].member.incarnation
                where = f"{group}/{barrier}/{other}"
                note_latest(self.state.opened, where, (incarnation, one.call), MAX_OPENED)
            del found.waiting[barrier]
        elif before is None or before.call == call:
            return False
        self._on_barrier(group)  # it has opened, or the older call of the member ends
        return len(waiting) >= num_members

    def give_up(self, group: str, barrier: str, name: str, call: int) -> bool:
        """Remove a call from a barrier. Returns whether the barrier had opened for it."""
        found = self.state.groups.get(group)
        if found is not None:
            if self._has_opened(group, barrier, name, call):
                return True
            waits = found.waiting.get(barrier, {}).get(name)
            if waits is not None and waits.call == call:
                self._stop_waiting(found, barrier, name)
        return False

    def forget_opened(
        self, group: str, name: str, incarnation: int, waiting: Collection[int]
    ) -> None:
        """Forget that barriers have opened for a member, but for calls that still wait: the others
        have their answers. Another process is ignored."""
        if not self.is_member(group, name, incarnation):
            return
        opened = self.state.opened
        for where, (_, call) in list(opened.items()):
            is_its = where.startswith(f"{group}/") and where.endswith(f"/{name}")
            if is_its and call not in waiting:
                del opened[where]

    def _has_opened(self, group: str, barrier: str, name: str, call: int) -> bool:
        entry = self.state.groups[group].entries.get(name)
        opened = self.state.opened.get(f"{group}/{barrier}/{name}")
        return entry is not None and opened == (entry.member.incarnation, call)

    @staticmethod
    def _stop_waiting(found: _Group, barrier: str, name: str) -> None:
        waiting = found.waiting[barrier]
        waiting.pop(name, None)
        if not waiting:
            del found.waiting[barrier]


def _check_member(group: str, role: str, name: str, address: str) -> None:
    for what, text in (("group", group), ("role", role), ("name", name)):
        if reason := why_not(text):
            raise MessagingError(f"{what}: {reason}")
    if not 0 < len(address) <= MAX_ADDRESS_BYTES:
        raise MessagingError(f"an address has 1 to {MAX_ADDRESS_BYTES} bytes, not {len(address)}")


def check_barrier(name: str, num_members: int) -> None:
    """Raises ValueError for a name that no barrier may have, or for fewer than one member."""
    if reason := why_not(name):
        raise ValueError(f"{shortened(name)!r} cannot be a barrier: {reason}")
    if num_members < 1:
        raise ValueError(f"a barrier is for one member at least, not {num_members}")


def replaced(barrier: str) -> MessagingError:
    """Make the error of a call at a barrier."""
    return MessagingError(f"a newer call waits at the barrier {barrier!r} instead of this one")


def note_latest(noted: MutableMapping[Key, Value], key: Key, value: Value, most: int) -> None:
    """Store a value as the newest of a mapping; remove the oldest if there are more than `most`."""
    noted.pop(key, None)
    noted[key] = value
    if len(noted) > most:
        del noted[next(iter(noted))]


def _lowest(taken: set[int]) -> int:
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)
