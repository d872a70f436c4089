"""Admission control of a real server: members and unregistered clients that open more calls than
they need."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from grpc_status import rpc_status

from support.silent import SilentConnection
from support.waiting import until
from support.wire import Code, Member, reason, refused
from xain_coordinator.server.calls.admission_control import CALLS_PER_MEMBER, UNREGISTERED_READS
from xain_coordinator.server.serve import STREAMS_PER_CONNECTION
from xain_coordinator.updates.bodies import StallTimer
from xain_coordinator.updates.measured_upload import MeasuredUpload
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection

HEARTBEAT = "/xain_proto.fl.Coordinator/Heartbeat"
NUM_UNREGISTERED = 20


@pytest.fixture
def start_small(start: Any) -> Any:
    """Start a coordinator with few slots for calls, so that a test can fill them."""

    async def start_one(min_participants: int, **bounds: Any) -> Any:
        coordinator = await start(rounds={"min_participants": min_participants})
        admission = coordinator._server.admission
        admission.capacities = dict.fromkeys(admission.capacities, NUM_UNREGISTERED)
        # Else silent calls end sooner, because others wait to be read.
        admission.reading = asyncio.Semaphore(10 * NUM_UNREGISTERED)
        for name, value in bounds.items():
            setattr(admission, name, value)
        return coordinator

    return start_one


def open_calls(coordinator: Any) -> int:
    return coordinator._server.admission.num_calls


async def until_open(coordinator: Any, num_calls: int) -> None:
    await until(lambda: open_calls(coordinator) == num_calls)


async def silence() -> AsyncIterator[Any]:
    """No request, for ever."""
    await asyncio.Event().wait()
    yield None


def silent_heartbeat(member: Member) -> Any:
    return member.channel.stream_unary(HEARTBEAT)(silence(), metadata=member.metadata)


async def test_member_with_too_many_calls_is_asked_to_come_again(enter, start, join):
    """The calls of another member, and of unregistered clients, are not refused for it."""
    coordinator = await start(rounds={"min_participants": 2})
    greedy, modest = await enter(coordinator, "greedy", "modest")
    calls = [greedy.watch() for _ in range(CALLS_PER_MEMBER)]
    for call in calls:
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await greedy.heartbeat()
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert reason(caught.value) == "TOO_MANY_CALLS"
    retry = RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(caught.value).details)
    assert retry.retry_delay.ToMilliseconds() == 1000
    await modest.heartbeat()
    await join(coordinator, None).inspection.GetStatus(inspection.GetStatusRequest())
    calls[0].cancel()
    await until_open(coordinator, CALLS_PER_MEMBER - 1)
    await greedy.heartbeat()
    for call in calls:
        call.cancel()


async def test_call_without_a_message_ends_with_deadline_exceeded(start, join):
    """Calls of a member and streams of requests end so too, and leave nothing."""
    coordinator = await start(rounds={"min_participants": 2})
    coordinator._server.admission.first_message_s = 0.1
    member, unregistered = join(coordinator, "a"), join(coordinator, "unregistered")
    await member.rendezvous()
    reflection = ServerReflectionStub(unregistered.channel).ServerReflectionInfo(silence())
    calls = [
        silent_heartbeat(member),
        silent_heartbeat(unregistered),
        member.stub.PutWeights(silence(), metadata=member.metadata),
        reflection.read(),
    ]
    codes = [(await refused(call))[0] for call in calls]
    assert codes == [Code.DEADLINE_EXCEEDED] * 4
    await until_open(coordinator, 0)
    assert (await member.heartbeat()).state == pb.STANDBY


async def test_no_message_of_an_upload_is_held_once_its_data_are_taken(enter, start, monkeypatch):
    """Each may be of megabytes, its data may wait to be written, and its sender may pause."""
    coordinator = await start()
    admission = coordinator._server.admission
    [member] = await enter(coordinator, "a", round_=0)
    read, write, latest, is_held = admission.read, MeasuredUpload.write, None, list[bool]()

    def note() -> None:
        if latest is not None:
            is_held.append(sys.getrefcount(latest) > 2)  # more than the variable, and the argument

    async def noting_read(call: Any) -> Any:
        nonlocal latest
        note()
        message = await read(call)
        latest = message if isinstance(message, pb.PutWeightsRequest) else None
        return message

    def noting_write(upload: MeasuredUpload, data: bytes) -> None:
        note()
        write(upload, data)

    monkeypatch.setattr(admission, "read", noting_read)
    monkeypatch.setattr(MeasuredUpload, "write", noting_write)
    await member.upload(np.zeros(25_000, dtype=np.float32), chunk=20_000)
    assert is_held == [False] * len(is_held)
    assert len(is_held) > 6


async def test_call_that_two_limits_end_at_once_is_ended_once(enter, start, caplog, monkeypatch):
    """The upload's own limit passes together with the one of its first message. gRPC logs an error
    for a second end of a call."""
    coordinator = await start(rounds={"min_participants": 2})
    coordinator._server.admission.first_message_s = 0.1
    monkeypatch.setattr(StallTimer, "stalled_s", 0.1)
    [member] = await enter(coordinator, "a")
    for _ in range(5):
        call = member.stub.PutWeights(silence(), metadata=member.metadata)
        assert (await refused(call))[0] in (Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE)
    await until_open(coordinator, 0)
    # asyncio may tell of clients of earlier tests, whenever their memory is collected.
    errors = [r for r in caplog.records if r.levelname == "ERROR" and r.name.startswith("grpc")]
    assert [record.message for record in errors] == []


async def test_slow_requests_of_unregistered_clients_end_when_others_wait_to_be_read(start, join):
    """gRPC holds a message that is coming in memory, so only a few are read at a time."""
    coordinator = await start(rounds={"min_participants": 1})
    silent, unregistered = join(coordinator, "silent"), join(coordinator, "a")
    calls = [silent_heartbeat(silent) for _ in range(UNREGISTERED_READS)]
    await until_open(coordinator, UNREGISTERED_READS)
    assert not any(call.done() for call in calls)
    assert (await unregistered.rendezvous()).reply == pb.ACCEPT
    await until(lambda: any(call.done() for call in calls))
    ended = next(call for call in calls if call.done())
    assert await ended.code() is Code.UNAVAILABLE
    for call in calls:
        call.cancel()


async def test_silent_calls_of_unregistered_clients_make_room_for_newer_calls(start_small, join):
    """One of them ends; unregistered clients that do send their message are answered."""
    coordinator = await start_small(1, min_silence_s=0.0)
    unregistered = join(coordinator, "a")
    silent = join(coordinator, "silent")
    calls = [silent_heartbeat(silent) for _ in range(NUM_UNREGISTERED)]
    await until_open(coordinator, NUM_UNREGISTERED)
    assert (await unregistered.rendezvous()).reply == pb.ACCEPT
    await until(lambda: any(call.done() for call in calls))
    await until_open(coordinator, NUM_UNREGISTERED - 1)
    (ended,) = [call for call in calls if call.done()]
    assert (await refused(ended))[0] is Code.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()


async def test_unregistered_clients_are_refused_while_younger_calls_fill_their_slots(
    start_small, join
):
    """A flood within the second in which a message may still be on its way."""
    coordinator = await start_small(2)
    member, silent = join(coordinator, "a"), join(coordinator, "silent")
    await member.rendezvous()
    with SilentConnection(coordinator.port) as connection:
        connection.open_calls(HEARTBEAT, 3 * NUM_UNREGISTERED)
        await until_open(coordinator, NUM_UNREGISTERED)
        assert (await member.heartbeat()).state == pb.STANDBY
        health = health_pb2_grpc.HealthStub(silent.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await until_open(coordinator, 0)


async def test_streams_of_unregistered_clients_are_bounded_and_the_oldest_ends(start_small, join):
    """Health/Watch and reflection share their places; health checks have others."""
    coordinator = await start_small(2, min_silence_s=0.0)
    unregistered = join(coordinator, "unregistered")
    health = health_pb2_grpc.HealthStub(unregistered.channel)
    request = health_pb2.HealthCheckRequest(service="")
    watches = []
    for _ in range(NUM_UNREGISTERED + 5):
        watches.append(watch := health.Watch(request))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    codes = [(await refused(watch.read()))[0] for watch in watches[:5]]
    assert codes == [Code.RESOURCE_EXHAUSTED] * 5
    await until_open(coordinator, NUM_UNREGISTERED)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    for watch in watches:
        watch.cancel()


async def test_stream_of_an_unregistered_client_has_an_end(start, join):
    """UNAVAILABLE: a client that still watches opens another one."""
    coordinator = await start(rounds={"min_participants": 2})
    coordinator._server.admission.stream_s = 0.1
    unregistered = join(coordinator, "unregistered")
    watch = health_pb2_grpc.HealthStub(unregistered.channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    assert (await refused(watch.read()))[0] is Code.UNAVAILABLE
    await until_open(coordinator, 0)


async def test_connection_has_a_limit_of_streams(enter, start):
    """A client that keeps to HTTP/2 waits with further calls; one that does not is refused them."""
    coordinator = await start(rounds={"min_participants": 2})
    # Else silent calls end while the last ones come, because others wait to be read.
    coordinator._server.admission.reading = asyncio.Semaphore(2 * STREAMS_PER_CONNECTION)
    [member] = await enter(coordinator, "a")
    with SilentConnection(coordinator.port) as connection:
        with suppress(ConnectionError):
            connection.open_calls(HEARTBEAT, 1000)
        await until(lambda: open_calls(coordinator) >= STREAMS_PER_CONNECTION)
        assert (await member.heartbeat()).state == pb.STANDBY
        await until_open(coordinator, STREAMS_PER_CONNECTION)


async def test_stop_does_not_wait_for_a_watcher_that_does_not_read(start):
    """A health watcher with no window for the answer holds the status of the service."""
    coordinator = await start(rounds={"min_participants": 2})
    with SilentConnection(coordinator.port, window=0) as connection:
        connection.open_calls("/grpc.health.v1.Health/Watch", 3, b"")
        await until_open(coordinator, 3)
        async with asyncio.timeout(10):
            await coordinator.stop()
