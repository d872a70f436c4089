"""Bounds of a coordinator on members of Membership, beside its participants."""

from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.messaging import PATIENCE_S
from xain_coordinator.server.calls.admission_control import CALLS_PER_MEMBER
from xain_wire.fl import coordinator_pb2 as fl
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

NUM_CALLS = 70


def memberships(coordinator: Any, channel: grpc.aio.Channel) -> Any:
    """The service of a coordinator, which lets newcomers in at once, and keeps them."""
    registry = coordinator.server._membership._registry
    registry._open_at, registry.lease_s = 0.0, 100 * PATIENCE_S
    return MembershipStub(channel)


async def joined(stub: Any, name: str) -> dict[str, Any]:
    answer = await stub.Join(pb.JoinRequest(group="g", role="r", name=name, address="x"))
    return {"group": "g", "name": name, "incarnation": answer.member.incarnation}


async def test_members_leave_room_for_all_else(start):
    """Each has a stream that stands for as long as it is there. A coordinator of one participant
    answers others all the same."""
    coordinator = await start(rounds={"min_participants": 1})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        stub = memberships(coordinator, channel)
        streams = []
        for i in range(100):
            streams.append(stub.Watch(pb.WatchRequest(**await joined(stub, f"member-{i}"))))
            assert len((await streams[-1].read()).members) == i + 1
        request = health_pb2.HealthCheckRequest(service="liveness")
        health = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        for stream in streams:
            stream.cancel()


async def test_member_takes_no_slots_from_participants_and_unregistered_clients(start, join):
    """However many streams a member opens and barriers it waits at, its open calls are few."""
    coordinator = await start(rounds={"min_participants": 1})
    participant = join(coordinator, "a")
    await participant.rendezvous()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        stub = memberships(coordinator, channel)
        who = await joined(stub, "anna")
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
