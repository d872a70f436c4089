"""A gRPC server that enrols sites, with an authority in memory: what they see of a coordinator."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from support import grpc_servers
from support.certificates import HOSTS, issued, make_authority, write_folder
from xain_foundation.security.callers import Callers
from xain_foundation.security.identity import Identity, IdentityRules, Role
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import Authority, digest_of_key, read_request
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl import coordinator_pb2, coordinator_pb2_grpc
from xain_wire.fl.access_pb2_grpc import AccessServicer, add_AccessServicer_to_server
from xain_wire.metadata import ERROR_DOMAIN


def refuse(context: Any, reason: str, message: str) -> None:
    detail = AnyMessage()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    code = grpc.StatusCode.UNAUTHENTICATED.value[0]
    status = status_pb2.Status(code=code, message=message, details=[detail])
    context.abort_with_status(rpc_status.to_status(status))


@dataclass
class Enroller(AccessServicer, coordinator_pb2_grpc.CoordinatorServicer):
    """Signs each token for one key, and each renewal.

    keys: digest of the key for which each token was signed, by serial number. lifetime_s: of
    certificates. num_lost: answers that are lost after they were decided. peers: callers of
    Heartbeat.
    """

    authority: Authority = field(default_factory=make_authority)
    lifetime_s: float = 3600.0
    num_lost: int = 0
    keys: dict[str, str] = field(default_factory=dict)
    signed: dict[str, bytes] = field(default_factory=dict)
    serials: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._callers = Callers(IdentityRules(authority=self.authority.name))

    def token(self, name: str, address: str, lifetime_s: float = 3600.0) -> str:
        certificate, key = issued(
            self.authority, Role.JOINING, name, hosts=(), lifetime_s=lifetime_s
        )
        return JoinToken(address, certificate, key, self.authority.certificate).encode()

    def _sign(self, request: bytes, name: str) -> bytes:
        key = read_request(request)
        digest = digest_of_key(key)
        if digest not in self.signed:
            identity = Identity(self.authority.name, Role.PARTICIPANT, name)
            self.signed[digest] = self.authority.issue(
                key, identity, time.time(), self.lifetime_s, hosts=HOSTS
            )
        return self.signed[digest]

    def Join(self, request: Any, context: Any) -> Any:  # gRPC's name
        caller = self._caller(context)
        digest = digest_of_key(read_request(request.request))
        if self.keys.setdefault(caller.serial, digest) != digest:
            refuse(context, "TOKEN_USED", "it was used at 12:00 from 10.0.0.7, with another key")
        return self._answer(pb.JoinResponse, request, caller.identity.name, context)

    def Renew(self, request: Any, context: Any) -> Any:
        return self._answer(pb.RenewResponse, request, self._caller(context).identity.name, context)

    def _answer(self, response: Any, request: Any, name: str, context: Any) -> Any:
        certificate = self._sign(request.request, name)
        if self.num_lost:
            self.num_lost -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return response(certificate=certificate, authority=self.authority.certificate)

    def Heartbeat(self, request: Any, context: Any) -> Any:
        self.serials.append(self._caller(context).serial)
        return coordinator_pb2.HeartbeatResponse()

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        number = 0
        while context.is_active():
            yield coordinator_pb2.WatchResponse(round=number)
            number += 1
            time.sleep(0.02)  # news without end: a pause between two, and nothing waits for it

    def _caller(self, context: Any) -> Any:
        return self._callers.of_certificate(context.auth_context()["x509_pem_cert"][0])


@contextmanager
def serving(enroller: Enroller, folder: Path, hosts: Any = HOSTS) -> Iterator[str]:
    """Serve with certificates of the enroller's authority. Yields the address."""
    if not folder.exists():
        write_folder(folder, enroller.authority, Role.COORDINATOR, "coordinator", hosts=hosts)
    server = grpc.server(ThreadPoolExecutor(8))
    add_AccessServicer_to_server(enroller, server)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(enroller, server)
    with grpc_servers.serving(server, Certificates(folder).of_server()) as port:
        yield f"127.0.0.1:{port}"
