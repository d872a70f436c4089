"""What members of Membership may take of a coordinator, beside its participants."""

import asyncio
from typing import Any

import grpc

from integration.conftest import Join, Start
from support.messaging import PATIENCE_S
from xain_coordinator.server.serve import RPCS_PER_PARTICIPANT, SPARE_RPCS
from xain_messaging.discovery.registry import MAX_BARRIERS
from xain_messaging.discovery.service import RPCS_PER_MEMBER
from xain_proto.fl import coordinator_pb2 as fl
from xain_proto.messaging import membership_pb2 as pb
from xain_proto.messaging.membership_pb2_grpc import MembershipStub

Code = grpc.StatusCode


async def joined(stub: Any) -> dict[str, Any]:
    """Who it is, as calls say it."""
    request = pb.JoinRequest(group="g", role="r", name="anna", address="x")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                member = (await stub.Join(request)).member
                return {"group": "g", "name": "anna", "incarnation": member.incarnation}
            except grpc.aio.AioRpcError as error:
                # Newcomers are let in a moment after the start.
                if error.code() is not Code.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.1)  # a poll, not a race: it ends when it is in


async def test_a_member_cannot_take_the_room_of_participants(
    start: Start, join: Join, monkeypatch: Any
) -> None:
    """However many streams it opens and barriers it waits at, it has no more than its share of
    the calls that a coordinator answers at a time."""
    monkeypatch.setattr("xain_coordinator.server.serve.MAX_MEMBERS", 1)
    coordinator = await start(rounds={"min_participants": 1})
    participant = join(coordinator, "a")
    await participant.rendezvous()
    num_rpcs = RPCS_PER_PARTICIPANT + RPCS_PER_MEMBER + SPARE_RPCS
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        stub: Any = MembershipStub(channel)
        who = await joined(stub)
        streams = []
        barriers = []
        for i in range(num_rpcs):
            streams.append(stub.Watch(pb.WatchRequest(**who)))
            assert len((await streams[-1].read()).members) == 1
            request = pb.BarrierRequest(**who, barrier=f"b{i}", num_members=2)
            barriers.append(stub.Barrier(request, timeout=PATIENCE_S))
        # What is refused comes first, or it would not be.
        for call in (*streams[:-1], *barriers[MAX_BARRIERS:]):
            assert await call.code() in (Code.ABORTED, Code.RESOURCE_EXHAUSTED)
        status = await participant.heartbeat()
        assert isinstance(status, fl.HeartbeatResponse)
        watches = [participant.watch() for _ in range(RPCS_PER_PARTICIPANT + SPARE_RPCS - 1)]
        for watch in watches:
            await watch.read()
        for call in (*streams, *barriers, *watches):
            call.cancel()
