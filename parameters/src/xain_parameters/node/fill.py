"""The stream that makes a backup or learner whole: tiles of the replica, and entries between."""

import heapq
from collections import deque

from xain_parameters.messages import Entry, Message, Tile, Whole
from xain_parameters.node.copy import Copy, tiles_of
from xain_parameters.specs import RangeView

MAX_TILES_IN_FLIGHT = 4


class Fill:
    """One such stream, which goes on over a broken connection.

    number: of the probe that it began with. is_sent: all tiles have been sent, and Whole.
    """

    def __init__(self, number: int, copy: Copy, range_: RangeView) -> None:
        self.number = number
        self.is_sent = False
        self._copy = copy
        self._range = range_
        self._tiles = tiles_of(copy.replica)
        self._unconfirmed: deque[Message] = deque()  # sent tiles, and at the end Whole
        self._num_confirmed = 0

    def next(self) -> Message | None:
        """Return the next tile, or Whole; None: tiles have to be confirmed, or all is sent."""
        if self.is_sent or len(self._unconfirmed) >= MAX_TILES_IN_FLIGHT:
            return None
        message = next(self._tiles, None)
        if message is None:
            self.is_sent = True
            sequence, made_in = self._copy.replica.sequence, self._copy.made_in
            message = Message(Whole(self._range.number, self._range.epoch, sequence, made_in))
        self._unconfirmed.append(message)
        return message

    def confirm(self, num_tiles: int) -> None:
        """Record how many tiles have arrived."""
        while self._num_confirmed < num_tiles:
            self._unconfirmed.popleft()
            self._num_confirmed += 1

    def rest(self, received: int) -> list[Message] | None:
        """Messages that were sent and have not arrived, in their order.

        received: the last entry that has. None: the entries after are not kept any more, or no tile
        has arrived.
        """
        entries = self._copy.tail.after(received, None) if self._num_confirmed else None
        if entries is None:
            return None
        # A tile has the effect of the entries up to its own sequence.
        return list(heapq.merge(entries, self._unconfirmed, key=_sequence))


def _sequence(message: Message) -> int:
    assert isinstance(message.head, Entry | Tile | Whole)
    return message.head.sequence
