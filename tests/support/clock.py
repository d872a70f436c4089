"""Session time that a test moves."""


class HeldClock:
    """A clock that stands still unless it is moved."""

    def __init__(self, time_s: float = 0.0) -> None:
        self.time_s = time_s

    def now(self) -> float:
        return self.time_s

    def wall_ns(self) -> int:
        return 0
