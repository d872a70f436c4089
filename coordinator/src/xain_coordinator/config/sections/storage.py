"""The sections [storage] and [journal]."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from xain_coordinator.config.fields import MAX_SILENCE_S, KeyPrefix, OptionalUrl, is_plaintext
from xain_coordinator.config.named import known_kind
from xain_coordinator.core.vocabulary.values import Option
from xain_coordinator.extensions import plugins
from xain_foundation.settings.fields import Check, Conflicts, FilePath, Section, WrongSetting
from xain_foundation.settings.hints import hint


class StorageSettings(Section):
    """[storage]"""

    kind: str = "files"
    options: dict[str, Option] = Field(default_factory=dict)
    path: FilePath = Path("xain-data/weights")
    endpoint: OptionalUrl = ""
    public_endpoint: OptionalUrl = ""
    ca_file: FilePath | None = None
    insecure: bool = False
    region: str = "us-east-1"
    bucket: str = ""
    prefix: KeyPrefix = ""
    create_bucket: bool = False
    access_key_id: SecretStr = SecretStr("")
    access_key_id_file: FilePath | None = None
    secret_access_key: SecretStr = SecretStr("")
    secret_access_key_file: FilePath | None = None
    session_token: SecretStr = SecretStr("")
    session_token_file: FilePath | None = None
    timeout_s: float = Field(default=15.0, gt=0, le=MAX_SILENCE_S)
    presigned: bool = True
    url_lifetime_s: int = Field(default=3600, ge=60, le=7 * 24 * 3600)
    format: Literal["npy", "xain-pickle"] = "npy"
    keep_updates: Annotated[int, Field(ge=0)] | Literal["all"] = 1
    keep_models: Annotated[int, Field(ge=1)] | Literal["all"] = "all"

    @Check
    def _store_is_there(self) -> Conflicts:
        yield from known_kind(plugins.STORES, self.kind, ("files", "s3"), self.options)

    @Check
    def _bucket_is_read(self) -> Conflicts:
        """Check that S3 has a bucket, and that no other store is given settings of S3."""
        if self.kind == "s3" and not self.bucket:
            yield WrongSetting("bucket", 'it must be given with storage.kind = "s3"')
        if self.kind != "s3":
            for name in self.changed(*type(self).model_fields):
                if name not in ("kind", "options", "path", "format", "keep_updates", "keep_models"):
                    yield WrongSetting(name, 'nothing would read it without storage.kind = "s3"')

    @Check
    def _weights_are_encrypted(self) -> Conflicts:
        """Check that weights travel to and from S3 encrypted, unless storage.insecure allows
        otherwise."""
        if self.kind == "s3" and not self.insecure:
            for name in self.known("endpoint", "public_endpoint"):
                if is_plaintext(getattr(self, name)):
                    yield WrongSetting(
                        name,
                        "others could read the weights on their way; take https://, with "
                        "storage.ca_file for an authority of your own, or, in a network that you "
                        "trust, " + hint("xain-coordinator", "storage.insecure = true"),
                    )

    @Check
    def _participants_find_weights(self) -> Conflicts:
        """Check that XAIN's participants find their pickles: in S3, without a prefix."""
        if self.format == "xain-pickle" and self.kind != "s3":
            yield WrongSetting(
                "format",
                "XAIN's participants look for weights in S3: "
                + hint("xain-coordinator", 'storage.kind = "s3"'),
            )
        elif self.format == "xain-pickle" and self.prefix:
            yield WrongSetting("prefix", "XAIN's participants look in the root of the bucket")

    @Check
    def _credentials_are_whole(self) -> Conflicts:
        """Check that each of the credentials is given once, and both halves or none."""
        if self.kind != "s3":
            return
        for name in ("access_key_id", "secret_access_key", "session_token"):
            if self._has_text(name) and getattr(self, f"{name}_file"):
                yield WrongSetting(f"{name}_file", f"storage.{name} is given too; keep one of them")
        has_id = self._has_text("access_key_id") or self.access_key_id_file is not None
        has_secret = self._has_text("secret_access_key") or self.secret_access_key_file is not None
        for name in ("session_token", "session_token_file"):
            if getattr(self, name) and not has_id:
                yield WrongSetting(name, "it goes with storage.access_key_id")
        if has_id != has_secret:
            missing = "secret_access_key" if has_id else "access_key_id"
            yield WrongSetting(missing, "one half of the credentials is given; give both or none")

    @property
    def location(self) -> str:
        """Location of the weights, for messages."""
        if self.kind == "s3":
            return f"bucket {self.bucket}" + (f" below {self.prefix}" if self.prefix else "")
        if self.kind != "files":
            return f"the store {self.kind!r}"
        return f"[storage] path {self.path}"

    def _has_text(self, name: str) -> bool:
        """Whether a secret is given; blanks alone are nothing, as they are to read_secret."""
        secret: SecretStr = getattr(self, name)
        return bool(secret.get_secret_value().strip())


class JournalSettings(Section):
    """[journal]"""

    path: FilePath = Path("xain-data/journal.sqlite")
