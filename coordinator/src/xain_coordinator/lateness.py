"""How far behind the coordinator itself is: what it is late for is not held against participants.

A busy machine, or one that was stopped for a while, takes up the signs of life that have come
meanwhile only when their senders' leases have run out. To let those participants go would be wrong,
and to take them in again costs more than the signs of life did, so that it would not end.
"""

from collections import deque
from statistics import median

# Of so many calls the median counts, so that no single sender can say how late we are.
NUM_WAITS = 31
# Less is what any event loop is late.
MIN_LATE_S = 0.1


class Lateness:
    """In seconds of session time. lease_s: what was noted counts for so long, and what senders
    have said counts for no more than that."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._waits: deque[tuple[float, float]] = deque(maxlen=NUM_WAITS)
        self._stalled = (0.0, 0.0)

    def waited(self, now: float, seconds: float) -> None:
        """A call of a participant has waited here for so long until it was taken up."""
        self._waits.append((now, seconds))

    def woke(self, now: float, due: float, active_at: float) -> None:
        """We were to do something when it was due. active_at: when we last did anything; that we
        stood still may have begun right after it."""
        late = now - min(due, active_at)
        if now - due >= MIN_LATE_S and late >= self.at(now):
            self._stalled = (now, late)

    def at(self, now: float) -> float:
        """Of what came after `now` minus this, some may not have been taken up."""
        recent = [waited for noted, waited in self._waits if noted + self._lease_s > now]
        said = min(median(recent), self._lease_s) if recent else 0.0
        noted, stalled = self._stalled
        late = max(said, stalled if noted + self._lease_s > now else 0.0)
        return late if late >= MIN_LATE_S else 0.0
