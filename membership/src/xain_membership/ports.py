"""Ports of a group: its members, the membership of one, and the discovery where members find each
other. One suite of tests runs on all adapters of a discovery."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that is in the group.

    rank: among those of its role, from 0 on; its own for as long as it is there, and again when it
        comes back before somebody else has taken it.
    incarnation: of two processes with this name, the one that joined later has the higher number.
        Peers hear no process whose number is higher than the one that they have been told.
    """

    name: str
    role: str
    rank: int
    address: str
    incarnation: int


Roster: TypeAlias = Mapping[str, Member]  # by name


class Membership(Protocol):
    """Being in a group. Heartbeats go on in a thread of its own until leave()."""

    @property
    def member(self) -> Member:
        """We ourselves, with our rank."""
        ...

    def barrier(self, name: str, num_members: int, timeout_s: float) -> None:
        """Wait until so many members of the group, this one among them, wait at the barrier of this
        name. It can be used again. Who has given up is not counted.

        Over a network a call gives up a quarter of a second before its time is over, a tenth of it
        at most. A call that the answer does not reach by then may have been counted, and raises
        TimedOut all the same. If a connection breaks while the answer is on it, the call is asked
        again and hears it then; only from a service that has lost all meanwhile it does not, and
        waits for the next opening. A name that is used once has no next one.

        Raises TimedOut, ValueError for a name or number that no barrier has, Closed if this is no
        member any more, MessagingError when a newer call of this member waits at the same barrier,
        and DiscoveryUnavailable if it waits at too many: four at a time, where a service holds the
        calls.
        """
        ...

    def leave(self) -> None:
        """Tell the others at once, and end the thread. Takes a second at most: a service that does
        not answer lets the entry expire. May be called again."""
        ...


class Discovery(Protocol):
    """Where members of groups find each other."""

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
    ) -> Membership:
        """Become a member. A name whose process has died is free when its entry has expired, which
        this waits for.

        on_change: called with all members, ourselves among them, once before this returns, and
            whenever they are others or somewhere else; from a thread, one call at a time. The
            incarnation of a name is never lower than before.
        on_lost: called once if we are no member any more against our will, with MembershipLost.
        Raises NameTaken if the one who has the name is alive still when timeout_s is over,
        DiscoveryUnavailable if nobody answers, and MessagingError for a name or an address that no
        member has.
        """
        ...
