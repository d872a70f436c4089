"""Deadlines and consistency over a real channel. Session time is moved by hand: no test waits."""

import io
import json
from typing import Any

import numpy as np

from support.clock import HeldClock
from support.waiting import until
from support.wire import Code, Member, assert_refused, npy
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.core.vocabulary.commands import Tick
from xain_coordinator.core.vocabulary.values import Phase
from xain_wire.fl import coordinator_pb2 as pb

DEADLINE_S = 30.0
IDLE_S = 50.0
TIMED = {"deadline_s": DEADLINE_S, "idle_timeout_s": IDLE_S}
ASP = {**TIMED, "consistency": "asp", "start_participants": 3, "rounds": 6}


def hold(coordinator: SessionCoordinator) -> HeldClock:
    """Stop the session clock. Call it before the first round, which begins then."""
    clock = coordinator.driver.clock = HeldClock(coordinator.driver.clock.now())
    return clock


async def let_pass(coordinator: SessionCoordinator, seconds: float, *members: Member) -> None:
    """Let session time pass, with heartbeats of these members."""
    clock = coordinator.driver.clock
    assert isinstance(clock, HeldClock)
    end = clock.time_s + seconds
    while clock.time_s < end:
        clock.time_s = min(end, clock.time_s + 10.0)
        for member in members:
            await member.heartbeat()
        await coordinator.driver.submit(Tick())


async def model(member: Member, round_: int) -> list[float]:
    data = await member.download(f"{round_}/global")
    return np.load(io.BytesIO(data), allow_pickle=False).tolist()


async def put(coordinator: SessionCoordinator, key: str, value: float) -> None:
    """Upload an object as XAIN's client does, with credentials of its own."""
    upload = coordinator.store.upload(key)
    upload.write(npy([value]))
    upload.commit(overwrite=False)


async def heard(member: Member) -> tuple[int, int]:
    """State and round of a heartbeat's reply."""
    seen = await member.heartbeat()
    return seen.state, seen.round


async def until_heard(member: Member, state: int, round_: int) -> None:
    """Poll, as XAIN's participants do."""

    async def is_heard() -> bool:
        return await heard(member) == (state, round_)

    await until(is_heard)


async def test_a_straggler_is_left_out_at_the_deadline(enter, start, tmp_path):
    """The round closes without it. What it then brings is FAILED_PRECONDITION, counted once however
    often it asks, and the next round is its own again."""
    coordinator = await start(rounds={**TIMED, "rounds": 2, "start_participants": 2})
    hold(coordinator)
    a, b = await enter(coordinator, "a", "b", round_=0)
    await a.hand_in([1.0])
    await let_pass(coordinator, DEADLINE_S - 1, a, b)
    assert await heard(a) == (pb.ROUND, 0)
    status = await a.status()
    assert (status.deadline_seconds, status.phase) == (1.0, "collecting")
    await let_pass(coordinator, 1, a, b)
    await b.until(pb.ROUND, 1)
    assert await model(a, 1) == [1.0]

    await assert_refused(b.upload([9.0]), Code.FAILED_PRECONDITION, "STALE_ROUND")
    for _ in range(3):
        await assert_refused(b.end(), Code.FAILED_PRECONDITION, "STALE_ROUND")
    assert (await a.status()).counters["late_updates"] == 1
    await b.hand_in([5.0], round_=1)
    await a.hand_in([3.0], round_=1)
    await a.until(pb.FINISHED, 1)
    assert await model(a, 2) == [4.0]
    await coordinator.stop()
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    late = [point for point in points if point["measurement"] == "late_update"]
    assert [(point["tags"]["id"], point["fields"]) for point in late] == [("b", {"round": 0})]


async def test_a_session_that_cannot_go_on_says_why(enter, start, join):
    """Watchers, callers and the operator hear the cause; a restart does not begin anew."""
    rounds = {**TIMED, "min_participants": 2}
    coordinator = await start(rounds=rounds)
    hold(coordinator)
    a, b = await enter(coordinator, "a", "b", round_=0)
    await a.hand_in([1.0])
    await let_pass(coordinator, DEADLINE_S, a, b)
    assert (await a.status()).ends_seconds == IDLE_S
    watch = b.watch()
    assert (await watch.read()).state == pb.ROUND
    await let_pass(coordinator, IDLE_S, a, b)
    cause = (
        "round 0 had too few updates at its deadline, and for rounds.idle_timeout_s = 50 s after "
        "it: 1 of 2"
    )
    seen = await watch.read()
    assert (seen.state, seen.cause) == (pb.FINISHED, cause)
    assert (await a.heartbeat()).cause == cause
    await assert_refused(b.end(), Code.FAILED_PRECONDITION, "ROUND_CLOSED")
    await coordinator.stop()
    again = await start(rounds=rounds)
    c = join(again, "c")
    status = await c.status()
    assert (status.state, status.cause) == (pb.FINISHED, cause)
    assert again.driver.session.phase is Phase.FINISHED


async def in_asp(start, enter, **rounds: Any) -> tuple[SessionCoordinator, Member, ...]:
    """Members in round 1, from a model [0]."""
    coordinator = await start(rounds={**ASP, **rounds})
    hold(coordinator)
    members = await enter(coordinator, *"abc", round_=0)
    for member in members:
        await member.hand_in([0.0])
    await members[0].until(pb.ROUND, 1)
    return coordinator, *members


async def test_a_late_xain_client_is_not_taken_for_the_next_round(enter, start):
    """XAIN's client does not say which round it means, but its object lies under the round that is
    over. It is counted as late, as any other."""
    coordinator = await start(rounds={**TIMED, "rounds": 2, "start_participants": 2})
    hold(coordinator)
    fast, slow = await enter(coordinator, None, None)
    await until_heard(fast, pb.ROUND, 0)
    await put(coordinator, "0/uuid-fast", 1.0)
    await fast.end(name="uuid-fast", round_=None)
    await let_pass(coordinator, DEADLINE_S, fast, slow)
    await until_heard(slow, pb.ROUND, 1)
    await put(coordinator, "0/uuid-slow", 9.0)
    await assert_refused(
        slow.end(name="uuid-slow", round_=None), Code.FAILED_PRECONDITION, "STALE_ROUND"
    )
    assert coordinator.driver.num_late == 1
    await put(coordinator, "1/uuid-slow", 3.0)
    await slow.end(name="uuid-slow", round_=None)
    await put(coordinator, "1/uuid-fast", 5.0)
    await fast.end(name="uuid-fast", round_=None)
    await until_heard(fast, pb.FINISHED, 1)
    assert await model(fast, 2) == [4.0]


async def test_a_straggler_does_not_fill_the_memory(enter, start):
    """While it trains an early round, what is known of the uploads of all rounds between is
    forgotten, and it is still taken in."""
    coordinator, a, b, _ = await in_asp(start, enter, rounds=30)
    ref = await b.upload([5.0], round_=1)
    for number in range(1, 25):
        await a.hand_in([float(number)], round_=number)
        await a.until(pb.ROUND, number + 1)
    slots = coordinator._server.slots.by_name
    known = {f"{round_}/{name}" for name, slot in slots.items() for round_ in slot.stored}
    assert known <= {"1/a", "1/b", "24/a"}
    await b.end(ref, round_=1)
    await b.until(pb.ROUND, 26)
