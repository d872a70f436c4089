"""Broadcast to thousands of waiters that lets the event loop run between batches of them."""

import asyncio
from collections.abc import Iterator

# Each waiter works for a fraction of a millisecond when it wakes.
WOKEN_PER_ITERATION = 16


class Broadcast:
    """An asyncio Event for thousands of waiters, which it wakes in the order in which they came:
    WOKEN_PER_ITERATION in each iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Wait for the next wake(). Several wakes before the waiter runs wake it once."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            await woken
        finally:
            self._waiting.pop(woken, None)  # a cancelled waiter must not be kept for ever

    def wake(self) -> None:
        """Wake everything that waits now."""
        if self._waiting:
            waiting, self._waiting = iter(self._waiting), {}
            self._wake_some(waiting)

    def _wake_some(self, waiting: Iterator[asyncio.Future[None]]) -> None:
        """Wake the next WOKEN_PER_ITERATION waiters, and the rest in later iterations of the event
        loop."""
        for _ in range(WOKEN_PER_ITERATION):
            woken = next(waiting, None)
            if woken is None:
                return
            if not woken.done():
                woken.set_result(None)
        asyncio.get_running_loop().call_soon(self._wake_some, waiting)
