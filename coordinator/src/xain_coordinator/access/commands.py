"""Commands to the decider of access control.

serial: of what is to be issued, made by chance outside. lifetime_s: until it expires. by: who asks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CreateToken:
    serial: str
    name: str
    role: str
    lifetime_s: float
    by: str
    reusable: bool = False


@dataclass(frozen=True, slots=True)
class CreateBearer:
    """digest: SHA-256 of the token's text."""

    serial: str
    name: str
    role: str
    lifetime_s: float
    by: str
    digest: str


@dataclass(frozen=True, slots=True)
class Join:
    """token: serial number of the token that the caller came with."""

    serial: str
    token: str
    key_digest: str
    peer: str
    lifetime_s: float
    by: str


@dataclass(frozen=True, slots=True)
class Renew:
    """certificate: serial number of the certificate that the caller came with."""

    serial: str
    certificate: str
    key_digest: str
    lifetime_s: float
    by: str


@dataclass(frozen=True, slots=True)
class Sign:
    serial: str
    name: str
    role: str
    key_digest: str
    lifetime_s: float
    by: str


@dataclass(frozen=True, slots=True)
class IssueOwn:
    """A certificate of the coordinator itself."""

    serial: str
    key_digest: str
    hosts: tuple[str, ...]
    lifetime_s: float
    by: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """which: name or serial number."""

    which: str
    by: str


Command = CreateToken | CreateBearer | Join | Renew | Sign | IssueOwn | Revoke
