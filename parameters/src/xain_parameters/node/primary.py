"""The primary of a range: entries go to its backups and learners, and requests are answered when
all have them."""

from collections import deque
from dataclasses import dataclass

import msgspec

from xain_parameters.messages import (
    Begin,
    Declare,
    Done,
    Entry,
    Have,
    Head,
    Message,
    Probe,
    Refused,
)
from xain_parameters.node.copy import Copy, num_bytes
from xain_parameters.node.fill import Fill
from xain_parameters.node.ports import Host, Source
from xain_parameters.specs import RangeView, TableSpec

# Entries that a server has not confirmed. More than these, and requests are refused as "busy": the
# memory of the queues between is bounded by the slowest server.
MAX_IN_FLIGHT = 256
MAX_IN_FLIGHT_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class _Peer:
    """A backup or learner.

    is_counted: acknowledgements wait for this peer. That holds for each backup, and for a learner
        from the moment on that it may be whole: the scheduler may make it the primary without
        asking here.
    probe: the last one sent; 0: it is to be sent again.
    is_streaming: it has answered the probe, and gets entries and tiles.
    have: what counts for acknowledgements. received: what has come, durable or not.
    whole_at: of a learner, the last of the entries that make it whole; None: not yet, or the
        scheduler knows it.
    fill: what makes it whole; None: it is.
    """

    name: str
    is_counted: bool
    is_learner: bool
    probe: int = 0
    is_streaming: bool = False
    have: int = -1
    received: int = -1
    whole_at: int | None = None
    fill: Fill | None = None


class Primary:
    """The primary's side of one range in one epoch."""

    def __init__(self, copy: Copy, range_: RangeView, host: Host) -> None:
        self.copy = copy
        self._range = range_
        self._host = host
        self._last_probe = 0  # a restarted server is in a new epoch
        backups = [_Peer(name, is_counted=True, is_learner=False) for name in range_.servers[1:]]
        learners = [_Peer(name, is_counted=False, is_learner=True) for name in range_.learners]
        copy.replica.epoch = range_.epoch
        copy.replica.keeps_cuts = True
        self._peers = {peer.name: peer for peer in backups + learners}
        copy.is_alone = not self._peers
        self._in_flight: deque[tuple[int, int]] = deque()  # sequence, bytes
        self._num_bytes = 0
        self._promised: deque[tuple[int, Source, int]] = deque()  # sequence, source, request

    # --- requests ---

    @property
    def is_busy(self) -> bool:
        is_full = len(self._in_flight) >= MAX_IN_FLIGHT or self._num_bytes >= MAX_IN_FLIGHT_BYTES
        return is_full or self.copy.is_broken

    def commit(self, message: Message) -> None:
        """Send the next entry of the range to its servers, and apply it here."""
        entry = message.head
        assert isinstance(entry, Entry)
        # Sent first: the others work while this server does. Nothing is acknowledged before all
        # have it, in whatever order.
        for peer in self._peers.values():
            if peer.is_streaming:
                self._host.emit(peer.name, message)
        self.copy.advance(message)
        if entry.sequence > self._received:
            size = num_bytes(message)
            self._in_flight.append((entry.sequence, size))
            self._num_bytes += size

    @property
    def is_settled(self) -> bool:
        """Whether all that has been committed is durable, and all requests are answered."""
        return not self._promised and self.copy.replica.sequence <= self._durable

    def promise(self, source: Source, request: int) -> None:
        """Answer the request when all that has been committed so far is durable."""
        self._promised.append((self.copy.replica.sequence, source, request))

    def settle(self, *, is_leased: bool) -> None:
        """Answer the requests that are durable. A server without lease answers none: another
        one may be the primary by now."""
        if self._in_flight:
            reached = self._received
            while self._in_flight and self._in_flight[0][0] <= reached:
                self._num_bytes -= self._in_flight.popleft()[1]
        if not is_leased or not self._promised:
            return
        durable = self._durable
        while self._promised and self._promised[0][0] <= durable:
            _, source, request = self._promised.popleft()
            self._host.emit(source, Message(Done(request)))

    @property
    def _durable(self) -> int:
        """Sequence of the last entry that this and all counted servers have durably."""
        if not self._peers:
            return self.copy.synced
        had = [peer.have for peer in self._peers.values() if peer.is_counted]
        return min([self.copy.synced, *had])

    @property
    def _received(self) -> int:
        """Last entry that is on disk here and that all streaming servers have received."""
        if not self._peers:
            return self.copy.synced
        had = [peer.received for peer in self._peers.values() if peer.is_streaming]
        return min([self.copy.synced, *had])

    def take_over(self, before: "Primary") -> None:
        """Go on with the requests of the epoch before, in which this server was the primary too."""
        self._promised = before._promised
        self._in_flight = before._in_flight
        self._num_bytes = before._num_bytes

    def abandon_cuts(self) -> None:
        """Give up open checkpoints, of which the next primary writes no part either."""
        replica = self.copy.replica
        replica.keeps_cuts = False
        for number in list(replica.cuts):
            replica.end_cut(number)

    def end(self, version: tuple[int, int]) -> None:
        """Refuse the open requests as "moved": this server is no longer the primary."""
        self.abandon_cuts()
        for _, source, request in self._promised:
            refused = Refused(request, "moved", "the range has another primary", version)
            self._host.emit(source, Message(refused))
        self._promised.clear()

    # --- the other servers ---

    def probe(self) -> None:
        """Ask each server that has no open probe which records of the range it has."""
        for peer in self._peers.values():
            if peer.probe == 0:
                self._last_probe += 1
                peer.probe = self._last_probe
                self._send(peer, Probe(self._range.number, self._range.epoch, peer.probe))

    def lost(self, server: str) -> None:
        """Ask a server again: its connection broke, and everything under way on it is lost."""
        peer = self._peers.get(server)
        if peer is not None:
            peer.probe = 0
            peer.is_streaming = False
            peer.whole_at = None

    def had(self, server: str, have: Have) -> None:
        """Note what a server has, and go on to send what it lacks."""
        peer = self._peers.get(server)
        if peer is None or have.probe != peer.probe or have.epoch != self._range.epoch:
            return
        if not peer.is_streaming:
            self._begin(peer, have)
            return
        if have.is_whole:
            peer.have = have.sequence
            peer.fill = None
        elif peer.fill is not None:
            peer.fill.confirm(have.tiles)
        peer.received = have.received
        if peer.whole_at is not None and peer.have >= peer.whole_at:
            peer.whole_at = None
            self._host.report_whole(self._range.number, self._range.epoch, peer.name)
        self._send_tiles(peer)

    def declare(self, table: TableSpec) -> None:
        message = self.copy.declare(table)
        if message is not None:
            assert isinstance(message.head, Declare)
            declared = msgspec.structs.replace(message.head, epoch=self._range.epoch)
            for peer in self._peers.values():
                if peer.is_streaming:
                    self._send(peer, declared)

    def _begin(self, peer: _Peer, have: Have) -> None:
        """Bring a server up to date: by the entries that it lacks, or by tiles, from where an
        earlier connection broke."""
        copy, range_, fill = self.copy, self._range, peer.fill
        lacking = None
        if have.is_whole:
            fill = None
            lacking = copy.tail.after(have.received, have.made_in)
        elif fill is not None and have.fill == fill.number:
            fill.confirm(have.tiles)
            lacking = fill.rest(have.received)
        self._last_probe += 1
        peer.probe = self._last_probe
        peer.is_streaming = True
        peer.received = have.received
        if lacking is None:
            fill = Fill(peer.probe, copy, range_)
            peer.have = peer.received = -1
        peer.fill = fill
        number = 0 if fill is None else fill.number
        self._send(peer, Begin(range_.number, range_.epoch, peer.probe, number))
        for spec in copy.tables:
            self._send(peer, Declare(range_.number, range_.epoch, spec))
        for message in lacking or ():
            self._host.emit(peer.name, message)
        if fill is None:
            peer.have = have.sequence
        if fill is None or fill.is_sent:
            self._count(peer)
        self._send_tiles(peer)  # the first tile before any entry

    def _send_tiles(self, peer: _Peer) -> None:
        """Send tiles to a server, as many as may be under way."""
        while peer.fill is not None and (message := peer.fill.next()) is not None:
            if peer.fill.is_sent:
                self._count(peer)
            self._host.emit(peer.name, message)

    def _count(self, peer: _Peer) -> None:
        """Count a server: acknowledge nothing from now on that it does not have."""
        peer.is_counted = True
        if peer.is_learner:
            peer.whole_at = self.copy.replica.sequence

    def _send(self, peer: _Peer, head: Head) -> None:
        self._host.emit(peer.name, Message(head))
