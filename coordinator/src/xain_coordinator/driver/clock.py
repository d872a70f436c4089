"""Session time."""

import time


class SessionClock:
    """Seconds of a session's life that this process has seen, begun where the last one stopped.

    The time between death and restart does not count, and steps of the wall clock do not matter.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._offset = start - time.monotonic()

    def now(self) -> float:
        """Session time in seconds."""
        return time.monotonic() + self._offset

    def wall_ns(self) -> int:
        """Time of the wall clock, in nanoseconds since 1970."""
        return time.time_ns()
