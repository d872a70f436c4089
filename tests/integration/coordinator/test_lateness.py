"""The coordinator's own lateness removes no participant."""

import asyncio
import contextlib
import signal

import grpc
import pytest

from support.process import CoordinatorProcess
from support.wire import Member
from xain_coordinator.driver.lateness import MIN_SENDERS, Lateness
from xain_wire.fl import coordinator_pb2 as pb

LEASE = {"server.heartbeat_time_s": 1.0, "server.heartbeat_timeout_s": 1.0}
LEASE_S = 2.0
PATIENCE_S = 60.0


@pytest.mark.e2e
async def test_a_process_that_stood_still_removes_no_participant(keep, tmp_path):
    """After a machine was suspended, messages wait in it and the leases have run out. A participant
    that stays silent then is removed."""
    process = keep(CoordinatorProcess(tmp_path, {"rounds.start_participants": 9, **LEASE}))
    await process.start()
    members = [Member(process.port, f"p{number}") for number in range(8)]
    silent = Member(process.port, "silent")
    for member in (*members, silent):
        assert (await member.rendezvous()).reply == pb.ACCEPT
    process.send(signal.SIGSTOP)
    try:
        beats = [asyncio.ensure_future(member.heartbeat()) for member in members]
        await asyncio.sleep(2 * LEASE_S)  # what is tested: they run out
    finally:
        process.send(signal.SIGCONT)
    await asyncio.gather(*beats)

    async def live(member: Member) -> None:
        while True:
            await member.heartbeat()
            await asyncio.sleep(LEASE_S / 8)  # between two signs of life

    living = [asyncio.ensure_future(live(member)) for member in members]
    try:
        await process.until_logged('"participant_left"')
    finally:
        for task in living:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*living)
    (told,) = [line for line in process.log().splitlines() if '"participant_left"' in line]
    assert '"silent"' in told


async def test_calls_say_how_long_they_have_waited(start, join, monkeypatch):
    """A call has waited for its time limit less what is left of it; unregistered clients, and
    callers without a limit, tell nothing."""
    coordinator = await start(rounds={"start_participants": 9})
    members = [join(coordinator, f"p{number}") for number in range(MIN_SENDERS)]
    unregistered_clients = [join(coordinator, f"s{number}") for number in range(MIN_SENDERS)]
    lateness, clock = coordinator.driver.lateness, coordinator.driver.clock
    monkeypatch.setattr(Lateness, "note_stall", lambda *_: None)  # however late this machine is

    async def beat(who: Member, *told: tuple[str, str]) -> None:
        await who.stub.Heartbeat(
            pb.HeartbeatRequest(), metadata=(*who.metadata, *told), timeout=PATIENCE_S
        )

    for member in members:
        await member.rendezvous()
    lease_s = coordinator.driver.session.rules.lease_s
    told = ("xain-timeout-ms", str(round(1000 * (PATIENCE_S + lease_s / 2))))
    for unregistered in unregistered_clients:
        with pytest.raises(grpc.aio.AioRpcError):
            await beat(unregistered, told)
    for member in members:
        await beat(member)
    for member in members:
        assert lateness.at(clock.now()) == 0.0
        await beat(member, told)
    # gRPC rounds what it says of the time that is left.
    assert lease_s / 4 <= lateness.at(clock.now()) <= lease_s
