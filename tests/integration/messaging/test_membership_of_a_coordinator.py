"""Peers that find each other at a real coordinator, which is killed."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.messaging import PATIENCE_S, until
from support.process import CoordinatorProcess
from xain_messaging.format.messages import SessionMessage
from xain_messaging.proxy import Proxy
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

pytestmark = pytest.mark.e2e


def joined(port: int, role: str, expected: dict[str, int] | None = None) -> Proxy:
    return Proxy(
        "training",
        role,
        expected,
        name=role,
        discovery=f"127.0.0.1:{port}",
        timeout_s=PATIENCE_S,
    )


async def test_members_leave_room_for_all_else(tmp_path: Path) -> None:
    """Each has a stream that stands for as long as it is there. A coordinator of one participant
    answers others all the same."""
    coordinator = CoordinatorProcess(tmp_path, {})
    await coordinator.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
            stub: Any = MembershipStub(channel)

            async def join(name: str) -> pb.JoinResponse:
                request = pb.JoinRequest(group="g", role="r", name=name, address="x")
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        try:
                            answer: pb.JoinResponse = await stub.Join(request)
                            return answer
                        except grpc.aio.AioRpcError as error:
                            # Newcomers are let in a moment after the start.
                            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                                raise
                        await asyncio.sleep(0.1)  # a poll, not a race: it ends when it is in

            streams = []
            for i in range(100):
                answer = await join(f"member-{i}")
                who = {"name": answer.member.name, "incarnation": answer.member.incarnation}
                stream = stub.Watch(pb.WatchRequest(group="g", **who))
                streams.append(stream)
                assert len((await stream.read()).members) == i + 1
            request = health_pb2.HealthCheckRequest(service="liveness")
            health = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            for stream in streams:
                stream.cancel()
    finally:
        await coordinator.end()


async def test_peers_go_on_while_their_coordinator_is_away(tmp_path: Path) -> None:
    """kill -9: those who know each other go on talking. Started again, it knows them as who they
    were, and who comes then is told of them."""
    coordinator = CoordinatorProcess(tmp_path, {})
    await coordinator.start()
    proxies: list[Proxy] = []
    try:
        proxies.append(await asyncio.to_thread(joined, coordinator.port, "master"))
        proxies.append(await asyncio.to_thread(joined, coordinator.port, "worker", {"master": 1}))
        master, worker = proxies
        before = [proxy.endpoint.member for proxy in proxies]

        def ask(body: int) -> object:
            session = master.isend(SessionMessage("ask", "master", "worker", body))
            asked = worker.receive_once()
            assert asked is not None
            worker.reply(asked, body=asked.body + 1)
            (answer,) = master.receive_by_id(session)
            return answer.body

        await asyncio.to_thread(until, lambda: "worker" in master.peers, "the worker")
        assert await asyncio.to_thread(ask, 1) == 2
        await coordinator.kill()
        assert await asyncio.to_thread(ask, 2) == 3
        await coordinator.start()
        proxies.append(
            await asyncio.to_thread(joined, coordinator.port, "late", {"master": 1, "worker": 1})
        )
        assert await asyncio.to_thread(ask, 3) == 4
        assert [proxy.endpoint.member for proxy in proxies[:2]] == before
    finally:
        for proxy in proxies:
            await asyncio.to_thread(proxy.close, 0.0)
        await coordinator.end()
