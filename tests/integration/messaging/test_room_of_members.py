"""Bounds of a coordinator on members of Membership, beside its participants."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from integration.conftest import Join, Start
from support.messaging import PATIENCE_S
from xain_coordinator.server.calls.admission_control import CALLS_PER_MEMBER
from xain_wire.fl import coordinator_pb2 as fl
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

Code = grpc.StatusCode
NUM_CALLS = 70


async def joined(stub: Any) -> dict[str, Any]:
    """The member as calls name it."""
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


async def test_member_takes_no_slots_from_participants_and_unregistered_clients(
    start: Start, join: Join
) -> None:
    """However many streams a member opens and barriers it waits at, its open calls are few."""
    coordinator = await start(rounds={"min_participants": 1})
    participant = join(coordinator, "a")
    await participant.rendezvous()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        stub: Any = MembershipStub(channel)
        who = await joined(stub)
        streams = []
        barriers = []
        for i in range(NUM_CALLS):
            streams.append(stub.Watch(pb.WatchRequest(**who)))
            with suppress(grpc.aio.AioRpcError):  # the member has too many calls already
                assert len((await streams[-1].read()).members) == 1
            request = pb.BarrierRequest(**who, barrier=f"b{i}", num_members=2)
            barriers.append(stub.Barrier(request, timeout=PATIENCE_S))
        status = await participant.heartbeat()
        assert isinstance(status, fl.HeartbeatResponse)
        assert coordinator._server.admission.num_calls <= 1 + CALLS_PER_MEMBER
        for call in (*streams, *barriers):
            call.cancel()
