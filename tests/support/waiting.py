"""Waits for a condition, each of which ends when the condition holds."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PATIENCE_S = 240.0  # for what takes seconds, on a machine that has other things to do
LOOK_S = 0.01

Found = TypeVar("Found")


async def until(found: Callable[[], Found | Awaitable[Found]]) -> Found:
    """Wait for a condition, also one that is asked for. Returns what the call has returned."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            result = found()
            if isinstance(result, Awaitable):
                result = await result
            if result:
                return result
            await asyncio.sleep(LOOK_S)  # a poll, not a race: it ends when it is so


def wait_until(found: Callable[[], object]) -> None:
    """Wait for a condition in a test without an event loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s"
        time.sleep(LOOK_S)  # a poll, not a race: it ends when it is so


@contextmanager
def beside(*calls: Callable[[], object]) -> Iterator[None]:
    """Run calls in threads of their own, which have ended when the body has."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
