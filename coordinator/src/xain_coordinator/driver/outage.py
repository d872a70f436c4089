"""Outages of the weights store in the log: a warning when one begins, a line when it is over."""

import asyncio
from collections.abc import Callable
from math import inf

from xain_foundation.logs.logger import get_logger

log = get_logger(__name__)

# Between two warnings. A disk that is almost full takes some updates and refuses others.
PAUSE_S = 30.0


class Outage:
    """An outage of the store and its cause. Calls and work share it, in one event loop.

    is_under_way: a call or work has failed, and has not succeeded since.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """now: seconds; by default the time of the event loop."""
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self.is_under_way = False
        self._failing: set[str] = set()
        self._num_refused = 0
        self._began_at = 0.0
        self._is_logged = False
        self._log_at = -inf

    def note_failure(self, what: str, error: Exception, **fields: object) -> None:
        """Note that the store was away for a call or for work. what: the method, or the name of the
        work. fields: for the log line."""
        now = self._now()
        if not self._failing:
            self._num_refused, self._began_at = 0, now
        self._failing.add(what)
        self.is_under_way = True
        self._num_refused += 1
        if not self._is_logged and now >= self._log_at:
            self._is_logged, self._log_at = True, now + PAUSE_S
            log.warning("store_unavailable", error=str(error), **fields)

    def note_success(self, what: str) -> None:
        """Note that a call or work has succeeded. The outage is over if the same call or work
        failed before: a full disk can still be read."""
        if what not in self._failing:
            return
        self._failing.clear()
        self.is_under_way = False
        if self._is_logged:
            self._is_logged = False
            log.info(
                "store_available",
                duration_s=round(self._now() - self._began_at, 1),
                num_refused=self._num_refused,
            )
