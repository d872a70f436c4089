"""Tags on the wire: who is selected, and what is told of them."""

import asyncio
import threading

import numpy as np
import pytest

from support.agents import Same
from xain_foundation.exit_statuses import EXIT_NOTHING_COUNTED
from xain_participant import Agent
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

NORTH = {"site": "north", "ward": "7"}
GOOD = np.float32([1, 2, 3])


async def test_only_those_with_the_tags_train(start, join):
    """The others hear STANDBY; the status says for whom it waits, and who does not count."""
    coordinator = await start(
        rounds={"rounds": 1, "min_participants": 2, "tags": {"site": ["north", "west"]}}
    )
    a, b, s, nobody = (join(coordinator, name) for name in ("a", "b", "s", "nobody"))
    await s.rendezvous(tags={"site": "south"})
    await nobody.rendezvous()
    await a.rendezvous(tags=NORTH)
    status = await a.status()
    assert (status.num_connected, status.num_required) == (3, 2)
    assert "with site = north or west: 1 of 2 connected" in status.waiting_for
    assert status.waiting_for.endswith(": s, nobody.")
    await b.rendezvous(tags={"site": "west"})
    await b.until(pb.ROUND, 0)
    assert (await s.heartbeat()).state == pb.STANDBY
    assert (await nobody.heartbeat()).state == pb.STANDBY
    answer = await a.inspection.ListParticipants(inspection.ListParticipantsRequest())
    tags = {one.participant_id: dict(one.tags) for one in answer.participants}
    assert tags == {"a": NORTH, "b": {"site": "west"}, "s": {"site": "south"}, "nobody": {}}
    await a.hand_in(GOOD)
    await b.hand_in(GOOD)
    await s.until(pb.FINISHED, 0)


async def test_an_agent_sends_its_tags(start):
    """An agent without the tags stands by until the end, and says that nothing of it counted."""
    coordinator = await start(rounds={"rounds": 2, "tags": {"site": ["north"]}})
    target = f"127.0.0.1:{coordinator.port}"
    has_joined = threading.Event()
    south = Agent(
        Same(),
        target,
        "s",
        tags={"site": "south"},
        observer=lambda step, *_: has_joined.set() if step == "joined" else None,
    )
    south_ends = asyncio.ensure_future(asyncio.to_thread(south.run))
    assert await asyncio.to_thread(has_joined.wait, 60)
    north = Agent(Same(), target, "n", tags={"site": "north"})
    assert await asyncio.wait_for(asyncio.to_thread(north.run), 60) == 0
    assert await asyncio.wait_for(south_ends, 60) == EXIT_NOTHING_COUNTED
    assert coordinator.driver.history.accounts.contributions() == {"n": 1}


@pytest.mark.parametrize("tags", [{"": "x"}, {"a": "\n"}])
def test_an_agent_refuses_tags_that_the_coordinator_would_refuse(tags):
    with pytest.raises(ValueError, match="tag"):
        Agent(Same(), "127.0.0.1:1", "a", tags=tags)
