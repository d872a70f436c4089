"""Decisions of access control: a command and the state in, events out.

Pure and deterministic, like the core: the time, serial numbers and digests of keys come with the
command. What is decided counts when the events are in the audit log, and nothing is signed before.
"""

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from xain_coordinator.access import commands as c
from xain_coordinator.access import events as e
from xain_coordinator.access.errors import (
    Reason,
    Refusal,
    Unauthenticated,
    not_permitted,
)
from xain_coordinator.access.values import GRANTED, Access, Certificate, Issued, Token
from xain_foundation.names import shortened, why_not
from xain_foundation.security.callers import serial_of
from xain_foundation.security.identity import Identity, Role

OWN_NAME: Final = "coordinator"  # in the certificate of the coordinator itself
MAX_LIFETIME_S: Final = 10 * 365 * 86_400.0
# A site that renews over and over must not fill the audit log: 1,000 lines in the life of a
# certificate. Honest ones have two.
MAX_VALID: Final = 1000
# The audit log tells of a token that is shown again and again once in this time.
REFUSED_AGAIN_S: Final = 60.0
SERIALS_A_LINE: Final = 1000
MIN_SERIAL: Final = 8  # digits of a serial number that may stand for it; lists show 12
# A serial number of another authority. One that is short could be a name: it has 0x before it.
_FOREIGN: Final = re.compile(r"0x[0-9a-f]{1,40}|[0-9a-f]{16,40}")


def decide(access: Access, command: c.Command, now: float) -> tuple[e.Event, ...]:
    """The events of a command; none if it was carried out before, as after a lost answer.

    A TokenRefused among them is what has happened, and the command is refused.
    Raises a refusal, which changes nothing.
    """
    match command:
        case c.CreateToken(serial, name, role, lifetime_s, by, reusable):
            granted = _granted(role)
            _require_name(access, name, now)
            expires_at = _expiry(now, lifetime_s)
            return (e.TokenCreated(now, by, serial, name, granted, expires_at, reusable),)
        case c.CreateBearer(serial, name, role, lifetime_s, by, digest):
            granted = _granted(role)
            _require_name(access, name, now)
            expires_at = _expiry(now, lifetime_s)
            return (e.BearerCreated(now, by, serial, name, granted, expires_at, digest),)
        case c.Join():
            return _join(access, command, now)
        case c.Renew():
            return _renew(access, command, now)
        case c.Sign(serial, name, role, key_digest, lifetime_s, by):
            granted = _granted(role)
            _require_name(access, name, now)
            expires_at = _expiry(now, lifetime_s)
            return (e.CertificateIssued(now, by, serial, name, granted, expires_at, key_digest),)
        case c.IssueOwn(serial, key_digest, hosts, lifetime_s, by):
            return (
                e.CertificateIssued(
                    now,
                    by,
                    serial,
                    OWN_NAME,
                    Role.COORDINATOR,
                    _expiry(now, lifetime_s),
                    key_digest,
                    hosts=hosts,
                ),
            )
        case c.Revoke():
            return _revoke(access, command, now)


def serials_of(access: Access, which: str) -> tuple[str, ...]:
    """Serial numbers that are revoked with a name, or with the serial number that begins so; a name
    comes first. With a token goes what it was exchanged for; with a certificate all that were
    renewed from one another, before it and after it.

    The whole serial number of another authority's certificate stands for itself.
    Raises UNKNOWN_CERTIFICATE.
    """
    if found := access.serials.get(which):
        return found
    bare = which.replace(":", "").lower()  # as openssl shows it
    serial = serial_of(which)
    if serial in access.issued:
        return _with_descendants(access, (_first_of_renewals(access, serial),))
    if len(serial) >= MIN_SERIAL:
        found = tuple(one for one in access.issued if one.startswith(serial))
        if len(found) == 1:
            return _with_descendants(access, (_first_of_renewals(access, found[0]),))
        if found:
            raise Refusal(
                Reason.UNKNOWN_CERTIFICATE,
                f"{len(found)} serial numbers begin with {which!r}; give more of the one that you "
                f"mean: {', '.join(found[:5])}",
            )
    if serial and _FOREIGN.fullmatch(bare):
        return (serial,)
    raise Refusal(
        Reason.UNKNOWN_CERTIFICATE,
        f"nothing was issued for {shortened(which)!r}, which is no serial number here either; "
        "`xain-coordinator certs list` has both. A serial number of another authority has 16 "
        "digits, or 0x before it",
    )


def made_by(access: Access, serials: Iterable[str], now: float) -> list[str]:
    """Names with a valid certificate or token that an operator with one of these serials made."""
    holders = (access.issued[each] for each in serials if each in access.issued)
    operators = {
        str(Identity("", each.role, each.name)) for each in holders if each.role is Role.OPERATOR
    }
    made = [each.serial for each in access.issued.values() if each.by in operators]
    valid = (access.issued[each] for each in _with_descendants(access, made))
    return sorted(
        {
            each.name
            for each in valid
            if each.serial not in access.revoked and now <= each.expires_at
        }
    )


def _first_of_renewals(access: Access, serial: str) -> str:
    """The certificate at the beginning of a chain of renewals. The holder of any key in the chain
    may have asked for what came later, so that a revocation takes all of it."""
    while isinstance(one := access.issued[serial], Certificate) and one.basis:
        if not isinstance(access.issued.get(one.basis), Certificate):
            break
        serial = one.basis
    return serial


def _with_descendants(access: Access, serials: Iterable[str]) -> tuple[str, ...]:
    """These serial numbers, and those of all certificates that came of them by exchange or
    renewal."""
    found = dict.fromkeys(serials)
    for each in access.issued.values():  # what comes of another one is later
        if isinstance(each, Certificate) and each.basis in found:
            found[each.serial] = None
    return tuple(found)


def require_valid(access: Access, what: Issued, now: float) -> None:
    """Check that something was neither revoked nor has expired. Raises Unauthenticated."""
    kind = "certificate" if isinstance(what, Certificate) else "token"
    if what.serial in access.revoked:
        raise Unauthenticated(
            f"the {kind} of {what.name!r} with the serial number {what.serial} was revoked"
        )
    if now > what.expires_at:
        raise Unauthenticated(
            f"the {kind} of {what.name!r} has expired at {time_of(what.expires_at)}; ask an "
            "operator for a new token (xain-coordinator tokens create)"
        )


def token_used(refused: e.TokenRefused) -> Refusal:
    """The refusal of a token that came with another key."""
    return Refusal(
        Reason.TOKEN_USED,
        f"the token for {refused.name!r} was used at {time_of(refused.first_at)} by "
        f"{refused.first_peer}, for another key than that of this request at "
        f"{time_of(refused.at)} by {refused.peer}. If both are the same site, it has lost its "
        "key: ask an operator for a new token. If not, somebody else has the token: revoke the "
        f"name (xain-coordinator certs revoke {refused.name!r})",
    )


def time_of(seconds: float) -> str:
    """A time for people, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _join(access: Access, command: c.Join, now: float) -> tuple[e.Event, ...]:
    """The events that exchange a token for a certificate; none if the key has one already; a
    TokenRefused if another key was first and the token is not reusable. Raises a refusal."""
    token = access.issued.get(command.token)
    if not isinstance(token, Token):
        raise Unauthenticated(
            f"this coordinator has made no token with the serial number {command.token}; ask an "
            "operator for a new one (xain-coordinator tokens create)"
        )
    require_valid(access, token, now)
    if _has(access, token.serial, command.key_digest, now):
        return ()
    first = token.first_use
    if first is not None and not token.reusable and first.key_digest != command.key_digest:
        refused = e.TokenRefused(
            now,
            command.by,
            token.serial,
            token.name,
            command.key_digest,
            command.peer,
            first.at,
            first.peer,
        )
        if token.refused_at is not None and abs(now - token.refused_at) < REFUSED_AGAIN_S:
            raise token_used(refused)
        return (refused,)
    _require_room(access, token.name, now)
    return (
        e.CertificateIssued(
            now,
            command.by,
            command.serial,
            token.name,
            token.role,
            _expiry(now, command.lifetime_s),
            command.key_digest,
            token.serial,
            command.peer,
        ),
    )


def _renew(access: Access, command: c.Renew, now: float) -> tuple[e.Event, ...]:
    """Issue a certificate that follows on the caller's own; none if the new key has one already.
    Raises a refusal."""
    current = access.issued.get(command.certificate)
    if isinstance(current, Token):
        raise not_permitted("a token cannot be renewed; exchange it (xain-participant join)")
    if not isinstance(current, Certificate):
        raise Unauthenticated(
            f"the certificate with the serial number {command.certificate} was not issued here, "
            "and only those can be renewed; ask an operator for a token "
            "(xain-coordinator tokens create)"
        )
    require_valid(access, current, now)
    if current.role is Role.COORDINATOR:
        raise not_permitted("a coordinator renews its own certificate itself")
    if _has(access, current.serial, command.key_digest, now):
        return ()
    _require_room(access, current.name, now)
    return (
        e.CertificateIssued(
            now,
            command.by,
            command.serial,
            current.name,
            current.role,
            _expiry(now, command.lifetime_s),
            command.key_digest,
            current.serial,
        ),
    )


def _has(access: Access, basis: str, key_digest: str, now: float) -> bool:
    """Whether a valid certificate was issued before for this basis and key. Raises Unauthenticated
    if it was revoked."""
    found = access.certificate_for(basis, key_digest)
    if found is None:
        return False
    if found.serial in access.revoked:
        require_valid(access, found, now)
    return now <= found.expires_at


def _revoke(access: Access, command: c.Revoke, now: float) -> tuple[e.Event, ...]:
    """Revoke all that goes with a name or serial number and is not revoked yet, in events of at
    most SERIALS_A_LINE. Raises UNKNOWN_CERTIFICATE."""
    left = [one for one in serials_of(access, command.which) if one not in access.revoked]
    return tuple(
        e.Revoked(now, command.by, command.which, tuple(left[start : start + SERIALS_A_LINE]))
        for start in range(0, len(left), SERIALS_A_LINE)
    )


def _granted(role: str) -> Role:
    """The role of this name, if it is one that certificates are issued for. Raises
    INVALID_CERTIFICATE_REQUEST."""
    for each in GRANTED:
        if each == role:
            return each
    raise Refusal(
        Reason.INVALID_CERTIFICATE_REQUEST,
        f"the role {shortened(role)!r} is given to nobody; the roles are {', '.join(GRANTED)}",
    )


def _expiry(now: float, lifetime_s: float) -> float:
    """When something ends that is issued now: seconds since the epoch, whole ones, as certificates
    have them. Raises INVALID_CERTIFICATE_REQUEST."""
    if not 0 < lifetime_s <= MAX_LIFETIME_S:  # NaN is neither
        raise Refusal(
            Reason.INVALID_CERTIFICATE_REQUEST,
            f"nothing is issued for {lifetime_s} s; it must be more than 0, and "
            f"{MAX_LIFETIME_S:.0f} s (10 years) at most",
        )
    return float(math.ceil(now + lifetime_s))


def _require_name(access: Access, name: str, now: float) -> None:
    """Check that something may be issued for a name. Raises INVALID_CERTIFICATE_REQUEST,
    NOT_PERMITTED."""
    if why := why_not(name):
        raise Refusal(
            Reason.INVALID_CERTIFICATE_REQUEST, f"{shortened(name)!r} cannot be a name: {why}"
        )
    _require_room(access, name, now)


def _require_room(access: Access, name: str, now: float) -> None:
    """Check that a name has fewer than MAX_VALID valid certificates and tokens. Raises
    NOT_PERMITTED."""
    num_valid = sum(
        serial not in access.revoked and now <= access.issued[serial].expires_at
        for serial in access.serials.get(name, ())
    )
    if num_valid >= MAX_VALID:
        raise not_permitted(
            f"{name!r} has {num_valid} valid certificates and tokens; the limit is {MAX_VALID}. "
            f"Revoke them (xain-coordinator certs revoke {name!r})"
        )
