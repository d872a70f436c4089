"""Certificates for 127.0.0.1, made by openssl."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
