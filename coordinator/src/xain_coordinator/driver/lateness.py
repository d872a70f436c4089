"""Lateness of the coordinator itself, which is not held against participants.

A busy machine, or one that was stopped for a while, takes up the signs of life that have come
meanwhile only when their senders' leases have run out. To let those participants go would be wrong,
and to take them in again costs more than the signs of life did, so that it would not end.
"""

from collections import deque
from statistics import median_low

# Senders whose median counts, each by its latest call; of two in the middle the lesser one. So no
# single sender can claim more lateness than another has seen, however often it calls.
NUM_SENDERS = 31
# With fewer senders one could decide the median; then only our own measurement counts.
MIN_SENDERS = 3
# Less is what any event loop is late.
MIN_LATE_S = 0.1


class Lateness:
    """How late the coordinator takes up calls, in seconds of session time.

    lease_s: a noted lateness counts for so long, and what senders have said counts for no more than
    that. interval_s: between two heartbeats of a sender."""

    def __init__(self, lease_s: float, interval_s: float) -> None:
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._waits: dict[str, tuple[float, float]] = {}  # the latest sender at the end
        # When we noticed, and how late we were then: each longer than those after it.
        self._stalls: deque[tuple[float, float]] = deque()

    def note_wait(self, participant_id: str, now: float, seconds: float) -> None:
        """Note that a call of this participant waited for so long until it was taken up."""
        self._waits.pop(participant_id, None)
        self._waits[participant_id] = (now, seconds)
        if len(self._waits) > NUM_SENDERS:
            del self._waits[next(iter(self._waits))]

    def note_stall(self, now: float, due: float, active_at: float) -> None:
        """Note that a timer fired late. active_at: time of the last activity before. The stall may
        have begun right after it; a participant whose lease ended when the timer was due has sent a
        heartbeat since, if it lives."""
        missed = now - due
        if missed < MIN_LATE_S:
            return
        late = max(missed, min(now - active_at, missed + self._interval_s))
        while self._stalls and self._stalls[-1][1] <= late:
            self._stalls.pop()
        self._stalls.append((now, late))

    def at(self, now: float) -> float:
        """Lateness in seconds: calls that came after `now` minus this may not have been handled."""
        recent = [waited for noted, waited in self._waits.values() if noted + self._lease_s > now]
        said = 0.0
        if len(recent) >= MIN_SENDERS:
            said = min(median_low(recent), self._lease_s)
        while self._stalls and self._stalls[0][0] + self._lease_s <= now:
            self._stalls.popleft()
        late = max(said, self._stalls[0][1] if self._stalls else 0.0)
        return late if late >= MIN_LATE_S else 0.0
