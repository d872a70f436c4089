"""Log lines about events that any client can cause as often as it likes."""

import time
from collections.abc import Callable
from typing import Any

EVERY_S = 10.0


class RareLine:
    """One log line in EVERY_S at most, which says how many events there were since the last one.

    write: a method of a logger.
    """

    def __init__(self, write: Callable[..., Any], event: str) -> None:
        self._write = write
        self._event = event
        self._num = 0
        self._next_at = 0.0

    def __call__(self, **fields: object) -> None:
        """Count an event. fields: of this one, for the line."""
        self._num += 1
        now = time.monotonic()
        if now >= self._next_at:
            self._write(self._event, num=self._num, **fields)
            self._num, self._next_at = 0, now + EVERY_S
