"""Links deliver every message once and in order, for as long as both ends live.

A connection may break, and the sender cannot know which of its last messages have arrived. So every
message is numbered and kept until its receiver has taken it. Over a new connection, to the same
process or to one that comes in its place, all kept messages go out again, in order; the receiver
drops those that it has had.

A message is taken when the application gets it, not when it arrives. A message that waited in the
queue of a process that died goes to the process that comes back under its name. Acks travel with
messages, or alone a moment later; if the process dies before its ack is out, the next process gets
the message again.

**Credit.** A peer may have so many messages and bytes on their way to another peer that are not
taken yet (see Bounds), whether that peer is here or away; an ack gives the credit back. The
receiver has the same bounds for what waits in its queue, of each peer and of all together. A
message beyond them is dropped, and asked for when half of what waits is taken.

The roster decides which process has a name. A process may send before the roster lists it, and a
stranger may write any higher incarnation. So packets of a later process than the roster's are held,
and handled in their order when the roster lists that process. Packets for which there is no room
are dropped, and asked for then.

A packet is a list of frames: a head, which holds the messages, and the arrays of these messages in
their order. The head is msgpack:

    [kind, name, to, incarnation, follows, to_incarnation, heard, untaken, messages]

kind: "m" messages, "a" nothing but the ack, "g" an ack of a peer that has not heard the messages
    after `heard`: they have to go out again; "w" an ack of a peer that may have lost something, and
    wants an ack; "l" the last ack of a process that leaves.
name, incarnation: of the sender. Of two processes with one name the later has the higher one.
to: the name of the receiver; a peer with another name drops the packet.
follows: the number of the message before the first one on this connection, 0 if there is none.
    Numbers between belong to messages that are taken, or that went to other peers; a receiver that
    has not heard `follows` asks for what was lost.
to_incarnation, heard, untaken: the receiver's messages up to the number `heard` are taken, except
    those in `untaken`: the first and the last number of each run of them. An incarnation of 0 tells
    nothing.
messages: of each its number, its kind ("m" a message, "c" one of a collective operation), how many
    of the packet's frames belong to it, and its envelope, see codec.py. Numbers count from 1 on, by
    the sender for all peers together, so that they go on for a peer that was forgotten.

Pure: no I/O, no clock, no threads. Methods return what is to be sent. The program's own thread
calls keep(), next_packet() and take(), where an interrupt may come between any two calls: these
change what belongs together without a call between, and leave at worst a gap that the receiver asks
for.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from xain_messaging.codec import Frame, Frames, num_bytes
from xain_messaging.errors import MalformedMessage
from xain_messaging.messages import check_name

# Acks travel with messages that go the other way. When none goes: after so many messages or bytes,
# or a moment later, see endpoint.py.
ACK_EVERY = 64
ACK_EVERY_BYTES = 8 << 20

Kind: TypeAlias = Literal["m", "c"]
MESSAGE: Final = "m"
COLLECTIVE: Final = "c"
_ACK: Final = "a"
_AGAIN: Final = "g"
_WHERE: Final = "w"
_LEAVING: Final = "l"

Packet: TypeAlias = list[Frame]

# A packet takes further messages as long as their bytes are fewer than that.
BATCH_BYTES = 64 << 10
BATCH_MESSAGES = 256

# Runs of untaken messages that an ack tells of.
MAX_RUNS = 512

# Bytes that a head may add to the largest message: names, numbers, runs, and a batch.
MAX_HEAD_BYTES = 4096 + 18 * MAX_RUNS + 2 * BATCH_BYTES

# Later processes of one name, of which packets were dropped and a log line was written.
MAX_DROPPED = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is sent and not taken yet: to one peer, and to all together. A single message may be
    larger. The peers of a group should have the same."""

    max_messages: int = 1024
    max_bytes: int = 256 << 20
    max_messages_in_all: int = 65_536
    max_bytes_in_all: int = 1 << 30


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(slots=True)
class Outbox:
    """What one peer keeps for all others together. last_number: of all that it has sent."""

    bounds: Bounds = DEFAULT_BOUNDS
    num_messages: int = 0
    num_bytes: int = 0
    last_number: int = 0


@dataclass(slots=True)
class Untaken:
    """What has come of all peers together and is not taken.

    behind: those who are to be asked for what was not heard of them, by name, and who may not have
        been yet, since too much waits. When fills(0.5) is over it is time to look at them; see
        Link.is_behind and Link.owes_ack.
    """

    num_messages: int = 0
    num_bytes: int = 0
    behind: "dict[str, Link]" = field(default_factory=dict)

    def fills(self, part: float, bounds: Bounds) -> bool:
        """At least this part of what may wait."""
        return (
            self.num_messages >= part * bounds.max_messages_in_all
            or self.num_bytes >= part * bounds.max_bytes_in_all
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
    untaken: list[_Number]
    messages: list[tuple[_Number, Kind, _Number, bytes]]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Head)


class Delivery(NamedTuple):
    """A message that has come: to be handed to the application, and then take()."""

    peer: str
    incarnation: int
    number: int
    kind: str
    frames: Frames
    num_bytes: int


class _Held(NamedTuple):
    """A packet of a process that the roster has not told of yet."""

    head: Head
    frames: Frames
    num_bytes: int


class _Kept(NamedTuple):
    """A message on its way."""

    kind: Kind
    frames: Frames
    num_bytes: int


@dataclass(slots=True, eq=False)
class Link:
    """The way to one peer and from it.

    is_here: it has a connection, as far as we know. Messages for one that is away are kept.
    has_left: the peer's process has said that it leaves the group, so it answers nothing more.
    waiting: what has come on all links together.
    """

    own_name: str
    own_incarnation: int
    name: str  # of the peer
    outbox: Outbox = field(default_factory=Outbox)
    waiting: Untaken = field(default_factory=Untaken)
    is_here: bool = False
    has_left: bool = False
    kept_bytes: int = 0
    _kept: OrderedDict[int, _Kept] = field(default_factory=OrderedDict)  # by number
    _unsent: deque[int] = field(default_factory=deque)  # numbers, of those for this connection
    _last_sent: int = 0  # over this connection
    _told_heard: int = 0  # the highest number that the peer has told of over this connection
    # Of the peer: which process it is, the first that the roster has told of, the last one that may
    # be heard, where 0 is any. Packets of later ones are held, or dropped where there is no room.
    _peer_incarnation: int = 0
    _first: int = 0
    _newest: int = 0
    _held: list[_Held] = field(default_factory=list)
    _held_bytes: int = 0
    _dropped: set[int] = field(default_factory=set)  # incarnations
    # The last number heard of that process, the number of messages heard, messages not taken yet,
    # and the bytes taken that it has not been told of. Messages of earlier processes wait as well.
    _heard: int = 0
    _num_heard: int = 0
    # Bytes, and position among the messages heard, by number.
    _untaken: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    _former: dict[tuple[int, int], int] = field(default_factory=dict)  # incarnation, number: bytes
    _untaken_bytes: int = 0  # of both
    _num_untold: int = 0
    _untold_bytes: int = 0
    # What follows on the last number heard was not kept; and the peer has been asked for it.
    _is_behind: bool = False
    _has_asked: bool = False
    _is_unsure: bool = False  # whether that is so; what comes next tells

    @property
    def num_kept(self) -> int:
        """Messages that the peer has not taken."""
        return len(self._kept)

    @property
    def has_unheard(self) -> bool:
        """The peer has not said, over this connection, that it has received all kept messages."""
        return bool(self._kept) and next(reversed(self._kept)) > self._told_heard

    @property
    def is_holding(self) -> bool:
        """Packets wait until the roster tells of the process that has sent them."""
        return bool(self._held)

    @property
    def has_untaken(self) -> bool:
        """Some of what has come is not taken."""
        return self._num_untaken > 0

    @property
    def _num_untaken(self) -> int:
        return len(self._untaken) + len(self._former)

    @property
    def is_settled(self) -> bool:
        """Nothing is kept for it, and nothing of it waits."""
        return not self._kept and not self.has_untaken

    @property
    def is_behind(self) -> bool:
        """It is here, and still to be asked for what was not heard of it; see Untaken."""
        return self._is_behind and not self._has_asked and self.is_here

    def why_no_room(self, size_bytes: int) -> str | None:
        """Why one more message has to wait; None if it has not.

        For the first to a peer that is here there always is room, however large it is: those that
        are away must not keep it from all the others.
        """
        bounds, in_all = self.outbox.bounds, self.outbox
        if not self._kept and (self.is_here or not in_all.num_messages):
            return None
        fits = self.kept_bytes + size_bytes <= bounds.max_bytes
        if self._kept and not (fits and len(self._kept) < bounds.max_messages):
            return (
                f"{self.name!r} has not taken {len(self._kept)} messages of {self.kept_bytes} "
                f"bytes, and no more is kept for it; it is {'here' if self.is_here else 'away'}"
            )
        fits = in_all.num_bytes + size_bytes <= bounds.max_bytes_in_all
        if not (fits and in_all.num_messages < bounds.max_messages_in_all):
            return (
                f"all peers together have not taken {in_all.num_messages} messages of "
                f"{in_all.num_bytes} bytes, and no more is kept; {self.name!r} is "
                f"{'here' if self.is_here else 'away'}"
            )
        return None

    # --- out ---

    def send(self, kind: Kind, frames: Frames) -> Packet | None:
        """Keep a message. Returns the packet that goes out now; None if the peer is away."""
        self.keep(kind, frames, num_bytes(frames))
        return self.next_packet()

    def keep(self, kind: Kind, frames: Frames, size_bytes: int) -> None:
        """Keep a message until it is taken; next_packet() sends it."""
        kept = _Kept(kind, frames, size_bytes)
        number = self.outbox.last_number = self.outbox.last_number + 1
        self._kept[number] = kept
        self.kept_bytes += size_bytes
        self.outbox.num_messages += 1
        self.outbox.num_bytes += size_bytes
        if self.is_here:
            self._unsent.append(number)

    @property
    def so_far(self) -> tuple[int, int]:
        """The last numbers that have been sent, and that the peer has told of."""
        return self._last_sent, self._told_heard

    @property
    def is_sending(self) -> bool:
        """Messages wait for next_packet(), or have gone out and are not heard yet."""
        return bool(self._unsent) or self._told_heard < self._last_sent

    def next_packet(self, most: int = BATCH_MESSAGES) -> Packet | None:
        """The next messages that have not gone out over this connection, at most so many; None if
        there are none, or the peer is away."""
        follows, unsent = self._last_sent, self._unsent
        messages: list[tuple[int, Kind, int, Frame]] = []
        packet: Packet = [b""]
        size_bytes = 0
        while unsent and len(messages) < most and size_bytes < BATCH_BYTES:
            number = unsent[0]
            kept = self._kept.get(number)
            if kept is not None:
                if messages and size_bytes + kept.num_bytes > BATCH_BYTES:
                    break
                size_bytes += kept.num_bytes
                messages.append((number, kept.kind, len(kept.frames) - 1, kept.frames[0]))
                if len(kept.frames) > 1:
                    packet += kept.frames[1:]
                # Before it is off the list: what an interrupt loses from here on leaves a gap.
                self._last_sent = number
            unsent.popleft()
        if not messages:
            return None
        packet[0] = self._head(MESSAGE, follows, messages)
        return packet

    def connected(self) -> list[Packet]:
        """There is a connection, which nothing has gone over yet. Returns what goes out: all that
        is kept, and what may not have been heard of what is taken."""
        self.is_here = True
        self._told_heard = 0
        self._has_asked = False
        if self._is_unsure:
            self.missed()  # the question may have been lost
        if self._heard:
            self._num_untold = max(self._num_untold, 1)
        packets = self._after(0)
        ack = self.ack()
        if self.is_behind:
            self.waiting.behind[self.name] = self
        return packets if ack is None else [*packets, ack]

    def again(self, head: Head) -> list[Packet]:
        """What goes out once more, if that is what the peer asks for."""
        if head.kind != _AGAIN or head.to_incarnation != self.own_incarnation or not self.is_here:
            return []
        if self._is_former(head.incarnation) or self._is_unlisted(head.incarnation):
            return []
        return self._after(head.heard)

    def _after(self, heard: int) -> list[Packet]:
        """Packets of all kept messages after this number."""
        self._last_sent = heard
        self._unsent = deque(number for number in self._kept if number > heard)
        return list(iter(self.next_packet, None))

    def gone(self) -> None:
        """There is none any more."""
        self.is_here = False
        self._unsent.clear()

    def forget(self) -> None:
        """What is kept is lost: nobody comes for it."""
        self._forget_kept(list(self._kept))
        self.take_held()
        self.waiting.behind.pop(self.name, None)

    def keep_only(self, is_taken: Callable[[Frames], bool]) -> None:
        """Drop what is kept of other frames. Before connected(), so that nothing follows on it."""
        self._forget_kept(
            [number for number, kept in self._kept.items() if not is_taken(kept.frames)]
        )

    # --- in ---

    def listed(self, incarnation: int, *, has_missed: bool = False) -> None:
        """The roster says which process has the name; call release() next. What it has sent before
        there was a link, as has_missed says, is to be asked for. Of an earlier one than it has told
        of before: nothing."""
        if self._first and incarnation < self._newest:
            return
        self._first = self._first or incarnation
        self.has_left = self.has_left and incarnation == self._newest
        self._newest = incarnation
        if has_missed or incarnation < self._peer_incarnation:
            self.missed()

    def release(self) -> Iterator[tuple[Head, Frames]]:
        """Yield the held packets in their order, to be handled again: those of the process that the
        roster lists now are received. Afterwards ask for the packets that were dropped."""
        for held in self.take_held():
            yield held.head, held.frames
        if self._dropped:
            self.missed()
            # Later ones are asked for when the roster tells of them.
            self._dropped = {one for one in self._dropped if self._is_unlisted(one)}

    def drop_held(self) -> None:
        """Drop the held packets, whose process the roster has not listed in time. If it lists that
        process later, they are asked for."""
        self._dropped.update(held.head.incarnation for held in self.take_held())

    def take_held(self) -> list[_Held]:
        """Remove the held packets, which no longer count as waiting, and return them."""
        held, self._held = self._held, []
        self.waiting.num_messages -= len(held)
        self.waiting.num_bytes -= self._held_bytes
        self._held_bytes = 0
        return held

    def where(self) -> Packet | None:
        """Anything that came of this peer may have been lost here, or something that was to go to
        it. Returns what goes out: what it has to know of us, and the question for the same of it.
        So each asks for what it lacks, and nothing else goes twice."""
        if not self.is_here:
            self.missed()
            return None
        self._is_unsure = True
        self._num_untold = max(self._num_untold, 1)
        return [self._head(_WHERE, self._last_sent)]

    def missed(self) -> None:
        """Something that it has sent may have been lost here: it is to be asked for."""
        self._is_unsure = False
        if self._newest not in (0, self._peer_incarnation):
            self._hear(self._newest)
        if self._peer_incarnation:
            self._has_asked = False
            self._fall_behind()

    def _fall_behind(self) -> None:
        """It is to be asked for something, and it may be for others to be taken before."""
        self._is_behind = True
        self.waiting.behind[self.name] = self

    def _is_former(self, incarnation: int) -> bool:
        """Of a process whose place another has taken: one that we have heard, or, while we have
        heard none, one that was there before the roster told of any."""
        return incarnation < (self._peer_incarnation or self._first)

    def _is_unlisted(self, incarnation: int) -> bool:
        """Of a process that is later than the one that the roster has told of, or, of a name that
        it has never told of, than the first one that came."""
        return 0 < self._newest < incarnation

    def _hear(self, incarnation: int) -> None:
        """Another process than before; or the first that we hear of."""
        for number, (size, _) in self._untaken.items():
            self._former[self._peer_incarnation, number] = size
        self._untaken.clear()
        self._peer_incarnation = incarnation
        self.has_left = False
        self._newest = self._newest or incarnation
        self._heard = self._num_heard = self._num_untold = self._untold_bytes = 0
        self._is_behind = self._has_asked = self._is_unsure = False

    def received(self, head: Head, frames: Frames) -> list[Delivery]:
        """The new messages that a packet of this peer brings. frames: those after the head.

        A message beyond the bounds of what waits here is not heard, nor are those that follow: they
        are asked for when half of what waits is taken. The first message of each peer is heard in
        any case: somebody may await just that. Raises MalformedMessage when messages begin to be
        dropped, and for a packet that has not the frames that its head tells of.
        """
        if head.incarnation != self._peer_incarnation:
            if self._is_former(head.incarnation):
                return []
            if self._is_unlisted(head.incarnation):
                self._hold(head, frames)
                return []
        if head.to_incarnation == self.own_incarnation:
            self._drop_taken(head.heard, head.untaken)
        if head.kind != MESSAGE:
            self._received_ack(head)
            return []
        if head.incarnation > self._peer_incarnation:
            self._hear(head.incarnation)
        if sum(num_frames for _, _, num_frames, _ in head.messages) != len(frames):
            raise MalformedMessage(f"a packet of {self.name!r} with {len(frames)} frames")
        found: list[Delivery] = []
        follows, at = head.follows, 0
        for number, kind, num_frames, envelope in head.messages:
            begin, at = at, at + num_frames
            if number <= self._heard:
                self._num_untold += 1  # the word that it is taken may have been lost
            elif follows > self._heard or self._has_waiting(1.0):
                self._drop(follows, may_raise=not found)
                break
            else:
                whole = [envelope, *frames[begin:at]]
                size = len(envelope) if not num_frames else num_bytes(whole)
                found.append(Delivery(self.name, head.incarnation, number, kind, whole, size))
                self._is_behind = self._has_asked = self._is_unsure = False
                self._heard = number
                self._num_heard += 1
                self._untaken[number] = size, self._num_heard
                self._untaken_bytes += size
                self.waiting.num_messages += 1
                self.waiting.num_bytes += size
            follows = number
        return found

    def _drop(self, follows: int, *, may_raise: bool) -> None:
        """Drop a message that is behind a gap, or for which there is no room."""
        was_behind = self._is_behind
        if self._is_unsure:  # also whether what was asked for came; now we know
            self._is_unsure = self._has_asked = False
        is_behind_a_gap = follows > self._heard
        if not is_behind_a_gap:  # it is what was asked for, and there is no room now
            self._has_asked = False
        self._fall_behind()
        if may_raise and not was_behind and not is_behind_a_gap:
            raise MalformedMessage(
                f"{self.name!r} has sent {self._num_untaken} messages of "
                f"{self._untaken_bytes} bytes that are not taken, all peers together "
                f"{self.waiting.num_messages} of {self.waiting.num_bytes}, and goes on"
            )

    def _received_ack(self, head: Head) -> None:
        """It tells what has been sent before it, and may want the same of us."""
        heard = self._heard if head.incarnation == self._peer_incarnation else 0
        is_behind = head.follows > heard
        if head.kind == _WHERE or is_behind:
            if head.incarnation > self._peer_incarnation:
                self._hear(head.incarnation)
            # It may have lost what it was asked for; or we what came then. Else one question will
            # do: what it has been asked for is on its way.
            self._has_asked = self._has_asked and head.kind != _WHERE and not self._is_unsure
        if head.kind == _WHERE:
            self._num_untold = max(self._num_untold, 1)
        if head.kind == _LEAVING:
            if head.incarnation > self._peer_incarnation:
                self._hear(head.incarnation)
            self.has_left = not is_behind
        if is_behind:
            self._fall_behind()
        self._is_unsure = False

    def _hold(self, head: Head, frames: Frames) -> None:
        """Hold a packet, or drop it if as much is held as a peer may send before it gets an ack.

        Raises MalformedMessage for the first packet that is dropped of a process; of more than
        MAX_DROPPED processes it may do so again.
        """
        incarnation, bounds = head.incarnation, self.outbox.bounds
        is_full = (
            len(self._held) >= bounds.max_messages
            or self._held_bytes >= bounds.max_bytes
            or (self.is_holding and self.waiting.fills(1.0, bounds))
        )
        if not is_full and incarnation not in self._dropped:
            size = num_bytes([one[3] for one in head.messages]) + num_bytes(frames)
            size += 8 * len(head.untaken)
            self._held.append(_Held(head, frames, size))
            self._held_bytes += size
            self.waiting.num_messages += 1
            self.waiting.num_bytes += size
            return
        if incarnation in self._dropped:
            return
        if len(self._dropped) >= MAX_DROPPED:
            self._dropped.clear()
        self._dropped.add(incarnation)
        raise MalformedMessage(
            f"{self.name!r} sends as the process {incarnation}, and {self._newest} is the last one "
            f"that is known; {len(self._held)} messages of {self._held_bytes} bytes wait until "
            "it is known to be in the group, and no more are held"
        )

    def _has_waiting(self, part: float) -> bool:
        """Not taken: at least this part of what a peer may send, or all together."""
        number = self._num_untaken
        if not number:
            return False
        bounds = self.outbox.bounds
        return (
            number >= part * bounds.max_messages
            or self._untaken_bytes >= part * bounds.max_bytes
            or self.waiting.fills(part, bounds)
        )

    def take(self, delivery: Delivery) -> Packet | None:
        """The application has it. Returns an ack if it is time for one."""
        number, former = delivery.number, (delivery.incarnation, delivery.number)
        is_former = delivery.incarnation != self._peer_incarnation
        if (former in self._former) if is_former else (number in self._untaken):
            if is_former:
                del self._former[former]
            else:
                del self._untaken[number]
            self._untaken_bytes -= delivery.num_bytes
            self.waiting.num_messages -= 1
            self.waiting.num_bytes -= delivery.num_bytes
        if is_former:  # its sender waits for it no more
            return self.ack() if self._is_to_ask else None
        self._num_untold += 1
        self._untold_bytes += delivery.num_bytes
        is_due = self._num_untold >= ACK_EVERY or self._untold_bytes >= ACK_EVERY_BYTES
        return self.ack() if is_due or self._is_to_ask else None

    @property
    def _is_to_ask(self) -> bool:
        return self._is_behind and not self._has_asked and not self._has_waiting(0.5)

    @property
    def owes_ack(self) -> bool:
        """The peer has not been told of all that is taken, or is to be asked for what is lost."""
        return self._num_untold > 0 or self._is_to_ask

    def ack(self) -> Packet | None:
        """What the peer has not been told of what is taken, and what it is asked for; None if there
        is nothing, or it is away."""
        if not self.owes_ack or not self.is_here:
            return None
        if not self._is_to_ask:
            return [self._head(_ACK, self._last_sent)]
        self._has_asked = True
        self._num_untold = max(self._num_untold, 1)  # it says from where on
        return [self._head(_AGAIN, self._last_sent)]

    def leaving(self) -> Packet | None:
        """Return the last packet of this process, which says that it leaves; None if the peer is
        away."""
        return [self._head(_LEAVING, self._last_sent)] if self.is_here else None

    def _drop_taken(self, heard: int, untaken: list[int]) -> None:
        """Drop the kept messages up to `heard` that are in no run of `untaken`."""
        self._told_heard = max(self._told_heard, heard)
        runs = iter(untaken)
        first, last = next(runs, heard + 1), next(runs, heard)
        taken = []
        for number in self._kept:
            while number > last and last < heard:
                first, last = next(runs, heard + 1), next(runs, heard)
            if number > heard or (first <= number and last >= heard):
                break
            if number < first:
                taken.append(number)
        self._forget_kept(taken)

    def _forget_kept(self, numbers: list[int]) -> None:
        for number in numbers:
            size_bytes = self._kept.pop(number).num_bytes
            self.kept_bytes -= size_bytes
            self.outbox.num_messages -= 1
            self.outbox.num_bytes -= size_bytes

    def _head(
        self,
        kind: Literal["m", "a", "g", "w", "l"],
        follows: int,
        messages: Sequence[tuple[int, Kind, int, Frame]] = (),
    ) -> bytes:
        told: tuple[int, int, list[int]] = (0, 0, [])
        if self._num_untold:
            told = (self._peer_incarnation, *self._runs())
        who = (kind, self.own_name, self.name, self.own_incarnation)
        head = _ENCODER.encode((*who, follows, *told, messages))
        self._num_untold = self._untold_bytes = 0
        return head

    def _runs(self) -> tuple[int, list[int]]:
        """Up to where the peer is told which of its messages are taken; and the first and the last
        number of each run of those that are not."""
        untaken = self._untaken
        if not untaken:
            return self._heard, []
        first, last = next(iter(untaken)), next(reversed(untaken))
        if untaken[last][1] - untaken[first][1] == len(untaken) - 1:  # one run, as nearly always
            return self._heard, [first, last]
        runs = [first]
        before, place = first, untaken[first][1]
        for number, (_, at) in untaken.items():
            if at > place + 1:
                runs.append(before)
                if len(runs) >= 2 * MAX_RUNS:
                    return before, runs
                runs.append(number)
            before, place = number, at
        return self._heard, [*runs, before]


def read_head(frame: Frame) -> Head:
    """The head of a packet. Raises MalformedMessage, whatever the bytes are."""
    try:
        head = _DECODER.decode(frame)
        check_name("sender", head.name)
        check_name("receiver", head.to)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedMessage(f"not the head of a packet: {error!s:.200}") from None
    if (head.kind == MESSAGE) != bool(head.messages) or len(head.untaken) % 2:
        raise MalformedMessage("not the head of a packet: no messages, or half a run")
    before = 0
    for number, *_ in head.messages:
        if number <= before:
            raise MalformedMessage(f"not the head of a packet: the number {number} after {before}")
        before = number
    return head
