"""Rate limit of calls: a number a second, a burst at once, and reserved times for all others.

The virtual scheduling form of the generic cell rate algorithm (ITU-T I.371, annex A), which needs
one number: the time at which the next call is due if all calls keep to the rate. To it we add
reservations: a call that comes too early is told its time, which the limit counts at once. So
callers that wait come back one after another instead of together, and none waits a second time.
"""

# A reservation outlives its time by so much: XAIN's participants ask every five seconds, whatever
# they are told, and must find theirs.
RESERVED_S = 15.0


class RateLimit:
    """Pure: the time is an argument, in seconds, and never goes back.

    per_s: calls admitted each second. burst: calls admitted at once, after some calm.
    max_waiting: reservations at a time. A further caller is told when the last of them is due.

    In any t seconds at most burst + per_s * t calls are admitted, and those that come late to their
    reserved times, at most per_s * RESERVED_S.
    """

    def __init__(self, per_s: float, burst: int, max_waiting: int) -> None:
        self._interval_s = 1.0 / per_s
        self._tolerance_s = (burst - 1) / per_s
        self._max_waiting = max_waiting
        self._due_at = float("-inf")
        self._reserved: dict[str, float] = {}  # time by caller, the earliest first

    def wait_s(self, name: str, now: float) -> float:
        """Seconds that the call of this caller has to wait; 0: it is admitted now. A caller that
        asks before its time keeps its reservation, and gets no second one."""
        self._drop_overdue(now)
        admitted_at = self._reserved.get(name)
        if admitted_at is None:
            due_at = max(self._due_at, now)
            admitted_at = due_at - self._tolerance_s
            if admitted_at > now:
                if len(self._reserved) >= self._max_waiting:
                    return admitted_at - now
                self._reserved[name] = admitted_at
            self._due_at = due_at + self._interval_s
        elif admitted_at <= now:
            del self._reserved[name]
        return max(0.0, admitted_at - now)

    def _drop_overdue(self, now: float) -> None:
        """Drop reservations whose callers have not come within RESERVED_S of their time."""
        while self._reserved:
            name, admitted_at = next(iter(self._reserved.items()))
            if admitted_at + RESERVED_S >= now:
                return
            del self._reserved[name]
