"""Connections of an unregistered client at each gRPC port: members and newcomers are served."""

import asyncio
import socket
import time
from contextlib import ExitStack

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.discovery import MemberCalls
from support.drivers import Receiving, closing_all, received
from support.messaging import until
from support.silent import SilentConnection
from xain_foundation.net import connection_limit
from xain_membership.server import MembershipServer
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings
from xain_wire.fl import coordinator_pb2 as pb

PATIENCE_S = 60.0
MAX_UNREGISTERED = 20
NUM_UNREGISTERED = 50


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few connections of unregistered clients, as where a process may open few files."""
    monkeypatch.setattr(connection_limit, "_max_open", lambda: 4 * MAX_UNREGISTERED)


def say_nothing(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def say_half_a_preface(port: int) -> socket.socket:
    connection = say_nothing(port)
    connection.sendall(b"PRI * HTTP/2.0\r\n")
    return connection


def say_settings(port: int) -> socket.socket:
    return SilentConnection(port)._socket


def call_as_nobody(port: int) -> socket.socket:
    connection = SilentConnection(port)
    connection.open_calls("/xain_proto.fl.Coordinator/StartTrainingRound", 1, b"")
    return connection._socket


def check_health(port: int) -> socket.socket:
    connection = SilentConnection(port)
    connection.open_calls("/grpc.health.v1.Health/Check", 1, b"")
    return connection._socket


KINDS = (say_nothing, say_half_a_preface, say_settings, call_as_nobody, check_health)


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not ended it yet."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def num_open(flood: list[socket.socket]) -> int:
    return sum(map(is_open, flood))


@pytest.mark.parametrize("connect", KINDS)
async def test_unregistered_connections_of_a_coordinator_are_ended_and_members_kept(
    enter, connect, start, join
):
    """The oldest connections without an accepted call are ended; a member's stays, also while only
    a Watch stream is open on it. Newcomers join and health checks are answered meanwhile."""
    coordinator = await start(rounds={"min_participants": 10})
    [member] = await enter(coordinator, "member")
    stream = member.stub.Watch(pb.WatchRequest(), metadata=member.metadata)
    await stream.read()
    flood = [await asyncio.to_thread(connect, coordinator.port) for _ in range(NUM_UNREGISTERED)]
    try:
        deadline = time.monotonic() + PATIENCE_S
        while num_open(flood) > MAX_UNREGISTERED:
            assert time.monotonic() < deadline
            newcomer = join(coordinator, f"newcomer{time.monotonic()}")
            check = health_pb2_grpc.HealthStub(newcomer.channel).Check
            answer = await check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await newcomer.close()
        [newcomer] = await enter(coordinator, "newcomer")
        assert not stream.done()
        await member.heartbeat()
    finally:
        for connection in flood:
            connection.close()


def until_ended(flood: list[socket.socket]) -> None:
    until(lambda: num_open(flood) <= MAX_UNREGISTERED, "the ends of connections")


@pytest.mark.parametrize("make", ["membership", "scheduler"])
def test_unregistered_connections_of_a_membership_service_are_ended_and_members_kept(
    make, tmp_path
):
    server = (
        MembershipServer(settle_s=0.0)
        if make == "membership"
        else SchedulerServer(Journal(tmp_path / "scheduler.db"), Settings())
    )
    with server, MemberCalls(server.target, "member") as member, ExitStack() as at_end:
        stream = member.join().watch()
        assert len(next(stream).members) == 1
        flood = [
            at_end.enter_context(say_settings(int(server.target.rpartition(":")[2])))
            for _ in range(NUM_UNREGISTERED)
        ]
        until_ended(flood)
        with MemberCalls(server.target, "newcomer") as newcomer:
            newcomer.join()
        assert stream.is_active()


def test_unregistered_connections_of_a_driver_are_ended_and_peers_kept():
    there, here, friend = Receiving(GrpcDriver()), Receiving(GrpcDriver()), GrpcDriver()
    with closing_all(there, here, friend), ExitStack() as at_end:
        here.connect("there", there.address)
        here.send("there", [b"1"])
        assert received(there) == [b"1"]
        port = int(there.address.rpartition(":")[2])
        flood = [at_end.enter_context(say_settings(port)) for _ in range(NUM_UNREGISTERED)]
        until_ended(flood)
        friend.connect("there", there.address)
        friend.send("there", [b"2"])
        assert received(there) == [b"2"]
        here.send("there", [b"3"])
        assert received(there) == [b"3"]
        assert here.receive(0.0) is None, "the connection to the peer was lost"
