"""Certificates of the programs of a launch, by an authority that lives as long as the launch."""

import shutil
import time
from pathlib import Path

from xain_foundation.durable import replace_file
from xain_foundation.security import tls
from xain_foundation.security.identity import Identity, Role
from xain_foundation.security.x509 import Authority, key_to_pem, make_request, new_key, read_request

NAME = "launch"  # of the authority
CERTIFICATES = "certificates"  # in the work folder; those of the programs of one launch
LIFETIME_S = 365 * 86_400.0


class LaunchCertificates:
    """Makes a folder of certificates for each program. The key of the authority stays in memory.

    folder: has the folders of the programs; removed by close().
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self._authority = Authority.create(NAME, time.time(), LIFETIME_S)

    def issue(self, name: str, role: Role, *hosts: str) -> Path:
        """The folder of a program, which is made at the first call. hosts: that others reach it
        by."""
        folder = self._folder / role / name
        if folder.is_dir():
            return folder
        key = new_key()
        certificate = self._authority.issue(
            read_request(make_request(key, name)),
            Identity(NAME, role, name),
            time.time(),
            LIFETIME_S,
            hosts=hosts,
        )
        folder.mkdir(parents=True, mode=0o700)
        (folder / tls.AUTHORITY).write_bytes(self._authority.certificate)
        (folder / tls.CERTIFICATE).write_bytes(certificate)
        replace_file(folder / tls.KEY, [key_to_pem(key)], 0o600)
        return folder

    def close(self) -> None:
        """Remove the certificates of all programs."""
        shutil.rmtree(self._folder, ignore_errors=True)
