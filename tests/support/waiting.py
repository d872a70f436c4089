"""Waits for a condition, each of which ends when the condition holds."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 240.0  # for what takes seconds, on a machine that has other things to do
LOOK_S = 0.01

Found = TypeVar("Found")


async def until(found: Callable[[], Found]) -> Found:
    """Wait for a condition. Returns what the call has returned."""
    async with asyncio.timeout(PATIENCE_S):
        while not (result := found()):  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(LOOK_S)  # a poll, not a race: it ends when it is so
    return result


def wait_until(found: Callable[[], object]) -> None:
    """Wait for a condition in a test without an event loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s"
        time.sleep(LOOK_S)  # a poll, not a race: it ends when it is so
