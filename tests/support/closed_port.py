"""A weights port with certificates, without the rest of a coordinator."""

from pathlib import Path

from support.certificates import make_authority, write_folder
from xain_coordinator.access.errors import Unauthenticated
from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.server.weights.capabilities import Capabilities
from xain_coordinator.server.weights.weights_port import Closed, WeightsPort
from xain_coordinator.stores.files import FileStore
from xain_coordinator.updates.measured_upload import Announced, MeasuredUpload
from xain_coordinator.updates.measuring import Inspector
from xain_coordinator.updates.uploads import Source
from xain_foundation.security.callers import Caller, Callers
from xain_foundation.security.identity import IdentityRules, NoIdentity, Role
from xain_foundation.security.tls import Certificates

SECRET = b"s" * 32


class ClosedPort:
    """Serves model "0/global" and takes updates.

    is_closed: False for the same port without certificates.
    ended: why each upload ended that was not taken.
    """

    def __init__(self, folder: Path, model: bytes, *, is_closed: bool = True) -> None:
        self.folder = folder
        self.model = model
        self.store = FileStore(folder / "store")
        self.store.put({"0/global": model})
        self.authority = make_authority()
        self.revoked: set[str] = set()
        self.refused: list[tuple[str, str]] = []
        self.ended: list[BaseException] = []
        self.uploads: list[MeasuredUpload] = []
        self._callers = Callers(IdentityRules())
        closed = None
        if is_closed:
            own = write_folder(folder / "own", self.authority, Role.COORDINATOR, "coordinator")
            self.certificates = Certificates(own)
            closed = Closed(self.certificates, self._identify, self._note)
        self.port = WeightsPort(
            ("127.0.0.1", 0), Capabilities(SECRET, "s", 3600), self.store.open, closed=closed
        )

    def start(self) -> None:
        async def find(name: str, announced: Announced) -> int:
            return self.uploads[-1].offset

        self.port.start(self._receive, find)

    async def stop(self) -> None:
        await self.port.stop(0.0)
        self.store.close()

    def holder(self, name: str, role: Role = Role.PARTICIPANT, **of: float) -> Certificates:
        """Certificates of somebody else by the port's authority."""
        return Certificates(
            write_folder(self.folder / f"{role}-{name}", self.authority, role, name, **of)
        )

    def url(self, method: str, name: str) -> str:
        size = len(self.model)
        key = "0/global" if method == "GET" else ""
        url = self.port.url(method, name, 0, key, size)
        return url.replace("://:", "://127.0.0.1:")

    def revoke(self, serial: str) -> None:
        self.revoked.add(serial)
        refusal = Unauthenticated("the certificate is revoked")
        self.port.end(lambda caller: caller.serial == serial, refusal)

    def _identify(self, pem: bytes) -> Caller:
        try:
            caller = self._callers.of_certificate(pem)
        except NoIdentity as error:
            raise Unauthenticated(str(error)) from None
        if caller.serial in self.revoked:
            raise Unauthenticated("the certificate is revoked")
        return caller

    def _note(self, peer: str, reason: str) -> None:
        self.refused.append((peer, reason))

    async def _receive(self, name: str, source: Source) -> WeightsRef:
        header = await source.header()
        key = f"0/{name}.{len(self.uploads)}"
        upload = MeasuredUpload(self.store, key, header.announced, Inspector())
        self.uploads.append(upload)
        try:
            await source.into(upload)
            return upload.complete().ref
        except BaseException as error:  # a cancellation too
            self.ended.append(error)
            raise
