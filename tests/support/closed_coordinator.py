"""A coordinator with certificates, and those who call it: honest sites and attackers."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from support.certificates import issued
from support.secret_search import Secrets
from support.waiting import until
from support.wire import Member, npy, reason
from xain_coordinator.access.control import AccessControl, initialise
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.journal.codec import encode_record
from xain_coordinator.server.guard import Guard
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY, Certificates
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.security.x509 import Authority, key_to_pem, make_request, new_key
from xain_wire.fl import coordinator_pb2 as pb

SITES = ("ward-1", "ward-2")
MODEL = np.arange(100_000, dtype=np.float32)  # too large to travel inside a call
UPDATES = {"ward-1": MODEL + 1, "ward-2": MODEL + 3}
ROUNDS = {"rounds": 3, "min_participants": 2}


@dataclass(frozen=True, slots=True)
class State:
    """Session, journal and certificates, which a refused attack leaves as they are.

    session: the session without its signs of life. journal: SHA-256 of its events. issued, revoked:
    serial numbers that access control knows.
    """

    session: object
    journal: str
    issued: frozenset[str]
    revoked: frozenset[str]


class ClosedCoordinator:
    """folder: of its data. coordinator: started under `guard`."""

    def __init__(
        self, folder: Path, guard: Guard, coordinator: SessionCoordinator, secrets: Secrets
    ):
        self.folder, self.guard, self.coordinator = folder, guard, coordinator
        self.secrets = secrets
        self.certificates = folder / "access" / "tls"
        self.authority = authority_of(folder)
        self.members: list[Member] = []
        self.sites = [self.enrolled(Role.PARTICIPANT, name) for name in SITES]
        self._before: State | None = None

    @property
    def port(self) -> int:
        return self.coordinator.port

    @property
    def access(self) -> AccessControl:
        return self.guard.require_access()

    # --- who calls ---

    def certificate(self, role: Role, name: str, **of: Any) -> tuple[bytes, bytes]:
        """A certificate by the coordinator's authority, or by another one, and its key."""
        certificate, key = issued(of.pop("by", None) or self.authority, role, name, **of)
        self.secrets.add_key(key, name)
        return certificate, key

    def member(self, role: Role, name: str, says: str | None = None, **of: Any) -> Member:
        """A caller with a certificate that the coordinator has not issued itself."""
        return self.caller(*self.certificate(role, name, **of), says)

    def caller(self, certificate: bytes, key: bytes, says: str | None = None) -> Member:
        return self.caller_of(self.authority.certificate, certificate, key, says)

    def caller_of(
        self, authority: bytes, certificate: bytes, key: bytes, says: str | None = None
    ) -> Member:
        """A caller that trusts this authority."""
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        self.members.append(Member(self.port, says, credentials))
        return self.members[-1]

    def enrolled(self, role: Role, name: str) -> Member:
        """A caller that can be revoked."""
        return self.caller(*self.signed(role, name))

    def signed(self, role: Role, name: str) -> tuple[bytes, bytes]:
        """A certificate that the coordinator has issued itself, and its key."""
        key = new_key()
        pem = key_to_pem(key)
        self.secrets.add_key(pem, name)
        return self.access.sign(make_request(key, name), name, role, by="the test"), pem

    def folder_of(self, certificate: bytes, key: bytes) -> Path:
        """The same as files, for clients that are not gRPC's."""
        folder = self.folder / f"holder-{len(list(self.folder.glob('holder-*')))}"
        folder.mkdir()
        (folder / AUTHORITY).write_bytes(self.authority.certificate)
        (folder / CERTIFICATE).write_bytes(certificate)
        (folder / KEY).write_bytes(key)
        (folder / KEY).chmod(0o600)
        return folder

    def holder(self, certificate: bytes, key: bytes) -> Certificates:
        return Certificates(self.folder_of(certificate, key))

    # --- the session ---

    async def open_round(self) -> None:
        """The honest sites join, and round 0 is open."""
        for site in self.sites:
            await site.rendezvous()
        for site in self.sites:
            await site.until(pb.ROUND, 0)
        self.remember()

    async def close_round(self, number: int = 0) -> None:
        """The honest sites hand in, and the model is that of their two updates."""
        for site, update in zip(self.sites, UPDATES.values(), strict=True):
            await site.until(pb.ROUND, number)
            await site.hand_in(update, round_=number)
        key = f"{number + 1}/global"
        await until(lambda: key in self.coordinator.driver.history.models)
        model = await self.sites[0].download(key)
        assert model == npy(MODEL + 2), "the model is not that of the honest sites"

    def remember(self) -> None:
        """The attack begins: from here on nothing may change."""
        self._before = self.state()

    def require_unchanged(self, **but: object) -> None:
        """but: parts of the state that have changed, and to what."""
        assert self._before is not None
        assert self.state() == replace(self._before, **but)

    def state(self) -> State:
        access = self.access.access
        return State(
            self.coordinator.driver.session,
            self._journal(),
            frozenset(access.issued),
            frozenset(access.revoked),
        )

    def _journal(self) -> str:
        digest = hashlib.sha256()
        for record in self.coordinator.journal.load():
            digest.update(repr(encode_record(record)).encode())
        return digest.hexdigest()

    def pass_hours(self, hours: float) -> None:
        """Let the certificates of callers get older. Those of the honest sites have 90 days."""
        later = time.time() + 3600 * hours
        self.guard.certificates.callers._now = lambda: later
        self.guard._end_expired(later)

    async def end(self) -> None:
        for member in self.members:
            await member.close()


def authority_of(folder: Path) -> Authority:
    access = folder / "access"
    return Authority.of_pem((access / "ca.crt").read_bytes(), (access / "ca.key").read_bytes())


def closed_guard(folder: Path) -> Guard:
    """Make an authority below a data folder, and the guard of its coordinator."""
    access = folder / "access"
    initialise(access, ["127.0.0.1"])
    return Guard.open(TlsSettings(), access / "tls", access)


async def outcome_of(call: Awaitable[Any], told: list[str]) -> str:
    """How a call ends: "let in", or its status and, where it has one, its reason.

    told: gets its message.
    """
    try:
        async with asyncio.timeout(60.0):
            await call
    except grpc.aio.AioRpcError as error:
        told.append(error.details() or "")
        said = any(k == "grpc-status-details-bin" for k, _ in error.trailing_metadata() or ())
        return f"{error.code().name} {reason(error)}" if said else error.code().name
    return "let in"
