"""Broadcast: waiters wake in order, in batches, and a cancelled one is removed."""

import asyncio

import pytest

from xain_coordinator.driver.broadcast import WOKEN_PER_ITERATION, Broadcast


async def waiting(broadcast: Broadcast, heard: list[int], number: int) -> list[asyncio.Task[None]]:
    async def wait(i: int) -> None:
        await broadcast.wait()
        heard.append(i)

    tasks = [asyncio.create_task(wait(i)) for i in range(number)]
    await asyncio.sleep(0)  # one iteration of the event loop: all wait
    return tasks


async def test_waiters_wake_in_order_and_the_event_loop_runs_between_batches():
    broadcast, heard, seen = Broadcast(), [], []
    tasks = await waiting(broadcast, heard, 5 * WOKEN_PER_ITERATION + 1)
    broadcast.wake()
    while not all(task.done() for task in tasks):
        before = len(heard)
        await asyncio.sleep(0)  # one iteration of the event loop
        seen.append(len(heard) - before)
    assert heard == list(range(len(tasks)))
    assert max(seen) <= WOKEN_PER_ITERATION


async def test_waiter_that_waits_again_is_woken_by_the_next_broadcast_only():
    broadcast, heard = Broadcast(), []
    first = await waiting(broadcast, heard, 1)
    broadcast.wake()
    await asyncio.gather(*first)
    second = await waiting(broadcast, heard, 1)
    for _ in range(5):
        await asyncio.sleep(0)  # one iteration of the event loop
    assert heard == [0]
    broadcast.wake()
    await asyncio.gather(*second)
    assert heard == [0, 0]


async def test_cancelled_waiter_is_removed():
    """A client may open one watch after another while nothing happens."""
    broadcast = Broadcast()
    tasks = await waiting(broadcast, [], 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not broadcast._waiting


@pytest.mark.parametrize("when", ["after the wake", "before the wake"])
async def test_cancelled_waiter_does_not_delay_the_others(when):
    broadcast, heard = Broadcast(), []
    tasks = await waiting(broadcast, heard, 3 * WOKEN_PER_ITERATION)
    if when == "after the wake":
        broadcast.wake()
        tasks[-2].cancel()
    else:
        tasks[-2].cancel()
        broadcast.wake()
    await asyncio.wait(tasks)
    assert len(heard) == len(tasks) - 1
