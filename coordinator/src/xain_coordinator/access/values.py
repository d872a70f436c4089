"""Certificates, tokens and bearer tokens that were issued, and the state that they make up.

Times are seconds since the epoch, serial numbers and digests are in hex.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from xain_foundation.security.identity import Role

# Roles that can be given to others.
GRANTED = (Role.PARTICIPANT, Role.OBSERVER, Role.OPERATOR, Role.NODE)

Kind = Literal["certificate", "token", "bearer", "foreign"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """key_digest: SHA-256 of its public key. basis: serial number of the token or the certificate
    that it was issued for; "" if an operator asked for it. by: who has caused it."""

    serial: str
    name: str
    role: Role
    issued_at: float
    expires_at: float
    key_digest: str
    basis: str = ""
    hosts: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """The first exchange of a token: when, for which key, and for whom."""

    at: float
    key_digest: str
    peer: str


@dataclass(frozen=True, slots=True)
class Token:
    """A certificate of the role `joining`, which can be exchanged for one of the role `role`.

    reusable: by any number of keys. refused_at: when the audit log has last told that it was shown
    with another key; None if it never was.
    """

    serial: str
    name: str
    role: Role
    issued_at: float
    expires_at: float
    reusable: bool = False
    first_use: Use | None = None
    refused_at: float | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Bearer:
    """A token for the HTTP face. digest: SHA-256 of its text, which is kept nowhere."""

    serial: str
    name: str
    role: Role
    issued_at: float
    expires_at: float
    digest: str
    by: str = ""


Issued = Certificate | Token | Bearer


@dataclass(frozen=True, slots=True)
class Access:
    """The state of access control: a fold of the events in the audit log.

    authority: serial number of the authority's certificate; "" if none was made here.
    issued: by serial number, in the order of their issue.
    revoked: serial numbers, also of what another authority has issued.
    serials: by name, in the order of their issue.
    certificates: serial numbers by basis and digest of the key; of several the newest.
    bearers: serial numbers by digest.
    """

    authority: str = ""
    issued: Mapping[str, Issued] = field(default_factory=dict)
    revoked: Set[str] = frozenset()
    serials: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    certificates: Mapping[tuple[str, str], str] = field(default_factory=dict)
    bearers: Mapping[str, str] = field(default_factory=dict)

    def certificate_for(self, basis: str, key_digest: str) -> Certificate | None:
        """The newest certificate that was issued for a token or certificate, and a key."""
        found = self.issued.get(self.certificates.get((basis, key_digest), ""))
        return found if isinstance(found, Certificate) else None


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that was issued, or revoked alone, as it is listed.

    kind: "foreign" for a certificate of another authority that is revoked here; nothing else is
        known of it: its name is "", its role None, and its times 0. used: a token that was
        exchanged. reusable: a token that any number of keys may be joined with.
    """

    serial: str
    name: str
    role: Role | None
    kind: Kind
    issued_at: float
    expires_at: float
    revoked: bool = False
    used: bool = False
    reusable: bool = False


@dataclass(frozen=True, slots=True)
class Revocation:
    """serials: that are revoked. made: names for whom revoked operators have made what is valid
    still. is_foreign: whether nothing was issued here with the serial number."""

    serials: list[str]
    made: list[str] = field(default_factory=list)
    is_foreign: bool = False


def entries_of(access: Access) -> list[Entry]:
    """Everything that was issued, oldest first, and then what was revoked of other authorities."""
    entries = []
    for each in access.issued.values():
        kind: Kind = "certificate"
        used = reusable = False
        match each:
            case Token():
                kind, used, reusable = "token", each.first_use is not None, each.reusable
            case Bearer():
                kind = "bearer"
        entries.append(
            Entry(
                each.serial,
                each.name,
                each.role,
                kind,
                each.issued_at,
                each.expires_at,
                each.serial in access.revoked,
                used,
                reusable,
            )
        )
    foreign = sorted(serial for serial in access.revoked if serial not in access.issued)
    return entries + [Entry(each, "", None, "foreign", 0.0, 0.0, True) for each in foreign]
