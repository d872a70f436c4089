"""TLS from a folder with ca.crt, tls.crt and tls.key: credentials of gRPC and contexts of `ssl`,
which follow the files when they change.

Both sides of a connection show their certificates. The one that accepts a connection checks who
signed the other's; the one that connects compares the name in it too.
"""

import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xain_foundation.security.callers import Callers, serial_of
from xain_foundation.security.identity import Identity, IdentityRules, NoIdentity

if TYPE_CHECKING:
    import grpc

    from xain_foundation.security.x509 import Certificate

# The names in a Kubernetes secret of type kubernetes.io/tls, as cert-manager makes it.
AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
FILES: Final = (AUTHORITY, CERTIFICATE, KEY)
REVOKED: Final = "revoked.txt"  # may be missing
_SERIAL: Final = re.compile("[0-9a-f]{1,40}")
_WRONG_PURPOSE: Final = 26  # X509_V_ERR_INVALID_PURPOSE of OpenSSL
ANY_AUTHORITY: Final = IdentityRules()
_FileStates = tuple[tuple[int, int, int], ...]


class InvalidCertificates(Exception):
    """The files of a folder cannot be used; the message names them."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Files that belong together, and what is made of them."""

    authority: bytes
    certificate: bytes
    key: bytes
    own: "Certificate"
    accepts: ssl.SSLContext
    accepts_all: ssl.SSLContext
    connects: ssl.SSLContext
    connects_http2: ssl.SSLContext
    connects_by_name: ssl.SSLContext


class Certificates:
    """The certificate of a program with its key, and the authority that has to have signed the
    other side's.

    Changed files are noticed when a connection is made, or by refresh(). They count once they
    belong together; until then the old ones do. Connections that stand are kept.

    folder: has AUTHORITY, CERTIFICATE and KEY, in PEM. It may have REVOKED, with the serial number
        of a certificate a line: its holder is refused, as long as this program runs also when the
        line is removed, so that a file that is being written lets nobody in.
    rules: how the names in the other sides' certificates are read.
    version: grows with each change.
    callers: reads those names.
    Raises InvalidCertificates.
    """

    # Files are looked at again for a new connection when the last look is so old.
    look_s = 1.0
    # New files are written one after the other, and belong together after the last one.
    settles_s = 5.0

    def __init__(
        self,
        folder: Path | str,
        now: Callable[[], float] = time.time,
        *,
        rules: IdentityRules = ANY_AUTHORITY,
    ) -> None:
        self.folder = Path(folder)
        self.rules = rules
        self.callers = Callers(rules, now)
        self._now = now
        self._lock = threading.Lock()
        self.version = 0
        self._trouble = ""
        self._wrong_since: float | None = None
        self._looked_at = time.monotonic()
        self._seen = self._file_states()
        self._loaded = _load(self.folder)
        self._read_revoked()

    # --- what is made of the files: read for each connection ---

    @property
    def accepts(self) -> ssl.SSLContext:
        """Context for a socket that accepts connections. It asks for a certificate."""
        self.look()
        return self._loaded.accepts

    @property
    def accepts_all(self) -> ssl.SSLContext:
        """Context for callers who say by other means who they are. It asks for no certificate."""
        self.look()
        return self._loaded.accepts_all

    @property
    def connects(self) -> ssl.SSLContext:
        """Context for a socket that connects. It compares the name of the server."""
        self.look()
        return self._loaded.connects

    @property
    def connects_http2(self) -> ssl.SSLContext:
        """Context for a socket on which HTTP/2 is used, as servers of gRPC demand."""
        self.look()
        return self._loaded.connects_http2

    @property
    def connects_by_name(self) -> ssl.SSLContext:
        """Context for a client that compares the server's identity itself, and no host name."""
        self.look()
        return self._loaded.connects_by_name

    def of_server(self) -> "grpc.ServerCredentials":
        """Credentials of a gRPC server, which uses changed files from the next handshake on."""
        import grpc

        version = self.version

        def changed() -> Any:  # None for no change, which the types of gRPC leave out
            nonlocal version
            before, version = version, self.look()
            if version == before:
                return None
            return self._of_server()

        return grpc.dynamic_ssl_server_credentials(
            self._of_server(), changed, require_client_authentication=True
        )

    def _of_server(self) -> "grpc.ServerCertificateConfiguration":
        import grpc

        loaded = self._loaded
        return grpc.ssl_server_certificate_configuration(
            [(loaded.key, loaded.certificate)], loaded.authority
        )

    def of_channel(self) -> "grpc.ChannelCredentials":
        """Credentials of a gRPC channel. They do not change: when `version` has grown, the next
        call needs a new channel."""
        import grpc

        self.look()
        loaded = self._loaded
        return grpc.ssl_channel_credentials(loaded.authority, loaded.key, loaded.certificate)

    # --- what is known of them ---

    @property
    def authority(self) -> bytes:
        """Certificates of the authority, in PEM."""
        return self._loaded.authority

    @property
    def own(self) -> "Certificate":
        """The certificate that is shown now."""
        return self._loaded.own

    @property
    def identity(self) -> Identity:
        """Identity that the certificate shown now names. Raises NoIdentity."""
        return self.rules.identify(self.own.names)

    @property
    def are_of_coordinator(self) -> bool:
        """Whether a coordinator's authority has issued the certificates. Those name programs, and
        coordinators alone have hosts."""
        if self.rules.roles:
            return False
        try:
            ANY_AUTHORITY.identify(self.own.names)
        except NoIdentity:
            return False
        return True

    @property
    def trouble(self) -> str:
        """Fault of changed files that are not used; "" if there is none, or if they have
        changed a moment ago."""
        since = self._wrong_since
        if since is None or time.monotonic() - since < self.settles_s:
            return ""
        return self._trouble

    @property
    def expires_soon(self) -> bool:
        """Whether less than a third of the certificate's life is left."""
        own = self.own
        return self._now() > own.not_after - (own.not_after - own.not_before) / 3

    def refresh(self) -> bool:
        """Load the files if they have changed. Returns whether others are used from now on."""
        with self._lock:
            self._looked_at = time.monotonic()
            # Before they are read: what changes meanwhile is looked at again.
            seen = self._file_states()
            if seen == self._seen and self._wrong_since is None:
                return False
            try:
                self._read_revoked()
                loaded = _load(self.folder)
            except InvalidCertificates as error:
                self._trouble = str(error)
                if self._wrong_since is None:
                    self._wrong_since = time.monotonic()
                return False
            self._seen, self._wrong_since = seen, None
            is_changed = (loaded.authority, loaded.certificate, loaded.key) != (
                self._loaded.authority,
                self._loaded.certificate,
                self._loaded.key,
            )
            if is_changed:
                self._loaded = loaded
                self.version += 1
            return is_changed

    def look(self) -> int:
        """Load changed files, unless that was tried a moment ago. Returns the version."""
        if time.monotonic() - self._looked_at >= self.look_s:
            self.refresh()
        return self.version

    def _read_revoked(self) -> None:
        """Add the revoked serial numbers that can be read, whatever else is wrong. Raises
        InvalidCertificates for lines that are no serial numbers."""
        path = self.folder / REVOKED
        try:
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        except OSError as error:
            raise InvalidCertificates(f"{path}: {error.strerror}") from None
        serials = [serial_of(line) for line in lines]
        valid = {each for each in serials if _SERIAL.fullmatch(each)}
        if not valid <= self.callers.revoked:
            self.callers.revoked |= valid
        for number, (line, serial) in enumerate(zip(lines, serials, strict=True), 1):
            if line.strip() and serial not in valid:
                raise InvalidCertificates(
                    f"{path}, line {number}: no serial number, as openssl shows it"
                )

    def _file_states(self) -> _FileStates:
        found = []
        for name in (*FILES, REVOKED):
            try:
                stat = (self.folder / name).stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


def _load(folder: Path) -> _Loaded:
    """Read the certificates and the key of a folder, and make the contexts that need them. Raises
    InvalidCertificates."""
    from xain_foundation.security.x509 import InvalidCredential, read_certificate

    paths = [folder / name for name in FILES]
    try:
        authority, certificate, key = (path.read_bytes() for path in paths)
        text = authority.decode("ascii")
        # For "" create_default_context() trusts the authorities of the system.
        if not text.strip():
            raise InvalidCertificates(
                f"{paths[0]} is empty; it must have the authority's certificate"
            )
        own = read_certificate(certificate)
        accepts = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=text)
        accepts_all = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        connects, connects_http2 = (ssl.create_default_context(cadata=text) for _ in range(2))
        connects_http2.set_alpn_protocols(["h2"])
        connects_by_name = ssl.create_default_context(cadata=text)
        connects_by_name.check_hostname = False
        contexts = (accepts, accepts_all, connects, connects_http2, connects_by_name)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if context is not accepts_all:
                context.verify_mode = ssl.CERT_REQUIRED
            # An empty password: OpenSSL would ask a terminal for that of an encrypted key.
            context.load_cert_chain(paths[1], paths[2], password="")
        reason = _why_refused(accepts, paths[1], paths[2])
        # gRPC is given what was read, contexts read the files themselves.
        if (certificate, key) != (paths[1].read_bytes(), paths[2].read_bytes()):
            raise InvalidCertificates(f"the files in {folder} are changing")
    except InvalidCredential as error:
        raise InvalidCertificates(f"{paths[1]} cannot be used: {error}") from None
    except (ssl.SSLError, UnicodeError) as error:
        raise InvalidCertificates(
            f"{AUTHORITY}, {CERTIFICATE} or {KEY} in {folder} is no PEM, is encrypted, or they do "
            f"not belong together: {error}"
        ) from None
    except OSError as error:
        raise InvalidCertificates(f"no certificates: {error.filename}: {error.strerror}") from None
    if reason:
        raise InvalidCertificates(f"{paths[1]} would be refused by the other programs: {reason}")
    return _Loaded(authority, certificate, key, own, *contexts)


def _why_refused(accepts: ssl.SSLContext, certificate: Path, key: Path) -> str:
    """Why a program with the context `accepts` refuses the certificate, such as "certificate has
    expired"; "" if it takes it. A TLS handshake in memory: gRPC tells programs "Socket closed"."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.load_cert_chain(certificate, key, password="")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(down, up)
    answering = accepts.wrap_bio(up, down, server_side=True)
    for side in (asking, answering, asking, answering):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            # A program that only accepts connections may have a certificate for servers alone.
            return "" if error.verify_code == _WRONG_PURPOSE else error.verify_message
        except ssl.SSLError as error:
            return error.reason  # such as NO_SHARED_CIPHER, for a curve that TLS does not have
    return ""
