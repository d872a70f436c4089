"""How large the messages of an upload are.

The coordinator has so many places in memory for messages that are on their way, and a slow line
would hold them up. Which lines are slow, it sees: we cannot tell the time that a message takes from
the time for which it waits there. The rule for it and for us: messages have CHUNK_BYTES. If too
many lines are slow, it ends an upload of one of them with LINE_SLOW, to go on with small messages,
of SMALL_BYTES at most, which is said before the first of them. These take no place, but more of the
coordinator's time.
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
        """An upload did, most of whose bytes were sent now: an answer to others says nothing."""
        if not self.is_small:
            self._pause = 1
        elif self._left:
            self._left -= 1
        else:
            self.is_small = False
