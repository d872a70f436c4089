"""Load of a large fleet on the server: many calls at one instant, and reconnects of all."""

import asyncio

from xain_coordinator.core.vocabulary import commands as c
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.metadata import PARTICIPANT_ID_KEY

MANY = 300
BURST = 3000
CONNECTIONS = 15  # 200 calls each, fewer than a connection carries


async def test_calls_that_come_at_one_instant_are_all_answered(start, join):
    """gRPC by itself would cancel those that are not taken up at once, from 1,000 on."""
    coordinator = await start(
        rounds={"min_participants": BURST},
        server={"heartbeat_timeout_s": 3600.0},  # however long the others take to join
    )
    names = [f"site-{i}" for i in range(BURST)]
    submit = coordinator.driver.submit
    await asyncio.gather(*(submit(c.Rendezvous(name, None)) for name in names))
    ways = [join(coordinator, None) for _ in range(CONNECTIONS)]
    answers = await asyncio.gather(
        *(
            ways[i % CONNECTIONS].stub.Heartbeat(
                pb.HeartbeatRequest(state=pb.READY), metadata=((PARTICIPANT_ID_KEY, name),)
            )
            for i, name in enumerate(names)
        )
    )
    assert len(answers) == BURST


async def test_large_fleet_is_told_how_long_to_spread_its_reconnects(start, join):
    """A participant hears the spread when it joins; a member hears it with its next heartbeat."""
    coordinator = await start(rounds={"min_participants": MANY, "max_participants": MANY + 1})
    first = join(coordinator, "first")
    assert (await first.rendezvous()).reconnect_spread_ms == 0
    for i in range(MANY - 2):
        await coordinator.driver.submit(c.Rendezvous(f"site-{i}", None))
    joined = await join(coordinator, "last").rendezvous()
    assert joined.reply == pb.ACCEPT
    assert joined.reconnect_spread_ms == 1000 * MANY // 500
    assert (await first.heartbeat()).reconnect_spread_ms == joined.reconnect_spread_ms
