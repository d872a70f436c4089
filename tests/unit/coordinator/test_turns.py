"""Large pieces of work come one at a time, and the event loop turns in between."""

import asyncio
from itertools import pairwise

from xain_coordinator.turns import Turns


async def test_between_two_the_loop_turns():
    """However many wait; and they pass in the order in which they came."""
    turns = Turns(between=3)
    passed: list[tuple[str, int]] = []
    number = 0

    async def pass_by(name: str) -> None:
        await turns.next()
        passed.append((name, number))

    tasks = [asyncio.ensure_future(pass_by(name)) for name in "abcd"]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)  # one turn of the event loop
        number += 1
    assert [name for name, _ in passed] == list("abcd")
    assert all(later - earlier > 3 for earlier, later in pairwise(at for _, at in passed))


async def test_after_a_rest_nobody_waits():
    """Whoever is alone passes at once."""
    turns = Turns()
    for _ in range(2):
        passing = asyncio.ensure_future(turns.next())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert passing.done()
        for _ in range(50):
            await asyncio.sleep(0)


async def test_who_gives_up_is_passed_over():
    """It keeps nobody back."""
    turns = Turns()
    first, gone, last = (asyncio.ensure_future(turns.next()) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(first, last)
    assert gone.cancelled()
