"""Links deliver every message once and in order, for as long as both ends live.

A connection may break, and the sender cannot know which of its last messages have arrived. So every
message is numbered and kept until its receiver has taken it. Over a new connection, to the same
process or to the one that follows it, all kept messages go out again, in order; the receiver drops
those that it has had.

A message is taken when the program gets it, not when it arrives. A message that waited in the
queue of a process that died goes to the process that comes back under its name. Acks travel with
messages, or alone a moment later; if the process dies before its ack is out, the next process gets
the message again.

**Credit.** A peer may have so many messages and bytes on their way to another peer that are not
taken yet (see Bounds), whether that peer is here or away; an ack gives the credit back. What all
peers together may have waiting at a receiver has the same bound. A message beyond it is dropped,
and asked for when half of what waits is taken.

The roster decides which process has a name. A packet of a later process than the roster's is
dropped, and asked for when the roster lists that process.

A packet is a list of frames: a head, which holds the messages, and the arrays of these messages in
their order. The head is msgpack:

    [kind, name, to, incarnation, follows, to_incarnation, heard, taken, untaken, messages]

kind: "m" messages, "a" nothing but the ack, "g" an ack of a peer that has not heard the messages
    after `heard`: they have to go out again; "w" an ack of a peer that may have lost something, and
    wants an ack; "l" the last ack of a process that leaves.
name, incarnation: of the sender. Of two processes with one name the later has the higher one.
to: the name of the receiver; a peer with another name drops the packet.
follows: the number of the message before the first one on this connection, 0 if there is none.
    Numbers between belong to messages that are taken, or that went to other peers; a receiver that
    has not heard `follows` asks for what was lost.
to_incarnation, heard, taken, untaken: the receiver's messages up to the number `heard` have come;
    those up to `taken` are taken, except for `untaken`. An incarnation of 0 tells nothing.
messages: of each its number, its kind ("m" a message, "c" one of a collective operation), how many
    of the packet's frames belong to it, and its envelope, as a list or as bytes, see codec.py.
    Numbers count from 1 on, by the sender for all peers together, so that they go on for a peer
    that was forgotten.

Pure: no I/O, no clock, no threads. Methods return what is to be sent.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from xain_foundation.names import shortened
from xain_foundation.security.identity import NoIdentity
from xain_messaging.errors import MalformedMessage
from xain_messaging.format.codec import Frame, Frames, Parts, Plain, num_bytes
from xain_messaging.format.messages import Message

# Acks travel with messages that go the other way. When none goes: after so many messages or bytes,
# or a moment later, see endpoint.py.
ACK_EVERY = 256
ACK_EVERY_BYTES = 8 << 20

Kind: TypeAlias = Literal["m", "c"]
MESSAGE: Final = "m"
COLLECTIVE: Final = "c"
_ACK: Final = "a"
_AGAIN: Final = "g"
_WHERE: Final = "w"
_LEAVING: Final = "l"

Packet: TypeAlias = list[Any]  # frames
_Entry: TypeAlias = tuple[int, Kind, int, Frame | Plain]  # of a head

# A packet takes further messages as long as their bytes are fewer than that.
BATCH_BYTES = 64 << 10
BATCH_MESSAGES = 60
# A message of that size waits for no others.
LARGE_BYTES = 8 << 10

# Untaken messages that one ack names.
MAX_UNTAKEN = 128

# Bytes that a head may add to the largest message: names, numbers, and a batch.
MAX_HEAD_BYTES = 4096 + 9 * MAX_UNTAKEN + 2 * BATCH_BYTES


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of messages that are sent and not taken yet: to one peer, and to all together. A
    single message may be larger. The peers of a group should have the same."""

    max_messages: int = 1024
    max_bytes: int = 256 << 20
    max_messages_in_all: int = 65_536
    max_bytes_in_all: int = 1 << 30


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(slots=True)
class Totals:
    """Sums over all links of one peer.

    num_kept, kept_bytes: messages that no receiver has taken yet.
    num_waiting, waiting_bytes: messages that have come and that the program has not taken.
    behind: the links that have dropped messages since too much waited, by name.
    left: the peers that have said that they leave the group, so they answer nothing more.
    """

    bounds: Bounds = DEFAULT_BOUNDS
    last_number: int = 0
    num_kept: int = 0
    kept_bytes: int = 0
    num_waiting: int = 0
    waiting_bytes: int = 0
    behind: "dict[str, Link]" = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def fills(self, part: float) -> bool:
        """Whether at least this part of what may wait is waiting."""
        return (
            self.num_waiting >= part * self.bounds.max_messages_in_all
            or self.waiting_bytes >= part * self.bounds.max_bytes_in_all
        )


_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first frame of a packet; see above."""

    kind: Literal["m", "a", "g", "w", "l"]
    name: str
    to: str
    incarnation: _Number
    follows: _Number
    to_incarnation: _Number
    heard: _Number
    taken: _Number
    untaken: list[_Number]
    messages: list[tuple[_Number, Kind, _Number, bytes | list[Any]]]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Head)
_NUM_ARRAYS: Final = itemgetter(2)


NO_MESSAGE: Final = Message("none", "none", "none")


class Delivery(msgspec.Struct, eq=False, gc=False):
    """A message that has come: to be handed to the program, and then to Link.take().

    message: once it is decoded.
    position: in the inbox, once the message is to be put there.
    """

    peer: str
    incarnation: int
    number: int
    kind: str
    frames: Parts
    num_bytes: int
    message: Message = NO_MESSAGE
    position: int = 0
    is_taken: bool = False


class _Kept(msgspec.Struct, eq=False, frozen=True, gc=False):
    """A message on its way. entry: in the head of its packet; arrays: frames after the head."""

    entry: _Entry
    arrays: Parts
    num_bytes: int


@dataclass(slots=True, eq=False)
class Link:
    """The way to one peer and from it.

    is_here: the peer has a connection, as far as we know. Messages for one that is away are kept.
    unsent: kept messages that have not gone out over this connection.
    """

    own_name: str
    own_incarnation: int
    name: str  # of the peer
    totals: Totals = field(default_factory=Totals)
    is_here: bool = False
    kept_bytes: int = 0
    _kept: dict[int, _Kept] = field(default_factory=dict)  # by number
    unsent: deque[_Kept] = field(default_factory=deque)
    _last_sent: int = 0  # over this connection
    _told_heard: int = 0  # the highest number that the peer has told of over this connection
    _incarnation: int = 0  # of the peer's process, as the roster lists it
    _has_dropped_later: bool = False  # packets of a process that the roster had not listed
    _heard: int = 0  # the last number that has come of that process
    _untaken: dict[int, Delivery] = field(default_factory=dict)  # by number
    _num_untold: int = 0  # messages that were taken, and whose sender has not been told
    _untold_bytes: int = 0
    _is_behind: bool = False  # messages after _heard were dropped
    _has_asked: bool = False  # for them

    @property
    def num_kept(self) -> int:
        """Messages that the peer has not taken."""
        return len(self._kept)

    @property
    def has_untaken(self) -> bool:
        """Messages of the peer's process wait for the program."""
        return bool(self._untaken)

    @property
    def has_unheard(self) -> bool:
        """The peer has not said, over this connection, that all kept messages have come."""
        return bool(self._kept) and next(reversed(self._kept)) > self._told_heard

    @property
    def so_far(self) -> tuple[int, int]:
        """The last numbers that have been sent, and that the peer has told of."""
        return self._last_sent, self._told_heard

    def why_no_room(self, size_bytes: int) -> str | None:
        """Say why one more message has to wait; None if it has not.

        The first message to a peer that is here always has room, however large it is: peers that
        are away must not keep it from all the others.
        """
        totals, bounds = self.totals, self.totals.bounds
        if not self._kept and (self.is_here or not totals.num_kept):
            return None
        fits = self.kept_bytes + size_bytes <= bounds.max_bytes
        if self._kept and not (fits and len(self._kept) < bounds.max_messages):
            why_not = f"{self.name!r} has not taken {len(self._kept)} messages of {self.kept_bytes}"
        elif (
            totals.num_kept >= bounds.max_messages_in_all
            or totals.kept_bytes + size_bytes > bounds.max_bytes_in_all
        ):
            why_not = (
                f"all peers together have not taken {totals.num_kept} messages of "
                f"{totals.kept_bytes}"
            )
        else:
            return None
        presence = "here" if self.is_here else "away"
        return f"{why_not} bytes, and no more is kept for {self.name!r}, which is {presence}"

    # --- out ---

    def keep(self, kind: Kind, frames: Parts, size_bytes: int) -> bool:
        """Keep a message until it is taken; next_packet() sends it. Returns whether to do that now:
        the message is alone or large, or a packet is full."""
        totals = self.totals
        number = totals.last_number = totals.last_number + 1
        entry = (number, kind, len(frames) - 1, frames[0])
        kept = self._kept[number] = _Kept(entry, frames[1:], size_bytes)
        self.kept_bytes += size_bytes
        totals.num_kept += 1
        totals.kept_bytes += size_bytes
        if self.is_here:
            self.unsent.append(kept)
        is_full = len(self.unsent) >= BATCH_MESSAGES
        return is_full or size_bytes >= LARGE_BYTES or len(self._kept) == 1

    def next_packet(self) -> Packet | None:
        """Return the next messages that have not gone out over this connection; None if there are
        none, or the peer is away."""
        unsent = self.unsent
        if not unsent:
            return None
        follows = self._last_sent
        if len(unsent) == 1:
            kept = unsent[0]
            self._last_sent = kept.entry[0]
            unsent.clear()
            return [self._head(MESSAGE, follows, (kept.entry,)), *kept.arrays]
        messages: list[_Entry] = []
        packet: Packet = [b""]
        size_bytes = 0
        for kept in islice(unsent, BATCH_MESSAGES):
            size_bytes += kept.num_bytes
            if size_bytes > BATCH_BYTES and messages:
                break
            messages.append(kept.entry)
            if kept.arrays:
                packet += kept.arrays
        self._last_sent = messages[-1][0]
        if len(messages) == len(unsent):
            unsent.clear()
        else:
            for _ in messages:
                unsent.popleft()
        packet[0] = self._head(MESSAGE, follows, messages)
        return packet

    def connected(self) -> list[Packet]:
        """Note a new connection. Returns the packets for it: kept messages, or an ack."""
        self.is_here = True
        self._has_asked = False
        self._num_untold = max(self._num_untold, 1 if self._heard else 0)
        packets = self._resend_after(0)
        if not packets and (ack := self.ack()) is not None:
            packets.append(ack)
        return packets

    def answer_to(self, head: Head) -> list[Packet]:
        """Return the packets that one of the peer asks for: lost messages again, or an ack."""
        if not self.is_here or head.to_incarnation != self.own_incarnation:
            return []
        if head.incarnation != self._incarnation:
            return []
        if head.kind == _AGAIN:
            return self._resend_after(head.heard)
        if head.kind == _WHERE and (ack := self.ack(is_asked=True)) is not None:
            return [ack]
        return []

    def _resend_after(self, after: int) -> list[Packet]:
        """Return packets with the kept messages after this number; those before have come."""
        self.unsent = deque(kept for number, kept in self._kept.items() if number > after)
        self._last_sent = self._told_heard = after
        return list(iter(self.next_packet, None))

    def gone(self) -> None:
        """Note that the peer is away. What is kept for it waits until it is back."""
        self.is_here = False
        self.unsent.clear()
        self._last_sent = self._told_heard = 0

    def forget(self) -> None:
        """Drop what is kept for the peer."""
        self._forget_kept(list(self._kept))

    def where(self) -> Packet | None:
        """Ask the peer what has come; None if it is away."""
        return [self._head(_WHERE, self._last_sent)] if self.is_here else None

    def leaving(self) -> Packet | None:
        """Return the last packet of this process; None if the peer is away."""
        return [self._head(_LEAVING, self._last_sent)] if self.is_here else None

    def ack(self, *, is_asked: bool = False) -> Packet | None:
        """Return what the peer has not been told of what is taken, and ask it for what was dropped;
        None if there is nothing, or the peer is away."""
        asks = self._is_to_ask
        if not self.is_here or not (is_asked or asks or self._num_untold):
            return None
        if asks:
            self._has_asked = True
            self.totals.behind.pop(self.name, None)
        self._num_untold = max(self._num_untold, 1)
        return [self._head(_AGAIN if asks else _ACK, self._last_sent)]

    def _head(
        self,
        kind: Literal["m", "a", "g", "w", "l"],
        follows: int,
        messages: Sequence[_Entry] = (),
    ) -> bytes:
        """Encode the head of a packet, with what has been heard and taken of the peer's."""
        incarnation = heard = taken = 0
        untaken: list[int] = []
        if self._num_untold or kind != MESSAGE:
            incarnation, heard = self._incarnation, self._heard
            taken = heard
            if self._untaken:
                untaken = [*islice(self._untaken, MAX_UNTAKEN + 1)]
                taken = heard if len(untaken) <= MAX_UNTAKEN else untaken.pop() - 1
            self._num_untold = self._untold_bytes = 0
        ours = (kind, self.own_name, self.name, self.own_incarnation, follows)
        return _ENCODER.encode((*ours, incarnation, heard, taken, untaken, messages))

    # --- in ---

    def listed(self, incarnation: int) -> None:
        """Note which process has the peer's name. An earlier one than before is ignored."""
        if incarnation <= self._incarnation:
            return
        self._incarnation = incarnation
        self._untaken = {}  # the messages of the former process count as waiting until take()
        self._heard = self._num_untold = self._untold_bytes = 0
        self._has_asked = False
        self.totals.left.discard(self.name)
        self._is_behind, self._has_dropped_later = self._has_dropped_later, False

    def missed(self) -> None:
        """Something that the peer has sent was dropped: it is to be asked for."""
        self._is_behind = True

    def received(self, head: Head, frames: Frames) -> list[Delivery]:
        """Return the new messages that a packet of this peer brings. frames: those after the head.

        Raises MalformedMessage when messages begin to be dropped, since too much waits, and for a
        packet that has not the frames that its head tells of.
        """
        if head.incarnation != self._incarnation:
            self._has_dropped_later |= head.incarnation > self._incarnation
            return []
        if head.to_incarnation == self.own_incarnation:
            self._drop_taken(head)
        if head.kind != MESSAGE:
            if head.kind == _WHERE:
                self._has_asked = False  # what was asked for may have been lost
            if head.follows > self._heard:
                self._is_behind = True
            elif head.kind == _LEAVING:
                self.totals.left.add(self.name)
            return []
        messages = head.messages
        num_arrays = messages[0][2] if len(messages) == 1 else sum(map(_NUM_ARRAYS, messages))
        if num_arrays != len(frames):
            raise MalformedMessage(f"a packet of {self.name!r} with {len(frames)} frames")
        found: list[Delivery] = []
        totals, untaken, follows, at = self.totals, self._untaken, head.follows, 0
        bounds = totals.bounds
        for number, kind, num_frames, envelope in messages:
            begin, at = at, at + num_frames
            if number <= follows:  # numbers rise: no peer of ours sends that, nor what is after it
                break
            if number <= self._heard:
                self._num_untold += 1  # the word that it is taken may have been lost
            elif follows > self._heard:
                self._is_behind = True
                break
            elif untaken and (
                totals.num_waiting >= bounds.max_messages_in_all
                or totals.waiting_bytes >= bounds.max_bytes_in_all
            ):
                self._is_behind, self._has_asked = True, False
                if self.name not in totals.behind:
                    totals.behind[self.name] = self
                    if not found:
                        raise MalformedMessage(
                            f"all peers together have sent {totals.num_waiting} messages of "
                            f"{totals.waiting_bytes} bytes that are not taken, and {self.name!r} "
                            "goes on"
                        )
                break
            else:
                whole = (envelope, *frames[begin:at]) if num_frames else (envelope,)
                size = num_bytes(whole)
                delivery = Delivery(self.name, head.incarnation, number, kind, whole, size)
                found.append(delivery)
                self._is_behind = self._has_asked = False
                untaken[number] = delivery
                self._heard = number
                totals.num_waiting += 1
                totals.waiting_bytes += size
            follows = number
        return found

    def take(self, delivery: Delivery) -> bool:
        """Note that the program has a message. Returns whether it is time for an ack."""
        if delivery.is_taken:
            return False
        # If not: it is of a former process, which waits for the ack no more.
        if self._untaken.get(delivery.number) is delivery:
            self._num_untold += 1
            self._untold_bytes += delivery.num_bytes
            del self._untaken[delivery.number]
        delivery.is_taken = True
        self.totals.num_waiting -= 1
        self.totals.waiting_bytes -= delivery.num_bytes
        return self._num_untold >= ACK_EVERY or self._untold_bytes >= ACK_EVERY_BYTES

    @property
    def _is_to_ask(self) -> bool:
        return self._is_behind and not self._has_asked and not self.totals.fills(0.5)

    @property
    def owes_ack(self) -> bool:
        """The peer has not been told of all that is taken, or is to be asked for what was lost."""
        return self._num_untold > 0 or (self._is_behind and self._is_to_ask)

    def _drop_taken(self, head: Head) -> None:
        """Drop the kept messages that the peer has taken."""
        if head.heard > self._told_heard:
            self._told_heard = head.heard
        if taken := [*takewhile(head.taken.__ge__, self._kept)]:
            if head.untaken:
                taken = [*set(taken).difference(head.untaken)]
            self._forget_kept(taken)

    def _forget_kept(self, numbers: list[int]) -> None:
        totals = self.totals
        for number in numbers:
            size_bytes = self._kept.pop(number).num_bytes
            self.kept_bytes -= size_bytes
            totals.num_kept -= 1
            totals.kept_bytes -= size_bytes


def read_head(frame: Frame) -> Head:
    """Read the head of a packet. Raises MalformedMessage, whatever the bytes are."""
    try:
        return _DECODER.decode(frame)
    # RecursionError: of lists in each other.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"not the head of a packet: {error!s:.200}") from None


def require_sender(frames: Frames, sender: str) -> None:
    """Raises NoIdentity unless a packet is from the peer of this name, or is malformed."""
    try:
        name = read_head(frames[0]).name if frames else sender
    except MalformedMessage:
        return  # told when the packet is handled
    if name != sender:
        raise NoIdentity(
            f"the certificate is that of {sender!r}, and the packet is from {shortened(name)!r}"
        )
