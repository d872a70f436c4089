"""Capability URLs of the weights port: what a URL allows is written in it, and signed.

A URL names one method, participant, round, key and size, and when it expires. The signature is an
HMAC-SHA256 under a secret of the session that is kept beside the session's weights, so URLs stay
valid when the coordinator restarts. A URL works for everybody who has it and must not get into
logs.
"""

import base64
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

from xain_coordinator.ports import StoreError
from xain_coordinator.server.weights.http_messages import Answer
from xain_foundation.durable import make_directory, replace_file
from xain_wire.weights_port import PATH

_SECRET_FILE = ".weights-port"  # no key is stored under this name
_SECRET_BYTES = 32

Method = Literal["GET", "PUT"]


@dataclass(frozen=True, slots=True)
class Capability:
    """A request that one URL allows.

    key: of the model (GET), or the place of the update (PUT). size_bytes: of the model; of an
    update, the most that is taken. expires_at: Unix time in seconds.
    """

    method: Method
    participant_id: str
    round: int
    key: str
    size_bytes: int
    expires_at: int


class Capabilities:
    """Makes and checks the URLs of one session. Safe to use from several threads.

    secret: of the session. lifetime_s: of a URL. now: Unix time.
    """

    def __init__(
        self,
        secret: bytes,
        session_id: str,
        lifetime_s: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self._session_id = session_id.encode()
        self._lifetime_s = lifetime_s
        self._now = now

    def path(
        self, method: Method, participant_id: str, round_: int, key: str, size_bytes: int
    ) -> str:
        """The path of a new URL that allows a participant one request, until it expires."""
        expires_at = int(self._now()) + self._lifetime_s
        allowed = Capability(method, participant_id, round_, key, size_bytes, expires_at)
        payload = _text(json.dumps(astuple(allowed), separators=(",", ":")).encode())
        return f"{PATH}{payload}.{_text(self._sign(payload.encode()))}"

    def check(self, method: Method, path: str) -> Capability:
        """The request that the URL with this path allows. Raises Answer."""
        payload, _, signature = path.removeprefix(PATH).partition(".")
        # The signature is compared first, so that the payload is one of ours.
        expected = _text(self._sign(payload.encode()))
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise Answer(403, "the URL is none of this session's")
        data = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        allowed = Capability(*json.loads(data))
        if allowed.expires_at <= self._now():
            raise Answer(403, "the URL has expired")
        if allowed.method != method:
            raise Answer(403, f"the URL is for {allowed.method} only")
        return allowed

    def _sign(self, payload: bytes) -> bytes:
        """HMAC of a payload for this session."""
        return hmac.digest(self._secret, self._session_id + b"\0" + payload, "sha256")


def _text(data: bytes) -> str:
    """Bytes as text for a URL."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass(slots=True)
class PortFile:
    """The secret and the port of a session's weights port, kept over restarts of the coordinator.

    port: the one that the system has picked, which the next start asks for again; 0 before.
    """

    path: Path
    secret: bytes
    port: int = 0

    @classmethod
    def of(cls, folder: Path) -> "PortFile":
        """Read the file of a session, or write a new one with mode 0600. folder: of the session's
        weights. Raises StoreError."""
        path = folder / _SECRET_FILE
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            secret, port = bytes.fromhex(kept["secret"]), kept["port"]
            if len(secret) == _SECRET_BYTES and isinstance(port, int) and 0 <= port <= 65535:
                return cls(path, secret, port)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # it is made anew
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreError(f"cannot read {path}: {reason}") from None
        new = cls(path, secrets.token_bytes(_SECRET_BYTES))
        new.save()
        return new

    def save(self) -> None:
        """Write secret and port to the file, in one step and with mode 0600. Raises StoreError."""
        text = json.dumps({"secret": self.secret.hex(), "port": self.port})
        try:
            make_directory(self.path.parent)
            replace_file(self.path, [text.encode()], mode=0o600)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreError(f"cannot write {self.path}: {reason}") from None
