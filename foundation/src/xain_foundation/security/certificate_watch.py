"""Log lines about the certificates of a program that runs: new files, wrong ones, and the end of
their life."""

import time
from typing import Final

from xain_foundation.logs.logger import get_logger
from xain_foundation.security.tls import Certificates

log = get_logger(__name__)

DAY_S: Final = 86_400.0


class CertificateWatch:
    """Looks at certificates whenever it is asked to, and logs each thing once; that they expire,
    once a day from the last third of their life on. certificates: None: nothing to look at."""

    def __init__(self, certificates: Certificates | None) -> None:
        self._certificates = certificates
        self._version = 0 if certificates is None else certificates.version
        self._trouble = ""
        self._warn_at = 0.0

    def look(self, *, warns_of_end: bool = True) -> None:
        """Load changed certificates, and log changes, faults and, once a day, that they expire.

        warns_of_end: False where the certificate is renewed by itself.
        """
        certificates = self._certificates
        if certificates is None:
            return
        folder = str(certificates.folder)
        if (version := certificates.look()) != self._version:
            self._version = version
            log.info("certificates_changed", folder=folder)
        if (trouble := certificates.trouble) != self._trouble:
            self._trouble = trouble
            if trouble:
                log.warning("certificates_not_used", error=trouble)
        now = time.monotonic()
        if warns_of_end and certificates.expires_soon and now >= self._warn_at:
            self._warn_at = now + DAY_S
            left_s = certificates.own.not_after - time.time()
            log.warning("certificate_expires", folder=folder, days=round(left_s / DAY_S, 1))
