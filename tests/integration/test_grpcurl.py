"""Calls of an operator with grpcurl, and of a load balancer."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xain_coordinator.server.serve import LIVENESS, SERVICES

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or "grpcurl"


async def grpcurl(port: int, *arguments: str) -> str:
    """Run it against the coordinator; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        GRPCURL,
        "-plaintext",
        *arguments[:-2],
        f"127.0.0.1:{port}",
        *[argument for argument in arguments[-2:] if argument],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode()


async def test_grpcurl_lists_the_services(start):
    """Reflection is on: no .proto file is needed."""
    coordinator = await start()
    assert (await grpcurl(coordinator.port, "list", "")).split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "xain_proto.fl.Access",
        "xain_proto.fl.Control",
        "xain_proto.fl.Coordinator",
        "xain_proto.fl.Inspection",
        "xain_proto.messaging.Membership",
    ]
    described = await grpcurl(coordinator.port, "describe", "xain_proto.fl.Coordinator")
    assert "rpc Watch ( .xain_proto.fl.WatchRequest )" in described


async def test_grpcurl_calls_the_services(start):
    """A rendezvous, a heartbeat, a refusal and the status, by hand."""
    coordinator = await start(rounds={"min_participants": 2})
    me = ("-H", "xain-participant-id: me")
    fl = "xain_proto.fl."
    refused = await grpcurl(coordinator.port, *me, fl + "Coordinator/Heartbeat", "")
    assert "PermissionDenied" in refused
    assert "Please try to rendezvous" in refused
    accepted = json.loads(await grpcurl(coordinator.port, *me, fl + "Coordinator/Rendezvous", ""))
    assert accepted["heartbeat_interval_ms"] == 10_000
    await grpcurl(
        coordinator.port, *me, "-d", '{"state": "READY"}', fl + "Coordinator/Heartbeat", ""
    )
    status = json.loads(await grpcurl(coordinator.port, fl + "Inspection/GetStatus", ""))
    assert status["phase"] == "standby"
    assert status["num_connected"] == 1
    people = json.loads(await grpcurl(coordinator.port, fl + "Inspection/ListParticipants", ""))
    assert people["participants"][0]["participant_id"] == "me"
    for method in ("ListRounds", "ListModels"):
        assert json.loads(await grpcurl(coordinator.port, fl + f"Inspection/{method}", "")) == {}


async def test_health(start):
    """grpc.health.v1 says SERVING for the server, for each service, and for liveness."""
    coordinator = await start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        services = ("", *SERVICES, LIVENESS)
        for service in services:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
