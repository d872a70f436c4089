"""The configuration of a coordinator: what each key means is told in configs/.

Read by xain_messaging.process.settings: TOML file, then XAIN_COORDINATOR_SECTION__KEY in the
environment, then flags.
"""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, model_validator

from xain_coordinator.core import pacing
from xain_coordinator.core.selection import CONTROLLERS
from xain_coordinator.core.values import Rules
from xain_messaging.process.fields import (
    Allowed,
    FilePath,
    Host,
    Section,
    WrongSetting,
    join_host_port,
)
from xain_messaging.process.logs import LoggingSettings

ENV_PREFIX = "XAIN_COORDINATOR_"

_MIB = 1024 * 1024
# Weights travel in messages of 1 MiB and a little; below this a larger header would not fit.
_MIN_MESSAGE_BYTES = 2 * _MIB
_MAX_MESSAGE_BYTES = 2**31 - 1  # gRPC's options are of type int


def _fraction(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        raise ValueError("no number")
    try:
        return pacing.exact_fraction(value)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


ExactFraction = Annotated[
    Fraction,
    PlainValidator(_fraction),
    PlainSerializer(str),
    Allowed('a number above 0 and at most 1, or a fraction as text such as "1/3"'),
]


def _controller(name: str) -> str:
    if name not in CONTROLLERS:
        raise ValueError(f"no controller is called {name!r}")
    return name


ControllerName = Annotated[
    str, AfterValidator(_controller), Allowed(f"one of: {', '.join(sorted(CONTROLLERS))}")
]


class ServerSettings(Section):
    """[server]"""

    host: Host = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    heartbeat_time_s: float = Field(default=10.0, gt=0)
    heartbeat_timeout_s: float = Field(default=5.0, gt=0)
    max_message_bytes: int = Field(default=4 * _MIB, ge=_MIN_MESSAGE_BYTES, le=_MAX_MESSAGE_BYTES)
    max_update_bytes: int = Field(default=4096 * _MIB, ge=1)
    drain_s: float = Field(default=10.0, ge=0)
    grpc_options: dict[str, int | str] = Field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where to listen, as gRPC's add_insecure_port() takes it."""
        return self.address_at(self.port)

    def address_at(self, port: int) -> str:
        """The address with another port: the one that was found for port 0."""
        return join_host_port(self.host, port)


class RoundsSettings(Section):
    """[rounds]"""

    rounds: int = Field(default=10, ge=1)
    epochs: int = Field(default=1, ge=0)
    min_participants: int = Field(default=1, ge=1)
    fraction_participants: ExactFraction = Fraction(1)
    max_participants: int | None = Field(default=None, ge=1)
    start_participants: int | None = Field(default=None, ge=1)
    start_timeout_s: float = Field(default=60.0, ge=0)
    controller: ControllerName = "random"
    seed: int = Field(default=0, ge=0)

    @property
    def num_required(self) -> int:
        """N: how many must be connected for a round to be open."""
        return pacing.num_required(self.min_participants, self.fraction_participants)

    @property
    def num_selected(self) -> int:
        """k: how many train a round when N are connected."""
        return self._num_selected(self.num_required)

    @property
    def max_selected(self) -> int:
        """How many train a round when as many are connected as may be."""
        return self._num_selected(self.effective_max_participants)

    def _num_selected(self, num_connected: int) -> int:
        if self.controller == "all":
            return num_connected
        return pacing.num_selected(num_connected, self.fraction_participants)

    @property
    def effective_start_participants(self) -> int:
        """How many the first round waits for."""
        return self.start_participants or self.num_required

    @property
    def effective_max_participants(self) -> int:
        """How many may be connected."""
        return self.max_participants or self.effective_start_participants

    @model_validator(mode="after")
    def _possible(self) -> Self:
        required = self.num_required
        # Where N comes from, since it is in no file.
        because = (
            f"the {required} connected participants that min_participants = {self.min_participants}"
            f" at fraction_participants = {self.fraction_participants} need"
        )
        if self.max_participants is not None and self.max_participants < required:
            raise WrongSetting("max_participants", f"it must not be less than {because}")
        if self.start_participants is not None:
            if self.start_participants < required:
                raise WrongSetting("start_participants", f"it must not be less than {because}")
            if self.start_participants > self.effective_max_participants:
                raise WrongSetting(
                    "start_participants",
                    f"it must not be more than max_participants, {self.max_participants}",
                )
        return self


class WorkloadSettings(Section):
    """[workload]"""

    name: str = ""
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not self.name:
            if self.options:
                raise WrongSetting("options", "without workload.name nothing would read them")
            return self
        from xain_workloads import workload

        known = workload.known_workloads()
        if self.name not in known:
            raise WrongSetting("name", f'it must be one of: {", ".join(known)}, or "" for none')
        try:
            workload.create(self.name, self.options)
        except ValueError as error:
            raise _wrong_option(self.options, str(error)) from None
        return self


def _wrong_option(options: Mapping[str, object], message: str) -> WrongSetting:
    # Such a message is "eta0 is -1; it must be above 0". Ours begins in the same way, except that
    # it gives the key in full, and does not show the value if it might be secret.
    option, _, rest = message.partition(" ")
    if option in options and "; " in rest:
        return WrongSetting(f"options.{option}", rest.partition("; ")[2])
    return WrongSetting("options", message)


class AggregationSettings(Section):
    """[aggregation]"""

    rule: str = "weighted_average"

    @model_validator(mode="after")
    def _known(self) -> Self:
        # Imported here, because the rules bring numpy with them and --help does not need it.
        from xain_coordinator.aggregation.rules import RULES

        if self.rule not in RULES:
            raise WrongSetting("rule", f"it must be one of: {', '.join(sorted(RULES))}")
        return self


class StorageSettings(Section):
    """[storage]"""

    kind: Literal["files", "memory"] = "files"
    path: FilePath = Path("xain-data/weights")


class JournalSettings(Section):
    """[journal]"""

    path: FilePath = Path("xain-data/journal.sqlite")


class MetricsSettings(Section):
    """[metrics]"""

    kind: Literal["file", "none"] = "file"
    path: FilePath = Path("xain-data/metrics.jsonl")


_NO_S3 = 'is gone: models and updates are files below storage.path (storage.kind = "files")'
_NO_INFLUX = 'is gone: metrics are lines of the file metrics.path (metrics.kind = "file")'


class CoordinatorConfig(Section):
    """Everything that a coordinator is told."""

    server: ServerSettings = ServerSettings()
    rounds: RoundsSettings = RoundsSettings()
    workload: WorkloadSettings = WorkloadSettings()
    aggregation: AggregationSettings = AggregationSettings()
    storage: StorageSettings = StorageSettings()
    journal: JournalSettings = JournalSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: LoggingSettings = LoggingSettings()

    moved: ClassVar[Mapping[str, str]] = {
        "ai": "is called [rounds] now",
        "ai.rounds": "is called rounds.rounds now",
        "ai.epochs": "is called rounds.epochs now",
        "ai.min_participants": "is called rounds.min_participants now",
        "ai.fraction_participants": "is called rounds.fraction_participants now",
        "server.heartbeat_time": "is called server.heartbeat_time_s now",
        "server.heartbeat_timeout": "is called server.heartbeat_timeout_s now",
        "server.thread_pool_workers": "is gone: the server needs no thread for each call",
        "storage.endpoint": _NO_S3,
        "storage.bucket": _NO_S3,
        "storage.access_key_id": _NO_S3,
        "storage.secret_access_key": _NO_S3,
        "metrics.enable": 'is called metrics.kind now: "file" or "none"',
        "metrics.host": _NO_INFLUX,
        "metrics.port": _NO_INFLUX,
        "metrics.user": _NO_INFLUX,
        "metrics.password": _NO_INFLUX,
        "metrics.db_name": _NO_INFLUX,
    }

    @model_validator(mode="after")
    def _rule_fits(self) -> Self:
        from xain_coordinator.aggregation.rules import RULES, RuleFailed

        rule = RULES[self.aggregation.rule]()
        for num_updates in (self.rounds.min_participants, self.rounds.max_selected):
            try:
                rule.check(num_updates)
            except RuleFailed as error:
                raise WrongSetting(
                    "aggregation.rule",
                    f"a round may have {num_updates} updates with these [rounds], and {error}",
                ) from None
        return self

    def rules(self) -> Rules:
        """What a new session is opened with."""
        rounds = self.rounds
        return Rules(
            rounds=rounds.rounds,
            epochs=rounds.epochs,
            min_participants=rounds.min_participants,
            fraction_participants=rounds.fraction_participants,
            num_required=rounds.num_required,
            max_participants=rounds.effective_max_participants,
            start_participants=rounds.effective_start_participants,
            start_timeout_s=rounds.start_timeout_s,
            controller=rounds.controller,
            aggregation=self.aggregation.rule,
            seed=rounds.seed,
            heartbeat_time_s=self.server.heartbeat_time_s,
            heartbeat_timeout_s=self.server.heartbeat_timeout_s,
            initial="workload" if self.workload.name else "empty",
        )
