"""Many who wait for the same news."""

import asyncio

import pytest

from xain_coordinator.driver.broadcast import WOKEN_PER_TURN, Wave


async def waiting(wave: Wave, heard: list[int], number: int) -> list[asyncio.Task[None]]:
    async def wait(i: int) -> None:
        await wave.wait()
        heard.append(i)

    tasks = [asyncio.create_task(wait(i)) for i in range(number)]
    await asyncio.sleep(0)  # one turn of the event loop: all wait
    return tasks


async def test_all_hear_in_their_order_and_others_get_their_turn_between():
    wave, heard, seen = Wave(), [], []
    tasks = await waiting(wave, heard, 5 * WOKEN_PER_TURN + 1)
    wave.wake()
    while not all(task.done() for task in tasks):
        before = len(heard)
        await asyncio.sleep(0)  # one turn of the event loop
        seen.append(len(heard) - before)
    assert heard == list(range(len(tasks)))
    assert max(seen) <= WOKEN_PER_TURN


async def test_who_waits_again_hears_the_next_wave_only():
    wave, heard = Wave(), []
    first = await waiting(wave, heard, 1)
    wave.wake()
    await asyncio.gather(*first)
    second = await waiting(wave, heard, 1)
    for _ in range(5):
        await asyncio.sleep(0)  # one turn of the event loop
    assert heard == [0]
    wave.wake()
    await asyncio.gather(*second)
    assert heard == [0, 0]


async def test_who_gives_up_is_forgotten():
    """A client may open one watch after another while nothing happens."""
    wave = Wave()
    tasks = await waiting(wave, [], 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not wave._waiting


@pytest.mark.parametrize("when", ["before its turn", "in its turn"])
async def test_who_gives_up_while_the_wave_runs_holds_up_nobody(when):
    wave, heard = Wave(), []
    tasks = await waiting(wave, heard, 3 * WOKEN_PER_TURN)
    if when == "before its turn":
        wave.wake()
        tasks[-2].cancel()
    else:
        tasks[-2].cancel()
        wave.wake()
    await asyncio.wait(tasks)
    assert len(heard) == len(tasks) - 1
