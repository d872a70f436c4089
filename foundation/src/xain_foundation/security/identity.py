"""Identities: who a certificate says that its holder is, and which role the holder has.

A certificate of our own authority carries the URI spiffe://AUTHORITY/ROLE/NAME. Source of the form:
SPIFFE-ID, https://spiffe.io/docs/latest/spiffe-about/spiffe-concepts/. A name may have bytes that
SPIFFE does not allow; they are percent-encoded.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, Literal
from urllib.parse import quote, unquote

from xain_foundation.names import why_not

_SCHEME: Final = "spiffe://"
# The end of what peer_host() and node_host() return: a domain that nobody can have.
_OWN_HOSTS: Final = ".xain.invalid"
SCHEDULER: Final = "scheduler"  # name of the node whom servers and workers take for theirs
Source = Literal["uri", "dns", "cn"]


class Role(StrEnum):
    """Role of the holder of a certificate; see the coordinator's table of permissions."""

    PARTICIPANT = "participant"
    OBSERVER = "observer"
    OPERATOR = "operator"
    NODE = "node"  # scheduler and servers of the parameter server
    JOINING = "joining"  # holds a token, and may ask for a certificate
    COORDINATOR = "coordinator"  # shows its certificate to those who connect


@dataclass(frozen=True, slots=True)
class Identity:
    """authority: name of the authority, such as "coordinator.example.org"; "" with one's own
    authority, whose certificates have no such URI."""

    authority: str
    role: Role
    name: str

    @property
    def uri(self) -> str:
        return f"{_SCHEME}{self.authority}/{self.role}/{quote(self.name, safe='')}"

    def speaks_for(self, name: str, *roles: Role) -> bool:
        """Whether the holder may act under this name, in one of these roles: its own, or any for an
        operator. The coordinator may act for any node."""
        if self.role is Role.OPERATOR or (self.role is Role.COORDINATOR and Role.NODE in roles):
            return True
        return self.role in roles and self.name == name

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}"


def parse_uri(uri: str) -> Identity:
    """The identity in a certificate's URI. Raises ValueError with the reason."""
    parts = uri.removeprefix(_SCHEME).split("/")
    if not uri.startswith(_SCHEME) or len(parts) != 3 or not parts[0]:
        raise ValueError(f"{uri!r} is not spiffe://AUTHORITY/ROLE/NAME")
    authority, role, name = parts[0], parts[1], unquote(parts[2])
    if role not in list(Role):
        raise ValueError(f"{uri!r} names no role; the roles are {', '.join(Role)}")
    if why := why_not(name):
        raise ValueError(f"the name in {uri!r} cannot be one: {why}")
    return Identity(authority, Role(role), name)


def peer_host(name: str) -> str:
    """The host name that stands for a participant or node wherever it listens. gRPC compares a
    certificate with host names alone, and the addresses of peers change."""
    return _own_host(name, "peer")


def node_host(name: str) -> str:
    """The host name that stands for a node alone, and not for a participant of the same name. The
    coordinator has that of the scheduler as well, which it may have in its process."""
    return _own_host(name, "node")


def _own_host(name: str, kind: str) -> str:
    return f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.{kind}{_OWN_HOSTS}"


class NoIdentity(Exception):
    """A certificate says nobody, or nobody who is in a list of roles."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names in a certificate: the common name of its subject, and its alternative names."""

    common_name: str = ""
    uris: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names and IP addresses that the holder may be reached by."""
        named = (one for one in self.dns if not one.endswith(_OWN_HOSTS))
        return (*named, *self.addresses)


@dataclass(frozen=True, slots=True)
class IdentityRules:
    """How an identity is read out of a certificate.

    source: the kind of name that says who calls: "uri", "dns" or "cn", the common name.
    roles: for each role the names that have it, with "*" and "?" as in file names; of a URI the
        whole. Without them the name has to be a URI of our form, which says its role itself.
    authority: that a URI of our form has to name; "" for any.
    """

    source: Source = "uri"
    roles: Mapping[Role, Sequence[str]] | None = None
    authority: str = ""

    def identify(self, names: Names) -> Identity:
        """Return the identity in a certificate with these names. Raises NoIdentity."""
        found = {
            "uri": names.uris,
            "dns": names.dns,
            "cn": (names.common_name,) if names.common_name else (),
        }[self.source]
        if len(found) != 1:
            said = f"has {len(found)} names" if found else "has no name"
            raise NoIdentity(f"the certificate {said} of the kind {self.source!r}; it must have 1")
        name = found[0]
        if not self.roles:
            try:
                identity = parse_uri(name)
            except ValueError as error:
                raise NoIdentity(str(error)) from None
            if self.authority and identity.authority != self.authority:
                raise NoIdentity(
                    f"the certificate is for {identity.authority}, and not for {self.authority}"
                )
            return identity
        # The name alone would be that of any authority and role.
        own = name.rpartition("/")[2] if self.source == "uri" else name
        for role, patterns in self.roles.items():
            if any(fnmatchcase(name, each) for each in patterns):
                if why := why_not(own):
                    raise NoIdentity(f"{own!r} cannot be a name: {why}")
                return Identity("", Role(role), own)
        raise NoIdentity(f"{name!r} is in no list of [tls.roles]")
