"""Files of the authority and of the coordinator's own certificate, and what is signed with them."""

import re
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from xain_coordinator.access.errors import AccessError, Reason, Refusal
from xain_coordinator.access.values import Certificate, Token
from xain_foundation.durable import make_directory, replace_file, sync_directory
from xain_foundation.security import tls
from xain_foundation.security.identity import Identity, Role
from xain_foundation.security.join_token import JoinToken
from xain_foundation.security.x509 import (
    Authority,
    InvalidCredential,
    PrivateKey,
    PublicKey,
    key_to_pem,
    new_key,
    read_certificate,
    read_request,
)

CERTIFICATE: Final = "ca.crt"
KEY: Final = "ca.key"
OWN_HOSTS: Final = ("localhost", "127.0.0.1")
LIFETIME_S: Final = 10 * 365 * 86_400.0  # of an authority
_MAX_NAME: Final = 64  # characters of a common name
_LABEL: Final = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?"
_HOST: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*", re.IGNORECASE)


class Signer:
    """The authority, which signs what was decided.

    The same certificate comes out each time, byte for byte.
    """

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self.name = authority.name
        self.certificate_pem = authority.certificate
        own = read_certificate(authority.certificate)
        self.serial = own.serial
        self.expires_at = own.not_after

    def certificate(self, issued: Certificate, key: PublicKey) -> bytes:
        """A certificate in PEM for what was issued and a public key."""
        identity = Identity(self.name, issued.role, issued.name)
        return self._issue(key, identity, issued, issued.hosts)

    def token(self, issued: Token, address: str) -> str:
        """The text of a join token: an address, and a new key with its certificate of the role
        `joining`."""
        key = new_key()
        identity = Identity(self.name, Role.JOINING, issued.name)
        certificate = self._issue(key.public_key(), identity, issued)
        return JoinToken(address, certificate, key_to_pem(key), self.certificate_pem).encode()

    def _issue(
        self,
        key: PublicKey,
        identity: Identity,
        issued: Certificate | Token,
        hosts: Iterable[str] = (),
    ) -> bytes:
        """Sign a certificate with the serial number, beginning and end that were decided. Returns
        PEM."""
        begins_at = int(issued.issued_at)  # certificates have whole seconds
        return self._authority.issue(
            key,
            identity,
            begins_at,
            issued.expires_at - begins_at,
            hosts=hosts,
            serial=int(issued.serial, 16),
        )


def load(folder: Path, passphrase: bytes) -> Signer | None:
    """The authority in a folder; None without its key. Raises AccessError."""
    key, certificate = folder / KEY, folder / CERTIFICATE
    if not key.exists():
        return None
    try:
        return Signer(Authority.of_pem(certificate.read_bytes(), key.read_bytes(), passphrase))
    except OSError as error:
        raise AccessError(
            f"the authority in {folder} cannot be read: {error.filename}: {error.strerror}"
        ) from None
    except InvalidCredential as error:
        is_encrypted = b"ENCRYPTED" in _content(key)
        raise AccessError(
            f"the authority ({key}, {certificate}) cannot be used: {error}"
            + ("; [server] passphrase_file names the file with its passphrase" * is_encrypted)
        ) from None


def _content(path: Path) -> bytes:
    """The bytes of a file; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def certificate_of(folder: Path) -> tuple[bytes, str]:
    """Certificate of the authority in PEM, and its name; empty if there is none. Raises
    AccessError."""
    path = folder / CERTIFICATE
    try:
        pem = path.read_bytes()
        return pem, read_certificate(pem).names.common_name
    except FileNotFoundError:
        return b"", ""
    except OSError as error:
        raise AccessError(f"{path} cannot be read: {error.strerror}") from None
    except InvalidCredential as error:
        raise AccessError(f"{path} cannot be used: {error}") from None


def create(folder: Path, name: str, now: float, passphrase: bytes) -> Signer:
    """A new authority, whose certificate is written last: before, there is none. Raises OSError."""
    authority = Authority.create(name[:_MAX_NAME], now, LIFETIME_S)
    _write_secret(folder / KEY, key_to_pem(authority.key, passphrase))
    replace_file(folder / CERTIFICATE, [authority.certificate])
    return Signer(authority)


def hosts_of(given: Iterable[str]) -> tuple[str, ...]:
    """Hosts of the coordinator's certificate: those given, checked and without brackets, then
    OWN_HOSTS; none twice. Raises INVALID_CERTIFICATE_REQUEST."""
    hosts = []
    for host in given:
        bare = host.strip().removeprefix("[").removesuffix("]")
        try:
            hosts.append(str(ip_address(bare)))
        except ValueError:
            if len(bare) > 253 or not _HOST.fullmatch(bare):
                raise Refusal(
                    Reason.INVALID_CERTIFICATE_REQUEST,
                    f"{host!r} is no host; give a name or an IP address without a port, such as "
                    "coordinator.example.org (with other letters than ASCII in its form xn--...)",
                ) from None
            hosts.append(bare.lower())
    return tuple(dict.fromkeys((*hosts, *OWN_HOSTS)))


def request_key(request: bytes) -> PublicKey:
    """The key of a certificate request. Raises INVALID_CERTIFICATE_REQUEST."""
    try:
        return read_request(request)
    except InvalidCredential as error:
        raise Refusal(Reason.INVALID_CERTIFICATE_REQUEST, str(error)) from None


def check_address(address: str) -> None:
    """Check that an address is HOST:PORT and can be written into a token. Raises
    INVALID_CERTIFICATE_REQUEST."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536 and len(address) <= 300):
        raise Refusal(
            Reason.INVALID_CERTIFICATE_REQUEST,
            f"the address {address[:100]!r} is not HOST:PORT, as the site connects to it",
        )
    hosts_of([host])


def write_own(folder: Path, authority: bytes, certificate: bytes, key: PrivateKey) -> None:
    """Write the coordinator's own key and certificate, so that at any instant the files belong
    together, or finish_own() makes them. Raises OSError."""
    pem = key_to_pem(key)
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        make_directory(part, 0o700)
        _write_secret(part / tls.KEY, pem)
        replace_file(part / tls.CERTIFICATE, [certificate])
        replace_file(part / tls.AUTHORITY, [authority])
        part.replace(folder)
        sync_directory(folder.parent)
        return
    if not (folder / tls.AUTHORITY).exists():
        replace_file(folder / tls.AUTHORITY, [authority])
    finish_own(folder)
    key_part, certificate_part = _new(folder)
    # In this order: a new certificate without a new key is what finish_own() looks for.
    certificate_part.unlink(missing_ok=True)
    sync_directory(folder)
    _write_secret(key_part, pem)
    replace_file(certificate_part, [certificate])
    key_part.replace(folder / tls.KEY)
    sync_directory(folder)
    finish_own(folder)


def finish_own(folder: Path) -> None:
    """Finish what write_own() has begun, if its process was killed between key and certificate.
    Raises OSError."""
    key_part, certificate_part = _new(folder)
    if certificate_part.exists() and not key_part.exists():
        certificate_part.replace(folder / tls.CERTIFICATE)
        sync_directory(folder)


def own_hosts(folder: Path) -> tuple[str, ...]:
    """Hosts of the coordinator's certificate that is there. Raises AccessError."""
    path = folder / tls.CERTIFICATE
    try:
        names = read_certificate(path.read_bytes()).names
    except OSError as error:
        raise AccessError(f"{path} cannot be read: {error.strerror}") from None
    except InvalidCredential as error:
        raise AccessError(f"{path} cannot be used: {error}") from None
    return names.hosts


def _new(folder: Path) -> tuple[Path, Path]:
    """Paths at which a new key and certificate wait until they replace those of the folder."""
    return folder / f"{tls.KEY}.new", folder / f"{tls.CERTIFICATE}.new"


def _write_secret(path: Path, content: bytes) -> None:
    """Write a file that its owner alone can read, in one step."""
    path.with_name(f"{path.name}.part").unlink(missing_ok=True)  # which others may read
    replace_file(path, [content], 0o600)
