"""The sections [server], [predict] and [logging]."""

from typing import Annotated, Literal

from pydantic import Field

from xain_coordinator.config.fields import (
    CALLS_PER_S,
    MAX_PREDICT_RETRIES,
    MAX_PREDICT_TIMEOUT_S,
    MAX_SILENCE_S,
    WeightsAddress,
)
from xain_foundation.logs.logs import LoggingSettings
from xain_foundation.settings.fields import (
    Allowed,
    Check,
    Conflicts,
    FilePath,
    Host,
    Section,
    WrongSetting,
    join_host_port,
)

_MIB = 1024 * 1024

GrpcOption = Annotated[
    Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | str,
    Allowed("text, or a whole number of 32 bits"),
]


class ServerSettings(Section):
    """[server]"""

    host: Host = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    # At least: on the wire it is in whole milliseconds.
    heartbeat_time_s: float = Field(default=10.0, ge=0.001, le=MAX_SILENCE_S)
    heartbeat_timeout_s: float = Field(default=5.0, gt=0, le=MAX_SILENCE_S)
    max_calls_per_s: int = Field(default=CALLS_PER_S, ge=1)
    max_update_bytes: int = Field(default=4096 * _MIB, ge=1)
    max_update_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    update_encoding: Literal["plain", "float16"] = "plain"
    drain_s: float = Field(default=10.0, ge=0, le=MAX_SILENCE_S)
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
