"""Every message comes once and in order, for as long as both ends live.

A driver's connection may break, and what was on it may have come or not. So what is sent to a peer
is numbered and kept until the peer has taken it; when its connection has broken, or when it comes
back, all that it has not taken is sent again, in order. What has come twice is dropped.

A message is taken when the application gets it, not when it arrives: one that a peer had in its
queue when it died goes to the process that comes back under its name. What an application was
working on when it died is gone with it; that is for the application, which can reply when its work
is done.

That also bounds what is on its way: so many messages and bytes for each peer, and no more is sent
before it has taken some. The same holds for a peer that is away.

A packet is a list of frames: a head, and the frames of a message, see codec.py; of an ack the head
is all. The head is msgpack:

    [kind, name, incarnation, number, base, to_incarnation, taken]

kind: "m" a message, "c" one of a collective operation, "a" nothing but the ack.
name, incarnation: of the sender. Of two processes with one name the later has the higher one.
number: the message's, from 1 on, counted for each peer; 0 in an ack.
base: the lowest number that the sender still keeps: who has not heard of it before begins there.
to_incarnation, taken: all messages up to this number of the receiver's incarnation are taken.

Pure: no I/O, no clock, no threads. What is to be sent is returned.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import msgpack

from xain_messaging.codec import Frame, Frames, num_bytes
from xain_messaging.errors import MalformedMessage
from xain_messaging.names import why_not

# Acks travel with messages that go the other way. When none goes: after so many messages or bytes,
# or when the receiver has nothing else to do.
ACK_EVERY = 64
ACK_EVERY_BYTES = 8 << 20

Kind: TypeAlias = Literal["m", "c"]
MESSAGE: Final = "m"
COLLECTIVE: Final = "c"
_ACK: Final = "a"
_KINDS: Final = frozenset({MESSAGE, COLLECTIVE, _ACK})

Packet: TypeAlias = list[Frame]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is sent to one peer and not taken yet. A single message may be larger."""

    max_messages: int = 1024
    max_bytes: int = 256 << 20


class Head(NamedTuple):
    """See above."""

    kind: str
    name: str
    incarnation: int
    number: int
    base: int
    to_incarnation: int
    taken: int


class Delivery(NamedTuple):
    """A message that has come: to be handed to the application, and then take()."""

    peer: str
    incarnation: int
    number: int
    kind: str
    frames: Frames
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Kept:
    """A message on its way."""

    number: int
    kind: str
    frames: Frames
    num_bytes: int


@dataclass(slots=True, eq=False)
class Link:
    """The way to one peer and from it.

    is_here: it has a connection, as far as we know. Messages for one that is away are kept.
    """

    own_name: str
    own_incarnation: int
    name: str  # of the peer
    is_here: bool = False
    kept_bytes: int = 0
    _kept: deque[_Kept] = field(default_factory=deque)
    _next: int = 1
    # Of the peer: which process it is, the number awaited next, and how much that is taken it has
    # not been told of.
    _peer_incarnation: int = 0
    _awaited: int = 1
    _told: int = 0
    _untold_bytes: int = 0
    # What is delivered, in its order, and which of that is taken: the application takes a reply
    # before what came earlier.
    _delivered: deque[int] = field(default_factory=deque)
    _taken_out: set[int] = field(default_factory=set)

    @property
    def num_kept(self) -> int:
        """Messages that the peer has not taken."""
        return len(self._kept)

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way, in either direction."""
        return not self._kept and not self._delivered and self._told == self._taken

    def has_room(self, size_bytes: int, bounds: Bounds) -> bool:
        """For one more message. There always is for the first, however large."""
        if not self._kept:
            return True
        fits = self.kept_bytes + size_bytes <= bounds.max_bytes
        return fits and len(self._kept) < bounds.max_messages

    # --- out ---

    def send(self, kind: Kind, frames: Frames) -> Packet | None:
        """Keep a message. Returns what goes out now; None if the peer is away."""
        kept = _Kept(self._next, kind, frames, num_bytes(frames))
        self._next += 1
        self._kept.append(kept)
        self.kept_bytes += kept.num_bytes
        return self._packet(kept) if self.is_here else None

    def connected(self) -> Iterator[Packet]:
        """There is a connection, which nothing has gone over yet. All that is kept goes out."""
        self.is_here = True
        yield from [self._packet(kept) for kept in self._kept]

    def gone(self) -> None:
        """There is none any more."""
        self.is_here = False

    # --- in ---

    def received(self, head: Head, frames: Frames) -> Delivery | None:
        """What a packet of this peer brings, if it is new."""
        if head.incarnation < self._peer_incarnation:
            return None  # of a process whose place another has taken
        if head.to_incarnation == self.own_incarnation:
            self._drop_taken(head.taken)
        if head.kind not in (MESSAGE, COLLECTIVE):
            return None
        if head.incarnation > self._peer_incarnation:
            # Another process than before; or the first that we hear of.
            self._peer_incarnation = head.incarnation
            self._awaited = head.base
            self._told = head.base - 1
            self._untold_bytes = 0
            self._delivered.clear()
            self._taken_out.clear()
        if head.number != self._awaited:
            return None  # again, or after a gap: what is missing comes first, over a new connection
        self._awaited += 1
        self._delivered.append(head.number)
        size = num_bytes(frames)
        return Delivery(self.name, head.incarnation, head.number, head.kind, frames, size)

    def take(self, delivery: Delivery) -> Packet | None:
        """The application has it. Returns an ack if it is time for one."""
        if delivery.incarnation != self._peer_incarnation:
            return None  # nobody waits for it any more
        self._taken_out.add(delivery.number)
        while self._delivered and self._delivered[0] in self._taken_out:
            self._taken_out.remove(self._delivered.popleft())
        self._untold_bytes += delivery.num_bytes
        is_due = self._taken - self._told >= ACK_EVERY or self._untold_bytes >= ACK_EVERY_BYTES
        return self.ack() if is_due else None

    def ack(self) -> Packet | None:
        """What the peer has not been told of what is taken; None if there is nothing."""
        if self._taken == self._told or not self.is_here:
            return None
        return self._head(_ACK, 0)

    @property
    def _taken(self) -> int:
        """All up to this number are taken."""
        return (self._delivered[0] if self._delivered else self._awaited) - 1

    def _drop_taken(self, number: int) -> None:
        while self._kept and self._kept[0].number <= number:
            self.kept_bytes -= self._kept.popleft().num_bytes

    def _packet(self, kept: _Kept) -> Packet:
        return [*self._head(kept.kind, kept.number), *kept.frames]

    def _head(self, kind: str, number: int) -> Packet:
        self._told, self._untold_bytes = self._taken, 0  # an ack goes with all that goes
        base = self._kept[0].number if self._kept else self._next
        return [
            msgpack.packb(
                [
                    *(kind, self.own_name, self.own_incarnation, number, base),
                    *(self._peer_incarnation, self._taken),
                ]
            )
        ]


def read_head(frame: Frame) -> Head:
    """The head of a packet. Raises MalformedMessage, whatever the bytes are."""
    try:
        head = Head(*msgpack.unpackb(frame))
    except Exception as error:  # whatever bytes lead msgpack to
        raise MalformedMessage(f"not the head of a packet: {error!r:.200}") from error
    numbers = (head.incarnation, head.number, head.base, head.to_incarnation, head.taken)
    is_known = isinstance(head.kind, str) and head.kind in _KINDS
    if not is_known or any(type(number) is not int for number in numbers):
        raise MalformedMessage(f"not the head of a packet: {head!r:.200}")
    if not isinstance(head.name, str) or why_not(head.name):
        raise MalformedMessage(f"a packet without the name of its sender: {head.name!r:.80}")
    if not head.number and head.kind in (MESSAGE, COLLECTIVE):
        raise MalformedMessage("a message without a number")
    return head
