"""Callers: whose certificate a connection shows."""

from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from ssl import DER_cert_to_PEM_cert, SSLSocket
from threading import Lock
from time import time
from typing import Any

from xain_foundation.security.identity import Identity, IdentityRules, NoIdentity


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a certificate. serial: in hex. not_after: seconds since the epoch."""

    identity: Identity
    serial: str
    not_after: float


def serial_of(text: str) -> str:
    """A serial number as Caller has it. text: as people and openssl write it: 0A:BC, 0x0abc."""
    return text.strip().replace(":", "").lower().removeprefix("0x").lstrip("0")


class Callers:
    """Reads callers out of certificates, each once: parsing takes 21 us.

    max_kept: certificates that are remembered.
    revoked: serial numbers that are refused.
    check: asked about each caller, each time; raises NoIdentity for one whose certificate was
        revoked.
    """

    def __init__(
        self, rules: IdentityRules, now: Callable[[], float] = time, max_kept: int = 4096
    ) -> None:
        self._rules = rules
        self._now = now
        self._max_kept = max_kept
        self._known: OrderedDict[bytes, Caller] = OrderedDict()
        self._lock = Lock()
        self.revoked: Set[str] = frozenset()
        self.check: Callable[[Caller], None] = lambda caller: None

    def of_certificate(self, pem: bytes) -> Caller:
        """The caller with a certificate that a handshake has verified, which may have expired
        since.

        Raises NoIdentity with the reason.
        """
        with self._lock:
            caller = self._known.get(pem)
            if caller is not None:
                self._known.move_to_end(pem)
        if caller is None:
            caller = self._read(pem)
            with self._lock:
                self._known[pem] = caller
                if len(self._known) > self._max_kept:
                    self._known.popitem(last=False)
        self.require(caller)
        return caller

    def remembered(self) -> list[Caller]:
        """Return the latest callers whose certificates were shown, also those refused now."""
        with self._lock:
            return list(self._known.values())

    def require(self, caller: Caller) -> None:
        """Raise NoIdentity if the certificate of a caller has expired or was revoked."""
        if self._now() > caller.not_after:
            raise NoIdentity(f"the certificate of {caller.identity} has expired")
        if caller.serial in self.revoked:
            raise NoIdentity(
                f"the certificate of {caller.identity} with the serial number {caller.serial} was "
                "revoked"
            )
        self.check(caller)

    def of_call(self, context: Any) -> Caller:
        """Return the caller of a gRPC call, by its handler's context. Raises NoIdentity."""
        shown = context.auth_context().get("x509_pem_cert", ())
        if not shown:
            raise NoIdentity("the connection shows no certificate")
        return self.of_certificate(shown[0])

    def of_socket(self, connection: SSLSocket) -> Caller:
        """Return the caller at the other side of a connection. Raises NoIdentity."""
        shown = connection.getpeercert(binary_form=True)
        if not shown:
            raise NoIdentity("the connection shows no certificate")
        return self.of_certificate(DER_cert_to_PEM_cert(shown).encode())

    def _read(self, pem: bytes) -> Caller:
        from xain_foundation.security.x509 import InvalidCredential, read_certificate

        try:
            found = read_certificate(pem)
        except InvalidCredential as error:
            raise NoIdentity(str(error)) from None
        return Caller(self._rules.identify(found.names), found.serial, found.not_after)
