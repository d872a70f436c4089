"""Large pieces of work come one at a time, and the event loop turns in between."""

import asyncio
from itertools import pairwise

import pytest

from xain_coordinator.server.fair_queue import Turns
from xain_coordinator.stores.reading import CHUNK_BYTES


async def test_between_two_the_loop_turns():
    """However many wait; and they pass in the order in which they came."""
    turns = Turns(between=3)
    passed: list[tuple[str, int]] = []
    number = 0

    async def pass_by(name: str) -> None:
        await turns.next(CHUNK_BYTES)
        passed.append((name, number))

    tasks = [asyncio.ensure_future(pass_by(name)) for name in "abcd"]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)  # one turn of the event loop
        number += 1
    assert [name for name, _ in passed] == list("abcd")
    assert all(later - earlier > 3 for earlier, later in pairwise(at for _, at in passed))


async def passages(
    turns: Turns, num_chunks: int, num_bytes: int = CHUNK_BYTES, make_way_at: range = range(0)
) -> list[int]:
    """At which turn of the event loop each chunk has passed, if something comes at these."""
    passed: list[int] = []
    number = 0

    async def pass_by() -> None:
        await turns.next(num_bytes)
        passed.append(number)

    tasks = [asyncio.ensure_future(pass_by()) for _ in range(num_chunks)]
    while not all(task.done() for task in tasks):
        if number in make_way_at:
            turns.make_way()
        await asyncio.sleep(0)  # one turn of the event loop
        number += 1
    return passed


async def test_small_chunks_wait_in_proportion():
    """A quarter waits a quarter as long, and however small they are, the loop turns in between."""
    whole, quarter, least = [
        await passages(Turns(between=8), 4, num_bytes)
        for num_bytes in (CHUNK_BYTES, CHUNK_BYTES // 4, 1)
    ]
    assert all(later - earlier > 8 for earlier, later in pairwise(whole))
    assert all(2 < later - earlier <= 4 for earlier, later in pairwise(quarter))
    assert all(later > earlier for earlier, later in pairwise(least))


async def turns_under_calls(num: int, num_bytes: int) -> int:
    """Until so many chunks have passed, one after the other, while something always comes."""
    turns = Turns(between=8, most=80)
    number = 0

    async def pass_by() -> None:
        for _ in range(num):
            await turns.next(num_bytes)

    passing = asyncio.ensure_future(pass_by())
    while not passing.done():
        turns.make_way()
        await asyncio.sleep(0)  # one turn of the event loop
        number += 1
    return number


@pytest.mark.parametrize("parts", [4, 16, 32])
async def test_small_chunks_make_way_in_proportion(parts: int):
    """The same bytes take about as long, in however many pieces they come."""
    whole = await turns_under_calls(4, CHUNK_BYTES)
    assert whole >= 3 * 80
    assert 0.5 * whole < await turns_under_calls(4 * parts, CHUNK_BYTES // parts) < 2 * whole


async def test_chunks_make_way():
    """While something comes again and again, no chunk passes: but at last they do."""
    first, last = await passages(Turns(between=4, most=100), 2, make_way_at=range(2, 20))
    assert first < 2
    assert 20 + 4 <= last < 20 + 8
    first, last = await passages(Turns(between=4, most=50), 2, make_way_at=range(2, 10_000))
    assert 50 <= last - first < 60


async def test_after_a_rest_nobody_waits():
    """Whoever is alone passes at once."""
    turns = Turns()
    for _ in range(2):
        passing = asyncio.ensure_future(turns.next(CHUNK_BYTES))
        for _ in range(2):
            await asyncio.sleep(0)  # one turn of the event loop
        assert passing.done()
        for _ in range(50):
            await asyncio.sleep(0)  # and many more


async def test_who_gives_up_is_passed_over():
    """It keeps nobody back."""
    turns = Turns()
    first, gone, last = (asyncio.ensure_future(turns.next(CHUNK_BYTES)) for _ in range(3))
    await asyncio.sleep(0)  # one turn of the event loop: all wait
    gone.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(first, last)
    assert gone.cancelled()
