"""Joining: a token, or a request that an operator signs, becomes the certificate of a site.

Each step can be repeated after a kill: the key is on the disk before anybody is asked, and the
coordinator gives the same key the same certificate again.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net.channels import find_cause
from xain_foundation.security import tls
from xain_foundation.security.identity import Identity, IdentityRules, NoIdentity
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_foundation.security.x509 import (
    Certificate,
    InvalidCredential,
    digest_of_key,
    key_of_pem,
    make_request,
    read_certificate,
)
from xain_participant.enrolment.asking import ask_to_join
from xain_participant.enrolment.kept import KeptCertificates, Pending, extended
from xain_participant.tables.advice import advised, new_token
from xain_participant.wire.client import Refused
from xain_wire.fl.refusals_pb2 import RefusalReason

_TOKEN_USED = RefusalReason.Name(RefusalReason.TOKEN_USED)
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class Joined:
    """already: whether the certificate was there before."""

    name: str
    role: str
    address: str
    expires_at: float
    folder: Path
    already: bool = False


class Token:
    """A token as a site has it. origin: the file that it comes from, for messages.

    Raises CommandFailed if it is none."""

    def __init__(self, text: str, origin: str) -> None:
        """Decode the token and the certificate in it. Raises CommandFailed."""
        try:
            self.content = JoinToken.decode(text)
            own = read_certificate(self.content.certificate)
            self.identity = _identity(own)
        except (InvalidCredential, NoIdentity) as error:
            raise CommandFailed(f"{origin}: {error}; copy it whole, or {new_token()}") from None
        self.origin = origin
        self.serial = own.serial
        self.name = self.identity.name
        self._own = own

    def require_valid(self, at: float) -> None:
        """Check that the token is valid at a time, in seconds since the epoch. Raises
        CommandFailed."""
        own, origin = self._own, self.origin
        if at > own.not_after:
            raise CommandFailed(
                f"{origin}: the token for {self.name!r} has expired on {_day(own.not_after)}, and "
                f"it is {_day(at)} here; {new_token()}"
            )
        if at < own.not_before:
            raise CommandFailed(
                f"{origin}: the token for {self.name!r} is valid from {_day(own.not_before)} on, "
                f"and it is {_day(at)} here: is the clock of this machine right?"
            )


def join(kept: KeptCertificates, token: Token, address: str = "") -> Joined:
    """Exchange a token for a certificate, and keep it.

    address: HOST:PORT of the coordinator; by default that in the token.
    Raises CommandFailed, BlockingIOError and OSError.
    """
    address = address or token.content.address
    with _explained(kept), kept.asking():
        if kept.token == token.serial and (there := _joined(kept)) is not None:
            return there
        token.require_valid(time.time())
        _require_same_name(kept, token.name)
        pending = kept.pending()
        content = token.content
        credentials = grpc.ssl_channel_credentials(
            content.authority, content.key, content.certificate
        )
        request = make_request(key_of_pem(pending.key), token.name)
        try:
            signed = ask_to_join(address, credentials, request)
        except Refused as refused:
            raise CommandFailed(_why_refused(refused, token, address)) from None
        authority = extended(content.authority, signed.authority)
        return _accept(kept, pending, signed.certificate, authority, address, token.serial)


def make_site_request(kept: KeptCertificates, name: str) -> bytes:
    """A request for an operator to sign, in PEM; the same one as long as its certificate is not
    there. Raises CommandFailed, BlockingIOError and OSError."""
    with _explained(kept), kept.asking():
        _require_same_name(kept, name)
        return make_request(key_of_pem(kept.pending().key), name)


def take_certificate(
    kept: KeptCertificates, certificate: bytes, authority: bytes, address: str, origin: str
) -> Joined:
    """Keep the certificate that was signed for the request of make_site_request().

    authority: PEM; b"" if it follows the certificate in its file. origin: of the certificate, for
        messages.
    Raises CommandFailed, BlockingIOError and OSError.
    """
    try:
        found = read_certificate(certificate)
        _require_same_name(kept, _identity(found).name)
    except (InvalidCredential, NoIdentity) as error:
        raise CommandFailed(f"{origin}: {error}") from None
    with _explained(kept), kept.asking():
        pending = kept.pending()
        if digest_of_key(key_of_pem(pending.key).public_key()) != found.key_digest:
            there = _joined(kept)
            if there is not None and Certificates(kept.folder).own.serial == found.serial:
                return there
            raise CommandFailed(
                f"{origin}: the certificate is not for the key in {pending.folder}; have the "
                "request signed that `xain-participant join --request FILE` has written last"
            )
        return _accept(kept, pending, certificate, authority, address)


def _accept(
    kept: KeptCertificates,
    pending: Pending,
    certificate: bytes,
    authority: bytes,
    address: str,
    token: str = "",
) -> Joined:
    """Use a signed certificate from now on. Returns what has joined. Raises CommandFailed and
    OSError."""
    try:
        kept.accept(pending, certificate, authority, address, token)
    except InvalidCertificates as error:
        raise CommandFailed(
            f"the certificate for this site cannot be used: {error}; is the clock of this machine "
            "right? Else tell the operator of the coordinator"
        ) from None
    joined = _joined(kept)
    assert joined is not None
    return Joined(joined.name, joined.role, joined.address, joined.expires_at, joined.folder)


def _joined(kept: KeptCertificates) -> Joined | None:
    """The certificate that counts; None if there is none, or it is of no use."""
    try:
        own = Certificates(kept.folder).own
        identity = _identity(own)
    except (InvalidCertificates, NoIdentity):
        return None
    return Joined(
        identity.name, identity.role, kept.address, own.not_after, kept.folder, already=True
    )


def _require_same_name(kept: KeptCertificates, name: str) -> None:
    """Check that the state directory is not that of a participant with another name, and that join
    has made its certificates. Raises CommandFailed."""
    folder = kept.folder.parent
    if kept.are_there and not kept.folder.is_symlink():
        raise CommandFailed(
            f"{kept.folder} is a folder that join has not made; remove it, or leave it and do "
            "without a token"
        )
    others = []
    try:
        content = json.loads((folder / "participant.json").read_bytes())["content"]
        others.append(content["participant_id"])
    except (OSError, ValueError, LookupError, TypeError):
        pass  # nobody has used it yet, or the participant says what is wrong
    if (there := _joined(kept)) is not None:
        others.append(there.name)
    for other in others:
        if other != name:
            raise CommandFailed(
                f"{folder} is that of participant {other!r}, and the token is for {name!r}; give "
                "each participant a folder of its own with --state-dir"
            )


def _why_refused(refused: Refused, token: Token, address: str) -> str:
    """Why a token got no certificate, and what to do."""
    start = f"the coordinator at {address}"
    if refused.reason == _TOKEN_USED:  # whose message says what to do
        return f"{start} refuses {token.origin}: {refused.message}"
    if refused.reason:
        return f"{start} refuses {token.origin}: {refused.message}; {new_token()}"
    if refused.status is grpc.StatusCode.UNIMPLEMENTED:
        return f"{start} takes no tokens; is it another program, or an earlier version?"
    if refused.status not in _AWAY:
        return f"{start}: {refused.message or refused.status.name}"
    with TemporaryDirectory() as folder:
        content = token.content
        for name, pem in (
            (tls.AUTHORITY, content.authority),
            (tls.CERTIFICATE, content.certificate),
            (tls.KEY, content.key),
        ):
            (Path(folder) / name).touch(mode=0o600)
            (Path(folder) / name).write_bytes(pem)
        try:
            cause = find_cause(address, tls=Certificates(folder))
        except InvalidCertificates as error:
            return f"{token.origin}: {error}"
    text = advised(cause).replace(f"{folder}/tls.crt", f"in {token.origin}")
    text = text.replace(f"{folder}/ca.crt", f"the one in {token.origin}")
    return f"{start} cannot be reached: {text or refused.message}"


@contextmanager
def _explained(kept: KeptCertificates) -> Iterator[None]:
    """Turn errors of the state directory into CommandFailed."""
    try:
        yield
    except BlockingIOError as error:
        raise CommandFailed(f"{error}; wait for it, and repeat this") from None
    except OSError as error:
        where = error.filename or kept.folder.parent
        raise CommandFailed(f"{where} cannot be used: {error.strerror}") from None
    except InvalidCredential as error:
        raise CommandFailed(f"a key in {kept.folder.parent}/certificates: {error}") from None


def _identity(found: Certificate) -> Identity:
    """The identity that a certificate names. Raises NoIdentity."""
    return IdentityRules().identify(found.names)


def _day(at: float) -> str:
    """A time for people, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
