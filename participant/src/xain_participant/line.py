"""How large the messages of an upload are.

The coordinator has so many places in memory for messages that are on their way, and a slow line
would hold them up. Which lines are slow, it sees: we cannot tell the time that a message takes from
the time for which it waits there. The rule for it and for us: messages have CHUNK_BYTES. If too
many lines are slow, an upload of one of them ends, to go on with small messages, of SMALL_BYTES at
most. These take no place, but more of the coordinator's time. An upload that begins with a small
message has no other.
"""

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 64 << 10  # the same as in xain_coordinator.server.places
# The first small one comes with the header and has a place, for nobody knows yet how large it is.
# So much is there at once.
FIRST_BYTES = 4 << 10
MAX_PAUSE = 16  # uploads


class Line:
    """What is known of one participant's line, from one upload to the next."""

    def __init__(self) -> None:
        self._is_slow = False
        self._pause = 1  # so many uploads keep to small messages before large ones are tried again
        self._left = 0  # of them

    def sizes(self) -> tuple[int, int]:
        """Of the first message of a stream, and of all others."""
        return (FIRST_BYTES, SMALL_BYTES) if self._is_slow else (CHUNK_BYTES, CHUNK_BYTES)

    def ended_by_coordinator(self) -> bool:
        """A stream, before its end. Whether the next one will have smaller messages."""
        if self._is_slow:
            return False
        self._is_slow = True
        self._left = self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        return True

    def came_through(self) -> None:
        """An upload did."""
        if not self._is_slow:
            self._pause = 1
        elif self._left:
            self._left -= 1
        else:
            self._is_slow = False
