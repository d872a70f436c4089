"""What a proxy needs of the world: a driver that carries frames, and a discovery that knows who is
there. Adapters are in drivers/ and discovery/; one suite of tests runs on all of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from xain_messaging.codec import Frames

# --- drivers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What one send() of a peer was. The frames are the receiver's own. All but the first can be
    written to: arrays lie in them."""

    frames: Frames


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to this peer has broken, or could not be made: of what was sent on it nobody
    knows what has come. What is sent from now on goes over a new one, which the driver makes by
    itself and tries again and again until disconnect()."""

    peer: str


DriverEvent: TypeAlias = Arrived | Lost


class Driver(Protocol):
    """Carries frames from here to named peers, in order for as long as a connection lives.

    It keeps everything that it was given until that is sent or the connection is lost, and bounds
    nothing: its user does, see links.py. Safe for several threads, but one receives at a time.
    """

    @property
    def address(self) -> str:
        """Under which others connect to this one. It serves from its construction on."""
        ...

    def connect(self, peer: str, address: str) -> None:
        """From now on `peer` is reached there; what waits for a former address is dropped. Returns
        at once, whether anybody is there or not."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and what waits for it. Of an unknown one: nothing."""
        ...

    def check(self, peer: str, frames: Frames) -> None:
        """Raises BodyError for a message that is larger than this driver carries, or than that of
        the peer takes, as far as its address has told. What links.py adds to a message is carried
        in any case."""
        ...

    def send(self, peer: str, frames: Frames) -> None:
        """On its way, from the memory that it is in: no frame may change until it has come. Does
        not block. Raises UnknownPeer for one that is not connected."""
        ...

    def receive(self, timeout_s: float | None) -> DriverEvent | None:
        """The next event; None after timeout_s, which may be 0, or when woken. None: no end."""
        ...

    def wake(self) -> None:
        """Let receive() return now, or at its next call if nobody is in it."""
        ...

    def close(self, linger_s: float) -> None:
        """Sends what waits, for as long as linger_s; then everything ends. receive() returns None
        from then on. May be called again."""
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

        Over a network that is settled up to a quarter of a second before the time is over, a tenth
        of it at most. Whom the answer does not reach by then may have been counted, and hears
        TimedOut all the same. If a line breaks while the answer is on it, the call is asked again
        and hears it then; only from a service that has lost all meanwhile it does not, and waits
        for the next opening. A name that is used once has no next one.

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
