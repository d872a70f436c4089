"""The section [parameters]: a parameter server in the coordinator's process, off without a port."""

from pathlib import Path

from pydantic import Field

from xain_foundation.settings.fields import (
    Check,
    Conflicts,
    FilePath,
    Host,
    Section,
    WrongSetting,
    is_any,
    join_host_port,
)


class ParametersSettings(Section):
    """[parameters]"""

    port: int | None = Field(default=None, ge=0, le=65535)
    host: Host = "127.0.0.1"
    server: bool = True
    server_port: int = Field(default=0, ge=0, le=65535)
    advertised: Host | None = None
    path: FilePath = Path("xain-data/parameters")
    replicas: int = Field(default=0, ge=0, le=16)
    log: bool = False
    checkpoint_interval: int = Field(default=0, ge=0)
    checkpoints: str = ""

    @property
    def is_on(self) -> bool:
        """Whether the coordinator's process has a scheduler of a parameter server."""
        return self.port is not None

    @property
    def address(self) -> str:
        """Address that the scheduler listens on, if there is a scheduler."""
        assert self.port is not None, "it is on"
        return join_host_port(self.host, self.port)

    @property
    def local_host(self) -> str:
        """The host by which this process reaches its own scheduler."""
        if not is_any(self.host):
            return self.host
        return "::1" if ":" in self.host else "127.0.0.1"

    @property
    def checkpoints_url(self) -> str:
        """Folder or fsspec URL of the checkpoints."""
        return self.checkpoints or str((self.path / "checkpoints").absolute())

    @Check
    def _host_can_be_reached(self) -> Conflicts:
        """Check that a server that listens at all addresses says by which one it is reached."""
        if self.is_on and self.server and self.advertised is None and is_any(self.host):
            yield WrongSetting(
                "advertised",
                f"it must be given with parameters.host = {self.host}: the name or address of this "
                "machine, by which workers reach the server in the coordinator's process",
            )
