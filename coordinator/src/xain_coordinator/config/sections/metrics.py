"""The section [metrics]."""

from pathlib import Path

from pydantic import Field, SecretStr

from xain_coordinator.config.fields import OptionalUrl, is_plaintext
from xain_coordinator.config.named import known_kind
from xain_coordinator.core.vocabulary.values import Option
from xain_coordinator.extensions import plugins
from xain_foundation.names import shortened
from xain_foundation.settings.fields import Check, Conflicts, FilePath, Section, Texts, WrongSetting
from xain_foundation.settings.hints import hint

TRACKERS = ("mlflow", "tensorboard", "wandb")


class MetricsSettings(Section):
    """[metrics]"""

    kind: str = "file"
    options: dict[str, Option] = Field(default_factory=dict)
    path: FilePath = Path("xain-data/metrics.jsonl")
    url: OptionalUrl = ""
    org: str = ""
    bucket: str = ""
    token: SecretStr = SecretStr("")
    token_file: FilePath | None = None
    ca_file: FilePath | None = None
    insecure: bool = False
    trackers: Texts = ()

    @Check
    def _trackers_are_there(self) -> Conflicts:
        """Check that all trackers are built in or plugged in."""
        there = plugins.known(plugins.TRACKERS, TRACKERS)
        for name in self.trackers:
            if name not in there:
                text = f"there is no tracker {shortened(name)!r}; there are: {', '.join(there)}"
                yield WrongSetting("trackers", text)
                return

    @Check
    def _store_is_there(self) -> Conflicts:
        yield from known_kind(
            plugins.METRICS, self.kind, ("file", "influxdb", "none"), self.options
        )

    @Check
    def _metrics_are_encrypted(self) -> Conflicts:
        """Check that metrics travel to InfluxDB encrypted, unless metrics.insecure allows
        otherwise."""
        if self.kind == "influxdb" and not self.insecure and is_plaintext(self.url):
            yield WrongSetting(
                "url",
                "others could read metrics and token on their way; take https://, with "
                "metrics.ca_file for an authority of your own, or, in a network that you trust, "
                + hint("xain-coordinator", "metrics.insecure = true"),
            )

    @Check
    def _token_is_given_once(self) -> Conflicts:
        if self.token.get_secret_value() and self.token_file:
            yield WrongSetting("token_file", "metrics.token is given too; keep one of them")

    @Check
    def _database_is_given(self) -> Conflicts:
        """Check that InfluxDB has url, org and bucket, and that no other store is given them."""
        if self.kind != "influxdb":
            for name in self.changed("url", "ca_file"):
                yield WrongSetting(name, 'nothing would read it without metrics.kind = "influxdb"')
            return
        for name in self.known("url", "org", "bucket"):
            if not getattr(self, name):
                yield WrongSetting(name, 'it must be given with metrics.kind = "influxdb"')
