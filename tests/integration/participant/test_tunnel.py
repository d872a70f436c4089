"""Clients without TLS reach a coordinator with certificates through a tunnel."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from support.certificates import write_folder
from support.enrolling import Enroller, serving
from support.process import ran
from support.wire import Code, assert_refused
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_participant.enrolment.tunnel import Tunnel
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub


@pytest.fixture
def enroller() -> Enroller:
    return Enroller()


@pytest.fixture
def tls(enroller, tmp_path) -> Certificates:
    folder = write_folder(tmp_path / "site", enroller.authority, Role.PARTICIPANT, "ward-7")
    return Certificates(folder)


@contextlib.asynccontextmanager
async def running(tunnel: Tunnel) -> AsyncIterator[int]:
    ready = asyncio.get_running_loop().create_future()
    tunnel._on_ready = ready.set_result
    task = asyncio.create_task(tunnel.run())
    try:
        yield await ready
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not tunnel._open


def stub_at(port: int) -> tuple[grpc.aio.Channel, CoordinatorStub]:
    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
    return channel, CoordinatorStub(channel)


async def test_calls_and_streams_in_the_clear_arrive_under_the_certificate_of_the_site(
    enroller, tls, tmp_path
):
    with serving(enroller, tmp_path / "server") as address:
        async with running(Tunnel(tls, address)) as port:
            channel, stub = stub_at(port)
            async with channel:
                await stub.Heartbeat(pb.HeartbeatRequest())
                news = stub.Watch(pb.WatchRequest())
                assert [(await news.read()).round for _ in range(3)] == [0, 1, 2]
                news.cancel()
    assert enroller.serials == [tls.own.serial]


async def test_client_connects_again_after_the_coordinator_was_away(enroller, tls, tmp_path):
    with serving(enroller, tmp_path / "server") as address:
        tunnel = Tunnel(tls, address)
        async with running(tunnel) as port:
            channel, stub = stub_at(port)
            async with channel:
                tunnel._address = "127.0.0.1:1"
                await assert_refused(stub.Heartbeat(pb.HeartbeatRequest()), Code.UNAVAILABLE)
                tunnel._address = address
                await stub.Heartbeat(pb.HeartbeatRequest(), wait_for_ready=True, timeout=60.0)


async def test_connections_above_the_limit_are_closed(enroller, tls, tmp_path):
    with serving(enroller, tmp_path / "server") as address:
        tunnel = Tunnel(tls, address)
        tunnel.max_connections = 1
        async with running(tunnel) as port:
            first = await asyncio.open_connection("127.0.0.1", port)
            first[1].write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            assert await first[0].read(1)
            second = await asyncio.open_connection("127.0.0.1", port)
            assert await second[0].read() == b""
            for _, writer in (first, second):
                writer.close()


@pytest.mark.parametrize("listen", ["0.0.0.0:7", "x", "70000"])
def test_tunnel_listens_on_this_machine_alone(listen):
    ended = ran("-m", "xain_participant", "tunnel", "--listen", listen)
    assert ended.returncode == 2
    assert f"--listen is {listen!r}" in ended.stderr
