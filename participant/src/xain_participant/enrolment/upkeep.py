"""Upkeep of a participant's certificates while it runs: they are renewed in time, and what is wrong
with them is logged."""

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Final

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_participant.enrolment.asking import Refused, ask_to_renew
from xain_participant.enrolment.kept import KeptCertificates, extended
from xain_participant.tables.advice import new_token

# Share of its life at which a certificate is renewed, and by how much of it later at most, so that
# sites which have joined together do not renew together.
RENEWED_AT: Final = 2 / 3
_SPREAD: Final = 1 / 12
# Changed files are looked at so often; the clock may also be set, and a machine be suspended.
LOOK_S: Final = 60.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 30.0, 3600.0


class Upkeep:
    """Watches over certificates until close().

    kept: they are renewed there; None: only looked at. now: seconds since the epoch.
    """

    def __init__(
        self,
        tls: Certificates,
        address: str,
        kept: KeptCertificates | None,
        *,
        now: Callable[[], float] = time.time,
        chance: Random | None = None,
    ) -> None:
        self._tls = tls
        self._address = address
        self._kept = kept
        self._now = now
        chance = chance or Random()
        self._late = chance.uniform(0.0, _SPREAD)
        self._backoff = Backoff(_MIN_PAUSE_S, _MAX_PAUSE_S, chance)
        self._again_at = 0.0  # not before, after a failure
        self._told: set[str] = set()
        self._closed = threading.Event()
        self._log = get_logger(__name__)

    def run(self) -> None:
        """Look and renew, in a thread of its own."""
        while not self._closed.is_set():
            self._closed.wait(self.step())

    def close(self) -> None:
        """Let run() end; a call that is under way ends by its time limit."""
        self._closed.set()

    def step(self) -> float:
        """Do what is due now. Returns for how long to wait."""
        self._tls.refresh()
        trouble = self._tls.trouble
        if trouble and self._note_reason(trouble):
            hint = "those before are used on"
            self._log.warning("certificates_wrong", reason=trouble, hint=hint)
        now, due_at = self._now(), self._due_at()
        if self._kept is None:
            if self._tls.expires_soon:
                self._warn_of_the_end("put new files there")
            return LOOK_S
        if now >= due_at and now >= self._again_at:
            self._renew(self._kept)
        if self._tls.expires_soon and self._again_at:
            self._warn_of_the_end("it is not renewed: if that goes on, " + new_token())
        return min(LOOK_S, max(1.0, self._due_at() - now))

    def _due_at(self) -> float:
        """When the certificate is to be renewed, later by chance than that of other sites."""
        return due_at(self._tls, self._late)

    def _renew(self, kept: KeptCertificates) -> None:
        """Renew the certificate; a failure is logged once, and tried again after a pause that
        grows."""
        try:
            renew(kept, self._tls, self._address)
        except BlockingIOError:
            pass  # that process renews them
        except (Refused, InvalidCertificates, OSError) as error:
            self._again_at = self._now() + self._backoff.next_s()
            if self._note_reason(str(error)):
                self._log.warning("certificate_not_renewed", reason=str(error))
        else:
            self._again_at = 0.0
            self._told.clear()
            self._backoff.reset()
            self._tls.refresh()
            days = (self._tls.own.not_after - self._now()) / 86_400
            self._log.info("certificate_renewed", days=round(days, 1))

    def _warn_of_the_end(self, hint: str) -> None:
        """Log once a day that the certificate expires soon."""
        days = (self._tls.own.not_after - self._now()) / 86_400
        file = str(self._tls.folder / "tls.crt")
        if self._note_reason(f"{file} {int(days)}"):  # a line a day
            self._log.warning("certificate_expires", file=file, days=round(days, 1), hint=hint)

    def _note_reason(self, reason: str) -> bool:
        """Note a reason. Returns whether it was not told before: nobody reads a line a minute."""
        is_new = reason not in self._told
        self._told.add(reason)
        return is_new


def due_at(tls: Certificates, late: float = 0.0) -> float:
    """When a certificate is to be renewed. late: see _SPREAD."""
    own = tls.own
    return own.not_before + (own.not_after - own.not_before) * (RENEWED_AT + late)


def renew(kept: KeptCertificates, tls: Certificates, address: str) -> None:
    """Get a new certificate for a new key, and use it from now on.

    Killed at any step it can be repeated; until the end the certificate before is used. Raises
    Refused, BlockingIOError, InvalidCertificates and OSError.
    """
    from xain_foundation.security.x509 import key_of_pem, make_request

    with kept.asking():
        if tls.refresh():
            return  # another process has renewed it
        pending = kept.pending()
        name = tls.own.names.common_name
        request = make_request(key_of_pem(pending.key), name)
        signed = ask_to_renew(address, tls.of_channel(), request)
        authority = extended(tls.authority, signed.authority)
        kept.accept(pending, signed.certificate, authority, kept.address, kept.token)
