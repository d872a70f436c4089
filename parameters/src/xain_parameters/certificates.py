"""Certificates of the nodes of a group, for gRPC and for the transport."""

import os
import ssl
from pathlib import Path
from typing import Final

import grpc

from xain_parameters.errors import Invalid

# The names in a Kubernetes secret of type kubernetes.io/tls, as cert-manager makes it.
AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
FOLDER_ENV: Final = "XAIN_PARAMETERS_TLS__FOLDER"
_WRONG_PURPOSE: Final = 26  # X509_V_ERR_INVALID_PURPOSE of OpenSSL


class Certificates:
    """The certificate of a node with its key, and the authority that has to have signed the other
    side's. Both sides of a connection show their certificates; that of a scheduler or server must
    be for the host in its address.

    folder: has AUTHORITY, CERTIFICATE and KEY, in PEM.
    Raises Invalid, naming the files, if they cannot be used.
    """

    def __init__(self, folder: Path | str) -> None:
        paths = [Path(folder) / name for name in (AUTHORITY, CERTIFICATE, KEY)]
        try:
            authority, certificate, key = (path.read_bytes() for path in paths)
            text = authority.decode("ascii")
            # For "" create_default_context() trusts the authorities of the system.
            if not text.strip():
                raise Invalid(f"{paths[0]} is empty; it must have the authority's certificate")
            accepts = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=text)
            connects = ssl.create_default_context(cadata=text)
            for context in (accepts, connects):
                context.verify_mode = ssl.CERT_REQUIRED
                # An empty password: OpenSSL would ask a terminal for that of an encrypted key.
                context.load_cert_chain(paths[1], paths[2], password="")
        except (ssl.SSLError, UnicodeError) as error:
            raise Invalid(
                f"{AUTHORITY}, {CERTIFICATE} or {KEY} in {folder} is no PEM, is encrypted, or they "
                f"do not belong together: {error}"
            ) from None
        except OSError as error:
            raise Invalid(f"no certificates: {error.filename}: {error.strerror}") from None
        if reason := _why_refused(accepts, paths[1], paths[2]):
            raise Invalid(f"{paths[1]} would be refused by the other programs: {reason}")
        self.accepts = accepts
        self.connects = connects
        self._authority = authority
        self._own = (key, certificate)

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([self._own], self._authority, require_client_auth=True)

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._authority, *self._own)


def _why_refused(accepts: ssl.SSLContext, certificate: Path, key: Path) -> str:
    """Why a node with the context `accepts` refuses the certificate, such as "certificate has
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
            # A scheduler connects to no other program: its certificate may be for servers alone.
            return "" if error.verify_code == _WRONG_PURPOSE else error.verify_message
        except ssl.SSLError as error:
            return error.reason  # such as NO_SHARED_CIPHER, for a curve that TLS does not have
    return ""


def certificates_in(folder: Path | str | None) -> Certificates | None:
    """Certificates in the folder that a command line names, or else FOLDER_ENV; None if neither
    does.

    Raises Invalid, also for "": it comes from a shell variable that is not set, and must not turn
    encryption off.
    """
    named = os.environ.get(FOLDER_ENV) if folder is None else folder
    if named == "":
        raise Invalid(
            f"--tls or {FOLDER_ENV} is empty; name a folder, or leave it out if nothing is to be "
            "encrypted"
        )
    return None if named is None else Certificates(named)
