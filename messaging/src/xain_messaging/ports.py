"""Ports of a proxy: a driver that carries packets, and a discovery that knows the peers of a group.
Adapters are in drivers/ and discovery/; one suite of tests runs on all of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from xain_messaging.format.codec import Frames

# --- drivers --------------------------------------------------------------------------------------


class OnPacket(Protocol):
    """Takes the frames of a packet that a peer has sent. sender: the name that its certificate
    says; None without certificates. Raises NotTheSender for a packet in another name."""

    def __call__(self, frames: Frames, sender: str | None = None, /) -> None: ...


def ignore(frames: Frames, sender: str | None = None, /) -> None:
    """Drop a packet."""


class Driver(Protocol):
    """Carries packets of frames to named peers, in order for as long as a connection lives.

    A driver keeps every packet until it is sent or its connection is lost, and bounds nothing: its
    user does, see links.py. Its user calls one method at a time, except for run() and wake().
    """

    is_polled: bool  # packets come from run() only, whose caller may change from call to call

    @property
    def address(self) -> str:
        """Under which others connect to this driver. It listens from its construction on."""
        ...

    def serve(self, on_packet: OnPacket, on_lost: Callable[[str], None]) -> None:
        """Hand over what comes, from now on; from run(), or from threads of the driver's own.

        on_packet: called with each packet that a peer has sent. The frames are the
            receiver's own. All but the first can be written to: arrays lie in them.
        on_lost: called from run(), with the name of a peer whose connection has broken, where the
            driver hears of that: packets that were sent on it may not have arrived. Packets go over
            a new connection from then on, which the driver makes by itself, again and again, until
            disconnect().
        """
        ...

    def run(self, timeout_s: float) -> None:
        """Let packets come and go until something has come, or for timeout_s, or until woken. One
        thread at a time calls this, again and again."""
        ...

    def wake(self) -> None:
        """Let run() return now, or at its next call."""
        ...

    def connect(self, peer: str, address: str) -> None:
        """Reach `peer` at this address from now on; packets that wait for a former address are
        dropped. Returns at once, whether anybody is there or not."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and the packets that wait for it. An unknown peer is ignored."""
        ...

    def send(self, peer: str, frames: Frames) -> None:
        """Send a packet from the memory that it is in: no frame may change until it has arrived.
        Does not block. Raises UnknownPeer for a peer that is not connected."""
        ...

    def close(self, linger_s: float) -> None:
        """Send what waits, for as long as linger_s; then end everything. run() returns at once from
        then on. May be called again."""
        ...


# --- discovery ------------------------------------------------------------------------------------


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
        Raises NameTaken if the one who has the name is alive still when timeout_s is over, and
        DiscoveryUnavailable if nobody answers.
        """
        ...
