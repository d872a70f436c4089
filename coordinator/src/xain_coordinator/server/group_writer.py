"""Small objects on their way to the store, in groups.

While one group is being written, the next gathers. A thread for each of them would cost a store its
chance to do them together, and the event loop its time: every system call of such a thread gives up
the interpreter and then waits for it again.
"""

import asyncio

from xain_coordinator.ports import WeightsStore
from xain_coordinator.threads import run_to_end, wait_to_end

GROUP_SIZE = 64  # bounds what one failure hits


class GroupWriter:
    """Writes to one store, from one event loop."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._waiting: list[tuple[str, bytes, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, key: str, data: bytes) -> None:
        """Write one object in the place of what its key holds. Durable on return.

        A caller that is cancelled hears of it only when the writing has ended. Of two that write
        under one key at a time, which the caller prevents, the later one counts.
        Raises StoreUnavailable.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, data, written))
        if self._task is None:
            self._task = asyncio.ensure_future(self._write())
        await wait_to_end(written)

    async def _write(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP_SIZE], self._waiting[GROUP_SIZE:]
                error: Exception | None = None
                try:
                    await run_to_end(self._store.put, {key: data for key, data, _ in group})
                except asyncio.CancelledError:  # the event loop is being closed: nobody may hang
                    for _, _, written in (*group, *self._waiting):
                        written.cancel()
                    raise
                except Exception as raised:  # whatever it is, it is its callers' to hear
                    error = raised
                for _, _, written in group:
                    if error is None:
                        written.set_result(None)
                    else:
                        written.set_exception(error)
        finally:
            self._task = None
