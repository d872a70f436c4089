"""TLS handshakes that find out why two programs do not come together: gRPC says "Socket closed" for
everything."""

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from xain_foundation.security.identity import NoIdentity, node_host

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates
    from xain_foundation.security.x509 import Certificate

HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS: Final = 4  # type of the first frame of every HTTP/2 server

# Verification errors of OpenSSL, X509_V_ERR_...
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_HOST: Final = (62, 64)
_OTHER_AUTHORITY: Final = (2, 7, 18, 19, 20, 21, 24, 30)


class Fault(Enum):
    """Kind of a cause; what to do about it differs from program to program."""

    OTHER = auto()
    OTHER_AUTHORITY = auto()  # the server's certificate is of one that we do not know
    EXPIRED = auto()  # the server's certificate
    NOT_YET_VALID = auto()  # the server's certificate
    OTHER_HOST = auto()  # the server's certificate is for other names than we have typed
    NO_TLS = auto()  # the server speaks none
    NEEDS_TLS = auto()  # the server speaks TLS, and we do not
    REFUSED = auto()  # the server does not take our certificate


@dataclass(frozen=True, slots=True)
class Cause:
    """Why no call is answered. text: the end of a sentence; empty if a server answers."""

    text: str
    fault: Fault = Fault.OTHER

    def __bool__(self) -> bool:
        return bool(self.text)


ANSWERS: Final = Cause("")
Connect = Callable[[], socket.socket]


def is_http2(answer: bytes) -> bool:
    """Whether these bytes answer HELLO as a server of HTTP/2 does."""
    return len(answer) > 3 and answer[3] == _SETTINGS


def speaks_tls(connect: Connect) -> bool:
    """Whether TLS is spoken at the other end of a new connection, with whatever certificate."""
    return _shown(connect) is not None


def why_refused(connect: Connect, host: str, tls: "Certificates", node: str = "") -> Cause:
    """Make a handshake as gRPC would, and say why it fails.

    connect: opens a connection, with a time limit; called up to twice. Raises OSError if it does.
    host: that the certificate of the server has to name. node: see CurrentChannel.
    """
    if not tls.are_of_coordinator:
        node = ""
    wanted = node_host(node) if node else host
    connection = connect()
    try:
        with tls.connects_http2.wrap_socket(connection, server_hostname=wanted) as encrypted:
            return _why_no_call(connect, encrypted, tls)
    except ssl.SSLCertVerificationError as error:
        return _fault_of_theirs(error, host, tls, _shown(connect), node)
    except ssl.SSLError as error:
        return _why_no_handshake(connect, error)
    except TimeoutError:
        return Cause("it takes the connection and says nothing")
    except OSError:
        return Cause("it closes the connection: does it speak TLS?", Fault.NO_TLS)
    finally:
        connection.close()


def _why_no_call(connect: Connect, encrypted: ssl.SSLSocket, tls: "Certificates") -> Cause:
    """Say why a server answers no call after its handshake, in which it may not yet have looked at
    the certificate of the client."""
    try:
        encrypted.sendall(HELLO)
        answer = encrypted.recv(64)
    except TimeoutError:
        return Cause("it speaks TLS, and then says nothing")
    except OSError:  # also an alert
        answer = b""
    if is_http2(answer):
        return ANSWERS
    if answer:
        return Cause("it speaks TLS, but no gRPC: is it another port?")
    return _fault_of_ours(tls, _shown(connect))


def _why_no_handshake(connect: Connect, error: ssl.SSLError) -> Cause:
    if "ALERT" in (error.reason or ""):
        return Cause(f"it refuses the handshake ({error.reason})")
    try:
        with connect() as connection:
            connection.sendall(HELLO)
            is_grpc = is_http2(connection.recv(64))
    except OSError:
        is_grpc = False
    if is_grpc:
        return Cause("it speaks gRPC without TLS", Fault.NO_TLS)
    return Cause("it does not speak TLS as we do: is it another port?", Fault.NO_TLS)


def _fault_of_theirs(
    error: ssl.SSLCertVerificationError,
    host: str,
    tls: "Certificates",
    shown: "Certificate | None",
    node: str,
) -> Cause:
    """Say why we refuse the certificate of a server. shown: it; None if it cannot be read."""
    code = error.verify_code
    if shown is None:
        return Cause(f"its certificate is not accepted: {error.verify_message}")
    if code in _OTHER_AUTHORITY:
        ours, theirs = _authority_of(tls), shown.issuer
        file = tls.folder / "ca.crt"
        if theirs == ours:
            text = f"its authority has the name of the one in {file}, {ours}, and another key"
        else:
            text = f"its certificate is signed by {theirs}, and {file} is that of {ours}"
        return Cause(text, Fault.OTHER_AUTHORITY)
    if code == _EXPIRED:
        text = f"its certificate has expired on {_day(shown.not_after)}, and it is {_day()} here"
        return Cause(text, Fault.EXPIRED)
    if code == _NOT_YET_VALID:
        text = f"its certificate is valid from {_day(shown.not_before)} on; it is {_day()} here"
        return Cause(text, Fault.NOT_YET_VALID)
    if code in _OTHER_HOST:
        if node:
            return Cause(
                f"its certificate is that of {_holder(tls, shown)}, and not of node {node!r}",
                Fault.OTHER_HOST,
            )
        names = ", ".join(shown.names.hosts) or "no host at all"
        return Cause(f"its certificate is for {names}, and not for {host}", Fault.OTHER_HOST)
    return Cause(f"its certificate is not accepted: {error.verify_message}")


def _fault_of_ours(tls: "Certificates", shown: "Certificate | None") -> Cause:
    """Say why a server may refuse our certificate. shown: that of the server."""
    ours, file = tls.own, tls.folder / "tls.crt"
    why = f"it is one of {ours.issuer}"
    if ours.not_after < time.time():
        why = f"it has expired on {_day(ours.not_after)}"
    elif ours.not_before > time.time():
        why = f"it is valid from {_day(ours.not_before)} on; it is {_day()} here"
    elif shown is not None and shown.issuer != ours.issuer:
        why += f", and that of the server is one of {shown.issuer}"
    return Cause(f"it does not accept our certificate {file}: {why}", Fault.REFUSED)


def _holder(tls: "Certificates", shown: "Certificate") -> str:
    """Return the identity of a certificate as text, or else its subject."""
    try:
        return str(tls.rules.identify(shown.names))
    except NoIdentity:
        return shown.subject


def _authority_of(tls: "Certificates") -> str:
    from xain_foundation.security.x509 import InvalidCredential, read_certificate

    try:
        return read_certificate(tls.authority).subject
    except InvalidCredential:  # of a key that only OpenSSL knows
        return "another one"


def _shown(connect: Connect) -> "Certificate | None":
    """The certificate that a server shows to anybody. None if it speaks no TLS, or shows one that
    cannot be read."""
    from xain_foundation.security.x509 import InvalidCredential, read_certificate

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with connect() as connection, context.wrap_socket(connection) as encrypted:
            shown = encrypted.getpeercert(binary_form=True)
            assert shown, "a server always shows one"
            return read_certificate(ssl.DER_cert_to_PEM_cert(shown).encode())
    except (OSError, InvalidCredential):
        return None


def _day(at: float | None = None) -> str:
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
