"""Secrets of the configuration, given as they are or as the name of a file that holds them; and
files of authorities."""

import ssl
from pathlib import Path

from xain_coordinator.ports import StoreError
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog

log = get_logger(__name__)


class Secret:
    """Value of `name`, or of the file `name`_file, which is read again for each use: who renews the
    keys of a store need not start the coordinator again.

    section: what messages call the settings. Raises StoreError if the file cannot be read at the
    start. A file that cannot be read later, such as one that is being replaced, leaves the last
    value in use.
    """

    def __init__(self, section: str, settings: object, name: str) -> None:
        self._section = section
        self._settings = settings
        self._name = name
        self._last = read_secret(section, settings, name)
        self._unread = RateLimitedLog(log.warning, "secret_not_read_again")

    def __call__(self) -> str:
        """Read the value again, and return it without blanks around it; "" if none is given. If
        that fails, log it, and return the value that was read last."""
        try:
            self._last = read_secret(self._section, self._settings, self._name)
        except StoreError as error:
            self._unread(error=str(error))
        return self._last


def read_secret(section: str, settings: object, name: str) -> str:
    """The value of `name`, or what the file `name`_file holds, without blanks and line ends around
    it; "" if neither is given. section: what messages call the settings. Raises StoreError."""
    path: Path | None = getattr(settings, f"{name}_file")
    if path is None:
        source = f"{section}.{name}"
        value: str = getattr(settings, name).get_secret_value().strip()
    else:
        # Without the path: it may be the secret itself, put under the wrong key.
        source = f"{section}.{name}_file (not shown)"
        value = _read(source, path)
    if not value.isprintable():
        # Sent as it is, it would be a header that no server understands.
        raise StoreError(f"{source} has a line end or another control character in it; remove it")
    return value


def authorities_in(section: str, path: Path | None) -> str | None:
    """The file `ca_file`, which has certificates of authorities in PEM; None if none is named.
    section: what messages call the settings. Raises StoreError."""
    if path is None:
        return None
    reason = "no certificate in PEM is in it"
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
    else:
        return str(path)
    raise StoreError(f"cannot use {section}.ca_file, {path}: {reason}")


def _read(source: str, path: Path) -> str:
    """The text of a file, without blanks around it. source: what messages call it. Raises
    StoreError."""
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise StoreError(f"cannot read {source}: {reason}") from None
    if not value:
        raise StoreError(f"{source} holds no text")
    return value
