"""The configuration of a participant: what each key means is told in configs/.

Read by xain_foundation.settings.settings: TOML file, then XAIN_PARTICIPANT_SECTION__KEY in the
environment, then flags.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from xain_foundation.logs.logs import LoggingSettings
from xain_foundation.names import RULE, why_not
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.settings import tags as tag_rules
from xain_foundation.settings.fields import (
    Allowed,
    Check,
    Conflicts,
    FilePath,
    Host,
    Section,
    Texts,
    WrongSetting,
    join_host_port,
)
from xain_workloads.tables.partition import MAX_ALPHA, Partition
from xain_workloads.tables.statistics import MIN_CATEGORY_COUNT, MIN_KNOWN
from xain_workloads.tables.table import Table
from xain_workloads.tables.table_settings import TableSettings

ENV_PREFIX = "XAIN_PARTICIPANT_"

_MAX_PARTS = 100_000  # each participant computes all parts


def _refused_by(why_not: Callable[[str], str | None]) -> AfterValidator:
    """Make a validator that refuses text with the reason that why_not returns, as a coordinator
    would after the data are loaded; None, and empty text, pass."""

    def check(text: str) -> str:
        if text and (why := why_not(text)) is not None:
            raise ValueError(why)
        return text

    return AfterValidator(check)


ParticipantName = Annotated[str, _refused_by(why_not), Allowed(RULE)]  # "": make one
TagValue = Annotated[str, _refused_by(tag_rules.why_not_value), Allowed(tag_rules.VALUE_RULE)]


def _check_group_address(address: str) -> str:
    """Return an address as it is. Raises ValueError if it has a port that is none."""
    # The coordinator hands it to the other participants as it is.
    _, separator, port = address.rpartition(":")
    has_port = bool(separator) and not address.endswith("]")
    if has_port and not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise ValueError("its port must be a number between 1 and 65535")
    return address


GroupAddress = Annotated[str, AfterValidator(_check_group_address), Allowed("HOST:PORT or HOST")]


class CoordinatorSettings(Section):
    """[coordinator]"""

    host: Host = "localhost"
    port: int = Field(default=50051, ge=1, le=65535)
    direct: bool = True
    insecure: bool = False

    @property
    def address(self) -> str:
        """The target of a gRPC channel."""
        return join_host_port(self.host, self.port)


class ParticipantSettings(Section):
    """[participant]"""

    id: ParticipantName = ""
    instance_id: ParticipantName = ""
    alive_file: FilePath | None = None
    state_dir: FilePath | None = None
    serve: bool = False
    report_failures: Literal["type", "full"] = "type"
    require_approval: bool = False
    tags: dict[str, TagValue] = Field(default_factory=dict)

    @Check
    def _tags_are_taken(self) -> Conflicts:
        """Yield the tags that a coordinator would refuse."""
        for key in self.tags:
            if (why := tag_rules.why_not_key(key)) is not None:
                yield WrongSetting(f"tags.{key}", f"its name cannot be that of a tag: {why}")
        if len(self.tags) > tag_rules.MAX_TAGS:
            yield WrongSetting("tags", f"there must be at most {tag_rules.MAX_TAGS} of them")


class DataSettings(TableSettings):
    """[data]"""

    source: str = ""
    test_fraction: float = Field(default=0.2, ge=0, lt=1)
    min_category_count: int = Field(default=MIN_CATEGORY_COUNT, ge=1)
    min_known: int = Field(default=MIN_KNOWN, ge=1)

    @Check
    def _source_can_be_read(self) -> Conflicts:
        if self.source:
            yield from self.source_conflicts("data", "source", self.source)

    def load(self) -> Table:
        """Read the table. Raises DataError that names the file, and column and row if possible."""
        return self.table(self.source)


class PartitionSettings(Section):
    """[partition]"""

    kind: Literal["none", "iid", "dirichlet"] = "none"
    num_parts: int = Field(default=1, ge=1, le=_MAX_PARTS)
    index: int = Field(default=0, ge=0)
    alpha: float = Field(default=0.5, gt=0, le=MAX_ALPHA)
    seed: int = Field(default=0, ge=0)

    @Check
    def _parts_can_be_made(self) -> Conflicts:
        """Yield an index beyond the parts, and several parts without a kind."""
        if self.index >= self.num_parts:
            yield WrongSetting("index", f"it must be below num_parts, {self.num_parts}")
        if self.kind == "none" and self.num_parts > 1:
            # Every participant would train on all rows, which looks like success.
            yield WrongSetting("num_parts", "but kind is 'none'; choose a kind")

    def partition(self) -> Partition:
        """The part of the data set that this participant trains on."""
        return Partition(self.kind, self.num_parts, self.index, self.alpha, self.seed)


class TrainingSettings(Section):
    """[training]"""

    seed: int = Field(default=0, ge=0)
    workload: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    builders: Texts = ()
    threads: int = Field(default=1, ge=1, le=1024)
    process_group_address: GroupAddress = ""
    process_group_insecure: bool = False


class ParticipantConfig(Section):
    """All settings of a participant."""

    coordinator: CoordinatorSettings = CoordinatorSettings()
    participant: ParticipantSettings = ParticipantSettings()
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    training: TrainingSettings = TrainingSettings()
    logging: LoggingSettings = LoggingSettings()
    tls: TlsSettings = TlsSettings()

    moved: ClassVar[Mapping[str, str]] = {
        "training.process_group_timeout_s": "is gone: leave it out; members wait 60 s",
        "coordinator.grpc_options": "is gone: the SDK of XAIN never used it",
        "storage": "is gone: weights travel through the coordinator, and no participant needs a "
        "store",
    }
