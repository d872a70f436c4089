"""Certificates that a site has been given, in its state directory.

    tls -> certificates/2       what counts: ca.crt, tls.crt and tls.key, as tls.Certificates reads
    certificates/2/address      HOST:PORT of the coordinator
    certificates/2/token        serial number of the token that they were got with, if with one
    certificates/3/tls.key      a key that a certificate was asked for, or is about to be
    certificates/lock           held by the process that asks

The key is durable before a certificate is asked for, so that a lost answer is asked for again with
the same key, after a kill as well. The link is replaced at once: before and after, key and
certificate belong together.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xain_foundation.durable import make_directory, replace_file, sync_directory
from xain_foundation.security import tls

LINK: Final = "tls"
_FOLDERS: Final = "certificates"
_LOCK: Final = "lock"
_ADDRESS: Final = "address"
_TOKEN: Final = "token"
_SECRET: Final = 0o600


@dataclass(frozen=True, slots=True)
class Pending:
    """A key that has no certificate yet. key: PEM."""

    folder: Path
    key: bytes


def extended(known: bytes, offered: bytes) -> bytes:
    """The authority to trust from now on: the one that the coordinator offers if the known one is
    in it, else the known one. Both are PEM.

    A program that passes itself off as the coordinator once must not put its own authority there.
    """
    return offered if known.strip() and known.strip() in offered else known


class KeptCertificates:
    """Certificates in one state directory. Methods raise OSError."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._folders = state_dir / _FOLDERS
        self.folder = state_dir / LINK

    @property
    def are_there(self) -> bool:
        """Whether there is a certificate that counts."""
        return self.folder.is_dir()

    @property
    def is_begun(self) -> bool:
        """Whether a certificate was asked for, or is about to be, and none is there yet."""
        return not self.are_there and bool(self._numbers())

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator; "" if it is not known."""
        return self._text(_ADDRESS)

    @property
    def token(self) -> str:
        """Serial number of the token that the certificate was got with; "" without one."""
        return self._text(_TOKEN)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Keep other processes from asking meanwhile. Raises BlockingIOError."""
        make_directory(self._state_dir, mode=0o700)
        make_directory(self._folders, mode=0o700)
        fd = os.open(self._folders / _LOCK, os.O_RDWR | os.O_CREAT, _SECRET)
        try:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # systems say either
                raise BlockingIOError(f"another process uses {self._folders}") from None
            yield
        finally:
            os.close(fd)

    def pending(self) -> Pending:
        """Find the key that was asked with before and got no certificate, or write a new one."""
        from xain_foundation.security.x509 import key_to_pem, new_key

        current = self._current()
        number = max([current, *self._numbers()])
        folder = self._folders / str(number if number > current else current + 1)
        path = folder / tls.KEY
        try:
            key = path.read_bytes()
        except FileNotFoundError:
            key = key_to_pem(new_key())
            make_directory(folder, mode=0o700)
            replace_file(path, [key], _SECRET)
        return Pending(folder, key)

    def accept(
        self, pending: Pending, certificate: bytes, authority: bytes, address: str, token: str = ""
    ) -> tls.Certificates:
        """Use a certificate from now on. It outlives a kill when this returns.

        token: serial number of the token that it was got with. Raises InvalidCertificates if it is
        not for the pending key, or of no use; then all stays as it was.
        """
        files = {
            tls.AUTHORITY: authority,
            tls.CERTIFICATE: certificate,
            _ADDRESS: address.encode(),
            _TOKEN: token.encode(),
        }
        with suppress(FileNotFoundError):  # which an operator has put there
            files[tls.REVOKED] = (self.folder / tls.REVOKED).read_bytes()
        for name, content in files.items():
            replace_file(pending.folder / name, [content])
        tls.Certificates(pending.folder)  # raises if they do not belong together
        link = self._folders / LINK
        with suppress(FileNotFoundError):
            link.unlink()  # the rest of a crash
        # Relative to where it is moved to, so that the state directory itself can be moved.
        link.symlink_to(Path(_FOLDERS) / pending.folder.name)
        before = self._current()
        link.replace(self.folder)
        sync_directory(self._state_dir)
        for number in self._numbers():
            # The files before may be read at this moment.
            if number not in (before, int(pending.folder.name)):
                shutil.rmtree(self._folders / str(number), ignore_errors=True)
        return tls.Certificates(self.folder)

    def _current(self) -> int:
        """Number of the folder that counts; 0 without one."""
        try:
            return int(self.folder.readlink().name)
        except (OSError, ValueError):
            return 0

    def _numbers(self) -> list[int]:
        """Numbers of the folders with a key or certificate."""
        try:
            return [int(each.name) for each in self._folders.iterdir() if each.name.isdecimal()]
        except OSError:
            return []

    def _text(self, name: str) -> str:
        """The text of a file beside the certificate that counts; "" without it."""
        try:
            return (self.folder / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeError):
            return ""
