"""The driver as time passes, above all without its seeing it."""

import asyncio

import pytest

from support.driver import RULES, Bench, settled
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary.values import ParticipantState
from xain_coordinator.driver.driver import LOOK_AGAIN_S, Driver
from xain_coordinator.driver.lateness import MIN_SENDERS

LEASE_S = RULES.lease_s
STALL_S = 4 * LEASE_S
PATIENCE_S = 60.0
A_LITTLE_S = 1 / 32  # not late yet; exact, so that a lease ends at the very time that is due
NUM_APPENDS = 10  # more than there are


class Ticks:
    """The times, in session time, at which a driver's own ticks came."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []
        self._came = asyncio.Event()
        submit = driver.submit

        async def noted(command: c.Command) -> object:
            reply = await submit(command)
            if isinstance(command, c.Tick):
                self.times.append(driver.clock.now())
                self._came.set()
            return reply

        monkeypatch.setattr(driver, "submit", noted)

    async def next(self) -> None:
        """The next one has come, and what it decided is durable."""
        async with asyncio.timeout(PATIENCE_S):
            await self._came.wait()
        self._came.clear()


@pytest.fixture
async def full(bench: Bench) -> Bench:
    """With members a and b, whose leases have just begun, and which the driver has looked at."""
    await bench.join("a", "b")
    await beat_until(bench, LEASE_S)
    await bench.driver._tick()
    return bench


async def beat_until(bench: Bench, time_s: float) -> None:
    """Advance to a little after time_s, with a and b just heard and without a tick."""
    bench.clock.time_s = time_s + A_LITTLE_S
    for name in "ab":
        await bench.driver.submit(c.Heartbeat(name))


@pytest.mark.parametrize("first", ["the commit", "a call", "a call that is refused"])
async def test_a_commit_hides_no_stall(full, monkeypatch, first):
    """All stands still while something is written. Whatever is done first afterwards, the timer
    having been missed, ends no lease of those whose signs of life have yet to be taken up."""
    ticks = Ticks(full.driver, monkeypatch)
    full.journal.hold()
    joining = await full.submit(c.Rendezvous("c"))
    await full.journal.writing()
    full.clock.time_s += STALL_S
    calling = None
    if first != "the commit":
        calling = await full.submit(c.Heartbeat("a" if first == "a call" else "unregistered"))
    for _ in range(NUM_APPENDS):
        full.journal.let_go()
    await joining
    await ticks.next()
    assert sorted(full.driver.session.members) == ["a", "b", "c"]
    if calling is not None:
        await asyncio.wait([calling])
        assert (calling.exception() is None) == (first == "a call")
    for name in "abc":
        await full.driver.submit(c.Heartbeat(name))


async def writing_a_tick(full: Bench) -> asyncio.Task[None]:
    """The driver's own tick lets c go; that is on its way to the disk, where it is held."""
    await full.join("c")
    await beat_until(full, full.clock.time_s + LEASE_S)
    full.journal.hold()
    ticking = asyncio.create_task(full.driver._tick())
    await full.journal.writing()
    assert full.driver.lateness.at(full.clock.time_s) == 0.0
    return ticking


async def test_the_commit_of_a_tick_hides_no_stall(full, monkeypatch):
    """A stall is noticed even while the events of a tick are being written."""
    ticking = await writing_a_tick(full)
    ticks = Ticks(full.driver, monkeypatch)
    full.clock.time_s += STALL_S
    for _ in range(NUM_APPENDS):
        full.journal.let_go()
    await ticking
    await ticks.next()
    assert sorted(full.driver.session.members) == ["a", "b"]


async def test_a_slow_disk_is_no_stall(full):
    """While it writes what a tick has decided, signs of life are taken up."""
    ticking = await writing_a_tick(full)
    full.clock.time_s += LEASE_S / 3
    await full.driver.submit(c.Heartbeat("a"))
    full.journal.let_go()
    await ticking
    assert sorted(full.driver.session.members) == ["a", "b"]
    assert full.driver.lateness.at(full.clock.time_s) == 0.0


async def test_lease_of_a_participant_begins_when_its_join_is_answered(full):
    """However long the disk takes for the join, in which nothing else is late."""
    full.journal.hold()
    joining = await full.submit(c.Rendezvous("c"))
    await full.journal.writing()
    ticking = []
    for _ in range(6):
        full.clock.time_s += LEASE_S / 4
        for name in "ab":
            await full.driver.submit(c.Heartbeat(name))
        ticking.append(asyncio.create_task(full.driver._tick()))
        await settled()
    for _ in range(NUM_APPENDS):
        full.journal.let_go()
    await joining
    await asyncio.gather(*ticking)
    assert "c" in full.driver.session.members
    for num_quarters in range(1, 6):
        full.clock.time_s += LEASE_S / 4
        for name in "ab":
            await full.driver.submit(c.Heartbeat(name))
        await full.driver._tick()
        assert ("c" in full.driver.session.members) == (num_quarters < 4)


async def test_participant_that_joins_as_the_session_ends_has_not_heard_of_the_end(full):
    """Such a participant counts as connected until it asks, or for a lease."""
    full.journal.hold()
    joining = await full.submit(c.Rendezvous("c"))
    ending = await full.submit(c.EffectFailed("the end"))
    for _ in range(NUM_APPENDS):
        full.journal.let_go()
    await joining
    await ending
    await full.driver.submit(c.Heartbeat("a"))
    now = full.clock.time_s
    assert full.driver.session.members.is_connected_after_end("c", LEASE_S, now)


async def test_a_stall_ends_leases_later_and_not_never(full, monkeypatch):
    """A participant that is silent for a lease after the stall is removed."""
    full.clock.time_s += STALL_S
    await full.join("c")
    ticks = Ticks(full.driver, monkeypatch)
    until_s = full.clock.time_s + 2 * LEASE_S + STALL_S
    while full.clock.time_s < until_s and len(full.driver.session.members) > 1:
        full.clock.time_s += LEASE_S / 10
        await full.driver.submit(c.Heartbeat("a"))
        # Something is written, too: its commit sees that time has passed.
        await full.join("d")
        await full.driver.submit(c.Heartbeat("d", ParticipantState.FINISHED))
        await settled()
    assert list(full.driver.session.members) == ["a"]
    assert ticks.times


async def test_commits_put_off_no_look_at_the_leases(full, monkeypatch):
    """However often they come while the coordinator is late."""
    ticks = Ticks(full.driver, monkeypatch)
    late_s, step_s = 0.2, LOOK_AGAIN_S / 5
    full.clock.time_s += LEASE_S - step_s / 2
    for _ in range(20):
        full.clock.time_s += step_s
        for number in range(MIN_SENDERS):
            full.driver.lateness.note_wait(f"p{number}", full.clock.time_s, late_s)
        await full.join("c")
        await full.driver.submit(c.Heartbeat("c", ParticipantState.FINISHED))
        await settled()
    assert not full.driver.session.members
    gaps = [after - before for before, after in zip(ticks.times, ticks.times[1:], strict=False)]
    assert all(gap >= LOOK_AGAIN_S - step_s for gap in gaps), "nor are there more than that"
