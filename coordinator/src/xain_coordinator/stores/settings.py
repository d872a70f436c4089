"""Settings that the stores need, so that they depend on no configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class StoreSettings(Protocol):
    """Settings as in [storage]; read_secret() reads the credentials of S3."""

    kind: str
    endpoint: str
    public_endpoint: str
    ca_file: Path | None
    region: str
    bucket: str
    prefix: str
    create_bucket: bool
    path: Path
    timeout_s: float
    presigned: bool
    url_lifetime_s: int

    @property
    def options(self) -> Mapping[str, object]:
        """Options of a plug-in."""
