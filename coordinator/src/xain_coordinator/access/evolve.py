"""Changes of the state of access control by its events.

Nothing is refused here: what is in the audit log has happened.
"""

from collections.abc import Iterable
from dataclasses import replace

from xain_coordinator.access import events as e
from xain_coordinator.access.values import (
    Access,
    Bearer,
    Certificate,
    Issued,
    Token,
    Use,
)


def evolve(access: Access, event: e.Event) -> Access:
    """The state after an event."""
    return fold(access, (event,))


def fold(access: Access, events: Iterable[e.Event]) -> Access:
    """The state after many events; `access` itself is left as it is, and copied once."""
    authority = access.authority
    issued = dict(access.issued)
    revoked = set(access.revoked)
    serials = dict(access.serials)
    certificates = dict(access.certificates)
    bearers = dict(access.bearers)

    def add(new: Issued) -> None:
        issued[new.serial] = new
        serials[new.name] = (*serials.get(new.name, ()), new.serial)

    for event in events:
        match event:
            case e.CertificateIssued():
                add(_certificate(event))
                if event.basis:
                    certificates[event.basis, event.key_digest] = event.serial
                token = issued.get(event.basis)
                if isinstance(token, Token) and token.first_use is None:
                    use = Use(event.at, event.key_digest, event.peer)
                    issued[token.serial] = replace(token, first_use=use)
            case e.TokenCreated(at, by, serial, name, role, expires_at, reusable):
                add(Token(serial, name, role, at, expires_at, reusable, by=by))
            case e.TokenRefused(at=at, serial=serial):
                token = issued.get(serial)
                if isinstance(token, Token):
                    issued[serial] = replace(token, refused_at=at)
            case e.BearerCreated(at, by, serial, name, role, expires_at, digest):
                add(Bearer(serial, name, role, at, expires_at, digest, by))
                bearers[digest] = serial
            case e.Revoked():
                revoked.update(event.serials)
            case e.AuthorityCreated():
                authority = event.serial
    return Access(authority, issued, revoked, serials, certificates, bearers)


def _certificate(event: e.CertificateIssued) -> Certificate:
    """The certificate that an event says was issued."""
    return Certificate(
        event.serial,
        event.name,
        event.role,
        event.at,
        event.expires_at,
        event.key_digest,
        event.basis,
        event.hosts,
        event.by,
    )
