"""Who is in which group: what a discovery has to decide, without the ways to ask it.

A member has a lease, which it renews; whose lease is over has gone, and its name is free for the
process that comes in its place. Where a line stands to a member, its end says sooner that the
process may have died: the lease is cut short then, but for what a living one takes to be back.

A rank is the lowest that is free in its role, or the one that the name had last.

A registry keeps nothing for the next process. Its members come back to that one with what they were
told here, and are who they were. So that nobody else has their names and ranks by then, newcomers
are let in a moment later. Until `settled_at`, when all have had the time for it, who has never
stood in its rosters has not gone therefore.

Pure: times are seconds on any clock that does not go back.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from xain_messaging.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_messaging.names import why_not
from xain_messaging.ports import Member, Roster

LEASE_S = 10.0

# How long a member may be without a line before it is taken for dead. One that has lost it for
# another reason is back by then.
GRACE_S = 2.0

# How long newcomers wait after the start of a service, for the members of the one before it. Those
# look for it all the time, and are back within half of that.
SETTLE_S = 2.0

# Ranks of those who have left that are remembered, of a group.
MAX_FORMER = 4096


@dataclass(slots=True)
class _Entry:
    member: Member
    expires_at: float
    num_lines: int = 0


@dataclass(slots=True)
class _Group:
    entries: dict[str, _Entry] = field(default_factory=dict)
    former: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)  # ranks
    barriers: "dict[str, Barrier]" = field(default_factory=dict)  # that wait to be opened


@dataclass(slots=True, eq=False)
class Barrier:
    """One opening. waiting: names."""

    is_open: bool = False
    waiting: set[str] = field(default_factory=set)


class Registry:
    """Not for several threads.

    new_incarnation: gives higher numbers from call to call, and from process to process.
    on_change: called with the name of a group whose members are others or somewhere else by now.
    settle_s: for how long only members of before are let in.
    """

    def __init__(
        self,
        now: float,
        new_incarnation: Callable[[], int],
        on_change: Callable[[str], None],
        lease_s: float = LEASE_S,
        settle_s: float = 0.0,
    ) -> None:
        self.lease_s = lease_s
        self._open_at = now + settle_s
        self.settled_at = now + lease_s
        self._new_incarnation = new_incarnation
        self._on_change = on_change
        self._groups: dict[str, _Group] = {}

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

        Raises NameTaken if another process has the name, MembershipLost if it has it instead of
        this one, and DiscoveryUnavailable if it is too early for a newcomer.
        """
        if former is None and now < self._open_at:
            raise DiscoveryUnavailable(
                f"members of before may be coming back; newcomers are let in in "
                f"{self._open_at - now:.1f} s"
            )
        if former is None:
            self.expire(now)  # who comes for a name may be faster than the timer
        found = self._groups.setdefault(group, _Group())
        entry = found.entries.get(name)
        if entry is not None and (former is None or entry.member.incarnation != former.incarnation):
            _refuse(group, entry, former, now)
        if former is None:
            incarnation, wanted = self._new_incarnation(), found.former.get((role, name))
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
        found.former.pop((role, name), None)
        if is_new:
            self._on_change(group)
        return member

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

    def num_lines(self, group: str, name: str, incarnation: int) -> int:
        """That stand to this process."""
        entry = self._entry(group, name, incarnation)
        return 0 if entry is None else entry.num_lines

    def line_stands(self, group: str, name: str, incarnation: int, now: float) -> bool:
        """One more line to a member; a heartbeat too."""
        entry = self._entry(group, name, incarnation)
        if entry is None:
            return False
        entry.num_lines += 1
        return self.renew(group, name, incarnation, now)

    def line_has_ended(self, group: str, name: str, incarnation: int, now: float) -> None:
        """One of them."""
        entry = self._entry(group, name, incarnation)
        if entry is not None:
            entry.num_lines -= 1
            if not entry.num_lines:
                entry.expires_at = min(entry.expires_at, now + GRACE_S)

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
        member = found.entries.pop(name).member
        found.former[member.role, name] = member.rank
        if len(found.former) > MAX_FORMER:
            found.former.popitem(last=False)
        for barrier in list(found.barriers):
            self.give_up(group, barrier, name)
        if not found.entries:
            del self._groups[group]  # with its barriers and ranks: the next members begin anew
        self._on_change(group)

    # --- barriers ---

    def arrive(self, group: str, barrier: str, name: str, num_members: int) -> Barrier:
        """A member waits until the barrier that this returns is open."""
        found = self._groups[group].barriers
        waiting = found.setdefault(barrier, Barrier())
        waiting.waiting.add(name)
        if len(waiting.waiting) >= num_members:
            waiting.is_open = True
            del found[barrier]  # the next one of this name is another
            self._on_change(group)
        return waiting

    def give_up(self, group: str, barrier: str, name: str) -> None:
        """It waits no more."""
        found = self._groups[group].barriers if group in self._groups else {}
        if barrier in found:
            found[barrier].waiting.discard(name)
            if not found[barrier].waiting:
                del found[barrier]


def check_barrier(name: str, num_members: int) -> None:
    """Raises ValueError for what no discovery takes."""
    if reason := why_not(name):
        raise ValueError(f"{name!r} cannot be a barrier: {reason}")
    if num_members < 1:
        raise ValueError(f"a barrier is for one member at least, not {num_members}")


def _refuse(group: str, entry: _Entry, former: Member | None, now: float) -> NoReturn:
    name = entry.member.name
    if former is not None:
        raise MembershipLost(
            f"{name!r} was taken for dead, and another process has its name in {group!r}"
        )
    left_s = max(0.0, entry.expires_at - now)
    raise NameTaken(
        f"there is a {name!r} in the group {group!r} already, at {entry.member.address}; it is "
        f"heard of within {left_s:.1f} s, or gone"
    )


def _lowest(taken: set[int]) -> int:
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)
