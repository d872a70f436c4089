"""The configuration of a coordinator: what each key means is told in configs/.

Read by xain_foundation.settings.settings: TOML file, then XAIN_COORDINATOR_SECTION__KEY in the
environment, then flags.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationError, model_validator

from xain_coordinator.config import rule_fits
from xain_coordinator.config.evaluate import EvaluateSettings
from xain_coordinator.config.fields import (
    CALLS_PER_S,
    MAX_PREDICT_RETRIES,
    MAX_PREDICT_TIMEOUT_S,
    KeyPrefix,
    OptionalUrl,
    WeightsAddress,
    is_plaintext,
)
from xain_coordinator.config.http import HttpSettings
from xain_coordinator.config.launch import LaunchSettings
from xain_coordinator.config.named import naming
from xain_coordinator.config.parameters import ParametersSettings
from xain_coordinator.config.rounds import RoundsSettings
from xain_coordinator.config.schema import SchemaSettings
from xain_coordinator.config.study import SearchSettings, StudySettings, as_text, rules_of
from xain_coordinator.core.vocabulary.values import Option, Rules, Step
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import options_of
from xain_foundation.logs.logs import LoggingSettings
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.settings.fields import (
    Allowed,
    Check,
    Conflicts,
    FilePath,
    Host,
    Section,
    Texts,
    WrongSetting,
    is_loopback,
    join_host_port,
)
from xain_foundation.settings.hints import hint
from xain_workloads.measures.figures import LOSSES, OF_WEIGHED_CLASSES
from xain_workloads.passes import (
    PATIENCE_ROWS,
    ROUNDS,
    Stride,
    default_passes,
    default_patience,
    stride,
)

if TYPE_CHECKING:
    from xain_coordinator.aggregation.aggregator import Aggregator
    from xain_coordinator.aggregation.optimizers import Optimizer
    from xain_workloads.tables.preprocessing import PreprocessingOptions
    from xain_workloads.workload import Workload

ENV_PREFIX = "XAIN_COORDINATOR_"

_MIB = 1024 * 1024
# Weights travel in messages of 1 MiB and a little; below this a larger header would not fit.
_MIN_MESSAGE_BYTES = 2 * _MIB
_MAX_SILENCE_S = 24 * 3600.0  # of a peer that is to answer
_MAX_MESSAGE_BYTES = 2**31 - 1  # gRPC's options are of type int

GrpcOption = Annotated[
    Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | str,
    Allowed("text, or a whole number of 32 bits"),
]


class ServerSettings(Section):
    """[server]"""

    host: Host = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    # At least: on the wire it is in whole milliseconds.
    heartbeat_time_s: float = Field(default=10.0, ge=0.001, le=_MAX_SILENCE_S)
    heartbeat_timeout_s: float = Field(default=5.0, gt=0, le=_MAX_SILENCE_S)
    max_message_bytes: int = Field(default=4 * _MIB, ge=_MIN_MESSAGE_BYTES, le=_MAX_MESSAGE_BYTES)
    max_calls_per_s: int = Field(default=CALLS_PER_S, ge=1)
    max_update_bytes: int = Field(default=4096 * _MIB, ge=1)
    max_update_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    update_encoding: Literal["plain", "float16"] = "plain"
    drain_s: float = Field(default=10.0, ge=0, le=_MAX_SILENCE_S)
    port_file: FilePath | None = None
    weights_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = 0
    weights_address: WeightsAddress = ""
    insecure: bool = False
    passphrase_file: FilePath | None = None
    health_port: int | None = Field(default=None, ge=0, le=65535)
    grpc_options: dict[str, GrpcOption] = Field(default_factory=dict)

    @property
    def address(self) -> str:
        """Address to listen on, as gRPC's add_insecure_port() takes it."""
        return self.address_at(self.port)

    def address_at(self, port: int) -> str:
        """The address with another port: the one that was found for port 0."""
        return join_host_port(self.host, port)

    @property
    def passphrase(self) -> bytes:
        """The passphrase in passphrase_file, without blanks around it; nothing without a file.
        Raises WrongSetting."""
        if (path := self.passphrase_file) is None:
            return b""
        try:
            return path.read_bytes().strip()
        except OSError as error:
            reason = f"{path} cannot be read: {error.strerror}"
            raise WrongSetting("server.passphrase_file", reason) from None

    @Check
    def _health_has_a_port_of_its_own(self) -> Conflicts:
        if self.health_port and self.health_port in (self.port, self.weights_port):
            yield WrongSetting("health_port", "server.port or server.weights_port is the same")


class PreprocessingSettings(Section):
    """[workload.preprocessing]"""

    scaling: Literal["", "standard", "robust", "site", "none"] = ""
    missing: Literal["", "median", "mean"] = ""
    indicate_missing: bool = False
    # None, so that a session that was opened without the key is continued without it.
    clip: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def options(self) -> "PreprocessingOptions":
        """Options with which the initial model is made."""
        from xain_workloads.tables.preprocessing import PreprocessingOptions

        return PreprocessingOptions(self.scaling, self.missing, self.indicate_missing, self.clip)


_WITH_REMEDIES = ("sgd", "mlp", "neural")


class WorkloadSettings(Section):
    """[workload]"""

    name: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    remedy: Literal["", "proximal", "scaffold", "personal"] = ""
    proximal_mu: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    preprocessing: PreprocessingSettings = PreprocessingSettings()

    @property
    def whole_options(self) -> dict[str, Any]:
        """The options, with the remedy among them, as they are written into the model."""
        remedy = {"remedy": self.remedy, "proximal_mu": self.proximal_mu}
        changed = self.changed(*remedy)
        return {**self.options, **{key: remedy[key] for key in changed}}

    @Check
    def _remedy_fits(self) -> Conflicts:
        if self.remedy and self.name not in _WITH_REMEDIES:
            yield WrongSetting(
                "remedy", f"it is for the workloads {', '.join(_WITH_REMEDIES)}; leave it out"
            )
        if self.changed("proximal_mu") and self.remedy != "proximal":
            yield WrongSetting("proximal_mu", 'only remedy = "proximal" reads it')

    @Check
    def _can_be_made(self) -> Conflicts:
        if self.remedy and self.name not in _WITH_REMEDIES:
            return  # told by another check
        if not self.name:
            if self.options:
                yield WrongSetting("options", "without workload.name nothing would read them")
            return
        from xain_workloads import workload

        known = workload.known_workloads()
        if self.name not in known:
            yield WrongSetting("name", f'it must be one of: {", ".join(known)}, or "" for none')
            return
        try:
            workload.create(self.name, self.whole_options)
        except ValueError as error:
            yield _wrong_option(self.options, str(error))

    @property
    def made(self) -> "Workload | None":
        """The workload with its options; None without one."""
        if not self.name:
            return None
        from xain_workloads import workload

        return workload.create(self.name, self.whole_options)

    @property
    def made_options(self) -> Any:
        """Options of the workload, with their defaults; None if there are none."""
        return getattr(self.made, "options", None)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what the workload's models are measured by; empty without a workload."""
        if (made := self.made) is None:
            return ()
        from xain_workloads.workload import metrics_of

        return metrics_of(made)

    @property
    def task(self) -> str:
        """The workload's task: "classification", "regression", or "" without a workload."""
        return str(getattr(self.made_options, "task", ""))

    @property
    def personal(self) -> tuple[str, ...]:
        """Patterns of the tensors that stay at the participants with remedy = "personal"."""
        # Settings that were made of a session have the remedy among the options.
        if self.whole_options.get("remedy") != "personal":
            return ()
        made: Any = self.made  # only a workload with remedies has them
        return tuple(made.personal)


def _wrong_option(options: Mapping[str, object], message: str) -> WrongSetting:
    # Such a message is "width is -1; it must be above 0". Ours begins in the same way, except that
    # it gives the key in full, and does not show the value if it might be secret.
    option, _, rest = message.partition(" ")
    if option in ("remedy", "proximal_mu") and "; " in rest:
        return WrongSetting(option, rest.partition("; ")[2])
    if option in options and "; " in rest:
        return WrongSetting(f"options.{option}", rest.partition("; ")[2])
    return WrongSetting("options", message)


class ModelSettings(Section):
    """[model]"""

    personal: Texts = ()


class AggregationSettings(Section):
    """[aggregation]"""

    rule: str = rule_fits.ANY_RULE
    options: dict[str, Option] = Field(default_factory=dict)
    optimizer: str = ""
    optimizer_options: dict[str, Option] = Field(default_factory=dict)

    # The rules are imported where they are needed: numpy comes with them, which --help need not.

    def made_rule(self) -> "Aggregator":
        """The configured aggregation rule. Raises WrongSetting."""
        from xain_coordinator.aggregation.rules import known_rules, make_rule

        with naming("rule", "options", known_rules):
            return make_rule(self.rule, self.options)

    def made_optimizer(self) -> "Optimizer | None":
        """The configured server optimiser; None without one. Raises WrongSetting."""
        from xain_coordinator.aggregation.optimizers import OPTIMIZERS
        from xain_coordinator.aggregation.rules import make_optimizer

        if not self.optimizer:
            return None
        known = (*sorted(OPTIMIZERS), 'or "" for none')
        with naming("optimizer", "optimizer_options", lambda: known):
            return make_optimizer(self.optimizer, self.optimizer_options)

    @property
    def whole_options(self) -> Mapping[str, Option]:
        """Options of the rule: those that are given, and the defaults of the others.

        Raises WrongSetting.
        """
        with naming("rule", "options", tuple):
            return options_of(self.made_rule(), self.options)

    @Check
    def _rule_can_be_made(self) -> None:
        _ = self.whole_options

    @Check
    def _optimizer_can_be_made(self) -> Conflicts:
        if self.made_optimizer() is None and self.optimizer_options:
            yield WrongSetting(
                "optimizer_options", "without aggregation.optimizer nothing would read them"
            )


def _known_kind(
    group: str, kind: str, builtin: Sequence[str], options: Mapping[str, object]
) -> Conflicts:
    """The kind is built in, or a plug-in that can be imported; only plug-ins have options."""
    if kind in builtin:
        if options:
            yield WrongSetting("options", f'kind = "{kind}" has keys of its own in this section')
        return
    with naming("kind", "options", lambda: plugins.known(group, builtin)):
        _: object = plugins.load(group, kind, {})


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
    timeout_s: float = Field(default=15.0, gt=0, le=_MAX_SILENCE_S)
    presigned: bool = True
    url_lifetime_s: int = Field(default=3600, ge=60, le=7 * 24 * 3600)
    format: Literal["npy", "xain-pickle"] = "npy"
    keep_updates: Annotated[int, Field(ge=0)] | Literal["all"] = 1
    keep_models: Annotated[int, Field(ge=1)] | Literal["all"] = "all"

    @Check
    def _store_is_there(self) -> Conflicts:
        yield from _known_kind(plugins.STORES, self.kind, ("files", "s3"), self.options)

    @Check
    def _bucket_is_read(self) -> Conflicts:
        if self.kind == "s3" and not self.bucket:
            yield WrongSetting("bucket", 'it must be given with storage.kind = "s3"')
        if self.kind != "s3":
            for name in self.changed(*type(self).model_fields):
                if name not in ("kind", "options", "path", "format", "keep_updates", "keep_models"):
                    yield WrongSetting(name, 'nothing would read it without storage.kind = "s3"')

    @Check
    def _weights_are_encrypted(self) -> Conflicts:
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
        """Blanks alone are nothing, as they are to read_secret."""
        secret: SecretStr = getattr(self, name)
        return bool(secret.get_secret_value().strip())


class JournalSettings(Section):
    """[journal]"""

    path: FilePath = Path("xain-data/journal.sqlite")


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
    timeout_s: float = Field(default=10.0, gt=0, le=_MAX_SILENCE_S)
    trackers: Texts = ()

    @Check
    def _trackers_are_there(self) -> Conflicts:
        there = plugins.known(plugins.TRACKERS, TRACKERS)
        for name in self.trackers:
            if name not in there:
                text = f"there is no tracker {name!r}; there are: {', '.join(there)}"
                yield WrongSetting("trackers", text)
                return

    @Check
    def _store_is_there(self) -> Conflicts:
        yield from _known_kind(
            plugins.METRICS, self.kind, ("file", "influxdb", "none"), self.options
        )

    @Check
    def _metrics_are_encrypted(self) -> Conflicts:
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
        if self.kind != "influxdb":
            for name in self.changed("url", "ca_file"):
                yield WrongSetting(name, 'nothing would read it without metrics.kind = "influxdb"')
            return
        for name in self.known("url", "org", "bucket"):
            if not getattr(self, name):
                yield WrongSetting(name, 'it must be given with metrics.kind = "influxdb"')


# Every assignment carries the whole section.
_MAX_TRAIN_BYTES = 64 * 1024


_NO_INFLUX = 'is gone: metrics.kind = "influxdb" has url, org, bucket and token'


CheckLevel = Literal["refuse", "warn", "note", "off"]


class PredictSettings(Section):
    """[predict]"""

    timeout_s: float = Field(default=100.0, gt=0, le=MAX_PREDICT_TIMEOUT_S)
    max_retries: int = Field(default=0, ge=0, le=MAX_PREDICT_RETRIES)


class CoordinatorLoggingSettings(LoggingSettings):
    """[logging] of a coordinator, which has files for two streams."""

    status_file: FilePath | None = None
    latency_file: FilePath | None = None

    @Check
    def _are_two(self) -> Conflicts:
        if self.latency_file is not None and self.latency_file == self.status_file:
            yield WrongSetting("latency_file", "logging.status_file is the same; name another one")


class CoordinatorConfig(Section):
    """Configuration of a coordinator: all sections."""

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    rounds: RoundsSettings = RoundsSettings()
    train: dict[str, Any] = Field(default_factory=dict)
    evaluate: EvaluateSettings = EvaluateSettings()
    workload: WorkloadSettings = WorkloadSettings()
    model: ModelSettings = ModelSettings()
    checks: dict[str, CheckLevel] = Field(default_factory=dict)
    # Models of pydantic have a method `schema`.
    data_schema: SchemaSettings = Field(default=SchemaSettings(), alias="schema")
    aggregation: AggregationSettings = AggregationSettings()
    predict: PredictSettings = PredictSettings()
    storage: StorageSettings = StorageSettings()
    journal: JournalSettings = JournalSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: CoordinatorLoggingSettings = CoordinatorLoggingSettings()
    http: HttpSettings = HttpSettings()
    parameters: ParametersSettings = ParametersSettings()
    launch: LaunchSettings = LaunchSettings()
    study: StudySettings = StudySettings()
    search: SearchSettings = SearchSettings()

    @model_validator(mode="before")
    @classmethod
    def _workload_chooses(cls, given: Any) -> Any:
        return rule_fits.with_choices(given)

    moved: ClassVar[Mapping[str, str]] = {
        "ai": "is called [rounds] now",
        "ai.rounds": "is called rounds.rounds now",
        "ai.epochs": "is called rounds.epochs now",
        "ai.min_participants": "is called rounds.min_participants now",
        "ai.fraction_participants": "is called rounds.fraction_participants now",
        "server.heartbeat_time": "is called server.heartbeat_time_s now",
        "server.heartbeat_timeout": "is called server.heartbeat_timeout_s now",
        "server.thread_pool_workers": "is gone: the server needs no thread for each call",
        "parameters.tls": "is called tls.folder now, for all ports of the coordinator",
        "parameters.insecure": "is called server.insecure now, for all ports of the coordinator",
        "http.insecure": "is called server.insecure now, which is for all ports",
        "metrics.enable": 'is called metrics.kind now: "file", "influxdb" or "none"',
        "metrics.host": _NO_INFLUX,
        "metrics.port": _NO_INFLUX,
        "metrics.user": _NO_INFLUX,
        "metrics.password": _NO_INFLUX,
        "metrics.db_name": _NO_INFLUX,
    }

    @Check
    def _train_can_be_carried(self) -> Conflicts:
        can_be = True
        for key, value in self.train.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                can_be = False
                yield WrongSetting(
                    f"train.{key}",
                    "it must be a number, text, true, false, or a list or table of them",
                )
        if "epochs" in self.train:
            yield WrongSetting(
                "train.epochs",
                hint("xain-coordinator", "rounds.epochs = N")
                + ": participants find it in the same place",
            )
        if can_be and len(json.dumps(self.train)) > _MAX_TRAIN_BYTES:
            largest = max(self.train, key=lambda key: len(json.dumps(self.train[key])))
            yield WrongSetting(
                f"train.{largest}",
                f"the whole section must have at most {_MAX_TRAIN_BYTES} bytes as JSON",
            )

    @Check
    def _rule_takes_stale_updates(self) -> Conflicts:
        if self.rounds.max_staleness != 0 and not self.aggregation.made_rule().takes_stale:
            key = "pacing" if self.rounds.pacing else "consistency"
            yield WrongSetting(
                "aggregation.rule",
                f'rounds.{key} = "{getattr(self.rounds, key)}" mixes updates with the model '
                'that there is, which only "weighted_average" can do',
            )

    @Check
    def _rule_takes_as_many_updates(self) -> None:
        from xain_coordinator.aggregation.aggregator import RuleFailed

        rule = self.aggregation.made_rule()
        for num_updates in (self.rounds.min_participants, self.rounds.max_updates):
            is_most = num_updates != self.rounds.min_participants
            is_open = is_most and self.rounds.max_participants is None
            bound = "; rounds.max_participants bounds them" if is_open else ""
            try:
                rule.check(num_updates)
            except RuleFailed as error:
                raise WrongSetting(
                    "aggregation.rule",
                    f"a round may have {num_updates} updates with these [rounds], and {error}"
                    + bound,
                ) from None
            except Exception as error:  # a plug-in's code runs here, and may raise anything
                raise WrongSetting(
                    "aggregation.rule",
                    f"its check() fails with num_updates = {num_updates}: "
                    f"{type(error).__name__}: {error}",
                ) from error

    @Check
    def _personal_tensors_are_named_once(self) -> Conflicts:
        if self.workload.remedy == "personal" and self.model.personal:
            yield WrongSetting(
                "model.personal", 'workload.remedy = "personal" keeps tensors, too; set one of both'
            )

    _rule_fits_workload = Check(rule_fits.workload_fits)
    _rule_reads_all = Check(rule_fits.all_is_read)
    _scaffold_fits = Check(rule_fits.scaffold_fits)
    _rule_fits_epochs = Check(rule_fits.epochs_fit)
    _rule_fits_participants = Check(rule_fits.participants_fit)
    _rule_fits_options = Check(rule_fits.options_fit)
    _rule_fits_estimators = Check(rule_fits.estimators_fit)
    _rule_fits_passes = Check(rule_fits.passes_fit)
    _script_fits = Check(rule_fits.script_fits)

    @Check
    def _task_is_that_of_the_workload(self) -> Conflicts:
        task, trained = self.data_schema.task, self.workload.task
        if task and trained and task != trained:
            yield WrongSetting("schema.task", f'the workload trains for "{trained}"')

    @Check
    def _metric_is_measured(self) -> Conflicts:
        metric, measured = self.evaluate.metric, self.workload.metrics
        if metric and measured and metric not in measured:
            yield WrongSetting(
                "evaluate.metric",
                f"the models of this workload are measured by: {', '.join(measured)}",
            )

    @Check
    def _threshold_has_probabilities(self) -> Conflicts:
        measured = self.workload.metrics
        if self.evaluate.threshold and measured and "auc" not in measured:
            yield WrongSetting(
                "evaluate.threshold", "the models of this workload give no probabilities"
            )

    @Check
    def _checks_are_known(self) -> Conflicts:
        if self.checks:
            from xain_workloads.tables.checks import CHECKS

            for name in self.checks:
                if name not in CHECKS:
                    yield WrongSetting(
                        f"checks.{name}", f"there is no such check; there are: {', '.join(CHECKS)}"
                    )

    @Check
    def _fits_can_be_requested(self) -> Conflicts:
        if self.rounds.start == "request" and not self.http.is_on:
            yield WrongSetting("rounds.start", "without http.port nothing could request a fit")
        if self.http.is_on and self.storage.format == "xain-pickle":
            yield WrongSetting(
                "http.port",
                'each fit opens a session; leave it out with storage.format = "xain-pickle"',
            )

    @Check
    def _study_can_be_done(self) -> Conflicts:
        kind, search = self.study.kind, self.search.is_on
        if kind is None and not search:
            return
        key = "search.options" if search else f"study.{kind}"
        if kind is not None and search:
            yield WrongSetting("search.options", "leave it out, or [study]")
        if self.http.is_on:
            yield WrongSetting("http.port", f"each fit opens a session; leave it out with {key}")
        if self.storage.format == "xain-pickle":
            yield WrongSetting(
                "storage.format", f"XAIN's participants know one session; leave it out with {key}"
            )
        if self.keeps_estimators:
            yield WrongSetting(
                key, "with bagging " + hint("xain-coordinator", "workload.options.publish = true")
            )
        if self.workload.name == "describe" or (
            not self.workload.name and kind not in (None, "model")
        ):
            yield WrongSetting(
                key, "it needs a workload, such as " + hint("xain-coordinator", "--workload sgd")
            )
        if search and self.evaluate.every == 0:
            yield WrongSetting("evaluate.every", "a search compares options by evaluations")

    @Check
    def _options_can_be_searched(self) -> Conflicts:
        from xain_foundation.settings.settings import mistakes

        for number, options in enumerate(self.search.found(), 1):
            whole = self._with_options(options)
            try:
                CoordinatorConfig.model_validate(whole)
            except ValidationError as error:
                told = mistakes(CoordinatorConfig, whole, error)
                yield WrongSetting("search.options", f"option {number}: {'; '.join(told)}")
                return

    @Check
    def _initial_weights_are_read(self) -> Conflicts:
        if self.workload.name and self.rounds.initial_weights is not None:
            yield WrongSetting(
                "rounds.initial_weights",
                "nothing would read it with a workload, which makes the initial model",
            )

    @property
    def access_folder(self) -> Path:
        """The folder of the authority, the audit log and the coordinator's own certificate."""
        return self.journal.path.parent / "access"

    @property
    def certificates(self) -> Path | None:
        """The folder with the certificate of this coordinator; None if it is open to whoever
        reaches it."""
        return self.tls.folder_or(self.access_folder / "tls")

    @property
    def in_the_clear(self) -> tuple[str, ...]:
        """Traffic that leaves this machine without encryption, in words."""
        server, found = self.server, []
        if not is_loopback(server.host):
            if self.certificates is None:
                found.append("calls and weights of the participants (server.insecure)")
            if server.health_port is not None:
                found.append("health checks (server.health_port)")
            if self.aggregation.rule == "assemble":
                found.append("tensors between the participants of a process group")
        if self.http.is_on and not is_loopback(self.http.host) and self.certificates is None:
            found.append("fits and predictions over HTTP (server.insecure)")
        parameters = self.parameters
        is_reached = parameters.is_on and not is_loopback(parameters.host)
        if is_reached and self.certificates is None:
            found.append("tables of the parameter server (server.insecure)")
        for what, url in (
            ("weights to the store (storage.endpoint)", self.storage.endpoint),
            (
                "weights between participants and store (storage.public_endpoint)",
                self.storage.public_endpoint,
            ),
            ("metrics (metrics.url)", self.metrics.url),
        ):
            if is_plaintext(url):
                found.append(what)
        return tuple(found)

    def require_certificates(self) -> None:
        """Raises WrongSetting if others reach an open coordinator, and that is not asked for. Not a
        check: certificates are made under the same settings."""
        server, parameters, http = self.server, self.parameters, self.http
        if self.certificates is None and (self.access_folder / "ca.crt").exists():
            # A coordinator that was closed must not open itself because a folder is missing.
            raise WrongSetting(
                "tls.folder",
                f"{self.access_folder} has an authority, but no certificate of this coordinator; "
                "to make one, "
                + hint("xain-coordinator", "xain-coordinator certs renew --host HOST")
                + f", or move {self.access_folder} away if nothing is to be encrypted any more",
            )
        if server.insecure or self.certificates is not None:
            return
        reached = (
            (http.is_on, "http.host", http.host, "fit and predict"),
            (parameters.is_on, "parameters.host", parameters.host, "read and change all tables"),
            (True, "server.host", server.host, "read the model and hand in updates"),
        )
        for is_on, key, host, could in reached:
            if is_on and not is_loopback(host):
                raise WrongSetting(
                    key,
                    f"whoever reaches {host} could {could}, and nothing is encrypted; "
                    "make certificates first, "
                    + hint("xain-coordinator", "xain-coordinator certs init --host HOST")
                    + ", or, in a network that you trust, "
                    + hint("xain-coordinator", "--insecure"),
                )

    @property
    def keeps_estimators(self) -> bool:
        """Whether fitted estimators stay at the participants."""
        return self.workload.name == "bagging" and not self.workload.options.get("publish")

    @property
    def _has_local_models(self) -> bool:
        """Whether a site can train the workload on its own rows alone. Participants that train one
        network together have the same rows."""
        return bool(self.workload.name) and self.aggregation.rule != "assemble"

    @property
    def _has_importances(self) -> bool:
        """Whether a site can permute the columns of a table, and measure the model. The pixels of
        an image are no columns, which a network takes apart first."""
        layers = getattr(self.workload.made_options, "layers", ())
        is_of_images = any(layer["type"] == "unflatten" for layer in layers)
        return self._has_local_models and not self.keeps_estimators and not is_of_images

    @property
    def num_stages(self) -> int:
        """Stages that the rule "assemble" puts together; 0: one for each participant."""
        options = self.workload.options
        if not self.workload.name:
            return int(self.aggregation.options.get("stages", 0))
        cuts = options.get("cuts")
        return int(options.get("stages", 0)) or (len(cuts) + 1 if cuts else 0)

    @property
    def _measures_same_rows(self) -> bool:
        """Whether all models are measured on the same rows: of all sites, or the coordinator's."""
        rounds, evaluate = self.rounds, self.evaluate
        has_all = rounds.controller == "all" or rounds.fraction_participants == 1
        is_whole = rounds.consistency == "bsp" and not rounds.pacing and not rounds.quorum
        return evaluate.every > 0 and (bool(evaluate.data) or (has_all and is_whole))

    @property
    def _metric_of_weighed_classes(self) -> str:
        """The metric of models whose rows weigh by their class, and whose log loss says little:
        their probabilities are those of classes of equal size. "" for other models."""
        if not getattr(self.workload.made_options, "class_weight", ""):
            return ""
        return next(name for name in OF_WEIGHED_CLASSES if name in self.workload.metrics)

    @property
    def _metric_of_search(self) -> str:
        """The metric that all options of a search have, where the loss does not compare them: it is
        too high on purpose with class weights, and not known without probabilities. "" for the
        loss."""
        tables = [self._with_options(one)["workload"] for one in self.search.found()]
        every = [WorkloadSettings.model_validate(one) for one in tables]
        if any(getattr(one.made_options, "class_weight", "") for one in every):
            return next(n for n in OF_WEIGHED_CLASSES if all(n in one.metrics for one in every))
        has_losses = all({*LOSSES} & {*one.metrics} for one in every)
        return "" if has_losses else "balanced_accuracy"

    @property
    def has_default_length(self) -> bool:
        """Whether neither passes nor rounds are set."""
        return self.rounds.passes is None and self.rounds.rounds is None

    @property
    def passes(self) -> int:
        """Passes over all rows that a session trains for; 0 if its rounds are counted."""
        if not self.has_default_length:
            return self.rounds.passes or 0
        return default_passes(self.workload.name, self.workload.made_options)

    @property
    def num_rounds(self) -> int:
        """Rounds of a session that counts them."""
        own = getattr(self.workload.made_options, "rounds", ROUNDS)  # of bagging
        return int(own if self.rounds.rounds is None else self.rounds.rounds)

    @property
    def stride(self) -> Stride:
        """Rounds of the workload, where they are less than a pass."""
        mode = ""
        if self.aggregation.rule == "trees":
            mode = str(self.aggregation.whole_options["mode"])
        return stride(self.workload.made_options, mode)

    def _initial(self) -> Literal["first", "empty", "workload"]:
        if self.workload.name:
            return "workload"
        # XAIN's participants all make some weights, and know of no other way.
        default = "average" if self.storage.format == "xain-pickle" else "first"
        chosen = self.rounds.initial_weights or default
        return "empty" if chosen == "average" else "first"

    def given(self) -> dict[str, Any]:
        """The sections as they were given, without what the workload has chosen."""
        return rule_fits.without_choices(self.model_dump(by_alias=True, exclude_unset=True))

    def _with_options(self, options: Mapping[str, str]) -> dict[str, Any]:
        """The settings without a study, and with these options by dotted key, as JSON."""
        # Rule, optimiser and options that the workload chose before are chosen anew.
        whole = {key: part for key, part in self.given().items() if key not in ("study", "search")}
        for key, text in options.items():
            *path, name = key.split(".")
            table = whole
            for part in path:
                table = table.setdefault(part, {})
            table[name] = json.loads(text)
        return whole

    def rules_of_averaging(self) -> Rules:
        """The rules of a session that averages a network, as version 0.1 did, where these settings
        have it send gradients without saying so; else those of a new session."""
        given = self.given()
        own = dict(given.get("workload", {}).get("options", {}))
        if own == self.workload.options:
            return self.rules()
        averaged = {**given.get("workload", {}), "options": {**own, "mode": "federated"}}
        rules = CoordinatorConfig.model_validate({**given, "workload": averaged}).rules()
        return replace(rules, workload_options=json.dumps(own, sort_keys=True) if own else "")

    def rules(self, step: Step | None = None) -> Rules:
        """The rules of a new session. step: its part in a study."""
        study = as_text(self.study, self.search, self.passes or self.num_rounds)
        if step is None:
            return replace(self._rules(), study=study)
        config = self
        if step.options:
            config = CoordinatorConfig.model_validate(self._with_options(step.options))
        rules = replace(config._rules(), study=study)
        if self.search.is_on and self.workload.name and not self.evaluate.metric:
            rules = replace(rules, evaluate_metric=self._metric_of_search)
        return rules_of(step, rules)

    def _rules(self) -> Rules:
        """The rules of a session that is of no study."""
        rounds, aggregation, evaluate = self.rounds, self.aggregation, self.evaluate
        options = self.workload.whole_options
        stages = {"stages": self.num_stages} if aggregation.rule == "assemble" else {}
        describes = self.workload.name == "describe"
        passes = 0 if describes else self.passes
        patience = evaluate.patience
        if patience is None:
            patience = default_patience(passes) if passes and self._measures_same_rows else 0
        is_averaged = not rule_fits.is_own(aggregation.rule)
        return Rules(
            # With passes those of one site, until the first round opens.
            rounds=0 if describes else passes or self.num_rounds,
            epochs=rounds.effective_epochs,
            min_participants=rounds.min_participants,
            fraction_participants=rounds.fraction_participants,
            num_required=rounds.num_required,
            max_participants=rounds.effective_max_participants,
            start_participants=rounds.effective_start_participants,
            start_timeout_s=rounds.start_timeout_s,
            expected_participants=rounds.expected_participants,
            start=rounds.start or ("request" if self.http.is_on else "participants"),
            controller=rounds.controller,
            controller_options=rounds.whole_controller_options,
            tags=rounds.tags,
            refused_limit=rounds.refused_limit,
            refused_rounds=rounds.refused_rounds,
            max_lost_share=rounds.max_lost_share,
            max_share=rounds.max_share,
            scripted=rounds.scripted,
            evaluate_every=(
                0 if self.keeps_estimators or describes else rule_fits.evaluated_every(self)
            ),
            evaluate_metric=evaluate.metric or self._metric_of_weighed_classes,
            evaluate_minimised=evaluate.is_minimised,
            evaluate_patience=patience,
            evaluate_patience_rows=PATIENCE_ROWS if patience and evaluate.patience is None else 0,
            evaluate_min_delta=evaluate.min_delta,
            evaluate_data=bool(evaluate.data),
            evaluate_deadline_s=evaluate.deadline_s,
            evaluate_min_rows=evaluate.min_rows,
            evaluate_threshold=evaluate.threshold,
            evaluate_local=evaluate.local and self._has_local_models,
            evaluate_importance=evaluate.importance and self._has_importances,
            train_config=json.dumps(self.train, sort_keys=True) if self.train else "",
            aggregation=aggregation.rule,
            aggregation_options={**aggregation.whole_options, **stages},
            optimizer=aggregation.optimizer,
            optimizer_options=options_of(aggregation.made_optimizer(), {}),
            seed=rounds.seed,
            passes=passes,
            plans_epochs=bool(passes) and rounds.epochs is None and is_averaged,
            stride=self.stride,
            heartbeat_time_s=self.server.heartbeat_time_s,
            heartbeat_timeout_s=self.server.heartbeat_timeout_s,
            workload=self.workload.name,
            workload_options=(
                json.dumps(options, sort_keys=True)
                if (options := self.workload.whole_options)
                else ""
            ),
            preprocessing=self.workload.preprocessing.model_dump_json(exclude_none=True),
            initial=self._initial(),
            pacing=rounds.pacing,
            pacing_options=rounds.whole_pacing_options,
            deadline_s=rounds.deadline_s,
            idle_timeout_s=rounds.idle_timeout_s,
            quorum=rounds.quorum,
            over_selection=rounds.over_selection,
            consistency=rounds.consistency,
            staleness=rounds.max_staleness,
            buffer_size=rounds.buffer_size or rounds.min_participants,
            schema=self.data_schema.agreed(self.workload.task),
        )
