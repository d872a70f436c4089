"""What a session leaves in its store."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from xain_coordinator.core.commands import Tick
from xain_coordinator.core.values import Phase
from xain_proto.fl import coordinator_pb2 as pb

PATIENCE_S = 20.0
ROUNDS = 4


def updates(coordinator) -> dict[int, int]:
    """How many there are, by round."""
    found: dict[int, int] = {}
    for key in sorted(coordinator.store.keys()):
        round_, _, name = key.partition("/")
        if round_.isdecimal() and name != "global":
            found[int(round_)] = found.get(int(round_), 0) + 1
    return found


async def until(coordinator, wanted: dict[int, int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while updates(coordinator) != wanted:  # noqa: ASYNC110  # files have no event to wait for
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when it is so


def storage(folder: Path, **settings: object) -> dict[str, object]:
    return {"path": str(folder / "weights"), **settings}


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, {3: 2}),
        ({"keep_updates": 0}, {}),
        ({"keep_updates": 2}, {2: 2, 3: 2}),
        ({"keep_updates": "all"}, {0: 2, 1: 2, 2: 2, 3: 2}),
    ],
)
async def test_a_session_keeps_what_it_is_told_to(start, join, tmp_path, settings, left):
    """By default the updates of the last round; and every model."""
    rounds = {"rounds": ROUNDS, "start_participants": 2, "min_participants": 2}
    coordinator = await start(rounds=rounds, storage=storage(tmp_path, **settings))
    members = [join(coordinator, name) for name in "ab"]
    for member in members:
        await member.rendezvous()
    for round_ in range(ROUNDS):
        await members[0].until(pb.ROUND, round_)
        for member in members:
            await member.hand_in(np.full(3, round_, np.float32), round_=round_)
    await members[0].until(pb.FINISHED, ROUNDS - 1)
    await until(coordinator, left)
    models = [key for key in sorted(coordinator.store.keys()) if key.endswith("/global")]
    assert len(models) == ROUNDS + 1


async def test_what_may_still_count_stays(start, join, tmp_path):
    """A participant that is behind hands in for the round that it trains, however many are over."""
    coordinator = await start(
        rounds={
            "rounds": 6,
            "start_participants": 2,
            "consistency": "asp",
            "deadline_s": 3600.0,
            "idle_timeout_s": 7200.0,
        },
        storage=storage(tmp_path, keep_updates=0),
    )
    fast, slow = join(coordinator, "fast"), join(coordinator, "slow")
    for member in (fast, slow):
        await member.rendezvous()
    await fast.until(pb.ROUND, 0)
    for member in (fast, slow):
        await member.hand_in([0.0])
    await fast.until(pb.ROUND, 1)
    put = await slow.upload([7.0], round_=1)
    for round_ in (1, 2, 3):
        await fast.until(pb.ROUND, round_)
        await fast.hand_in([float(round_)], round_=round_)
    await fast.until(pb.ROUND, 4)
    # What there was of rounds that nobody trains has gone; what slow has uploaded stays.
    await until(coordinator, {1: 2})
    await slow.end(put, round_=1)
    await slow.until(pb.ROUND, 5)
    # Nobody trains any of these rounds any more.
    await until(coordinator, {})


async def test_what_was_left_is_dropped_at_the_next_start(start, join, tmp_path):
    """Whoever was killed at the end of a session had no time for it, or was told to keep all."""
    rounds = {"rounds": ROUNDS, "start_participants": 1}
    first = await start(rounds=rounds, storage=storage(tmp_path, keep_updates="all"))
    a = join(first, "a")
    await a.rendezvous()
    for round_ in range(ROUNDS):
        await a.until(pb.ROUND, round_)
        await a.hand_in([1.0], round_=round_)
    await a.until(pb.FINISHED, ROUNDS - 1)
    assert updates(first) == dict.fromkeys(range(ROUNDS), 1)
    await first.stop()
    second = await start(rounds=rounds, storage=storage(tmp_path, keep_updates=0))
    await until(second, {})


async def test_a_session_that_fails_keeps_no_more(start, join, tmp_path):
    """Nothing of the round that was open counts any more, and nobody looks for it."""
    settings = {
        "rounds": {"rounds": 1, "start_participants": 2, "min_participants": 2},
        "storage": storage(tmp_path, keep_updates=0),
    }
    coordinator = await start(**settings)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    for member in (a, b):
        await member.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    assert updates(coordinator) == {0: 1}
    clock = coordinator.driver.clock
    now = clock.now()
    for _ in range(2):  # their leases run out, and then the wait for others
        now += 2 * coordinator.driver.session.rules.idle_timeout_s
        clock.now = lambda now=now: now
        await coordinator.driver.submit(Tick())
    assert coordinator.driver.session.phase is Phase.FINISHED
    await until(coordinator, {})
    await coordinator.stop()
    again = await start(**settings)
    assert again.driver.session.cause == coordinator.driver.session.cause != ""
