"""Members in one process, for tests and simulations."""

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from xain_foundation.waits import left_s
from xain_membership.errors import Closed, MembershipLost, NameTaken, TimedOut
from xain_membership.ports import Member, Roster
from xain_membership.registry import Registry


@dataclass(slots=True)
class _Told:
    """A member of this process, and what it is told with."""

    group: str
    member: Member
    on_change: Callable[[Roster], None]
    on_lost: Callable[[Exception], None]


class InProcessDiscovery:
    """See ports.Discovery. Nobody expires by himself: expire() does it."""

    def __init__(self) -> None:
        incarnations = itertools.count(1)
        self._num_calls = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())
        self._registry = Registry(
            0.0,
            lambda: next(incarnations),
            self._tell,
            lease_s=1.0,
            on_barrier=lambda group: self._changed.notify_all(),
        )
        self._told: dict[tuple[str, str], _Told] = {}

    def join(
        self,
        group: str,
        role: str,
        name: str,
        address: str,
        *,
        timeout_s: float,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> "InProcessMembership":
        """Join a group, once the name is free. Raises NameTaken if it is not in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                try:
                    member = self._registry.join(group, role, name, address, 0.0, None)
                except NameTaken:
                    if time.monotonic() >= deadline:
                        raise
                    self._changed.wait(left_s(deadline))
                else:
                    break
            # The change went to those before it; the newcomer hears of all.
            self._told[group, name] = _Told(group, member, on_change, on_lost)
            on_change(self._registry.roster(group))
            return InProcessMembership(self, group, member)

    def _tell(self, group: str) -> None:
        """Tell all members of a group who is in it, and wake waiting calls."""
        roster = self._registry.roster(group)
        for told in list(self._told.values()):
            if told.group == group and told.member.name in roster:
                told.on_change(roster)
        self._changed.notify_all()

    def expire(self, group: str, name: str) -> None:
        """Remove a member as if its process had died: the others hear that it has gone, and it that
        it has lost its membership."""
        with self._changed:
            told = self._told[group, name]
            self.leave(group, told.member)
            told.on_lost(MembershipLost(f"{name!r} has expired"))

    def leave(self, group: str, member: Member) -> None:
        """Remove a member, unless it has gone or another one has its name."""
        with self._changed:
            told = self._told.get((group, member.name))
            if told is not None and told.member == member:
                del self._told[group, member.name]
                self._registry.leave(group, member.name, member.incarnation)

    def barrier(
        self, group: str, member: Member, barrier: str, num_members: int, timeout_s: float
    ) -> None:
        """Wait until `num_members` members wait at the barrier. Raises TimedOut."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._check_member(group, member)
            call = next(self._num_calls)
            where = (group, barrier, member.name)
            try:
                while not self._registry.arrive(*where, num_members, call, 0.0, math.inf):
                    if time.monotonic() >= deadline:
                        raise TimedOut(f"waited {timeout_s:g} s at the barrier {barrier!r}")
                    self._changed.wait(left_s(deadline))
                    self._check_member(group, member)
            finally:
                self._registry.give_up(*where, call)

    def _check_member(self, group: str, member: Member) -> None:
        if not self._registry.is_member(group, member.name, member.incarnation):
            raise Closed(f"{member.name!r} is no member of {group!r} any more")


class InProcessMembership:
    """See ports.Membership."""

    def __init__(self, discovery: InProcessDiscovery, group: str, member: Member) -> None:
        self._discovery = discovery
        self._group = group
        self.member = member

    def barrier(self, name: str, num_members: int, timeout_s: float) -> None:
        self._discovery.barrier(self._group, self.member, name, num_members, timeout_s)

    def leave(self) -> None:
        self._discovery.leave(self._group, self.member)
