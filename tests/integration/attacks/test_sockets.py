"""Sockets of every kind, and connections that must not stand: TLS of the wrong kind, none at all,
and the operator's socket in the hands of another user of the machine."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from integration.attacks.test_callers import ALL, call
from support.certificates import make_authority
from support.closed_coordinator import ClosedCoordinator, outcome_of
from support.drivers import closing_all
from support.process import PATIENCE_S
from support.wire import Member
from xain_coordinator.server.operators_socket import socket_of
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY
from xain_membership.server import MembershipServer
from xain_messaging.drivers.grpc_streams import GrpcDriver

HTTP1 = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
GREETINGS = {"gRPC": HTTP2, "weights port": HTTP1, "messaging": HTTP2, "membership": HTTP2}

Make = Callable[[ClosedCoordinator], ssl.SSLContext | None]


# --- clients ---


def context_of(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.set_alpn_protocols(["h2"])
    context.check_hostname = False  # the certificate of a peer is for its name
    return context


def holding(name: str = "ward-1", **of: Any) -> Make:
    def make(at: ClosedCoordinator) -> ssl.SSLContext:
        return context_of(at.folder_of(*at.certificate(Role.PARTICIPANT, name, **of)))

    return make


def of_another_authority(at: ClosedCoordinator) -> ssl.SSLContext:
    return holding(by=make_authority())(at)


def without_certificate(at: ClosedCoordinator) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=at.authority.certificate.decode())
    context.set_alpn_protocols(["h2"])
    context.check_hostname = False
    return context


def of_tls_1_1(at: ClosedCoordinator) -> ssl.SSLContext:
    context = holding()(at)
    context.set_ciphers("ALL:@SECLEVEL=0")  # else OpenSSL itself would send nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def in_the_clear(at: ClosedCoordinator) -> None:
    return None


CLIENTS: dict[str, Make] = {
    "no certificate": without_certificate,
    "another authority": of_another_authority,
    "expired": holding(lifetime_s=-1.0),
    "not yet valid": holding(begins_in_s=3600.0),
    "TLS 1.1": of_tls_1_1,
    "in the clear": in_the_clear,
}


def is_let_in(port: int, context: ssl.SSLContext | None, greeting: bytes) -> bool:
    """Whether a server says anything but that it does not talk to this client."""
    with ExitStack() as opened:
        sock = opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        try:
            if context is not None:
                sock = opened.enter_context(context.wrap_socket(sock))
            sock.sendall(greeting)
            said = sock.recv(100)
        except OSError:  # an alert is one, too
            return False
    is_alert = context is None and said[:1] == b"\x15"
    return bool(said) and not is_alert


# --- servers ---


@contextmanager
def ports_of(at: ClosedCoordinator) -> Iterator[dict[str, int]]:
    """Ports of everything that has certificates of the coordinator's authority."""
    weights = at.coordinator.weights_port
    assert weights is not None
    own = at.holder(*at.certificate(Role.COORDINATOR, "coordinator"))
    peer = at.holder(*at.certificate(Role.PARTICIPANT, "ben"))
    driver = GrpcDriver(tls=peer)
    driver.serve(lambda frames, sender=None: None, lambda name: None)
    with closing_all(driver), MembershipServer(settle_s=0.0, tls=own) as membership:
        yield {
            "gRPC": at.port,
            "weights port": weights,
            "messaging": int(driver.address.rpartition(":")[2]),
            "membership": int(membership.target.rpartition(":")[2]),
        }


async def test_connections_without_a_certificate_that_counts_do_not_stand(closed):
    """On each port, for each kind of client; one with a certificate that counts is let in."""
    contexts = {name: make(closed) for name, make in CLIENTS.items()}
    own = holding()(closed)
    closed.remember()
    with ports_of(closed) as ports:
        assert set(ports) == set(GREETINGS)
        for name, port in ports.items():
            greeting = GREETINGS[name]
            assert await asyncio.to_thread(is_let_in, port, own, greeting), name
            let_in = [
                client
                for client, context in contexts.items()
                if await asyncio.to_thread(is_let_in, port, context, greeting)
            ]
            assert not let_in, f"{name} lets in: {let_in}"
    closed.require_unchanged()
    await closed.close_round()


async def test_port_without_certificates_talks_to_no_client_with_tls(start, said):
    """A participant that has a certificate sends nothing to a coordinator that shows none."""
    coordinator = await start()
    credentials = grpc.ssl_channel_credentials()
    member = Member(coordinator.port, "ward-1", credentials)
    assert await outcome_of(member.rendezvous(), said.messages) == "UNAVAILABLE"
    await member.close()
    assert not coordinator.driver.session.members
    port = coordinator.weights_port
    assert port is not None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    assert not await asyncio.to_thread(is_let_in, port, context, HTTP1)


async def test_port_of_health_checks_answers_nothing_else(closed, said):
    """Methods of other services are refused, and so are other services of gRPC servers."""
    port = closed.coordinator.server.health_port
    assert port is not None
    member = Member(port, "ward-1")
    closed.members.append(member)
    health = await HealthStub(member.channel).Check(HealthCheckRequest())
    assert health.status == HealthCheckResponse.SERVING
    outcomes = {
        method.full_name: await outcome_of(call(member, method), said.messages)
        for method in ALL
        if method.containing_service.name != "Health"
    }
    assert len(outcomes) > 20
    assert {one for one, outcome in outcomes.items() if outcome != "UNIMPLEMENTED"} == set()
    closed.require_unchanged()
    await closed.close_round()


# --- the operator's socket ---

NOBODY = 65534
CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__)
else:
    print("connected")
"""
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")


def as_nobody(path: Path) -> str:
    assert PYTHON is not None
    command = [PYTHON, "-ISc", CONNECT, str(path)]
    run = subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=True
    )
    return run.stdout.decode().strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(PYTHON is None, reason="needs a Python that other users may run")
@pytest.mark.parametrize("depth", [0, 120], ids=["beside the journal", "moved, since it is long"])
async def test_operators_socket_is_not_for_other_users(start, depth):
    """The mode of the socket keeps them out, where they may enter the folder of the data."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / ("d" * depth)
        folder.mkdir(exist_ok=True)
        for each in (Path(made), folder):
            each.chmod(0o755)
        coordinator = await start(journal={"path": str(folder / "journal.sqlite")})
        path = socket_of(folder / "journal.sqlite")
        assert (path.parent != folder) == bool(depth)
        assert await asyncio.to_thread(as_nobody, path) == "PermissionError"
        if not depth:  # the test would see it
            path.chmod(0o666)
            assert await asyncio.to_thread(as_nobody, path) == "connected"
        await coordinator.stop()
