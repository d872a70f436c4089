"""Telling many at once, without making everybody else wait until all of them have heard."""

import asyncio
from collections.abc import Iterator

# Each waiter works for a fraction of a millisecond when it wakes.
WOKEN_PER_TURN = 16


class Wave:
    """An asyncio Event for thousands of waiters: some are woken at a time, in the order in which
    they came, and between two turns the event loop does its other work."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Wait for the next wake(). Several wakes before this caller's turn wake it once."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            await woken
        finally:
            self._waiting.pop(woken, None)  # who gives up must not be kept for ever

    def wake(self) -> None:
        """All who wait now."""
        if self._waiting:
            waiting, self._waiting = iter(self._waiting), {}
            self._wake_some(waiting)

    def _wake_some(self, waiting: Iterator[asyncio.Future[None]]) -> None:
        for _ in range(WOKEN_PER_TURN):
            woken = next(waiting, None)
            if woken is None:
                return
            if not woken.done():
                woken.set_result(None)
        asyncio.get_running_loop().call_soon(self._wake_some, waiting)
