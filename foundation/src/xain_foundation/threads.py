"""Blocking work in threads, which a cancelled caller waits for to its end."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """asyncio.to_thread for work that must not go on after its caller was cancelled.

    A thread cannot be cancelled. When the caller is (its client has gone away), to_thread would
    return at once and leave the work going on without the locks that the caller held. Here the
    caller hears of its cancellation only when the work has ended.
    """
    loop = asyncio.get_running_loop()
    return await wait_to_end(loop.run_in_executor(None, partial(work, *args, **kwargs)))


async def wait_to_end(running: asyncio.Future[T]) -> T:
    """Wait for work that is under way, to its end even if the caller is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # no caller is left to hear it
        raise cancelled
    try:
        return running.result()
    finally:
        del running  # a failure holds this frame; they must not hold each other


def num_processors() -> int:
    """Number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
