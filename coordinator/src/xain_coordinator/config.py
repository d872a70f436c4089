"""The configuration of a coordinator: what each key means is told in configs/.

Read by xain_messaging.process.settings: TOML file, then XAIN_COORDINATOR_SECTION__KEY in the
environment, then flags.
"""

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    model_validator,
)

from xain_coordinator.aggregation.options import WrongOption, options_of
from xain_coordinator.controllers import known_controllers, make_controller
from xain_coordinator.core import pacing
from xain_coordinator.core.values import Consistency, Expression, Option, Rules
from xain_coordinator.plugins import PluginFailed
from xain_coordinator.stores.s3_names import MAX_PREFIX_BYTES, key_to_name
from xain_messaging import tags as tag_rules
from xain_messaging.conditional_events import ConditionalEventError, parse
from xain_messaging.names import why_not
from xain_messaging.process.fields import (
    Allowed,
    FilePath,
    Host,
    Section,
    WrongSetting,
    join_host_port,
)
from xain_messaging.process.logs import LoggingSettings

if TYPE_CHECKING:
    from xain_coordinator.aggregation.aggregator import Aggregator
    from xain_coordinator.aggregation.optimizers import Optimizer

ENV_PREFIX = "XAIN_COORDINATOR_"

_MIB = 1024 * 1024
# Weights travel in messages of 1 MiB and a little; below this a larger header would not fit.
_MIN_MESSAGE_BYTES = 2 * _MIB
_MAX_WAIT_S = 366 * 24 * 3600.0  # longer than this is for ever
_MAX_SILENCE_S = 24 * 3600.0  # of somebody who is to answer
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


def _excess(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        raise ValueError("no number")
    try:
        excess = Fraction(str(value))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if excess < 0:
        raise ValueError(f"must not be negative, got {value}")
    return excess


ExactExcess = Annotated[
    Fraction,
    PlainValidator(_excess),
    PlainSerializer(str),
    Allowed('a number, not negative, such as 0.3, or a fraction as text such as "1/3"'),
]


# No name of a participant begins like this.
_LIST = re.compile(r'\s*\[\s*["\[]')


def _parse_list(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists in lists, too deep") from None


def _quorum(value: object) -> Expression:
    """Lists as tuples, which do not change. What they say is looked at later."""
    if isinstance(value, str):
        # In the environment and in flags a list is text.
        return _quorum(_parse_list(value)) if _LIST.match(value) else value
    if isinstance(value, list | tuple):
        return tuple(_quorum(part) for part in value)
    raise ValueError("neither text nor a list")


Quorum = Annotated[
    Expression,
    PlainValidator(_quorum),
    Allowed(
        'a conditional event such as "participant:update:80%", "hospital-a:update:1", or a list of '
        'them that ends in "AND" or "OR"'
    ),
]


def _tag_values(value: object) -> tuple[str, ...]:
    """One value, or a list of them: those that a tag may have."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("neither text nor a list")
    for one in values:
        if not isinstance(one, str) or tag_rules.why_not_value(one) is not None:
            raise ValueError("no value of a tag")
    return tuple(values)


TagValues = Annotated[
    tuple[str, ...],
    PlainValidator(_tag_values),
    Allowed(f'{tag_rules.VALUE_RULE}, such as "north", or a list of such texts'),
]


def _url(value: object) -> str:
    """ "" or an http(s) URL of a server, without a slash at its end."""
    if not isinstance(value, str):
        raise ValueError("not text")
    if value == "":
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("no URL of a server")
    if parts.query or parts.fragment or (parts.port is not None and parts.port < 1):
        raise ValueError("no URL of a server")
    return value.rstrip("/")


OptionalUrl = Annotated[
    str, BeforeValidator(_url), Allowed('a URL such as "https://host:9000", without user or query')
]


def _key_prefix(value: str) -> str:
    if value and len(key_to_name(value).encode()) > MAX_PREFIX_BYTES:
        raise ValueError("no room for the rest of a key")
    return value


KeyPrefix = Annotated[
    str,
    AfterValidator(_key_prefix),
    Allowed(
        f'the beginning of a key, such as "trials/7", of at most {MAX_PREFIX_BYTES} bytes and '
        "without a slash at its ends"
    ),
]


class ServerSettings(Section):
    """[server]"""

    host: Host = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    heartbeat_time_s: float = Field(default=10.0, gt=0, le=_MAX_SILENCE_S)
    heartbeat_timeout_s: float = Field(default=5.0, gt=0, le=_MAX_SILENCE_S)
    max_message_bytes: int = Field(default=4 * _MIB, ge=_MIN_MESSAGE_BYTES, le=_MAX_MESSAGE_BYTES)
    max_update_bytes: int = Field(default=4096 * _MIB, ge=1)
    max_update_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    update_encoding: Literal["plain", "float16", "int8"] = "plain"
    drain_s: float = Field(default=10.0, ge=0, le=_MAX_SILENCE_S)
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
    start_timeout_s: float = Field(default=60.0, ge=0, le=_MAX_WAIT_S)
    controller: str = "random"
    controller_options: dict[str, Option] = Field(default_factory=dict)
    tags: dict[str, TagValues] = Field(default_factory=dict)
    # Each refusal is written down, so that their number must have a bound.
    refused_limit: int = Field(default=3, ge=0, le=100)
    refused_rounds: int = Field(default=3, ge=0)
    seed: int = Field(default=0, ge=0)
    over_selection: ExactExcess = Fraction(0)
    quorum: Quorum = ""
    deadline_s: float = Field(default=24 * 3600.0, gt=0, le=_MAX_WAIT_S)
    idle_timeout_s: float = Field(default=7 * 24 * 3600.0, gt=0, le=_MAX_WAIT_S)
    consistency: Consistency = "bsp"
    staleness: int | None = Field(default=None, ge=1)
    buffer_size: int | None = Field(default=None, ge=1)

    @property
    def num_required(self) -> int:
        """N: how many must be connected for a round to be open."""
        return pacing.num_required(self.min_participants, self.fraction_participants)

    @property
    def num_selected(self) -> int:
        """k: how many train a round when N are connected."""
        return self._num_selected(self.num_required)

    @property
    def num_wanted(self) -> int:
        """With how many updates a round is complete when N are connected."""
        if not self.over_selection:
            return self.num_selected
        return pacing.num_wanted(self.num_required, self.fraction_participants)

    @property
    def max_selected(self) -> int:
        """How many train a round when as many are connected as may be."""
        return self._num_selected(self.effective_max_participants)

    @property
    def max_updates(self) -> int:
        """Of how many updates a model may be made."""
        if self.over_selection and not self.quorum:
            return pacing.num_wanted(self.effective_max_participants, self.fraction_participants)
        return self.max_selected

    def _num_selected(self, num_connected: int) -> int:
        if self.controller == "all":
            return num_connected
        return pacing.num_selected(num_connected, self.fraction_participants, self.over_selection)

    @property
    def whole_controller_options(self) -> Mapping[str, Option]:
        """Those that are given, and the defaults of the others."""
        made = make_controller(self.controller, self.controller_options)
        return options_of(made, self.controller_options)

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

    @model_validator(mode="after")
    def _can_select(self) -> Self:
        try:
            _ = self.whole_controller_options
        except KeyError:
            raise WrongSetting(
                "controller", f"it must be one of: {', '.join(known_controllers())}"
            ) from None
        except WrongOption as error:
            option = f"controller_options.{error.option}".removesuffix(".")
            raise WrongSetting(option, error.text) from None
        except PluginFailed as error:
            raise WrongSetting("controller", str(error)) from None
        for key in self.tags:
            if (why := tag_rules.why_not_key(key)) is not None:
                raise WrongSetting(f"tags.{key}", f"no participant can have such a tag: {why}")
        return self

    @model_validator(mode="after")
    def _can_close(self) -> Self:
        """A round that these settings describe can be complete."""
        if self.consistency == "bsp":
            for name in ("staleness", "buffer_size"):
                if getattr(self, name) is not None:
                    raise WrongSetting(name, 'nothing would read it with consistency = "bsp"')
        else:
            for name in ("over_selection", "quorum"):
                if getattr(self, name):
                    raise WrongSetting(
                        name,
                        f'with consistency = "{self.consistency}" a model is made of every '
                        "rounds.buffer_size updates; leave this one out",
                    )
        if self.consistency == "ssp" and self.staleness is None:
            raise WrongSetting("staleness", 'it must be given with consistency = "ssp"')
        if self.consistency == "asp" and self.staleness is not None:
            raise WrongSetting("staleness", 'there is no limit with consistency = "asp"; use "ssp"')
        if self.buffer_size is not None:
            if self.buffer_size < self.min_participants:
                raise WrongSetting(
                    "buffer_size",
                    f"it must not be less than min_participants, {self.min_participants}",
                )
            if self.buffer_size > self.max_selected:
                raise WrongSetting(
                    "buffer_size", f"it must not be more than train at a time, {self.max_selected}"
                )
        if self.over_selection and (self.controller == "all" or self.fraction_participants == 1):
            raise WrongSetting(
                "over_selection",
                "everybody is selected without it; it needs a fraction_participants below 1 and "
                'another controller than "all"',
            )
        if self.quorum:
            self._check_quorum()
        return self

    def _check_quorum(self) -> None:
        try:
            condition = parse(self.quorum)
        except ConditionalEventError as error:
            raise WrongSetting("quorum", str(error)) from None
        for unit in condition.units:
            is_one = unit.source not in ("*", pacing.PEER_TYPE)
            if unit.tag not in ("*", pacing.TAG):
                raise WrongSetting(
                    "quorum", f'"{unit}" counts what no round gets; its tag must be "{pacing.TAG}"'
                )
            if is_one and (why := why_not(unit.source)) is not None:
                raise WrongSetting("quorum", f'"{unit}" names a participant, but {why}')
            if is_one and unit.count is not None and unit.count > 1:
                raise WrongSetting(
                    "quorum", f'"{unit}" never happens: a participant sends one update a round'
                )
            if unit.count is not None and unit.count > self.max_selected:
                raise WrongSetting(
                    "quorum", f'"{unit}" never happens: at most {self.max_selected} are selected'
                )


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
    options: dict[str, Option] = Field(default_factory=dict)
    optimizer: str = ""
    optimizer_options: dict[str, Option] = Field(default_factory=dict)

    # The rules are imported where they are needed: numpy comes with them, which --help need not.

    def made_rule(self) -> "Aggregator":
        """Raises WrongSetting."""
        from xain_coordinator.aggregation.rules import known_rules, make_rule

        try:
            return make_rule(self.rule, self.options)
        except KeyError:
            raise WrongSetting("rule", f"it must be one of: {', '.join(known_rules())}") from None
        except PluginFailed as error:
            raise WrongSetting("rule", str(error)) from None
        except WrongOption as error:
            raise WrongSetting(*_at("options", error)) from None

    def made_optimizer(self) -> "Optimizer | None":
        """None if there is to be none. Raises WrongSetting."""
        from xain_coordinator.aggregation.optimizers import OPTIMIZERS
        from xain_coordinator.aggregation.rules import make_optimizer

        if not self.optimizer:
            return None
        try:
            return make_optimizer(self.optimizer, self.optimizer_options)
        except KeyError:
            known = ", ".join(sorted(OPTIMIZERS))
            raise WrongSetting("optimizer", f'it must be one of: {known}, or "" for none') from None
        except WrongOption as error:
            raise WrongSetting(*_at("optimizer_options", error)) from None

    @property
    def whole_options(self) -> Mapping[str, Option]:
        """Those of the rule that are given, and the defaults of the others. Raises WrongSetting."""
        try:
            return options_of(self.made_rule(), self.options)
        except WrongOption as error:
            raise WrongSetting(*_at("options", error)) from None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _ = self.whole_options
        if self.made_optimizer() is None and self.optimizer_options:
            raise WrongSetting(
                "optimizer_options", "without aggregation.optimizer nothing would read them"
            )
        return self


def _at(section: str, error: WrongOption) -> tuple[str, str]:
    return f"{section}.{error.option}" if error.option else section, error.text


class StorageSettings(Section):
    """[storage]"""

    kind: Literal["files", "s3", "memory"] = "files"
    path: FilePath = Path("xain-data/weights")
    endpoint: OptionalUrl = ""
    public_endpoint: OptionalUrl = ""
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

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "s3" and not self.bucket:
            raise WrongSetting("bucket", 'it must be given with storage.kind = "s3"')
        for name, field in type(self).model_fields.items():
            if (
                self.kind != "s3"
                and name not in ("kind", "path", "format", "keep_updates")
                and getattr(self, name) != field.default
            ):
                raise WrongSetting(name, 'nothing would read it without storage.kind = "s3"')
        if self.format == "xain-pickle" and self.kind != "s3":
            raise WrongSetting(
                "format", 'XAIN\'s participants look for weights in S3: set storage.kind = "s3"'
            )
        if self.format == "xain-pickle" and self.prefix:
            raise WrongSetting("prefix", "XAIN's participants look in the root of the bucket")
        for name in ("access_key_id", "secret_access_key", "session_token"):
            if self._has_text(name) and getattr(self, f"{name}_file"):
                raise WrongSetting(f"{name}_file", f"storage.{name} is given too; keep one of them")
        has_id = self._has_text("access_key_id") or self.access_key_id_file is not None
        has_secret = self._has_text("secret_access_key") or self.secret_access_key_file is not None
        if self._has_text("session_token") and not has_id:
            raise WrongSetting("session_token", "it goes with storage.access_key_id")
        if self.session_token_file and not has_id:
            raise WrongSetting("session_token_file", "it goes with storage.access_key_id")
        if has_id != has_secret:
            missing = "secret_access_key" if has_id else "access_key_id"
            raise WrongSetting(missing, "one half of the credentials is given; give both or none")
        return self

    def _has_text(self, name: str) -> bool:
        """Blanks alone are nothing, as they are to read_secret."""
        secret: SecretStr = getattr(self, name)
        return bool(secret.get_secret_value().strip())


class JournalSettings(Section):
    """[journal]"""

    path: FilePath = Path("xain-data/journal.sqlite")


class MetricsSettings(Section):
    """[metrics]"""

    kind: Literal["file", "influxdb", "none"] = "file"
    path: FilePath = Path("xain-data/metrics.jsonl")
    url: OptionalUrl = ""
    org: str = ""
    bucket: str = ""
    token: SecretStr = SecretStr("")
    token_file: FilePath | None = None
    timeout_s: float = Field(default=10.0, gt=0, le=_MAX_SILENCE_S)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.token.get_secret_value() and self.token_file:
            raise WrongSetting("token_file", "metrics.token is given too; keep one of them")
        if self.kind != "influxdb" and self.url:
            raise WrongSetting("url", 'nothing would read it without metrics.kind = "influxdb"')
        if self.kind == "influxdb":
            for name in ("url", "org", "bucket"):
                if not getattr(self, name):
                    raise WrongSetting(name, 'it must be given with metrics.kind = "influxdb"')
        return self


_NO_INFLUX = 'is gone: metrics.kind = "influxdb" has url, org, bucket and token'


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
        "metrics.enable": 'is called metrics.kind now: "file", "influxdb" or "none"',
        "metrics.host": _NO_INFLUX,
        "metrics.port": _NO_INFLUX,
        "metrics.user": _NO_INFLUX,
        "metrics.password": _NO_INFLUX,
        "metrics.db_name": _NO_INFLUX,
    }

    @model_validator(mode="after")
    def _rule_fits(self) -> Self:
        from xain_coordinator.aggregation.aggregator import RuleFailed

        rule = self.aggregation.made_rule()
        if self.rounds.consistency != "bsp" and not rule.takes_stale:
            raise WrongSetting(
                "aggregation.rule",
                f'rounds.consistency = "{self.rounds.consistency}" mixes updates with the model '
                'that there is, which only "weighted_average" can do',
            )
        for num_updates in (self.rounds.min_participants, self.rounds.max_updates):
            try:
                rule.check(num_updates)
            except RuleFailed as error:
                raise WrongSetting(
                    "aggregation.rule",
                    f"a round may have {num_updates} updates with these [rounds], and {error}",
                ) from None
            except Exception as error:  # a plug-in's code runs here, and may raise anything
                raise WrongSetting(
                    "aggregation.rule",
                    f"its check() fails with num_updates = {num_updates}: "
                    f"{type(error).__name__}: {error}",
                ) from error
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
            controller_options=rounds.whole_controller_options,
            tags=rounds.tags,
            refused_limit=rounds.refused_limit,
            refused_rounds=rounds.refused_rounds,
            aggregation=self.aggregation.rule,
            aggregation_options=self.aggregation.whole_options,
            optimizer=self.aggregation.optimizer,
            optimizer_options=options_of(self.aggregation.made_optimizer(), {}),
            seed=rounds.seed,
            heartbeat_time_s=self.server.heartbeat_time_s,
            heartbeat_timeout_s=self.server.heartbeat_timeout_s,
            initial="workload" if self.workload.name else "empty",
            deadline_s=rounds.deadline_s,
            idle_timeout_s=rounds.idle_timeout_s,
            quorum=rounds.quorum,
            over_selection=rounds.over_selection,
            consistency=rounds.consistency,
            staleness=None if rounds.consistency == "asp" else rounds.staleness or 0,
            buffer_size=rounds.buffer_size or rounds.min_participants,
        )
