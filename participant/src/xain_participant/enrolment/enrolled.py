"""The means by which a participant connects: address, certificates and name, from its settings and
from its state directory, where `join` keeps them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xain_foundation.net.channels import require_private_way
from xain_foundation.security.identity import NoIdentity, Role
from xain_foundation.security.tls import Certificates, InvalidCertificates
from xain_foundation.settings.hints import hint
from xain_foundation.settings.settings import ConfigError
from xain_participant.enrolment.kept import KeptCertificates
from xain_participant.tables.advice import new_token

if TYPE_CHECKING:
    from xain_participant.config import CoordinatorSettings, ParticipantConfig
    from xain_participant.enrolment.upkeep import Upkeep


@dataclass(frozen=True, slots=True)
class Enrolled:
    """address: HOST:PORT of the coordinator. participant_id: "" if the settings and the certificate
    say none. kept: certificates that this program renews; None if they are another's."""

    address: str
    participant_id: str
    tls: Certificates | None = None
    kept: KeptCertificates | None = None

    def upkeep(self) -> "Upkeep | None":
        """Make the upkeep of the certificates, to run beside the participant; None without any."""
        if self.tls is None:
            return None
        from xain_participant.enrolment.upkeep import Upkeep

        return Upkeep(self.tls, self.address, self.kept)


def enrolled(config: "ParticipantConfig") -> Enrolled:
    """Read the certificates that the settings name. Raises ConfigError."""
    ours, where = config.participant, config.coordinator
    kept = None if ours.state_dir is None else KeptCertificates(ours.state_dir)
    folder = config.tls.folder
    if folder is None and kept is not None and kept.is_begun:
        raise ConfigError(
            f"participant.state_dir is {ours.state_dir}: a join was begun there and has not come to"
            " its end; repeat it, xain-participant join, with the same token"
        )
    if folder is None and kept is not None and kept.folder.is_symlink() and not kept.are_there:
        # Without certificates everything would go in the clear.
        raise ConfigError(
            f"participant.state_dir is {ours.state_dir}: a join was made there, but its "
            f"certificates are gone ({kept.folder} leads to nothing); put them back, or "
            f"{new_token()}"
        )
    is_joined = folder is None and kept is not None and kept.are_there
    if folder is None and not is_joined:
        _require_private(where)
        return Enrolled(where.address, ours.id)
    assert kept is not None or folder is not None
    try:
        tls = Certificates(folder if folder is not None else _of(kept))
    except InvalidCertificates as error:
        setting = f"participant.state_dir is {ours.state_dir}"
        if folder is not None:
            setting = f"tls.folder is {folder}"
        raise ConfigError(f"{setting}: {error}; if they cannot be mended, {new_token()}") from None
    name = ""
    try:
        identity = config.tls.rules().identify(tls.own.names)
        if identity.role is Role.PARTICIPANT:
            name = identity.name
    except NoIdentity:
        pass  # of an authority whose names the coordinator alone can read
    if name and ours.id not in ("", name):
        raise ConfigError(
            f'participant.id is "{ours.id}", and the certificate in {tls.folder} is that of '
            f'participant "{name}"; leave the id out'
        )
    address = where.address
    if is_joined and kept is not None and kept.address and "host" not in where.model_fields_set:
        address = kept.address
    is_ours = is_joined and kept is not None and kept.folder.is_symlink()
    return Enrolled(address, ours.id or name, tls, kept if is_ours else None)


def _require_private(where: "CoordinatorSettings") -> None:
    """Check that the coordinator is on this machine, or that calling it in the clear is meant.
    Raises ConfigError."""
    remedy = f"{new_token()}, or {hint('xain-participant', 'coordinator.insecure = true')}"
    try:
        require_private_way(where.address, None, insecure=where.insecure, remedy=remedy)
    except ValueError as error:
        raise ConfigError(f"coordinator.host: {error}") from None


def _of(kept: KeptCertificates | None) -> Path:
    """The folder of kept certificates, which are there."""
    assert kept is not None
    return kept.folder
