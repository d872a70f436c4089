"""A real server limits the rates of Rendezvous and Watch when many participants come at once."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_status import rpc_status

from support.agents import Same
from support.wire import Member
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary.values import ParticipantState
from xain_participant import Agent
from xain_wire.fl import coordinator_pb2 as pb

MANY = 300
PER_S = 200.0
BURST = 20


@pytest.fixture
def start_limited(start: Any) -> Any:
    """Start a coordinator that admits so many calls a second, after a burst."""

    async def start_one(per_s: float, burst: int, **rounds: int) -> Any:
        coordinator = await start(rounds=rounds)
        coordinator._server.service.limit(per_s, burst)
        return coordinator

    return start_one


@pytest.fixture
async def closed(start_limited: Any) -> Any:
    """A coordinator that admits two calls, and then none for a day."""
    return await start_limited(1 / 86400, 2, min_participants=2, max_participants=100)


def seconds_and_reason(error: grpc.aio.AioRpcError) -> tuple[float, str]:
    """Seconds until the call may come again, and the coordinator's code."""
    retry, info = RetryInfo(), ErrorInfo()
    for detail in rpc_status.from_call(error).details:
        detail.Unpack(retry)
        detail.Unpack(info)
    return retry.retry_delay.ToMilliseconds() / 1000, info.reason


async def come_in(member: Member) -> tuple[float, int]:
    """When it was let in, and how often it was asked to wait; it does as it is told."""
    for times in range(100):
        answer = await member.rendezvous()
        if answer.reply == pb.ACCEPT:
            return time.monotonic(), times
        await asyncio.sleep(answer.retry_after_ms / 1000)  # as it is told
    raise AssertionError("asked to wait for ever")


async def first_news(member: Member) -> tuple[float, int]:
    """The same for a Watch stream, which is closed again."""
    for times in range(100):
        stream = member.stub.Watch(pb.WatchRequest(), metadata=member.metadata)
        try:
            await stream.read()
        except grpc.aio.AioRpcError as error:
            wait_s, reason = seconds_and_reason(error)
            if (error.code(), reason) != (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE") or not wait_s:
                raise
            await asyncio.sleep(wait_s)  # as it is told
        else:
            stream.cancel()
            return time.monotonic(), times
    raise AssertionError("asked to wait for ever")


@pytest.mark.parametrize("come", [come_in, first_news])
async def test_hundreds_are_admitted_at_the_rate_limit(start_limited, join, come):
    """All are admitted, none earlier than the limit allows, and each waits once at most."""
    coordinator = await start_limited(PER_S, BURST, min_participants=MANY, max_participants=MANY)
    members = [join(coordinator, f"site-{i}") for i in range(MANY)]
    if come is first_news:
        for member in members:
            await coordinator.driver.submit(c.Rendezvous(member.participant_id, None))
    began = time.monotonic()
    came = await asyncio.gather(*(come(member) for member in members))
    seconds = sorted(at - began for at, _ in came)
    for n, second in enumerate(seconds):
        assert second >= (n - BURST - 1) / PER_S
    # The clock of an event loop may ring a millisecond early; the reservation then still stands.
    assert sum(times > 2 for _, times in came) == 0
    assert sum(times == 0 for _, times in came) >= BURST
    assert len(coordinator.driver.session.members) == MANY


async def test_agents_come_at_their_reserved_times(start_limited):
    """One after another, with their streams as well; then they train as ever."""
    per_s = 4.0
    coordinator = await start_limited(per_s, 1, rounds=2, min_participants=6)
    agents = [Agent(Same(), f"127.0.0.1:{coordinator.port}", f"site-{i}") for i in range(6)]
    joined_at = []
    # Threads of their own: the loop's are few, and the coordinator needs them.
    threads = ThreadPoolExecutor(len(agents))
    loop = asyncio.get_running_loop()
    ends = [loop.run_in_executor(threads, agent.run) for agent in agents]
    try:
        async with asyncio.timeout(60):
            while len(joined_at) < 6:
                await coordinator.driver.wait_for_change()
                members = coordinator.driver.session.members.values()
                joined_at = sorted(member.joined_at for member in members)
            assert await asyncio.gather(*ends) == [0] * 6
    finally:
        for agent in agents:
            agent.stop()  # harmless for those that have ended
    for n, at in enumerate(joined_at):
        assert at >= n / per_s  # the session's time begins with 0
    # Each of the two limits asks an agent to wait once.
    assert coordinator.counters["asked_to_wait"] <= 2 * len(agents)


async def test_new_clients_do_not_delay_members(closed, join):
    """Members have a limit of their own, so a member comes back at once."""
    member = join(closed, "member")
    await closed.driver.submit(c.Rendezvous("member", None))
    newcomers = [join(closed, f"site-{i}") for i in range(10)]
    answers = [await newcomer.rendezvous() for newcomer in newcomers]
    assert [answer.reply for answer in answers] == [pb.ACCEPT] * 2 + [pb.LATER] * 8
    waits = [answer.retry_after_ms for answer in answers[2:]]
    assert waits == sorted(set(waits))
    assert (await member.rendezvous()).reply == pb.ACCEPT
    assert (await first_news(member))[1] == 0
    assert closed.driver.session.members.keys() == {"member", "site-0", "site-1"}
    status = await member.status()
    assert status.counters["asked_to_wait"] == 8


async def test_member_that_waits_keeps_its_lease(closed, join):
    """A rendezvous that is told to wait renews the lease and keeps the state last reported."""
    member = join(closed, "member")
    await closed.driver.submit(c.Rendezvous("member", None))
    answers = [(await member.rendezvous()).reply for _ in range(2)]
    assert answers == [pb.ACCEPT] * 2
    await member.heartbeat(pb.TRAINING, 3)
    before = closed.driver.session.members.heard["member"]
    assert (await member.rendezvous()).reply == pb.LATER
    after = closed.driver.session.members.heard["member"]
    assert after.at > before.at
    assert (after.state, after.round) == (ParticipantState.TRAINING, 3)
