"""The configuration of a participant: what each key means is told in configs/.

Read by xain_messaging.process.settings: TOML file, then XAIN_PARTICIPANT_SECTION__KEY in the
environment, then flags.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from xain_messaging.process.fields import (
    Allowed,
    Host,
    Section,
    WrongSetting,
    join_host_port,
)
from xain_messaging.process.logs import LoggingSettings
from xain_workloads.partition import MAX_ALPHA, Partition

ENV_PREFIX = "XAIN_PARTICIPANT_"

_MAX_NAME_BYTES = 128


def _check_name(name: str) -> str:
    # The coordinator refuses the same names, since they become part of a key in its store; here
    # the refusal comes before the data are loaded.
    if (
        len(name.encode()) > _MAX_NAME_BYTES
        or name in (".", "global")
        or any(part in name for part in ("/", "\\", ".."))
        or not name.isprintable()
    ):
        raise ValueError(f"{name!r} cannot be a name")
    return name


ParticipantName = Annotated[
    str,
    AfterValidator(_check_name),
    Allowed(
        f"""a name of at most {_MAX_NAME_BYTES} bytes without "/", "\\" and "..", not "global\""""
    ),
]


class CoordinatorSettings(Section):
    """[coordinator]"""

    host: Host = "localhost"
    port: int = Field(default=50051, ge=1, le=65535)

    @property
    def address(self) -> str:
        """For a gRPC channel."""
        return join_host_port(self.host, self.port)


class ParticipantSettings(Section):
    """[participant]"""

    id: ParticipantName = ""


class DataSettings(Section):
    """[data]"""

    source: str = ""
    target: str | None = None
    task: Literal["classification", "regression"] = "classification"
    scale: float = 1.0
    num_features: int | None = Field(default=None, ge=1)
    zero_based: bool = False
    test_fraction: float = Field(default=0.0, ge=0, lt=1)


class PartitionSettings(Section):
    """[partition]"""

    kind: Literal["none", "iid", "dirichlet"] = "none"
    num_parts: int = Field(default=1, ge=1)
    index: int = Field(default=0, ge=0)
    alpha: float = Field(default=0.5, gt=0, le=MAX_ALPHA)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.index >= self.num_parts:
            raise WrongSetting("index", f"it must be below num_parts, {self.num_parts}")
        if self.kind == "none" and self.num_parts > 1:
            raise WrongSetting(
                "num_parts", 'with kind = "none" every participant would train on all rows'
            )
        return self

    def partition(self) -> Partition:
        """Which part of the data set is ours."""
        return Partition(self.kind, self.num_parts, self.index, self.alpha, self.seed)


class TrainingSettings(Section):
    """[training]"""

    seed: int = Field(default=0, ge=0)


_NO_STORAGE = "is gone: weights travel through the coordinator, and no participant needs a store"


class ParticipantConfig(Section):
    """Everything that a participant is told."""

    coordinator: CoordinatorSettings = CoordinatorSettings()
    participant: ParticipantSettings = ParticipantSettings()
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    training: TrainingSettings = TrainingSettings()
    logging: LoggingSettings = LoggingSettings()

    moved: ClassVar[Mapping[str, str]] = {
        "coordinator.grpc_options": "is gone: the SDK of XAIN never used it",
        "storage": _NO_STORAGE,
        "storage.endpoint": _NO_STORAGE,
        "storage.bucket": _NO_STORAGE,
        "storage.access_key_id": _NO_STORAGE,
        "storage.secret_access_key": _NO_STORAGE,
    }
