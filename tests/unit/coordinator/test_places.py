"""Places for chunks in memory: how many, whose turn it is, and lines that are slow or dead."""

import asyncio

import pytest

from xain_coordinator.server import places
from xain_coordinator.server.places import Line, Places


async def turns(number: int = 10) -> None:
    """Whatever can go on has done so."""
    for _ in range(number):
        await asyncio.sleep(0)


def a_line(them: Places) -> Line:
    return Line(them, on_stalled=lambda: None)


async def test_no_more_than_there_are_places() -> None:
    """However many ask, and they get them in the order in which they asked."""
    them, order, held = Places(3), list[int](), list[places.Place]()

    async def take(number: int) -> None:
        held.append(await a_line(them).take())
        order.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(20)]
    for given_back in range(18):
        await turns()
        assert order == list(range(3 + given_back)) or given_back == 17
        held[given_back].give_back()
        held[given_back].give_back()  # of no effect
    await asyncio.gather(*tasks)
    assert order == list(range(20))


async def test_whoever_goes_away_takes_no_place_along() -> None:
    """Neither one that waits, nor one whose turn has come just then."""
    them = Places(1)
    first = await a_line(them).take()
    waiting = [asyncio.create_task(a_line(them).take()) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    first.give_back()  # to the second, which does not know it yet
    waiting[1].cancel()
    await turns()
    assert waiting[2].done()
    waiting[2].result().give_back()
    assert them.fast.try_enter()
    assert not them.fast.try_enter()


async def test_a_slow_line_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunk moves to a place for slow lines, and its next one begins there."""
    monkeypatch.setattr(places, "SLOW_S", 0.01)
    them = Places(1, 1)
    slow, other = a_line(them), a_line(them)
    place = await slow.take()
    slow.begin(place)
    mine = await asyncio.wait_for(other.take(), 30)
    assert slow.is_slow
    assert not them.slow.try_enter()
    slow.end(1)
    place.give_back()
    place = await slow.take()
    assert not them.slow.try_enter()
    mine.give_back()
    assert them.fast.try_enter()


async def test_a_line_is_fast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that the last chunk took, in however many pieces it came."""
    line = a_line(Places(1))
    line.is_slow = True
    for at_once, is_slow in ((places.CHUNK_BYTES - 1, True), (1, False)):
        line.begin(None)
        line.end(at_once)
        assert line.is_slow == is_slow
    monkeypatch.setattr(places, "SLOW_S", -1.0)  # whatever it takes
    line.begin(None)
    line.end(places.CHUNK_BYTES)
    assert line.is_slow


async def test_a_dead_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SLOW_S", 0.01)
    monkeypatch.setattr(places, "STALLED_S", 0.05)
    ended = asyncio.Event()
    line = Line(Places(1), on_stalled=ended.set)
    line.begin(await line.take())
    await asyncio.wait_for(ended.wait(), 30)
