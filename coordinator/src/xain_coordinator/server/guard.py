"""Authentication and authorisation of callers.

There is one for each process; the sessions of the process follow one another behind it.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc

from xain_coordinator.access.errors import (
    AccessError,
    Reason,
    Refusal,
    Unauthenticated,
)
from xain_coordinator.server.identity import SENDER, THIS_MACHINE
from xain_coordinator.server.permissions import require_open, require_permitted
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.security.callers import Caller, Callers
from xain_foundation.security.certificate_watch import DAY_S, CertificateWatch
from xain_foundation.security.identity import NoIdentity, Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.settings.fields import is_any, is_loopback, join_host_port
from xain_foundation.threads import run_to_end

if TYPE_CHECKING:  # certificates take 50 ms to import, and most coordinators have none
    from xain_coordinator.access.control import AccessControl

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Holds = Callable[[Caller], bool]

# Author of lines of the audit log that no caller has asked for.
COORDINATOR = "coordinator"
# Refusals that wait to be written to the audit log. Anybody can cause them.
_MAX_NOTES = 16
# A renewal of the own certificate that has failed is tried again after so long.
_RENEW_AGAIN_S = 3600.0


class Guard:
    """Says who calls, and refuses callers that may not.

    certificates, callers, access: of a closed coordinator; an open one has none, and serves whoever
        reaches it. renews_own: the coordinator's own certificate is of its own authority.

    on_ended: told of callers that may call no more, and why: whatever they have open ends.
    on_left: told the names of participants that have no certificate any more.
    Both are called on the event loop of watch().
    """

    # Changed files are noticed so soon by a coordinator that nobody calls, and expired callers.
    look_s = 2.0

    def __init__(
        self,
        certificates: Certificates | None = None,
        callers: Callers | None = None,
        access: "AccessControl | None" = None,
        *,
        renews_own: bool = False,
    ) -> None:
        self.certificates = certificates
        self.access = access
        self.on_ended: list[Callable[[Holds, Refusal], None]] = []
        self.on_left: list[Callable[[str], None]] = []
        self._callers = callers
        self._renews_own = renews_own
        self._renew_at = 0.0
        self._watch = CertificateWatch(certificates)
        self._notes: set[asyncio.Task[None]] = set()
        self._refused = RateLimitedLog(log.warning, "caller_refused")

    @classmethod
    def open(
        cls, tls: TlsSettings, certificates: Path | None, folder: Path, passphrase: bytes = b""
    ) -> Self:
        """The guard of a coordinator with certificates in a folder; None: an open one.

        folder: of the authority and the audit log. passphrase: of an authority's key that is
            encrypted.
        Raises InvalidCertificates and AccessError.
        """
        if certificates is None:
            return cls()
        from xain_coordinator.access.control import OWN_TLS, AccessControl

        access = AccessControl.open(folder, passphrase)  # finishes a renewal that was interrupted
        is_own = certificates == folder / OWN_TLS
        rules = tls.rules(access.authority_name if is_own else "")
        try:
            loaded = Certificates(certificates, rules=rules)
        except BaseException:  # raised again
            access.close()
            raise

        def require_unrevoked(caller: Caller) -> None:
            try:
                access.check(caller)
            except Unauthenticated as error:
                raise NoIdentity(str(error)) from None

        # For the parameter server too, which knows no access control.
        loaded.callers.check = require_unrevoked
        return cls(loaded, loaded.callers, access, renews_own=is_own)

    def close(self) -> None:
        """Close the audit log, if there is one."""
        if self.access is not None:
            self.access.close()

    @property
    def is_closed(self) -> bool:
        """Whether every caller shows a certificate."""
        return self._callers is not None

    def advertised(self, host: str, port: int) -> str:
        """HOST:PORT by which others reach this coordinator: where it listens on all addresses, the
        first name in its certificate that is not this machine's own."""
        if self.certificates is not None and is_any(host):
            others = (one for one in self.certificates.own.names.hosts if not is_loopback(one))
            host = next(others, host)
        return join_host_port(host, port)

    def require_access(self) -> "AccessControl":
        """Access control. Raises NO_AUTHORITY on an open coordinator, which has none."""
        if self.access is None:
            raise Refusal(
                Reason.NO_AUTHORITY,
                "this coordinator has no certificates; stop it, run xain-coordinator certs init, "
                "and start it again",
            )
        return self.access

    # --- who calls ---

    def admit(self, method: str, context: Context) -> Caller | None:
        """Check that the caller may call a method. Returns the caller, THIS_MACHINE through the
        Unix socket; None where an open coordinator does not ask.

        Raises Unauthenticated and NOT_PERMITTED.
        """
        if context.peer().startswith("unix:"):
            if self.is_closed:
                require_permitted(method, THIS_MACHINE)
            return THIS_MACHINE
        if self._callers is None:
            require_open(method)
            return None
        shown = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        if shown is None:
            raise Unauthenticated("the connection shows no certificate")
        caller = self.caller_of(shown)
        require_permitted(method, caller)
        said = SENDER.get().said
        if said is not None and said != caller.identity.name:
            raise Unauthenticated(
                f"the certificate is that of {caller.identity}, and the call says that it is of "
                f"participant {said!r}"
            )
        return caller

    def caller_of(self, certificate: bytes) -> Caller:
        """The holder of a certificate in PEM that a handshake has verified. Raises
        Unauthenticated."""
        assert self._callers is not None, "an open coordinator asks nobody"
        try:
            return self._callers.of_certificate(certificate)
        except NoIdentity as error:
            raise Unauthenticated(str(error)) from None

    # --- the audit log ---

    async def note(self, event: str, *, by: str = COORDINATOR, **fields: object) -> None:
        """Write a line of the audit log, if there is one. Raises NOT_RECORDED."""
        if self.access is not None:
            await run_to_end(self.access.note, event, by=by, **fields)

    async def try_to_note(self, event: str, **fields: Any) -> None:
        """Write a line of the audit log about what has happened anyway; if that fails, log it."""
        try:
            await self.note(event, **fields)
        except Refusal as error:
            log.error("not_recorded", what=event, error=str(error))

    def note_refused(self, peer: str, reason: str) -> None:
        """Log a refused caller, and have a thread note it in the audit log later. Nothing is noted
        on an open coordinator, and while _MAX_NOTES lines wait."""
        access = self.access
        if access is None or len(self._notes) >= _MAX_NOTES:
            return
        self._refused(peer=peer, reason=reason)
        task = asyncio.ensure_future(asyncio.to_thread(access.note_refusal, peer, reason))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    # --- what changes while it runs ---

    async def watch(self) -> None:
        """At intervals, follow the files of the certificates, renew the coordinator's own, and end
        what callers have open whose certificates are revoked or expire."""
        if self.access is None or self.certificates is None:
            return
        loop = asyncio.get_running_loop()

        def revoked(serials: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._end_revoked, serials)

        self.access.on_revoked = revoked
        while True:
            await asyncio.sleep(self.look_s)  # the interval of the looks
            self._end_expired(time.time())
            await asyncio.to_thread(self._look, self.certificates, self.access)

    def _end(self, holds: Holds, refusal: Refusal) -> None:
        """End what these callers have open."""
        for end in self.on_ended:
            end(holds, refusal)

    def _end_expired(self, now: float) -> None:
        """End what callers have open whose certificates have expired."""
        expired = Unauthenticated("the certificate of this connection has expired")
        self._end(lambda caller: now > caller.not_after, expired)

    def _end_revoked(self, serials: frozenset[str]) -> None:
        """End what callers have open with these certificates, and report each participant that has
        no valid certificate any more to on_left. serials: of what was revoked now."""
        revoked = Unauthenticated("the certificate of this connection was revoked")
        self._end(lambda caller: caller.serial in serials, revoked)
        assert self.access is not None, "it has told of the serials"
        assert self._callers is not None
        now, is_revoked = time.time(), self.access.access.revoked
        # Names in the certificates of another authority are known from calls alone.
        sites = [
            (caller.identity.name, caller.serial, caller.not_after)
            for caller in self._callers.remembered()
            if caller.identity.role is Role.PARTICIPANT
        ]
        sites += [
            (one.name, one.serial, one.expires_at)
            for one in self.access.entries()
            if one.role is Role.PARTICIPANT and one.kind == "certificate"
        ]
        valid = {name for name, serial, end in sites if serial not in is_revoked and now < end}
        for name in {name for name, serial, _ in sites if serial in serials} - valid:
            for leave in self.on_left:
                leave(name)

    def _look(self, certificates: Certificates, access: "AccessControl") -> None:
        """Read changed files of certificates, warn of an end that is near, and renew the
        coordinator's own certificate if it expires soon. Blocks."""
        certificates.refresh()
        renews = self._renews_own and bool(access.authority)
        self._watch.look(warns_of_end=not renews)
        if renews and certificates.expires_soon and time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + _RENEW_AGAIN_S
            try:
                access.renew_own((), certificates.folder)
            except (Refusal, AccessError, OSError) as error:
                log.warning("own_certificate_not_renewed", error=str(error))
            else:
                log.info("own_certificate_renewed", folder=str(certificates.folder))
                certificates.refresh()

    @property
    def days_left(self) -> float | None:
        """Days until the coordinator's own certificate expires; None without one."""
        if self.certificates is None:
            return None
        return round((self.certificates.own.not_after - time.time()) / DAY_S, 1)

    @property
    def fields_of_metrics(self) -> dict[str, int | float | str]:
        """Days that the coordinator's certificate is valid for, and whether changed files are not
        used; empty without certificates."""
        if self.certificates is None or self.days_left is None:
            return {}
        return {"days_left": self.days_left, "not_used": int(bool(self.certificates.trouble))}

    @property
    def warnings(self) -> list[str]:
        """Warnings of certificates that are not used or expire soon, one sentence each."""
        found = []
        if (certificates := self.certificates) is not None:
            if certificates.trouble:
                found.append(f"New certificates are not used: {certificates.trouble}.")
            if certificates.expires_soon:
                found.append(
                    f"The coordinator's certificate in {certificates.folder} expires in "
                    f"{self.days_left} days."
                )
        return found
