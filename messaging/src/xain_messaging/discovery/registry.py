"""Who is in which group: what a discovery has to decide, without the ways to ask it.

A member has a lease, which it renews; whose lease is over has gone, and its name is free for the
process that comes in its place. Where a line stands to a member, its end says sooner that the
process may have died: the lease is cut short then, but for what a living one takes to be back.

A rank is the lowest that is free in its role, or the one that the name had last.

Of two processes with one name the later one stays, which is the one of the higher incarnation. The
other has lost its membership, also where it comes back when the later one has left: peers that have
heard of that one do not listen to it any more.

A registry keeps nothing for the next process. Its members come back to that one with what they were
told here, and are who they were. So that nobody else has their names and ranks by then, newcomers
are let in a moment later. Until `settled_at`, when all have had the time for it, who has never
stood in its rosters has not gone therefore.

Pure: times are seconds on any clock that does not go back.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from xain_foundation.names import shortened, why_not
from xain_messaging.errors import DiscoveryUnavailable, MembershipLost, MessagingError, NameTaken
from xain_messaging.ports import Member, Roster

Key = TypeVar("Key")
Value = TypeVar("Value")

LEASE_S = 10.0

# How long a member may be without a line before it is taken for dead. One that has lost it for
# another reason is back by then.
GRACE_S = 2.0

# How long newcomers wait after the start of a service, for the members of the one before it. Those
# look for it all the time, and are back within half of that.
SETTLE_S = 2.0

# Those who have left that are remembered: their ranks, of a group, and their incarnations, of all.
MAX_FORMER = 4096

# Openings of barriers that are remembered, each for each who waited there, of all groups together.
MAX_OPENED = 16_384

# That a member waits at, at the same time. Each holds a call, and there is not room for any number.
MAX_BARRIERS = 4

# Over a network who waits at a barrier gives up so long before its time is over, a tenth of it at
# most: so it hears in time whether it was counted.
WORD_S = 0.25


@dataclass(slots=True, eq=False)
class Arrival:
    """A member at a barrier, until that is open or the member waits there no more.

    call: the number of the call, by which it is known if it comes again; 0: it has none.
    on_end: called then.
    """

    group: str
    barrier: str
    name: str
    call: int
    on_end: Callable[[], None]
    is_waiting: bool = True
    is_open: bool = False


@dataclass(slots=True)
class _Entry:
    member: Member
    expires_at: float
    line: object = None  # the newest
    arrivals: dict[str, Arrival] = field(default_factory=dict)  # by barrier


@dataclass(slots=True)
class _Group:
    entries: dict[str, _Entry] = field(default_factory=dict)
    ranks: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)  # of former ones
    barriers: dict[str, dict[str, Arrival]] = field(default_factory=dict)  # by name of who waits


class Registry:
    """Not for several threads.

    new_incarnation: gives higher numbers from call to call, and from process to process.
    on_change: called with the name of a group whose members are others or somewhere else by now.
    settle_s: for how long only members of before are let in.
    grace_s: for how long a member without a Watch stream is still taken for alive.
    """

    def __init__(
        self,
        now: float,
        new_incarnation: Callable[[], int],
        on_change: Callable[[str], None],
        lease_s: float = LEASE_S,
        settle_s: float = 0.0,
        grace_s: float = GRACE_S,
    ) -> None:
        self.lease_s = lease_s
        self._grace_s = grace_s
        self._open_at = now + settle_s
        self.settled_at = now + lease_s
        self._new_incarnation = new_incarnation
        self._on_change = on_change
        self._groups: dict[str, _Group] = {}
        # The last of each name, by group, of those who have left; it outlives the group.
        self._incarnations: OrderedDict[tuple[str, str], int] = OrderedDict()
        # By group, member and barrier: the incarnation and the number of the call for which it
        # opened last. It outlives the group, too: all lines may break while answers are on them.
        self._opened: OrderedDict[tuple[str, str, str], tuple[int, int]] = OrderedDict()

    def roster(self, group: str) -> Roster:
        """All members, by name."""
        entries = self._groups[group].entries if group in self._groups else {}
        return {name: entry.member for name, entry in entries.items()}

    @property
    def num_members(self) -> int:
        """Of all groups."""
        return sum(len(group.entries) for group in self._groups.values())

    def is_member(self, group: str, name: str, incarnation: int) -> bool:
        """Whether this process is."""
        return self._entry(group, name, incarnation) is not None

    # --- to come and to go ---

    def join(
        self, group: str, role: str, name: str, address: str, now: float, former: Member | None
    ) -> Member:
        """A new member, or one that comes back with what it was told here or by the registry
        before, as `former`.

        Raises NameTaken if another process has the name, MembershipLost if one has it, or has had
        it, instead of this one, and DiscoveryUnavailable if it is too early for a newcomer.
        """
        if former is None and now < self._open_at:
            raise DiscoveryUnavailable(
                f"members of before may be coming back; newcomers are let in in "
                f"{self._open_at - now:.1f} s"
            )
        if former is None:
            self.expire(now)  # who comes for a name may be faster than the timer
        self._make_way(group, name, now, former)
        found = self._groups.setdefault(group, _Group())
        entry = found.entries.get(name)
        if former is None:
            incarnation, wanted = self._new_incarnation(), found.ranks.get((role, name))
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
            entry.member, entry.expires_at = member, now + self.lease_s  # its lines stand
        found.ranks.pop((role, name), None)
        self._incarnations.pop((group, name), None)
        if is_new:
            self._on_change(group)
        return member

    def _make_way(self, group: str, name: str, now: float, former: Member | None) -> None:
        """Nobody else has the name afterwards; or raises why somebody has. See join()."""
        last = self._incarnations.get((group, name), 0)
        entry = self._groups[group].entries.get(name) if group in self._groups else None
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
        """A heartbeat. Whether this process is a member."""
        entry = self._entry(group, name, incarnation)
        if entry is None:
            return False
        entry.expires_at = max(entry.expires_at, now + self.lease_s)
        return True

    def leave(self, group: str, name: str, incarnation: int) -> None:
        """By itself. Of one that is no member: nothing."""
        if self._entry(group, name, incarnation) is not None:
            self._remove(group, name)

    def line_stands(
        self, group: str, name: str, incarnation: int, now: float, line: object
    ) -> bool:
        """To a member, in the place of the one before; a heartbeat too."""
        entry = self._entry(group, name, incarnation)
        if entry is None:
            return False
        entry.line = line
        return self.renew(group, name, incarnation, now)

    def line_has_ended(
        self, group: str, name: str, incarnation: int, now: float, line: object
    ) -> None:
        """If it is not the newest of a member: nothing."""
        entry = self._entry(group, name, incarnation)
        if entry is not None and entry.line is line:
            entry.line = None
            entry.expires_at = min(entry.expires_at, now + self._grace_s)

    def expire(self, now: float) -> float | None:
        """Remove those whose lease is over. Returns when the next one will be; None: there is
        none."""
        expirations = []
        for group, found in list(self._groups.items()):
            for name, entry in list(found.entries.items()):
                if entry.expires_at <= now:
                    self._remove(group, name)
                else:
                    expirations.append(entry.expires_at)
        return min(expirations, default=None)

    def _entry(self, group: str, name: str, incarnation: int) -> _Entry | None:
        entry = self._groups[group].entries.get(name) if group in self._groups else None
        if entry is None or entry.member.incarnation != incarnation:
            return None
        return entry

    def _remove(self, group: str, name: str) -> None:
        found = self._groups[group]
        for arrival in list(found.entries[name].arrivals.values()):
            self.give_up(arrival)
        member = found.entries.pop(name).member
        note_latest(found.ranks, (member.role, name), member.rank, MAX_FORMER)
        note_latest(self._incarnations, (group, name), member.incarnation, MAX_FORMER)
        if not found.entries:
            del self._groups[group]  # with its barriers and ranks: the next members begin anew
        self._on_change(group)

    # --- barriers ---

    def arrive(
        self,
        group: str,
        barrier: str,
        name: str,
        num_members: int,
        call: int,
        on_end: Callable[[], None],
    ) -> Arrival:
        """A member waits there from now on, until give_up(); one who does already waits anew, and
        what it did before has ended. If that call was here when the barrier opened, and comes again
        since it has not heard of it, it does not wait for the next.

        Raises DiscoveryUnavailable for one that waits at too many others.
        """
        found = self._groups[group]
        arrivals = found.entries[name].arrivals
        arrival = Arrival(group, barrier, name, call, on_end)
        this = (found.entries[name].member.incarnation, call)
        if call and self._opened.get((group, name, barrier)) == this:
            arrival.is_waiting, arrival.is_open = False, True
            on_end()
            return arrival
        if barrier in arrivals:
            self.give_up(arrivals[barrier])
        if len(arrivals) >= MAX_BARRIERS:
            raise DiscoveryUnavailable(f"{name!r} waits at {MAX_BARRIERS} barriers already")
        waiting = found.barriers.setdefault(barrier, {})
        waiting[name] = arrivals[barrier] = arrival
        if len(waiting) >= num_members:
            for one in list(waiting.values()):
                one.is_open = True
                incarnation = found.entries[one.name].member.incarnation
                where = (group, one.name, barrier)
                note_latest(self._opened, where, (incarnation, one.call), MAX_OPENED)
                self.give_up(one)  # the next barrier of this name is another
        return arrival

    def give_up(self, arrival: Arrival) -> None:
        """It is over. If it has been before: nothing."""
        if not arrival.is_waiting:
            return
        arrival.is_waiting = False
        found = self._groups[arrival.group]
        waiting = found.barriers[arrival.barrier]
        del waiting[arrival.name], found.entries[arrival.name].arrivals[arrival.barrier]
        if not waiting:
            del found.barriers[arrival.barrier]
        arrival.on_end()


def check_barrier(name: str, num_members: int) -> None:
    """Raises ValueError for what no discovery takes."""
    if reason := why_not(name):
        raise ValueError(f"{shortened(name)!r} cannot be a barrier: {reason}")
    if num_members < 1:
        raise ValueError(f"a barrier is for one member at least, not {num_members}")


def replaced(barrier: str) -> MessagingError:
    """For a call at a barrier."""
    return MessagingError(f"a newer call waits at the barrier {barrier!r} in the place of this one")


def note_latest(noted: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """As the latest; of more than so many the oldest goes."""
    noted[key] = value
    noted.move_to_end(key)
    if len(noted) > most:
        noted.popitem(last=False)


def _lowest(taken: set[int]) -> int:
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)
