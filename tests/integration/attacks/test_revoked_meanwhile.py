"""Certificates that are revoked, or expire, while something is open under them: it ends with its
status, nothing more of its holder counts, and the others go on."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509

from support.certificates import issued, make_authority, write_folder
from support.closed_coordinator import MODEL, SITES, UPDATES, ClosedCoordinator, outcome_of
from support.waiting import until
from support.wire import Member, digest, npy
from xain_coordinator.driver.effects import StoreWorker
from xain_coordinator.server.guard import Guard
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Identity, Role, node_host
from xain_foundation.security.tls import KEY, REVOKED
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.security.tls_socket import TlsSocket
from xain_foundation.security.x509 import key_to_pem, make_request, new_key, read_certificate
from xain_membership.server import MembershipServer
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.messaging import membership_pb2 as mpb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub
from xain_wire.weights_port import DIGEST_HEADER

UNAUTHENTICATED = "UNAUTHENTICATED UNAUTHENTICATED"
MALLORYS = MODEL - 4
DATA = npy(MALLORYS)


async def half_an_upload() -> AsyncIterator[pb.PutWeightsRequest]:
    header = pb.PutWeightsRequest.Header(round=1, size_bytes=len(DATA), digest=digest(DATA))
    yield pb.PutWeightsRequest(header=header)
    yield pb.PutWeightsRequest(data=DATA[: len(DATA) // 2])
    await asyncio.Event().wait()


@pytest.fixture
async def mallory(closed: ClosedCoordinator) -> Member:
    """A third site in round 1, whose certificate is to be revoked."""
    made = closed.enrolled(Role.PARTICIPANT, "mallory")
    await made.rendezvous()
    await closed.close_round()
    await made.until(pb.ROUND, 1)
    return made


@pytest.mark.parametrize("how", ["revoked", "expired"])
@pytest.mark.parametrize("what", ["watch", "upload"])
async def test_stream_ends_with_the_certificate(closed, mallory, said, what, how):
    ending: Any
    if what == "watch":
        opened = mallory.watch()
        await opened.read()
        ending = opened.read()
    else:
        ending, slots = (
            mallory.stub.PutWeights(half_an_upload()),
            closed.coordinator.server.slots.by_name,
        )
        await until(lambda: "mallory" in slots and slots["mallory"].upload is not None)
    if how == "revoked":
        closed.access.revoke("mallory", by="the test")
    else:
        closed.pass_hours(24 * 91)
    assert await outcome_of(ending, said.messages) == UNAUTHENTICATED
    for again in (mallory.rendezvous(), mallory.heartbeat(), mallory.watch().read()):
        assert await outcome_of(again, said.messages) == UNAUTHENTICATED
    if how == "revoked":
        await until(lambda: set(closed.coordinator.driver.session.members) == set(SITES))
        await closed.close_round(1)


async def test_thief_who_has_renewed_a_certificate_is_revoked_with_it(closed, said):
    """Revoked is the serial number that the operator knows. The site's other certificate counts."""
    certificate, _ = closed.signed(Role.PARTICIPANT, "ward-1")
    stolen = read_certificate(certificate).serial
    identity = Identity(closed.authority.name, Role.PARTICIPANT, "ward-1")
    key = new_key()
    renewed = closed.access.renew(
        Caller(identity, stolen, time.time() + 60), make_request(key, "ward-1")
    )
    closed.secrets.add_key(key_to_pem(key), "the thief")
    thief = closed.caller(renewed, key_to_pem(key))
    opened = thief.watch()
    await opened.read()
    closed.access.revoke(stolen, by="the test")
    for call in (opened.read(), thief.rendezvous(), thief.heartbeat()):
        assert await outcome_of(call, said.messages) == UNAUTHENTICATED
    await closed.close_round()


async def in_a_group(member: Member, name: str, address: str = "127.0.0.1:1") -> tuple[Any, Any]:
    """Join a group of messaging, and watch it. Returns calls: for what the stream has to tell, and
    for a renewal of the lease."""
    stub = MembershipStub(member.channel)
    join = mpb.JoinRequest(group="g", role="peer", name=name, address=address)
    joined = await stub.Join(join)
    who = {"group": "g", "name": name, "incarnation": joined.member.incarnation}
    watch = stub.Watch(mpb.WatchRequest(**who))
    await watch.read()

    async def rest() -> None:
        while await watch.read() is not grpc.aio.EOF:
            pass

    return rest, lambda: stub.Renew(mpb.RenewRequest(**who))


async def test_revoked_member_leaves_the_groups_of_a_coordinator(closed, said):
    registry = closed.coordinator.server._membership._registry
    registry._open_at, registry.lease_s = 0.0, 3600.0  # it neither waits nor expires
    node = closed.enrolled(Role.NODE, "server-1")
    watch, renew = await in_a_group(node, "server-1")
    closed.access.revoke("server-1", by="the test")
    for call in (watch(), renew()):
        assert await outcome_of(call, said.messages) == UNAUTHENTICATED


async def test_programs_without_a_coordinator_refuse_who_is_in_their_files(closed, said):
    """Nothing more is said to a stream that stands, or taken from it."""
    stolen = closed.signed(Role.PARTICIPANT, "mallory")
    mallory = GrpcDriver(tls=closed.holder(*stolen))
    theirs = [closed.holder(*closed.signed(Role.NODE, name)) for name in ("members", "ben")]
    ben = GrpcDriver(tls=theirs[1])
    packets = []
    ben.serve(lambda frames, sender=None: packets.append(sender), lambda name: None)
    mallory.serve(lambda frames, sender=None: None, lambda name: None)
    with MembershipServer(lease_s=3600.0, settle_s=0.0, tls=theirs[0]) as server:
        options = [("grpc.ssl_target_name_override", node_host("members"))]
        channel = grpc.aio.secure_channel(
            server.target, closed.holder(*stolen).of_channel(), options
        )
        member = Member(0, None)
        member.channel = channel
        watch, renew = await in_a_group(member, "mallory")
        mallory.connect("ben", ben.address)
        mallory.send("ben", [b"one"])
        await until(lambda: packets == ["mallory"])
        closed.access.revoke("mallory", by="the test")
        for each in theirs:
            revoked = [one.serial for one in closed.access.entries() if one.revoked]
            (each.folder / REVOKED).write_text("\n".join(revoked))
        assert await outcome_of(watch(), said.messages) == "UNAUTHENTICATED"
        assert await outcome_of(renew(), said.messages) == "UNAUTHENTICATED"
        await until(lambda: ben.run(0.0) or not ben._streams)
        await until(lambda: mallory.run(0.0) or "ben" not in mallory._sending)
        mallory.send("ben", [b"two"])
        again = mallory._sending["ben"]
        await until(again.call.done)
        assert again.call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert packets == ["mallory"]
        await member.close()
    for driver in (mallory, ben):
        driver.close(0.0)


async def test_certificate_of_a_companys_authority_is_revoked_by_its_serial_number(
    start, tmp_path, said, secrets
):
    """Also after a restart. The coordinator has issued nothing itself, and a site that has no other
    certificate leaves the session."""
    authority = make_authority()
    folder = write_folder(tmp_path / "tls", authority, Role.COORDINATOR, "coordinator")
    (folder / KEY).chmod(0o600)
    settings = TlsSettings(identity="cn", roles={"participant": ["ward-*"]})
    certificates = {name: issued(authority, Role.PARTICIPANT, name) for name in SITES}
    for name, (_, key) in certificates.items():
        secrets.add_key(key, name)

    def site(port: int, name: str) -> Member:
        certificate, key = certificates[name]
        credentials = grpc.ssl_channel_credentials(authority.certificate, key, certificate)
        return Member(port, None, credentials)

    def guard() -> Guard:
        return Guard.open(settings, folder, tmp_path / "access")

    first = guard()
    coordinator = await start(guard=first)
    watching = asyncio.create_task(first.watch())
    revoked, honest = (site(coordinator.port, name) for name in SITES)
    for each in (revoked, honest):
        await each.rendezvous()
    opened = revoked.watch()
    await opened.read()
    number = x509.load_pem_x509_certificate(certificates[SITES[0]][0]).serial_number
    first.access.revoke(f"{number:X}", by="the test")
    for call in (opened.read(), revoked.heartbeat(), revoked.rendezvous()):
        assert await outcome_of(call, said.messages) == UNAUTHENTICATED
    await until(lambda: set(coordinator.driver.session.members) == {SITES[1]})
    await honest.heartbeat()
    for each in (revoked, honest):
        await each.close()
    watching.cancel()
    await coordinator.stop()
    first.close()
    second = guard()
    coordinator = await start(guard=second)
    again = site(coordinator.port, SITES[0])
    assert await outcome_of(again.rendezvous(), said.messages) == UNAUTHENTICATED
    await again.close()
    await coordinator.stop()
    second.close()


async def test_put_on_the_weights_port_breaks_off(closed, said):
    """The half that has arrived is handed in by nobody."""
    certificate, key = closed.signed(Role.PARTICIPANT, "ward-1")
    thief, holder = closed.caller(certificate, key), closed.holder(certificate, key)
    url = (await closed.sites[0].start()).upload.url
    closed.remember()
    sock = await asyncio.to_thread(connected, url, holder)
    with sock:
        path = url.partition("://")[2].partition("/")[2]
        head = f"PUT /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        head += f"{DIGEST_HEADER}: {'0' * 32}\r\n\r\n"
        await asyncio.to_thread(sock.sendall, head.encode() + b"x" * 50)
        port = closed.coordinator._weights_port
        (running,) = await until(lambda: port._callers)
        closed.access.revoke(holder.own.serial, by="the test")
        await until(running.done)
        answer = b""
        with suppress(OSError):
            answer = await asyncio.to_thread(sock.recv, 100)
    assert not answer.startswith(b"HTTP/1.1 2")
    assert await outcome_of(thief.end(), said.messages) == UNAUTHENTICATED
    closed.require_unchanged(revoked={holder.own.serial})
    await closed.close_round()


def connected(url: str, holder: Any) -> TlsSocket:
    port = int(url.partition("://")[2].partition("/")[0].rpartition(":")[2])
    sock = TlsSocket(socket.create_connection(("127.0.0.1", port)), holder.connects, "127.0.0.1")
    sock.handshake()
    return sock


async def test_update_that_was_acknowledged_counts_in_the_aggregation(
    closed, mallory, said, monkeypatch
):
    """The holder is revoked in the middle of it, leaves the session, and is told no model."""
    begun, go_on, aggregate = threading.Event(), threading.Event(), StoreWorker._aggregate

    def held(worker: StoreWorker, *of: Any) -> Any:
        begun.set()
        assert go_on.wait(60.0)
        return aggregate(worker, *of)

    monkeypatch.setattr(StoreWorker, "_aggregate", held)
    await mallory.hand_in(MALLORYS, round_=1)
    for site, update in zip(closed.sites, UPDATES.values(), strict=True):
        await site.hand_in(update, round_=1)
    assert await asyncio.to_thread(begun.wait, 60.0)
    closed.access.revoke("mallory", by="the test")
    await until(lambda: "mallory" not in closed.coordinator.driver.session.members)
    go_on.set()
    assert await outcome_of(mallory.heartbeat(), said.messages) == UNAUTHENTICATED
    assert await outcome_of(mallory.download("2/global"), said.messages) == UNAUTHENTICATED
    await until(lambda: closed.coordinator.driver.history.models.get("2/global"))
    mean = sum(UPDATES.values(), MALLORYS) / 3
    assert await closed.sites[0].download("2/global") == npy(np.asarray(mean, np.float32))
