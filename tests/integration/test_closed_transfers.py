"""Large weights of a closed coordinator, by its weights port and by gRPC."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from support.transfers import LARGE, MIB, PATIENCE_S, written
from support.waiting import until
from support.wire import Member, digest, npy
from xain_coordinator.access.control import initialise
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.server.guard import Guard
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY, Certificates
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.security.x509 import key_to_pem, make_request, new_key
from xain_participant.wire.direct import DirectTransfer, OfferFailed, with_host
from xain_wire.fl import coordinator_pb2 as pb

Hold = Callable[..., Certificates]


@pytest.fixture
async def guard(tmp_path: Path) -> AsyncIterator[Guard]:
    folder = tmp_path / "access"
    initialise(folder, ["127.0.0.1"])
    made = Guard.open(TlsSettings(), folder / "tls", folder)
    watching = asyncio.create_task(made.watch())
    yield made
    watching.cancel()
    made.close()


@pytest.fixture
def hold(guard: Guard, tmp_path: Path) -> Hold:
    """Certificates that the coordinator has issued."""

    def make(name: str, role: Role = Role.PARTICIPANT) -> Certificates:
        folder, key = tmp_path / name, new_key()
        folder.mkdir()
        access = guard.require_access()
        signed = access.sign(make_request(key, name), name, role, by="test")
        (folder / AUTHORITY).write_bytes(access.authority)
        (folder / CERTIFICATE).write_bytes(signed)
        (folder / KEY).write_bytes(key_to_pem(key))
        return Certificates(folder)

    return make


async def in_work(
    coordinator: SessionCoordinator, holder: Certificates
) -> tuple[Member, pb.StartTrainingRoundResponse]:
    member = Member(coordinator.port, None, holder.of_channel())
    await member.rendezvous()
    await member.until(pb.ROUND, 0)
    return member, await member.start()


async def test_revoked_participant_loses_its_upload(start, guard, hold, tmp_path):
    """The URL is worth nothing any more, either."""
    coordinator = await start(guard=guard, rounds={"min_participants": 1})
    holder = hold("a")
    member, work = await in_work(coordinator, holder)
    url = with_host(work.upload.url, f"127.0.0.1:{coordinator.port}")
    data = npy(LARGE)
    sent = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(num_bytes: int) -> None:
        """Wait for the revocation in the middle."""
        if num_bytes > 4 * MIB:
            loop.call_soon_threadsafe(sent.set)
            assert gone.wait(PATIENCE_S)

    gone = threading.Event()
    transfer = DirectTransfer(certificates=holder)
    putting = asyncio.create_task(
        asyncio.to_thread(transfer.put, url, [memoryview(data)], slowly, digest=digest(data))
    )
    async with asyncio.timeout(PATIENCE_S):
        await sent.wait()
    await written(tmp_path, 1)
    await asyncio.to_thread(guard.require_access().revoke, "a", by="test")
    await until(lambda: not coordinator._weights_port._connections)
    gone.set()
    with pytest.raises(OfferFailed):
        await putting
    transfer.close()
    await until(lambda: "a" not in coordinator.driver.session.members)
    await member.close()
    again = DirectTransfer(certificates=holder)  # this one leaves no host alone
    with pytest.raises(OfferFailed) as failed:
        await asyncio.to_thread(again.put, url, [memoryview(data)], digest=digest(data))
    assert failed.value.reason == "status 403"
    again.close()
