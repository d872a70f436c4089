"""Places for chunks in memory: how many, whose turn it is, and lines that are slow or dead."""

import asyncio
from asyncio import Event
from collections.abc import Callable
from typing import Any

import pytest

from xain_coordinator.core.errors import LineSlow, Unavailable
from xain_coordinator.server import places
from xain_coordinator.server.places import Line, Place, Places


async def turns(number: int = 10) -> None:
    """Whatever can go on has done so."""
    for _ in range(number):
        await asyncio.sleep(0)  # one turn of the event loop


def a_line(them: Places) -> Line:
    return Line(them, "go on")


async def test_no_more_than_there_are_places() -> None:
    """However many ask, and they get them in the order in which they asked."""
    them, order, held = Places(3, 1), list[int](), list[Place]()

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
    them = Places(1, 1)
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


class Clock:
    """What a line asks of its loop, on time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        handle = asyncio.TimerHandle(when, callback, args, loop)
        self._timers.append((when, handle))
        return handle

    async def go_on(self, seconds: float) -> None:
        """To the next timer and the next one, as a loop would, and to the end of the time."""
        await turns()
        until = self.now + seconds
        while due := [timer for timer in self._timers if timer[0] <= until]:
            timer = min(due, key=lambda one: one[0])
            self._timers.remove(timer)
            self.now = max(self.now, timer[0])
            if not timer[1].cancelled():
                timer[1]._run()
            await turns()
        self.now = until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of all lines."""
    clock = Clock()
    init = Line.__init__

    def init_with_clock(self: Line, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        monkeypatch.setattr(self, "_loop", clock)

    monkeypatch.setattr(Line, "__init__", init_with_clock)
    return clock


def passes(line: Line, place: Place | None, num_bytes: int) -> tuple[asyncio.Task[None], Event]:
    """A chunk that is through when the event is set."""
    through = Event()

    async def wait() -> None:
        with line.passing(place):
            await through.wait()
            line.count(num_bytes)

    return asyncio.create_task(wait()), through


async def test_a_slow_line_holds_up_nobody(clock: Clock) -> None:
    """Its chunk moves to a place for slow lines, and its next one begins there."""
    them = Places(1, 1)
    slow, other = a_line(them), a_line(them)
    place = await slow.take()
    passing, through = passes(slow, place, 1)
    taking = asyncio.create_task(other.take())
    await clock.go_on(places.SLOW_S - 0.01)
    assert not taking.done()
    await clock.go_on(0.02)
    mine = await taking
    assert slow.is_slow
    assert not them.slow.try_enter()
    through.set()
    await passing
    place.give_back()
    place = await slow.take()
    assert not them.slow.try_enter()
    mine.give_back()
    assert them.fast.try_enter()


async def test_a_slow_line_ends_where_no_place_is_free_for_it(clock: Clock) -> None:
    """It keeps no place of the others while it waits."""
    them = Places(1, 1)
    others, slow = a_line(them), a_line(them)
    others.is_slow = True
    await others.take()
    place = await slow.take()
    passing, _ = passes(slow, place, 1)
    await clock.go_on(places.SLOW_S + 0.01)
    with pytest.raises(LineSlow, match=r"slow.*; go on"):
        await passing
    place.give_back()
    assert them.fast.try_enter()


async def test_empty_messages_keep_no_place_of_the_fast(clock: Clock) -> None:
    """A line that is found slow when one of them is through moves with the next one."""
    them = Places(1, 1)
    line = a_line(them)
    place = await line.take()
    passing, through = passes(line, place, 0)
    await turns()
    clock.now += places.SLOW_S + 0.5 * places.LATE_S  # and the loop has not looked yet
    through.set()
    await passing
    assert line.is_slow
    assert not them.fast.try_enter()
    passing, through = passes(line, place, 0)
    await clock.go_on(0.0)
    assert them.fast.try_enter()
    through.set()
    await passing


@pytest.mark.parametrize("is_through", [True, False])
async def test_a_loop_that_is_late_is_no_slow_line(clock: Clock, is_through: bool) -> None:
    """What has come while it was busy counts as there, whether or not it looks before."""
    them = Places(1, 0)
    line = a_line(them)
    place = await line.take()
    passing, through = passes(line, place, places.CHUNK_BYTES)
    await turns()
    clock.now += 50 * places.SLOW_S
    if is_through:
        through.set()
    await clock.go_on(0.0)  # it looks now
    through.set()
    await passing
    assert not line.is_slow
    passing, _ = passes(line, place, 1)
    await turns()
    clock.now += 50 * places.SLOW_S
    await clock.go_on(places.LATE_S)
    with pytest.raises(LineSlow):  # nothing has come, so it is
        await passing


async def test_a_line_is_fast_again(clock: Clock) -> None:
    """By the time that the last chunk took, in however many pieces it came."""
    line = Line(Places(1, 1), "", is_slow=True)
    for seconds, num_bytes, is_slow in (
        (0.9 * places.SLOW_S, places.CHUNK_BYTES - 1, True),
        (0.0, 1, False),
        (1.1 * places.SLOW_S, places.CHUNK_BYTES, True),
    ):
        passing, through = passes(line, None, num_bytes)
        await clock.go_on(seconds)
        through.set()
        await passing
        assert line.is_slow == is_slow


@pytest.mark.parametrize("has_place", [True, False])
async def test_a_dead_line_ends(clock: Clock, has_place: bool) -> None:
    """Also one whose chunk is so small that it has no place: it holds the chunk all the same."""
    line = a_line(Places(1, 1))
    dead, _ = passes(line, await line.take() if has_place else None, 1)
    await clock.go_on(places.STALLED_S - 1)
    assert not dead.done()
    await clock.go_on(2)
    with pytest.raises(LineSlow, match=r"come through.*; go on"):
        await dead


async def test_a_small_chunk_takes_as_long_as_it_needs(clock: Clock) -> None:
    """It takes no place, however slow its line is and however many others are."""
    them = Places(1, 0)
    line = a_line(them)
    small, through = passes(line, None, places.SMALL_BYTES)
    await clock.go_on(20 * places.SLOW_S)
    through.set()
    await small
    assert line.is_slow
    assert them.fast.try_enter()


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds no place in time is told so, and is out of the queue."""
    monkeypatch.setattr(places, "LONGEST_WAIT_S", 0.0)
    them = Places(1, 1)
    first = await a_line(them).take()
    with pytest.raises(Unavailable, match=r"no place.*; go on"):
        await a_line(them).take()
    assert not them.fast.is_wanted
    first.give_back()
    assert them.fast.try_enter()


@pytest.mark.parametrize("every_s", [0.1, 10.0, places.STALLED_S - 1])
async def test_a_line_ends_however_small_its_pieces_are(clock: Clock, every_s: float) -> None:
    """A byte now and then keeps no place."""
    line = a_line(Places(1, 1))
    place = await line.take()

    async def trickle() -> None:
        while clock.now < 2 * places.STALLED_S:
            passing, through = passes(line, place, 1)
            await clock.go_on(every_s)
            through.set()
            await passing

    with pytest.raises(Unavailable, match="come through"):
        await trickle()
    assert clock.now <= places.STALLED_S + every_s


async def test_a_line_of_some_kilobytes_a_second_goes_on(clock: Clock) -> None:
    """For as long as it takes. The time in between, in which it waits for us, does not count."""
    line = a_line(Places(1, 1))
    for _ in range(200):
        place = await line.take()
        passing, through = passes(line, place, 16 << 10)
        await clock.go_on(0.2 * places.STALLED_S)
        through.set()
        await passing
        place.give_back()
        await clock.go_on(places.STALLED_S)
    assert line.is_slow


async def test_who_goes_away_is_told_nothing_else(clock: Clock) -> None:
    """Also when the line would have ended at the same moment."""
    line = a_line(Places(1, 0))
    place = await line.take()
    passing, _ = passes(line, place, 1)
    await turns()
    clock.now += places.SLOW_S
    line._look(place)
    passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await passing
