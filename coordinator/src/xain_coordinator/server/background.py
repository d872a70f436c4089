"""Work in the store that nobody waits for."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

from xain_coordinator.ports import StoreError, WeightsStore

MAX_DELETIONS = 1000  # that wait for their turn


class Background:
    """One thing at a time, in the order in which it comes: of the threads that commits and
    aggregations wait for, a slow store takes one. Of no harm if it fails. Used from one event loop.
    """

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_at_work = False

    def delete(self, key: str) -> None:
        """An object of a round. When too many wait it stays until its round is dropped."""
        if len(self._waiting) < MAX_DELETIONS:
            self.do(partial(self._store.delete, key))

    def do(self, work: Callable[[], None]) -> None:
        """What comes so seldom that it has a bound of its own."""
        self._waiting.append(work)
        if not self._is_at_work:
            self._is_at_work = True
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            self._is_at_work = False
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError):  # the process is ending
            attempt = loop.run_in_executor(None, _attempt, self._waiting.popleft())
            attempt.add_done_callback(lambda _: self._begin_next())


def _attempt(work: Callable[[], None]) -> None:
    with contextlib.suppress(StoreError):
        work()
