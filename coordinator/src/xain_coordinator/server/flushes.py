"""Small batches of many uploads, written together.

To hand one to a thread costs several times what writing it does. So those that come within a turn
of the event loop, or while all the threads are busy, are pieces of work for the threads that are
free: one for each of them, so that a store that keeps one waiting does not keep all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from xain_coordinator.server.reception import Reception

NUM_AT_A_TIME = 4  # a store far away may keep each of them waiting


@dataclass(frozen=True, slots=True)
class _Flush:
    reception: Reception
    batch: list[bytes]
    written: asyncio.Future[None]


class Flushes:
    """Used from one event loop. Each upload has one batch here at most, so there are no more."""

    def __init__(self) -> None:
        self._waiting: list[_Flush] = []
        self._num_busy = 0

    def add(self, reception: Reception, batch: list[bytes]) -> asyncio.Future[None]:
        """Flush a batch into a reception. Done when that is; has the exception that it raises."""
        loop = asyncio.get_running_loop()
        flush = _Flush(reception, batch, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._begin)
        self._waiting.append(flush)
        return flush.written

    def _begin(self) -> None:
        while self._waiting and self._num_busy < NUM_AT_A_TIME:
            num_free = NUM_AT_A_TIME - self._num_busy
            size = -(-len(self._waiting) // num_free)
            group, self._waiting = self._waiting[:size], self._waiting[size:]
            self._work_on(group)

    def _work_on(self, group: list[_Flush]) -> None:
        try:
            working = asyncio.get_running_loop().run_in_executor(None, _flush_all, group)
        except RuntimeError as error:  # the process is ending
            _tell(group, [error] * len(group))
            return
        self._num_busy += 1
        working.add_done_callback(partial(self._ended, group))

    def _ended(
        self, group: list[_Flush], working: "asyncio.Future[list[Exception | None]]"
    ) -> None:
        self._num_busy -= 1
        self._begin()
        failure = None if working.cancelled() else working.exception()
        if working.cancelled() or failure is not None:
            # Of which nobody knows what was written. It is not passed on as it is: one that ends a
            # thread would end the event loop.
            error = RuntimeError("the batches were not written")
            error.__cause__ = failure
            _tell(group, [error] * len(group))
        else:
            _tell(group, working.result())


def _flush_all(group: list[_Flush]) -> list[Exception | None]:
    return [_flush(one) for one in group]


def _flush(one: _Flush) -> Exception | None:
    try:
        one.reception.flush(one.batch)
    except Exception as error:  # whatever it is, it is that of one upload, which hears of it
        return error
    return None


def _tell(group: list[_Flush], errors: Sequence[Exception | None]) -> None:
    for one, error in zip(group, errors, strict=True):
        if one.written.done():
            continue  # its event loop is ending
        if error is None:
            one.written.set_result(None)
        else:
            one.written.set_exception(error)
