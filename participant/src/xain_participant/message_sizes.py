"""Sizes of the messages of an upload.

The coordinator has a bounded number of slots in memory for messages that it receives, and a slow
connection would hold them. Only the coordinator can see which connections are slow: a participant
cannot tell the time that a message takes from the time for which it waits there. Messages have
CHUNK_BYTES. If too many connections are slow, the coordinator ends an upload of one of them with
LINE_SLOW. The participant goes on with small messages, of SMALL_BYTES at most, and announces them
before the first one. Small messages take no slot, but more of the coordinator's time.
"""

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 64 << 10  # the same as in xain_coordinator.server.places
MAX_PAUSE = 16  # uploads


class MessageSizes:
    """The size of the messages of a participant's uploads, chosen by how the last ones ended."""

    def __init__(self) -> None:
        self._pause = 1  # so many uploads keep to small messages before large ones are tried again
        self._left = 0  # of them
        self.is_small = False

    @property
    def num_bytes(self) -> int:
        """Size of the messages of a stream; the last message may be shorter."""
        return SMALL_BYTES if self.is_small else CHUNK_BYTES

    def ended_for_slowness(self) -> bool:
        """Note that the coordinator ended a stream as too slow.

        Returns whether the next stream has smaller messages."""
        if self.is_small:
            return False
        self.is_small = True
        self._left = self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        return True

    def came_through(self) -> None:
        """Note that an upload has ended, most of whose bytes were sent in this attempt."""
        if not self.is_small:
            self._pause = 1
        elif self._left:
            self._left -= 1
        else:
            self.is_small = False
