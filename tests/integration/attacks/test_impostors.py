"""Holders of certificates of our authority who listen in the place of the coordinator: no client
sends them anything."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from support import grpc_servers
from support.process import PATIENCE_S
from xain_foundation.net.channels import open_channel
from xain_foundation.security.identity import SCHEDULER, Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import make_request, new_key
from xain_participant.enrolment.asking import Refused, ask_to_join
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub


@contextmanager
def listening(tls: Certificates, heard: list[str]) -> Iterator[int]:
    """A gRPC server that takes whatever it is sent; its port. heard: methods that were called."""

    class Everything(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            heard.append(details.method)
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool, [Everything()])
        with grpc_servers.serving(server, tls.of_server(), "localhost") as port:
            yield port


def trusted_by(client: Certificates, address: str) -> list[str]:
    """Kinds of clients that connect to the server at an address. Those of gRPC tell it what they
    call."""
    with open_channel(address, (), client.of_channel()) as channel, suppress(grpc.RpcError):
        CoordinatorStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=PATIENCE_S)
    with suppress(Refused):
        ask_to_join(address, client.of_channel(), make_request(new_key(), "ward-1"))
    trusting = []
    host, _, port = address.rpartition(":")
    for kind, context in (("weights", client.connects), ("tunnel", client.connects_http2)):
        try:
            with (
                socket.create_connection((host, int(port)), PATIENCE_S) as plain,
                context.wrap_socket(plain, server_hostname=host),
            ):
                trusting.append(kind)
        except ssl.SSLCertVerificationError:
            pass
    return trusting


@pytest.mark.parametrize("role", [Role.NODE, Role.PARTICIPANT, Role.OPERATOR])
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "coordinator", SCHEDULER])
async def test_holder_of_a_certificate_cannot_pass_for_the_coordinator(closed, role, name):
    """A certificate of another role is refused under each name and host."""
    impostor = closed.holder(*closed.signed(role, name))
    site = closed.holder(*closed.signed(Role.PARTICIPANT, "ward-9"))
    heard = []
    with listening(impostor, heard) as port:
        for host in ("localhost", "127.0.0.1"):
            assert await asyncio.to_thread(trusted_by, site, f"{host}:{port}") == []
    assert heard == []
    with listening(Certificates(closed.certificates), heard) as port:
        kinds = await asyncio.to_thread(trusted_by, site, f"localhost:{port}")
    assert kinds == ["weights", "tunnel"], "the test would see it"
    assert [one.rpartition("/")[2] for one in heard] == ["Heartbeat", "Join"]
    await closed.close_round()
