"""The Membership service: what it takes of members, and the streams on which it tells them."""

import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest

from support.discovery import MemberCalls, Peer, Service, is_refused
from support.fault_proxy import FaultProxy
from support.logs import capture_logs
from support.messaging import LEASE_S, PATIENCE_S, until
from xain_membership import background
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import DiscoveryUnavailable, NameTaken
from xain_membership.server import MembershipServer
from xain_membership.service import GATHER_S, KEEPALIVE, MAX_MEMBERS, MembershipService
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub


def test_claims_of_members_are_checked():
    """A member returns only with an incarnation that a service has given: later processes of its
    name would otherwise seem to be older."""
    with MembershipServer(settle_s=0.0) as server, grpc.insecure_channel(server.target) as channel:
        stub = MembershipStub(channel)

        def join(former: pb.Member | None = None) -> pb.Member:
            request = pb.JoinRequest(group="g", role="r", name="anna", address="x", former=former)
            answer = stub.Join(request, timeout=PATIENCE_S)
            return answer.member

        now = time.time_ns()
        for rank, incarnation in ((-7, now), (2**31 - 1, now), (0, 0), (0, 2**64 - 1)):
            with pytest.raises(grpc.RpcError) as caught:
                join(pb.Member(rank=rank, incarnation=incarnation))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # Another service's clock may have been ahead.
        before = join(pb.Member(rank=3, incarnation=now + 10**12))
        assert (before.rank, before.incarnation) == (3, now + 10**12)
        stub.Leave(pb.LeaveRequest(group="g", name="anna", incarnation=before.incarnation))
        assert join().incarnation > before.incarnation


def test_stream_without_a_reader_is_ended(monkeypatch):
    """A newer stream and a leave of the member end it too, though its message never goes out."""
    services = []

    class Service(MembershipService):
        def __init__(self, *rest: Any, **more: Any) -> None:
            super().__init__(*rest, **more)
            services.append(self)

    monkeypatch.setattr("xain_membership.server.MembershipService", Service)
    monkeypatch.setattr("xain_membership.service.GATHER_FOR_EACH_S", 0.0)
    with (
        MembershipServer(settle_s=0.0) as server,
        MemberCalls(server.target, "crowd") as crowd,
        ExitStack() as stack,
    ):
        for i in range(MAX_MEMBERS // 2):  # so that a few rosters are more than a line holds
            crowd.who = {"group": "g", "name": f"w{i}"}
            crowd.join("x" * 256)
        (service,) = services
        lines = [stack.enter_context(MemberCalls(server.target, "anna")) for _ in range(3)]
        lines[0].join()
        anna = ("g", "anna", lines[0].who["incarnation"])
        told = []

        def is_stuck() -> bool:
            """After one more change, and all those before it."""
            crowd.move()
            stream = service._streams.get(anna)
            told.append(stream is not None and stream not in ended and stream.is_writing)
            return all(told[-10:])

        ended, calls = set(), []
        over = []
        has_ended = service._registry.stream_ended
        monkeypatch.setattr(
            service._registry, "stream_ended", lambda *rest: over.append(rest) or has_ended(*rest)
        )
        for line in lines:
            line.who = lines[0].who
            calls.append(line.watch())
            told.append(False)
            until(is_stuck, "the stream to be stuck")
            ended.add(service._streams[anna])
        until(lambda: len(over) == 2, "the older streams to be over")
        crowd.stub.Leave(pb.LeaveRequest(**lines[0].who), timeout=PATIENCE_S)
        until(lambda: not service._streams, "the last one to be over")


def test_a_member_of_a_large_group_hears_of_many_changes_at_once(monkeypatch):
    """A while passes between two messages to a member, which grows with the group. It hears at once
    that its stream has ended."""
    monkeypatch.setattr("xain_membership.service.GATHER_FOR_EACH_S", 3600.0)
    with (
        MembershipServer(settle_s=0.0) as server,
        MemberCalls(server.target, "anna").join() as anna,
    ):
        stream = anna.watch()
        assert [member.name for member in next(stream).members] == ["anna"]
        began_at = time.monotonic()
        while time.monotonic() < began_at + 10 * GATHER_S:
            anna.move()
        anna.stub.Leave(pb.LeaveRequest(**anna.who), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert ended.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_stream_that_is_refused_is_said_once(monkeypatch):
    """Heartbeats go on meanwhile, so nobody would notice; and it is tried again and again."""

    async def refuse(service: MembershipService, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        yield

    monkeypatch.setattr(MembershipService, "Watch", refuse)
    with (
        capture_logs() as logs,
        MembershipServer(settle_s=0.0) as server,
        pytest.raises(DiscoveryUnavailable, match="does not say who is in the group"),
    ):
        Peer(CoordinatorDiscovery(server.target), "anna", timeout_s=2.0)
    said = [entry for entry in logs if entry["event"] == "discovery_refuses"]
    assert [(entry["log_level"], entry["error"]) for entry in said] == [("warning", "no room")]


def test_connection_that_ends_without_a_word_is_noticed(monkeypatch):
    """The service asks now and then whether somebody is there: long before a lease is over the
    member has gone."""
    monkeypatch.setitem(KEEPALIVE, "grpc.keepalive_time_ms", 200)
    monkeypatch.setitem(KEEPALIVE, "grpc.keepalive_timeout_ms", 200)
    monkeypatch.setitem(KEEPALIVE, "grpc.http2.ping_timeout_ms", 200)  # or it is a minute
    with MembershipServer(lease_s=3600.0, settle_s=0.0) as server:
        port = int(server.target.rpartition(":")[2])
        with FaultProxy(port) as proxy:
            watcher = Peer(CoordinatorDiscovery(server.target), "anna")
            Peer(CoordinatorDiscovery(f"127.0.0.1:{proxy.port}"), "ben")
            until(lambda: watcher.sees.keys() == {"anna", "ben"}, "anna to hear of ben")
            proxy.blackhole()
            until(lambda: watcher.sees.keys() == {"anna"}, "anna to hear that ben is gone")
            proxy.heal()
            until(lambda: watcher.sees.keys() == {"anna", "ben"}, "ben to be back")


def test_service_that_stood_still_removes_no_member():
    """Leases run out meanwhile, and heartbeats wait in it. Who then still says nothing goes."""
    lease_s = 2.0
    with (
        capture_logs() as logs,
        MembershipServer(lease_s=lease_s, settle_s=0.0) as server,
        MemberCalls(server.target, "silent").join(),
    ):
        discovery = CoordinatorDiscovery(server.target)
        anna, ben = (Peer(discovery, name, group="g") for name in ("anna", "ben"))
        until(lambda: len(anna.sees) == 3, "anna to hear of all")
        background.event_loop().call_soon_threadsafe(time.sleep, 2 * lease_s)
        until(lambda: "silent" not in anna.sees, "the silent one to be gone")
        for peer in (anna, ben):
            assert all({"anna", "ben"} <= roster.keys() for roster in anna.rosters[-2:])
            peer.leave()
    said = [entry["event"] for entry in logs]
    assert "membership_late" in said
    assert "member_came_back" not in said


def test_members_are_bounded(monkeypatch):
    """A member beyond the bound waits for its time, and gets the slot of a member that leaves."""
    monkeypatch.setattr("xain_membership.service.MAX_MEMBERS", 2)
    with Service("coordinator", LEASE_S) as service:
        discovery = service.discovery
        first, second = Peer(discovery, "anna"), Peer(discovery, "ben", group="another")

        def join(name: str, timeout_s: float) -> Peer:
            return Peer(discovery, name, timeout_s=timeout_s)

        for name, why, text in (
            ("cleo", DiscoveryUnavailable, "2 members already"),
            ("anna", NameTaken, "anna"),
        ):
            is_refused(why, text, partial(join, name))
        first.leave()
        third = Peer(discovery, "cleo")
        second.leave()
        third.leave()


def test_a_server_whose_port_is_taken():
    """The error says so, nothing is left, and the server can be stopped as after serving."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = MembershipServer(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(OSError, match="cannot listen"):
            server.start()
        server.stop()
    with server:
        Peer(CoordinatorDiscovery(server.target), "anna").leave()
