"""Settings that the stores need, so that they depend on no configuration."""

from pathlib import Path
from typing import Literal, Protocol


class StoreSettings(Protocol):
    """Settings as in [storage]; read_secret() reads the credentials of S3."""

    kind: Literal["files", "s3"]
    endpoint: str
    public_endpoint: str
    region: str
    bucket: str
    prefix: str
    create_bucket: bool
    path: Path
    timeout_s: float
    presigned: bool
    url_lifetime_s: int
