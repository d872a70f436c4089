"""Rate-limited log lines, for events that any client can cause as often as it likes."""

import time
from collections.abc import Callable
from typing import Any

EVERY_S = 10.0


class RateLimitedLog:
    """At most `burst` log lines of an event in EVERY_S. Each has the number of events since the
    last line.

    write: a method of a logger.
    """

    def __init__(self, write: Callable[..., Any], event: str, burst: int = 1) -> None:
        self._write = write
        self._event = event
        self._burst = burst
        self._num = 0
        self._num_lines = 0
        self._ends_at = 0.0

    def __call__(self, **fields: object) -> None:
        """Count an event, and write a line if the limit allows. fields: of this event."""
        self._num += 1
        now = time.monotonic()
        if now >= self._ends_at:
            self._num_lines, self._ends_at = 0, now + EVERY_S
        if self._num_lines < self._burst:
            self._write(self._event, num=self._num, **fields)
            self._num, self._num_lines = 0, self._num_lines + 1
