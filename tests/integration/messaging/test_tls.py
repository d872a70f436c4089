"""The gRPC driver and the Membership service with certificates."""

import threading
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from support.certificates import certified, needs_openssl
from support.drivers import Arrived, Receiving, next_event
from support.messaging import PATIENCE_S, until
from xain_foundation.sockets import free_ports
from xain_messaging.discovery.coordinator import CoordinatorDiscovery
from xain_messaging.discovery.in_process import InProcessDiscovery
from xain_messaging.discovery.server import MembershipServer
from xain_messaging.drivers.grpc_streams import GrpcDriver, TlsFiles
from xain_messaging.errors import DiscoveryUnavailable
from xain_messaging.messages import Message, SessionMessage
from xain_messaging.ports import Membership
from xain_messaging.proxy import Proxy

pytestmark = needs_openssl


def authority(folder: Path) -> TlsFiles:
    """A certificate for 127.0.0.1, and who has signed it."""
    certified(folder)
    return TlsFiles(*((folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")))


def note_failure(failed: threading.Event, state: grpc.ChannelConnectivity) -> None:
    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        failed.set()


def test_peers_of_one_authority_talk(tmp_path: Path) -> None:
    """Peers of another authority, or without encryption, are refused."""
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    there = Receiving(GrpcDriver(tls=ours))
    drivers = {"friend": GrpcDriver(tls=ours), "stranger": GrpcDriver(tls=theirs)}
    drivers["naked"] = GrpcDriver()
    try:
        for name, driver in drivers.items():
            driver.connect("there", there.address)
            driver.send("there", [name.encode()])
        event = next_event(there)
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"friend"
        for name in ("stranger", "naked"):
            failed = threading.Event()
            drivers[name]._connections["there"]._channel.subscribe(partial(note_failure, failed))
            assert failed.wait(PATIENCE_S), f"{name} has not been turned away"
        drivers["friend"].send("there", [b"again"])
        event = next_event(there)
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"again"
        assert there.receive(0.0) is None
    finally:
        for driver in (there, *drivers.values()):
            driver.close(0.0)


def joined(
    target: str, credentials: grpc.ChannelCredentials | None, timeout_s: float = PATIENCE_S
) -> Membership:
    return CoordinatorDiscovery(target, credentials).join(
        "training",
        "worker",
        "anna",
        "here",
        timeout_s=timeout_s,
        on_change=lambda roster: None,
        on_lost=lambda error: None,
    )


def test_members_of_one_authority_find_each_other(tmp_path: Path) -> None:
    """A discovery with credentials talks to a service that has a certificate of its authority, and
    to no other; nor does one without to that service."""
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    with MembershipServer(
        settle_s=0.0,
        credentials=grpc.ssl_server_credentials(
            [(ours.key, ours.certificate)], ours.ca, require_client_auth=True
        ),
    ) as server:
        member = joined(
            server.target,
            grpc.ssl_channel_credentials(ours.ca, ours.key, ours.certificate),
        )
        member.barrier("epoch", 1, PATIENCE_S)
        member.leave()
        for other in (
            grpc.ssl_channel_credentials(theirs.ca, theirs.key, theirs.certificate),
            grpc.ssl_channel_credentials(ours.ca),
            None,
        ):
            with pytest.raises(DiscoveryUnavailable, match=r"certificate|TLS"):
                joined(server.target, other, timeout_s=2.0)


def test_member_hears_why_no_service_answers() -> None:
    target = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(DiscoveryUnavailable, match=f"{target} does not answer: connection refused"):
        joined(target, None, timeout_s=0.5)


def test_proxies_of_one_authority_talk(tmp_path: Path) -> None:
    """A task and its answer, with arrays on streams; and a proxy without certificates is in the
    group, but hears and is heard by nobody."""
    ours = authority(tmp_path / "ours")
    discovery = InProcessDiscovery()

    def join(name: str, driver: GrpcDriver) -> Proxy:
        options = {"discovery": discovery, "timeout_s": PATIENCE_S}
        return Proxy("training", "peer", name=name, driver=driver, **options)

    with (
        join("a", GrpcDriver(tls=ours)) as a,
        join("b", GrpcDriver(tls=ours)) as b,
        join("naked", GrpcDriver()) as naked,
    ):
        until(lambda: all(len(p.peers.get("peer", [])) == 2 for p in (a, b, naked)), "all")
        naked.isend(Message("t", "naked", "b"))
        for number in (3, 300_000):
            sessions = a.isend(SessionMessage("double", "a", "b", np.arange(number)))
            task = b.receive_once()
            assert task is not None
            assert task.source == "a"
            b.reply(task, body=2 * task.body)
            (reply,) = a.receive_by_id(sessions).complete()
            assert (reply.body == 2 * np.arange(number)).all()
        assert naked.endpoint._links["b"].num_kept == 1
