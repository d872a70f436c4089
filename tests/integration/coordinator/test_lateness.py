"""The coordinator's own lateness removes no participant."""

import grpc
import pytest

from support.wire import Member
from xain_coordinator.driver.lateness import MIN_SENDERS, Lateness
from xain_wire.fl import coordinator_pb2 as pb

PATIENCE_S = 60.0


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
