"""Objects that a session leaves in its store."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from xain_wire.fl import coordinator_pb2 as pb

PATIENCE_S = 20.0
ROUNDS = 4


def updates(coordinator) -> dict[int, int]:
    """Number of updates by round."""
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
    ],
)
async def test_session_keeps_the_updates_of_so_many_rounds(start, join, tmp_path, settings, left):
    """The default is the updates of the last round; models are always kept."""
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


async def test_updates_that_may_still_count_stay(start, join, tmp_path):
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
    # Objects of rounds that are not trained have gone; the uploads of the slow participant stay.
    await until(coordinator, {1: 2})
    await slow.end(put, round_=1)
    await slow.until(pb.ROUND, 5)
    # None of these rounds is trained any more.
    await until(coordinator, {})
