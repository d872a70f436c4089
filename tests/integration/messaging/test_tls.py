"""The gRPC driver and the Membership service with certificates."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from support.certificates import make_authority, write_folder
from support.drivers import Arrived, Receiving, closing_all, next_event
from support.messaging import PATIENCE_S, taken, until
from xain_foundation.net.channels import open_channel
from xain_foundation.net.errors import MessagingError
from xain_foundation.net.sockets import free_ports
from xain_foundation.security.identity import IdentityRules, Role
from xain_foundation.security.tls import FILES, Certificates
from xain_foundation.security.x509 import Authority
from xain_membership.coordinator import CoordinatorDiscovery
from xain_membership.errors import DiscoveryUnavailable
from xain_membership.in_process import InProcessDiscovery
from xain_membership.ports import Membership
from xain_membership.server import MembershipServer
from xain_messaging.discovery.redis import RedisDiscovery
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.format.messages import Message, SessionMessage
from xain_messaging.proxy import Proxy
from xain_wire.messaging import membership_pb2 as pb
from xain_wire.messaging.membership_pb2_grpc import MembershipStub

OURS, THEIRS = make_authority(), make_authority()

Issue = Callable[..., Certificates]


@pytest.fixture
def issue(tmp_path: Path) -> Issue:
    """Makes the certificate of a peer. By default it names no host: peers are known by their
    names, wherever they are."""

    def made(
        name: str,
        role: Role = Role.PARTICIPANT,
        authority: Authority = OURS,
        hosts: tuple[str, ...] = (),
    ) -> Certificates:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        return Certificates(write_folder(folder, authority, role, name, hosts=hosts))

    return made


def note_failure(failed: threading.Event, state: grpc.ChannelConnectivity) -> None:
    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        failed.set()


def test_peers_of_one_authority_talk(issue):
    """Peers of another authority, or without encryption, are refused."""
    there = Receiving(GrpcDriver(tls=issue("there")))
    drivers = {
        "friend": GrpcDriver(tls=issue("friend")),
        "stranger": GrpcDriver(tls=issue("stranger", authority=THEIRS)),
    }
    drivers["naked"] = GrpcDriver()
    with closing_all(there, *drivers.values()):
        for name, driver in drivers.items():
            driver.connect("there", there.address)
            driver.send("there", [name.encode()])
        event = next_event(there)
        assert isinstance(event, Arrived)
        assert (bytes(event.frames[0]), event.sender) == (b"friend", "friend")
        for name in ("stranger", "naked"):
            failed = threading.Event()
            drivers[name]._sending["there"].channel.subscribe(partial(note_failure, failed))
            assert failed.wait(PATIENCE_S), f"{name} has not been turned away"
        drivers["friend"].send("there", [b"again"])
        event = next_event(there)
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"again"
        assert there.receive(0.0) is None


def ended_with(driver: GrpcDriver, peer: str) -> grpc.StatusCode:
    """The status of the stream to a peer, once the peer has ended it."""
    stream = driver._sending[peer]
    until(stream.call.done, "the end of the stream")
    return stream.call.code()


def test_peer_is_reached_by_its_own_certificate_alone(issue):
    """A program at the address of another peer gets none of its messages."""
    mallory = Receiving(GrpcDriver(tls=issue("mallory")))
    anna = GrpcDriver(tls=issue("anna"))
    with closing_all(anna, mallory):
        anna.connect("ben", mallory.address)
        anna.send("ben", [b"secret"])
        failed = threading.Event()
        anna._sending["ben"].channel.subscribe(partial(note_failure, failed))
        assert failed.wait(PATIENCE_S)
        assert mallory.receive(0.0) is None


def test_packet_in_the_name_of_another_peer_is_refused(issue):
    discovery = InProcessDiscovery()
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    mallory = GrpcDriver(tls=issue("mallory"))
    observer = GrpcDriver(tls=issue("eve", Role.OBSERVER))
    own = issue("ben", hosts=("127.0.0.1",))
    with (
        Proxy("g", "peer", driver=GrpcDriver(tls=issue("anna")), **options) as anna,
        Proxy("g", "peer", name="ben", driver=GrpcDriver(tls=own), **options) as ben,
    ):
        until(lambda: "anna" in ben.peers.get("peer", []), "both")
        member = ben.endpoint.roster["anna"]
        forged = msgspec.msgpack.encode(
            ["l", "anna", "ben", member.incarnation + 1, 0, 0, 0, 0, [], []]
        )
        with closing_all(mallory, observer):
            for driver in (mallory, observer):
                driver.connect("ben", ben.endpoint.roster["ben"].address)
                driver.send("ben", [forged])
                assert ended_with(driver, "ben") is grpc.StatusCode.UNAUTHENTICATED
        assert ben.endpoint.left == set()
        anna.isend(Message("t", "anna", "ben", 7))
        assert taken(ben).body == 7


def joined(
    target: str, tls: Certificates | None, timeout_s: float = PATIENCE_S, name: str = "anna"
) -> Membership:
    return CoordinatorDiscovery(target, tls).join(
        "training",
        "worker",
        name,
        "here",
        timeout_s=timeout_s,
        on_change=lambda roster: None,
        on_lost=lambda error: None,
    )


def serving(issue: Issue, **options: Any) -> MembershipServer:
    tls = issue("coordinator", Role.COORDINATOR, hosts=("127.0.0.1",))
    return MembershipServer(settle_s=0.0, tls=tls, **options)


def test_members_of_one_authority_find_each_other(issue):
    """A discovery with certificates talks to a service that has one of its authority, and to no
    other; nor does one without to that service."""
    with serving(issue) as server:
        member = joined(server.target, issue("anna"))
        member.barrier("epoch", 1, PATIENCE_S)
        member.leave()
        # The cause is looked for when the time is over, however short that is.
        for other in (issue("anna", authority=THEIRS), None):
            with pytest.raises(DiscoveryUnavailable, match=r"another key|TLS"):
                joined(server.target, other, timeout_s=0.5)


def test_member_acts_in_its_own_name_alone(issue):
    """A call in the name of another member is refused and changes nothing; but an operator's."""
    with serving(issue) as server:
        member = joined(server.target, issue("anna"))
        who = {"group": "training", "name": "anna", "incarnation": member.member.incarnation}
        join = {"group": "training", "role": "worker", "name": "ben", "address": "there"}
        former = pb.Member(name="anna", role="worker", incarnation=2**62)
        del join["name"]
        calls = [
            ("Join", pb.JoinRequest(**join, name="ben")),
            ("Join", pb.JoinRequest(**join, name="anna", former=former)),
            ("Leave", pb.LeaveRequest(**who)),
            ("Renew", pb.RenewRequest(**who)),
            ("Barrier", pb.BarrierRequest(**who, barrier="b", num_members=1)),
            ("Watch", pb.WatchRequest(**who)),
        ]
        for caller, expected in (
            (issue("mallory"), grpc.StatusCode.UNAUTHENTICATED),
            (issue("eve", Role.OBSERVER), grpc.StatusCode.PERMISSION_DENIED),
            (issue("ward-7", Role.JOINING), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with open_channel(server.target, (), caller.of_channel()) as channel:
                stub = MembershipStub(channel)
                for method, request in calls:
                    call = getattr(stub, method)
                    with pytest.raises(grpc.RpcError) as refused:
                        _ = list(call(request, timeout=PATIENCE_S))  # a stream ends as it is read
                    assert refused.value.code() is expected, method
        member.barrier("epoch", 1, PATIENCE_S)  # it is a member still
        operator = issue("olga", Role.OPERATOR)
        with open_channel(server.target, (), operator.of_channel()) as channel:
            MembershipStub(channel).Leave(pb.LeaveRequest(**who), timeout=PATIENCE_S)
        with pytest.raises(MessagingError, match="the certificate is that of"):
            joined(server.target, issue("mallory"), name="anna")
        member.leave()


def exchange(certificates: Certificates, other: Certificates) -> None:
    for name in FILES:
        (certificates.folder / name).write_bytes((other.folder / name).read_bytes())
    assert certificates.refresh()


def test_files_that_change_break_no_membership_and_no_stream(issue):
    """Peers and service get certificates of the same authority and then of another one, while
    messages go. What is new connects under the new ones."""
    service = issue("coordinator", Role.COORDINATOR, hosts=("127.0.0.1",))
    own = {name: issue(name) for name in ("anna", "ben")}
    for certificates in (service, *own.values()):
        certificates.look_s = 0.0
    lost = []
    with MembershipServer(settle_s=0.0, tls=service) as server:
        options = {"timeout_s": PATIENCE_S}
        proxies = {
            name: Proxy(
                "g",
                "peer",
                name=name,
                driver=GrpcDriver(tls=tls),
                discovery=CoordinatorDiscovery(server.target, tls),
                **options,
            )
            for name, tls in own.items()
        }
        anna, ben = proxies["anna"], proxies["ben"]
        with closing_all(*proxies.values()):
            until(lambda: all(len(p.peers.get("peer", [])) == 1 for p in (anna, ben)), "both")
            for number, authority in enumerate((OURS, OURS, THEIRS, THEIRS)):
                exchange(
                    service,
                    issue("coordinator", Role.COORDINATOR, authority, hosts=("127.0.0.1",)),
                )
                for name, certificates in own.items():
                    exchange(certificates, issue(name, authority=authority))
                anna.isend(Message("t", "anna", "ben", number))
                assert taken(ben).body == number
            late = joined(server.target, issue("carl", authority=THEIRS), name="carl")
            late.leave()
            assert ben.name in anna.peers["peer"]
            assert not lost


def test_stream_to_a_peer_that_is_away_takes_new_certificates(issue):
    """A peer that comes with a certificate of another authority is reached once both have one."""
    (port,) = free_ports(1)
    here = GrpcDriver(tls=(mine := issue("here")))
    mine.look_s = 0.0
    here.serve(lambda frames, sender=None: None, lambda peer: here.send("there", [b"kept"]))
    here.connect("there", f"127.0.0.1:{port}")
    here.send("there", [b"lost"])
    exchange(mine, issue("here", authority=THEIRS))
    there = Receiving(GrpcDriver(f"127.0.0.1:{port}", tls=issue("there", authority=THEIRS)))
    with closing_all(here, there):
        arrived = []

        def has_come() -> bool:
            here.run(0.05)
            event = there.receive(0.05)
            if isinstance(event, Arrived):
                arrived.append(bytes(event.frames[0]))
            return arrived == [b"kept"]

        until(has_come, "the packet")


def test_names_of_another_authority_come_from_lists(tmp_path, issue):
    """Certificates of openssl, say, which are for hosts."""
    rules = IdentityRules("cn", {Role.PARTICIPANT: ("*",)})
    folders = {
        name: write_folder(tmp_path / name, THEIRS, Role.COORDINATOR, name)
        for name in ("anna", "ben")
    }
    anna, ben = (Certificates(folder, rules=rules) for folder in folders.values())
    there, here = Receiving(GrpcDriver(tls=ben)), GrpcDriver(tls=anna)
    with closing_all(here, there):
        here.connect("ben", there.address)
        here.send("ben", [b"hello"])
        event = next_event(there)
        assert isinstance(event, Arrived)
        assert event.sender == "anna"


def test_plaintext_beyond_loopback_needs_insecure():
    for make in (
        lambda **more: GrpcDriver("0.0.0.0:0", advertise="127.0.0.1", **more),
        lambda **more: ZmqDriver("0.0.0.0", advertise="127.0.0.1", **more),
        lambda **more: MembershipServer("0.0.0.0:0", **more),
        lambda **more: RedisDiscovery("redis://:secret@redis.example.org/0", **more),
        lambda **more: CoordinatorDiscovery("coordinator.example.org:50051", **more),
    ):
        with pytest.raises(ValueError, match=r"insecure=True") as refused:
            make()
        assert "secret" not in str(refused.value)
        made = make(insecure=True)
        if hasattr(made, "close"):
            made.close(0.0)
    RedisDiscovery("rediss://redis.example.org/0")
    RedisDiscovery("unix:///run/redis.sock")


def test_member_hears_why_no_service_answers():
    target = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(DiscoveryUnavailable, match=f"{target} does not answer: connection refused"):
        joined(target, None, timeout_s=0.5)


def test_proxies_of_one_authority_talk(issue):
    """A task and its answer, with arrays on streams; and a proxy without certificates is in the
    group, but hears and is heard by nobody."""
    discovery = InProcessDiscovery()

    def join(name: str, driver: GrpcDriver) -> Proxy:
        options = {"discovery": discovery, "timeout_s": PATIENCE_S}
        return Proxy("training", "peer", name=name, driver=driver, **options)

    with (
        join("a", GrpcDriver(tls=issue("a"))) as a,
        join("b", GrpcDriver(tls=issue("b"))) as b,
        join("naked", GrpcDriver()) as naked,
    ):
        until(lambda: all(len(p.peers.get("peer", [])) == 2 for p in (a, b, naked)), "all")
        naked.isend(Message("t", "naked", "b"))
        for number in (3, 300_000):
            sessions = a.isend(SessionMessage("double", "a", "b", np.arange(number)))
            task = taken(b)
            assert task.source == "a"
            b.reply(task, body=2 * task.body)
            (reply,) = a.receive_by_id(sessions).complete()
            assert (reply.body == 2 * np.arange(number)).all()
        assert naked.endpoint._links["b"].num_kept == 1
