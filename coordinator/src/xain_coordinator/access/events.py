"""Events of access control, each a line of the audit log.

at: seconds since the epoch. by: who caused it. No event has a secret in it.
"""

from dataclasses import dataclass

from xain_foundation.security.identity import Role


@dataclass(frozen=True, slots=True)
class AuthorityCreated:
    """serial: of its certificate."""

    at: float
    by: str
    name: str
    serial: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class TokenCreated:
    """role: of the certificate that the token can be exchanged for."""

    at: float
    by: str
    serial: str
    name: str
    role: Role
    expires_at: float
    reusable: bool = False


@dataclass(frozen=True, slots=True)
class BearerCreated:
    """digest: SHA-256 of the token's text."""

    at: float
    by: str
    serial: str
    name: str
    role: Role
    expires_at: float
    digest: str


@dataclass(frozen=True, slots=True)
class CertificateIssued:
    """basis: serial number of the token, or of the renewed certificate; "" for neither. peer: who
    came with a token. hosts: that the certificate's holder may be reached by."""

    at: float
    by: str
    serial: str
    name: str
    role: Role
    expires_at: float
    key_digest: str
    basis: str = ""
    peer: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRefused:
    """A token came with another key than the one that it was exchanged for, first_at, by
    first_peer. One of the two does not own it."""

    at: float
    by: str
    serial: str
    name: str
    key_digest: str
    peer: str
    first_at: float
    first_peer: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """which: name or serial number that an operator gave. serials: that were valid until then."""

    at: float
    by: str
    which: str
    serials: tuple[str, ...]


Event = AuthorityCreated | TokenCreated | BearerCreated | CertificateIssued | TokenRefused | Revoked
