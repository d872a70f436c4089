"""Certificates for 127.0.0.1, made by our own authority, or by openssl as strangers make them."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from xain_foundation.security import tls
from xain_foundation.security.identity import Identity, Role
from xain_foundation.security.x509 import Authority, key_to_pem, make_request, new_key, read_request

AUTHORITY_NAME = "coordinator.example.org"
HOSTS = ("127.0.0.1", "localhost")

OPENSSL = shutil.which("openssl")
# In CI it is a failure instead, which openssl() says.
needs_openssl = pytest.mark.skipif(
    OPENSSL is None and not os.environ.get("CI"), reason="needs openssl, which is not there"
)


def openssl(*arguments: str) -> None:
    assert OPENSSL is not None, "openssl is not installed, and CI is set"
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)


def certified(folder: Path, days: int = 2, *, purposes: str = "", curve: str = "P-256") -> Path:
    """A new folder with ca.crt, of an authority of its own, and tls.crt and tls.key, which it has
    signed.

    days: until tls.crt expires; -1 for one that has.
    purposes: that tls.crt is for, such as "serverAuth"; by default any.
    curve: of the keys.
    """
    folder.mkdir()
    ca, ca_key, own, own_key = (
        str(folder / name) for name in ("ca.crt", "ca.key", "tls.crt", "tls.key")
    )
    new = ["req", "-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{curve}", "-nodes"]
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", ca_key, "-out", ca)
    request, names = str(folder / "own.csr"), folder / "names"
    openssl(*new, "-subj", "/CN=peer", "-keyout", own_key, "-out", request)
    usage = f"\nextendedKeyUsage={purposes}" if purposes else ""
    names.write_text("subjectAltName=IP:127.0.0.1" + usage)
    sign = ["x509", "-req", "-days", str(days), "-in", request, "-CA", ca, "-CAkey", ca_key]
    openssl(*sign, "-CAcreateserial", "-extfile", str(names), "-out", own)
    return folder


def make_authority(lifetime_s: float = 86_400.0) -> Authority:
    return Authority.create(AUTHORITY_NAME, time.time(), lifetime_s)


def issued(
    authority: Authority,
    role: Role,
    name: str,
    *,
    hosts: Iterable[str] = HOSTS,
    lifetime_s: float = 3600.0,
    begins_in_s: float = 0.0,
) -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM. lifetime_s: negative for one that has expired."""
    key = new_key()
    begins = time.time() + begins_in_s - (120.0 if lifetime_s < 0 else 0.0)
    certificate = authority.issue(
        read_request(make_request(key, name)),
        Identity(authority.name, role, name),
        begins,
        abs(lifetime_s),
        hosts=hosts,
    )
    return certificate, key_to_pem(key)


def write_folder(
    folder: Path,
    authority: Authority,
    role: Role,
    name: str,
    *,
    hosts: Iterable[str] = HOSTS,
    lifetime_s: float = 3600.0,
) -> Path:
    """A new folder with ca.crt, tls.crt and tls.key. See issued()."""
    folder.mkdir(parents=True)
    certificate, key = issued(authority, role, name, hosts=hosts, lifetime_s=lifetime_s)
    (folder / tls.AUTHORITY).write_bytes(authority.certificate)
    (folder / tls.CERTIFICATE).write_bytes(certificate)
    (folder / tls.KEY).write_bytes(key)
    return folder
