"""A search for secrets in what programs write and say."""

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

# Files whose purpose is to keep a secret. Each has to be of mode 0600.
SECRET_FILES = frozenset(("ca.key", "tls.key", ".weights-port"))
SECRET_SUFFIXES = frozenset((".token", ".passphrase"))


class Secrets:
    """Secrets that a test has made, and the forms in which they could be shown."""

    def __init__(self) -> None:
        self._forms: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._forms)

    def add_key(self, pem: bytes, whose: str) -> None:
        """A private key in PEM, whatever it is encoded in."""
        key = load_pem_private_key(pem, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        number = key.private_numbers().private_value
        self._add_bytes(number.to_bytes(32, "big"), f"the key of {whose}")
        self._forms[str(number).encode()] = f"the key of {whose}"

    def add_text(self, text: str, what: str) -> None:
        """A token, a passphrase, or the signature of a URL."""
        self._add_bytes(text.encode(), what)

    def _add_bytes(self, secret: bytes, what: str) -> None:
        assert len(secret) >= 16, f"{what} is short, and could be anywhere"
        self._forms[secret] = what
        for hexadecimal in (secret.hex(), secret.hex().upper(), secret.hex(":")):
            self._forms[hexadecimal.encode()] = what
        for offset in range(3):  # in the middle of something that is encoded
            whole = base64.b64encode(b"\0" * offset + secret)
            inner = whole[4:-4] if offset else whole[:-4]
            self._forms[inner] = what
            self._forms[inner.replace(b"+", b"-").replace(b"/", b"_")] = what

    def found_in(self, data: bytes) -> list[str]:
        """Which of them are in there. PEM breaks its lines anywhere."""
        joined = data.replace(b"\r", b"").replace(b"\n", b"").replace(b"\\n", b"")
        return sorted(
            {what for form, what in self._forms.items() if form in data or form in joined}
        )

    def told_by(self, sources: Iterable[tuple[str, bytes]]) -> list[str]:
        """Sentences about the sources that have a secret."""
        return [f"{where} has {what}" for where, data in sources for what in self.found_in(data)]


def files_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Files that are there to be read by others than their owner, or to be copied."""
    for path in sorted(folder.rglob("*")):
        is_secret = path.name in SECRET_FILES or path.suffix in SECRET_SUFFIXES
        if path.is_file() and not path.is_symlink():
            if is_secret:
                mode = path.stat().st_mode & 0o777
                assert mode == 0o600, f"{path} has mode {mode:o}"
            else:
                yield str(path), path.read_bytes()


def command_line(pid: int) -> tuple[str, bytes]:
    """Command line and environment of a process, as other programs of the machine list the first
    and the system's own tools the second."""
    return f"process {pid}", Path(f"/proc/{pid}/cmdline").read_bytes()
