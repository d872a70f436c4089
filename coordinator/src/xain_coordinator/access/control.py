"""Access control: who may come in, from the folder access/ of a coordinator.

    ca.crt, ca.key    the authority; without its key nothing is signed here
    audit.log         everything that was issued and revoked, and what else changed something
    tls/              ca.crt, tls.crt and tls.key of the coordinator itself

`cryptography` takes 50 ms to import, so what needs it is imported where it is used.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xain_coordinator.access import commands as c
from xain_coordinator.access import events as e
from xain_coordinator.access.audit_log import AuditLog, Line, NewLine, damaged_line
from xain_coordinator.access.decider import decide, made_by, require_valid, serials_of, token_used
from xain_coordinator.access.errors import (
    AccessError,
    Reason,
    Refusal,
    Unauthenticated,
    not_permitted,
)
from xain_coordinator.access.evolve import fold
from xain_coordinator.access.records import KINDS, event_of, line_of
from xain_coordinator.access.refusals import Refusals, host_of
from xain_coordinator.access.values import Access, Certificate, Entry, Revocation, Token, entries_of
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import shortened
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import Identity, Role

if TYPE_CHECKING:
    from xain_coordinator.access.authority import Signer

log = get_logger(__name__)

AUDIT_LOG: Final = "audit.log"
OWN_TLS: Final = "tls"
CERTIFICATE_LIFETIME_S: Final = 90 * 86_400.0
BEARER_PREFIX: Final = "xainb1."
_SELF: Final = "coordinator"  # who does what the coordinator does by itself
_OPERATOR: Final = "operator"
_MAX_NOTED: Final = 1000  # characters of a text in a note


def initialise(
    folder: Path,
    hosts: Sequence[str],
    *,
    passphrase: bytes = b"",
    now: Callable[[], float] = time.time,
) -> None:
    """Make the authority, and the coordinator's own certificate for `hosts`, localhost and
    127.0.0.1. A call that was interrupted can be repeated.

    passphrase: encrypts the key of the authority.
    Raises AccessError, also where there is an authority.
    """
    from xain_coordinator.access import authority

    try:
        own_hosts = authority.hosts_of(hosts)
    except Refusal as error:
        raise AccessError(str(error)) from None
    control = AccessControl(folder, now)
    try:
        if (folder / OWN_TLS).exists():
            raise AccessError(
                f"{folder / OWN_TLS} is there: this coordinator has its certificates. Nothing was "
                "changed"
            )
        key, certificate = folder / authority.KEY, folder / authority.CERTIFICATE
        if certificate.exists() and not key.exists():
            raise AccessError(f"{certificate} is there, but its key {key} is not; put it back")
        if key.exists() and not certificate.exists() and control.access.authority:
            raise AccessError(f"{key} is there, but its certificate {certificate} is not")
        control.create_authority(own_hosts[0], passphrase)
        control.renew_own(own_hosts, folder / OWN_TLS, by=_OPERATOR)
    except OSError as error:
        raise AccessError(f"{error.filename or folder}: {error.strerror or error}") from None
    except Refusal as error:  # of the disk, or of an authority that has expired
        raise AccessError(str(error)) from None
    finally:
        control.close()


class AccessControl:
    """The authority, what it has issued, and the audit log. From any thread; methods that write
    return when what they did is on disk.

    on_revoked: told the serial numbers that count no more, when that is on disk; in the thread of
        the caller.
    """

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        """Lock and read the audit log. Raises AccessError."""
        self.on_revoked: Callable[[frozenset[str]], None] = lambda serials: None
        self._folder = folder
        self._wall_clock = now
        self._lock = threading.Lock()  # of the log, and of changes of what is folded from it
        self._signer: Signer | None = None
        self._authority, self._authority_name = b"", ""
        self._refusals = Refusals()
        self._log = AuditLog(folder / AUDIT_LOG)
        try:
            lines = self._log.open(self._now, KINDS)
            self._access = fold(Access(), _events(self._log.path, lines))
        except BaseException:  # raised again
            self._log.close()
            raise

    @classmethod
    def open(
        cls, folder: Path, passphrase: bytes = b"", now: Callable[[], float] = time.time
    ) -> "AccessControl":
        """Lock and read the audit log, and load the authority if there is one; the folder is made
        where it is not there. passphrase: of an encrypted ca.key. Raises AccessError."""
        control = cls(folder, now)
        try:
            control._load(passphrase)
        except BaseException:  # raised again
            control.close()
            raise
        return control

    def close(self) -> None:
        """Close the audit log, which gives up its lock. Harmless when repeated."""
        with self._lock:
            self._log.close()

    @property
    def authority(self) -> bytes:
        """Certificate of the authority in PEM; b"" if there is none."""
        return self._authority

    @property
    def authority_name(self) -> str:
        """Name of the authority, which is in every identity; "" if there is none."""
        return self._authority_name

    @property
    def access(self) -> Access:
        """The state, which no later change changes."""
        return self._access

    # --- who calls ---

    def check(self, caller: Caller) -> None:
        """Check that the caller's certificate was not revoked, by a set look-up. Raises
        Unauthenticated."""
        if caller.serial in self._access.revoked:
            raise Unauthenticated(
                f"the certificate of {caller.identity} with the serial number {caller.serial} was "
                "revoked"
            )

    def bearer(self, text: str) -> Caller:
        """The holder of a bearer token, if it is valid. Raises Unauthenticated."""
        access = self._access
        found = access.issued.get(access.bearers.get(_digest(text), ""))
        if found is None:
            raise Unauthenticated(
                "this is no bearer token of this coordinator "
                "(xain-coordinator tokens create --bearer makes one)"
            )
        require_valid(access, found, self._now())
        identity = Identity(self.authority_name, found.role, found.name)
        return Caller(identity, found.serial, found.expires_at)

    # --- what is issued ---

    def create_token(
        self,
        name: str,
        role: str | Role,
        ttl_s: float,
        address: str,
        *,
        reusable: bool = False,
        by: str,
    ) -> tuple[str, str, float]:
        """Make a token to join with, and record it in the audit log. Returns (text, serial,
        expires_at).

        address: HOST:PORT that the site connects to.
        Raises INVALID_CERTIFICATE_REQUEST, NOT_PERMITTED, NO_AUTHORITY, NOT_RECORDED.
        """
        from xain_coordinator.access.authority import check_address

        check_address(address)
        signer = self._require_signer()
        serial = _new_serial()
        lifetime_s = self._within(signer, ttl_s)
        self._do(c.CreateToken(serial, name, role, lifetime_s, by, reusable))
        token = self._access.issued[serial]
        assert isinstance(token, Token)
        return signer.token(token, address), serial, token.expires_at

    def create_bearer(
        self, name: str, role: str | Role, ttl_s: float, *, by: str
    ) -> tuple[str, str, float]:
        """Make a token for the HTTP face, and record it. Returns (text, serial, expires_at). Raises
        INVALID_CERTIFICATE_REQUEST, NOT_PERMITTED, NOT_RECORDED."""
        text = BEARER_PREFIX + secrets.token_urlsafe(32)
        serial = _new_serial()
        self._do(c.CreateBearer(serial, name, role, ttl_s, by, _digest(text)))
        return text, serial, self._access.issued[serial].expires_at

    def join(self, caller: Caller, request: bytes, peer: str) -> bytes:
        """Exchange a token, which is the caller's certificate, for a certificate of its name and
        role. The same key gets the same certificate again.

        request: PKCS#10 in PEM. peer: as gRPC names the other side. Returns PEM.
        Raises TOKEN_USED, Unauthenticated, NOT_PERMITTED, INVALID_CERTIFICATE_REQUEST,
        NO_AUTHORITY, NOT_RECORDED.
        """
        from xain_coordinator.access.authority import request_key
        from xain_foundation.security.x509 import digest_of_key

        if caller.identity.role is not Role.JOINING:
            raise not_permitted(f"{caller.identity} has joined; only a token is exchanged")
        key = request_key(request)
        digest = digest_of_key(key)
        signer = self._require_signer()
        lifetime_s = self._within(signer, CERTIFICATE_LIFETIME_S)
        by, host = str(caller.identity), host_of(peer)
        self._do(c.Join(_new_serial(), caller.serial, digest, host, lifetime_s, by))
        return signer.certificate(self._issued_for(caller.serial, digest), key)

    def renew(self, caller: Caller, request: bytes) -> bytes:
        """Issue the next certificate, in PEM, for the caller's own name and role, and record it.
        The same key gets the same certificate again.

        Raises Unauthenticated, NOT_PERMITTED, INVALID_CERTIFICATE_REQUEST, NO_AUTHORITY,
        NOT_RECORDED.
        """
        from xain_coordinator.access.authority import request_key
        from xain_foundation.security.x509 import digest_of_key

        key = request_key(request)
        digest = digest_of_key(key)
        signer = self._require_signer()
        lifetime_s = self._within(signer, CERTIFICATE_LIFETIME_S)
        by = str(caller.identity)
        self._do(c.Renew(_new_serial(), caller.serial, digest, lifetime_s, by))
        return signer.certificate(self._issued_for(caller.serial, digest), key)

    def sign(self, request: bytes, name: str, role: str | Role, *, by: str) -> bytes:
        """Issue a certificate, in PEM, for a request that came by other means, and record it.
        Raises INVALID_CERTIFICATE_REQUEST, NOT_PERMITTED, NO_AUTHORITY, NOT_RECORDED."""
        from xain_coordinator.access.authority import request_key
        from xain_foundation.security.x509 import digest_of_key

        key = request_key(request)
        signer = self._require_signer()
        serial = _new_serial()
        lifetime_s = self._within(signer, CERTIFICATE_LIFETIME_S)
        self._do(c.Sign(serial, name, role, digest_of_key(key), lifetime_s, by))
        return signer.certificate(self._certificate(serial), key)

    def renew_own(self, hosts: Sequence[str], tls_folder: Path, *, by: str = _SELF) -> None:
        """Make a new key and certificate of the coordinator itself, record and write them, in a
        folder that foundation.tls.Certificates follows.

        hosts: besides localhost and 127.0.0.1; none: those of the certificate that is there.
        Raises NO_AUTHORITY, NOT_RECORDED, INVALID_CERTIFICATE_REQUEST, AccessError, OSError.
        """
        from xain_coordinator.access import authority
        from xain_foundation.security.x509 import digest_of_key, new_key

        signer = self._require_signer()
        names = authority.hosts_of(hosts or authority.own_hosts(tls_folder))
        key = new_key()
        serial, digest = _new_serial(), digest_of_key(key.public_key())
        lifetime_s = self._within(signer, CERTIFICATE_LIFETIME_S)
        self._do(c.IssueOwn(serial, digest, names, lifetime_s, by))
        certificate = signer.certificate(self._certificate(serial), key.public_key())
        authority.write_own(tls_folder, signer.certificate_pem, certificate, key)

    def revoke(self, which: str, *, by: str) -> Revocation:
        """Revoke all certificates, tokens and bearer tokens of a name, or a serial number and what
        came of it, also of another authority's certificate.

        Returns the same if they were revoked before. Raises UNKNOWN_CERTIFICATE, NOT_RECORDED.
        """
        events = self._do(c.Revoke(which, by))
        revoked = [
            each for event in events if isinstance(event, e.Revoked) for each in event.serials
        ]
        if revoked:
            self.on_revoked(frozenset(revoked))
        access = self._access
        serials = [serial for serial in serials_of(access, which) if serial in access.revoked]
        is_foreign = not any(serial in access.issued for serial in serials)
        return Revocation(serials, made_by(access, serials, self._now()), is_foreign=is_foreign)

    def entries(self) -> list[Entry]:
        """Everything that was issued, oldest first, and what was revoked of other authorities."""
        return entries_of(self._access)

    # --- the audit log ---

    def note(self, event: str, *, by: str, **fields: object) -> None:
        """Write a line to the audit log that changes nothing here. fields: as JSON takes them, and
        no secrets. Long texts are shortened. Raises NOT_RECORDED."""
        assert event not in KINDS, f"{event} is an event of access control"
        shown = {
            name: shortened(value, _MAX_NOTED) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        with self._lock:
            self._append([NewLine(self._now(), event, by, shown)])

    def note_refusal(self, peer: str, reason: str) -> None:
        """Write a line about an identity that was refused, at most once a minute and peer; others
        are counted for the next line. Raises nothing."""
        host = host_of(peer)
        with self._lock:
            told = self._refusals.count(host, time.monotonic())
            if told is None:
                return
            fields: dict[str, Any] = {"peer": host, "reason": shortened(reason, _MAX_NOTED)}
            if told.num > 1:
                fields["num"] = told.num
            if told.num_others:
                fields["num_of_other_peers"] = told.num_others
            try:
                self._append([NewLine(self._now(), "identity_refused", _SELF, fields)])
            except Refusal as error:
                log.warning("refused_identity_not_recorded", peer=host, error=str(error))

    @property
    def num_lines(self) -> int:
        """Lines of the audit log."""
        return self._log.num_lines

    @property
    def last_hash(self) -> str:
        """SHA-256 of the last line of the audit log, in hex."""
        return self._log.last_hash

    # --- the authority ---

    def create_authority(self, name: str, passphrase: bytes) -> None:
        """Make the authority unless its files are there, load it, and record it, once, in the audit
        log. Raises AccessError, NOT_RECORDED, OSError."""
        from xain_coordinator.access import authority

        at = self._now()
        if not (self._folder / authority.CERTIFICATE).exists():
            authority.create(self._folder, name, at, passphrase)
        self._load(passphrase)
        signer = self._require_signer()
        if self._access.authority != signer.serial:
            created = e.AuthorityCreated(
                at, _OPERATOR, signer.name, signer.serial, signer.expires_at
            )
            with self._lock:
                self._commit((created,))

    def _load(self, passphrase: bytes) -> None:
        """Load the authority's key and certificate if they are there, and finish a renewal of the
        coordinator's own certificate that was interrupted. Raises AccessError."""
        if not any((self._folder / name).exists() for name in ("ca.crt", "ca.key", OWN_TLS)):
            return
        from xain_coordinator.access import authority

        self._signer = authority.load(self._folder, passphrase)
        self._authority, self._authority_name = authority.certificate_of(self._folder)
        try:
            if (self._folder / OWN_TLS).is_dir():
                authority.finish_own(self._folder / OWN_TLS)
        except OSError as error:
            raise AccessError(f"{error.filename}: {error.strerror}") from None

    def _require_signer(self) -> "Signer":
        """The authority with its key. Raises NO_AUTHORITY if there is none in the folder."""
        if self._signer is None:
            raise Refusal(
                Reason.NO_AUTHORITY,
                f"{self._folder / 'ca.key'} is not there, so nothing is signed here; the authority "
                "is made by `xain-coordinator certs init`, or kept elsewhere",
            )
        return self._signer

    def _within(self, signer: "Signer", lifetime_s: float) -> float:
        """A lifetime, cut where the authority's certificate ends. Raises NO_AUTHORITY if it has
        ended."""
        left_s = signer.expires_at - self._now()
        if left_s <= 0:
            raise Refusal(
                Reason.NO_AUTHORITY,
                "the certificate of the authority has expired; nothing is signed",
            )
        return min(lifetime_s, left_s)

    def _certificate(self, serial: str) -> Certificate:
        """The certificate with this serial number, which was issued here."""
        found = self._access.issued[serial]
        assert isinstance(found, Certificate)
        return found

    def _issued_for(self, basis: str, key_digest: str) -> Certificate:
        """The certificate that was issued for a token or certificate, and a key."""
        found = self._access.certificate_for(basis, key_digest)
        assert found is not None
        return found

    # --- decide, commit, evolve ---

    def _now(self) -> float:
        """Seconds since the epoch, to the millisecond."""
        return round(self._wall_clock(), 3)

    def _do(self, command: c.Command) -> tuple[e.Event, ...]:
        """Decide a command, write its events to the audit log, and change the state by them.
        Returns the events, none if there was nothing left to do. Raises a refusal."""
        with self._lock:
            events = decide(self._access, command, self._now())
            if events:
                self._commit(events)
        for event in events:
            if isinstance(event, e.TokenRefused):
                log.warning("token_refused", name=event.name, peer=event.peer, serial=event.serial)
                raise token_used(event)
        return events

    def _commit(self, events: Sequence[e.Event]) -> None:
        """Write events to the audit log, and then change the state by them; the caller holds the
        lock. Raises NOT_RECORDED."""
        self._append([line_of(event) for event in events])
        self._access = fold(self._access, events)

    def _append(self, lines: Sequence[NewLine]) -> None:
        """Write lines to the audit log. Raises NOT_RECORDED."""
        try:
            self._log.append(lines)
        except OSError as error:
            raise Refusal(
                Reason.NOT_RECORDED,
                f"the audit log {self._log.path} cannot be written ({error.strerror or error}), so "
                "nothing was done",
            ) from error


def _events(path: Path, lines: Iterable[Line]) -> Iterable[e.Event]:
    """Events of the lines of an audit log, without notes. Raises AccessError."""
    for line in lines:
        try:
            event = event_of(line)
        except ValueError as error:
            raise damaged_line(path, line.sequence, str(error)) from None
        if event is not None:
            yield event


def _digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _new_serial() -> str:
    """A serial number of 20 bytes at most and positive, as RFC 5280 wants it."""
    return f"{secrets.randbits(158) | 1 << 158:x}"
