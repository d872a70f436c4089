"""Certificates of a benchmark's programs, by the authority of the coordinator that they call."""

import time
from pathlib import Path

from xain_coordinator.access.control import initialise
from xain_foundation.security.identity import Identity, Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY
from xain_foundation.security.x509 import Authority, key_to_pem, make_request, new_key, read_request

HOSTS = ("127.0.0.1",)
LIFETIME_S = 86_400.0


def close_coordinator(data: Path) -> None:
    """Make authority and certificate of a coordinator that keeps its data in this folder, so that
    it takes nobody without a certificate from its next start on."""
    data.mkdir(parents=True, exist_ok=True)
    initialise(data / "access", HOSTS)


class Issuer:
    """The authority of a closed coordinator.

    data: folder of the coordinator's data. holders: has a folder for each certificate.
    """

    def __init__(self, data: Path) -> None:
        self.holders = data / "holders"
        access = data / "access"
        self._authority = Authority.of_pem(
            (access / "ca.crt").read_bytes(), (access / "ca.key").read_bytes()
        )

    def folder(self, name: str, role: Role = Role.PARTICIPANT) -> Path:
        """A new folder with the certificate of somebody who may call the coordinator."""
        key, holder = new_key(), self.holders / name
        request = read_request(make_request(key, name))
        identity = Identity(self._authority.name, role, name)
        certificate = self._authority.issue(request, identity, time.time(), LIFETIME_S)
        holder.mkdir(parents=True)
        (holder / AUTHORITY).write_bytes(self._authority.certificate)
        (holder / CERTIFICATE).write_bytes(certificate)
        (holder / KEY).write_bytes(key_to_pem(key))
        return holder
