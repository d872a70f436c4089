"""The section [tls] of all programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from xain_foundation.security.identity import IdentityRules, Role, Source
from xain_foundation.settings.fields import (
    Allowed,
    Check,
    Conflicts,
    FilePath,
    Section,
    Texts,
    WrongSetting,
)

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates

_CALLERS = [role for role in Role if role not in (Role.JOINING, Role.COORDINATOR)]


def _given(folder: object) -> object:
    """Refuse None, which is what empty text is parsed to; the default is not checked. An empty
    option is a shell variable that is not set, and must not turn encryption off."""
    if folder is None:
        raise ValueError("empty")
    return folder


class TlsSettings(Section):
    """[tls].

    folder: with ca.crt, tls.crt and tls.key, see tls.Certificates; None: nothing is encrypted, or
    the program finds certificates in its own data.
    identity: the kind of name in a certificate that says who calls.
    roles: names by role, with "*" and "?"; for an authority that is not ours.
    """

    folder: Annotated[
        FilePath | None,
        BeforeValidator(_given),
        Allowed("a path, not empty and no URL; leave it out if nothing is to be encrypted"),
    ] = None
    identity: Source = "uri"
    roles: dict[str, Texts] = Field(default_factory=dict)

    @Check
    def _roles_are_known(self) -> Conflicts:
        for role in self.roles:
            if role not in _CALLERS:
                yield WrongSetting(f"roles.{role}", f"the roles are {', '.join(_CALLERS)}")

    @Check
    def _check_roles_are_given(self) -> Conflicts:
        if self.identity != "uri" and not self.roles:
            yield WrongSetting(
                "identity", "such a name says no role; list the names in [tls.roles]"
            )

    def rules(self, authority: str = "") -> IdentityRules:
        """How callers are identified. authority: that URIs of our form have to name."""
        roles = {Role(role): names for role, names in self.roles.items()}
        return IdentityRules(self.identity, roles or None, authority)

    def folder_or(self, own: Path) -> Path | None:
        """Return the folder, or else `own`, which a program keeps; None if neither is there."""
        if self.folder is not None:
            return self.folder
        return own if own.is_dir() else None

    def certificates(self) -> "Certificates | None":
        """Load the certificates of the folder; None without one. Raises InvalidCertificates."""
        from xain_foundation.security.tls import Certificates

        return None if self.folder is None else Certificates(self.folder, rules=self.rules())
