"""Reading back what lies in the store: updates that nobody has seen come, and parts of them.

Each reading may be of gigabytes. It takes a thread, a buffer and the disk's time, which commits and
aggregations need as well. So there are few of them at a time, whatever they are for.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from xain_coordinator.core.errors import Unavailable

NUM_READINGS = 4  # more would only share the same disk, or the same line


class Readings:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(NUM_READINGS)
        self._has_ended = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn to read. Its holder waits for threads and for nothing else: neither for another
        turn nor for a lock, since callers that wait for a turn may hold one.

        Raises Unavailable if the coordinator stops before.
        """
        async with self._free:
            if self._has_ended:
                raise Unavailable("the coordinator is stopping; ask the next one")
            yield

    def end(self) -> None:
        """No other reading begins."""
        self._has_ended = True
