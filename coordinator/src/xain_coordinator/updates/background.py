"""Background work in the store, for which no call waits."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from xain_coordinator.ports import StoreError, WeightsStore
from xain_foundation.logs.logger import get_logger
from xain_foundation.threads import run_to_end

log = get_logger(__name__)

MAX_DELETIONS = 1000  # that wait
GROUP_SIZE = 64  # keys deleted at once


class Background:
    """Queue of background work, done in one thread at a time, so that a slow store takes one of the
    threads that commits and aggregations need. Failures are logged and harmless. Used from one
    event loop."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._deletions: deque[str] = deque()  # keys
        self._waiting: deque[Callable[[], None]] = deque()
        self._working: asyncio.Task[None] | None = None

    def delete(self, key: str) -> None:
        """Queue the deletion of an object of a round. When MAX_DELETIONS wait, the object stays
        until its round is dropped."""
        if len(self._deletions) < MAX_DELETIONS:
            self._deletions.append(key)
            self._go_on()

    def do(self, work: Callable[[], None]) -> None:
        """Queue work, which comes so seldom that it needs no bound here."""
        self._waiting.append(work)
        self._go_on()

    async def close(self) -> None:
        """Wait until all queued work is done."""
        self._go_on()
        while self._working is not None and not self._working.done():
            await asyncio.wait([self._working])

    def _go_on(self) -> None:
        """Start to work through the queues, unless that is under way."""
        if (self._waiting or self._deletions) and (self._working is None or self._working.done()):
            self._working = asyncio.create_task(self._work(), name="background")

    async def _work(self) -> None:
        """Work through the queues, one piece in a thread at a time; objects are deleted GROUP_SIZE
        at once, after other work. Stops if there is no thread."""
        while self._waiting or self._deletions:
            if not self._waiting:
                size = min(GROUP_SIZE, len(self._deletions))
                keys = [self._deletions.popleft() for _ in range(size)]
                self._waiting.append(partial(self._store.delete, *keys))
            work = self._waiting.popleft()
            try:
                await run_to_end(_attempt, work)
            except RuntimeError as error:  # the system has no thread now: the next call tries again
                self._waiting.appendleft(work)
                log.warning("no_thread", error=str(error))
                return


def _attempt(work: Callable[[], None]) -> None:
    """Run work; log its errors instead of raising them."""
    try:
        work()
    except StoreError as error:
        log.debug("background_work_failed", error=str(error))
    except Exception as error:
        # A defect of ours costs room in the store, and no round.
        log.exception("background_work_crashed", error=str(error))
