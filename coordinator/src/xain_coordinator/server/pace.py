"""Pace of calls: a number a second, some more at once, and a queue for all others.

The virtual scheduling form of the generic cell rate algorithm (ITU-T I.371, annex A), which needs
one number, the time at which the next one is due if all keep to the pace. To it we add the queue:
whoever comes too early is told when its turn is, and the pace counts it there. So those who are
refused come back one after another instead of together, and none of them is refused again.
"""

# How long a place is kept for one who is late: somebody who waits as long as it likes, whatever it
# is told, does not lose it. XAIN's participants ask every five seconds.
KEPT_S = 15.0


class Pace:
    """Pure: the time is an argument, in seconds, and never goes back.

    per_s: how many are let in each second. burst: how many at once, after some calm.
    max_waiting: places in the queue. Whoever finds none is told when the queue will have passed.

    In any t seconds at most burst + per_s * t are let in, and those who come late to their places,
    of which there are per_s * KEPT_S at most.
    """

    def __init__(self, per_s: float, burst: int, max_waiting: int) -> None:
        self._interval_s = 1.0 / per_s
        self._tolerance_s = (burst - 1) / per_s
        self._max_waiting = max_waiting
        self._due_at = float("-inf")
        self._places: dict[str, float] = {}  # whose turn is when, the earliest first

    def wait_s(self, name: str, now: float) -> float:
        """Seconds that a call has to wait; 0: it is let in now.

        One who asks before its turn keeps its place, so nobody has two.
        """
        self._forget_the_late(now)
        turn_at = self._places.get(name)
        if turn_at is None:
            due_at = max(self._due_at, now)
            turn_at = due_at - self._tolerance_s
            if turn_at > now:
                if len(self._places) >= self._max_waiting:
                    return turn_at - now
                self._places[name] = turn_at
            self._due_at = due_at + self._interval_s
        elif turn_at <= now:
            del self._places[name]
        return max(0.0, turn_at - now)

    def _forget_the_late(self, now: float) -> None:
        while self._places:
            name, turn_at = next(iter(self._places.items()))
            if turn_at + KEPT_S >= now:
                return
            del self._places[name]
