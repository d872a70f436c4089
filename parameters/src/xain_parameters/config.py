"""The configuration of the programs of the parameter server.

Read by xain_foundation.settings: TOML file, then XAIN_PARAMETERS_SECTION__KEY in the
environment, then flags.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from xain_foundation.fields import Allowed, Check, Conflicts, FilePath, Section, WrongSetting
from xain_foundation.logs import LoggingSettings
from xain_parameters.scheduler.state import Settings

ENV_PREFIX = "XAIN_PARAMETERS_"


class SchedulerSettings(Section):
    """[scheduler].

    listen: "HOST:PORT". data: folder of the journal. worker_lease_s: how long the other
    workers wait for one that is gone. For the others see scheduler.state.Settings.
    """

    listen: str = "127.0.0.1:50052"
    data: FilePath = Path("parameters")
    replicas: Annotated[int, Field(ge=0, le=16)] = 0
    log: bool = False
    checkpoint_interval: Annotated[int, Field(ge=0)] = 0
    checkpoints: str = ""
    num_ranges: Annotated[int, Field(ge=0, le=4096)] = 0
    worker_lease_s: Annotated[float, Field(ge=2.5, le=86_400)] = 10.0

    @Check
    def _has_folder_for_checkpoints(self) -> Conflicts:
        if self.checkpoint_interval and not self.checkpoints:
            yield WrongSetting(
                "checkpoint_interval",
                "scheduler.checkpoints must be given too: the folder or s3:// URL for them",
            )

    def settings(self) -> Settings:
        # Servers, which may have other working directories, write to this folder too.
        is_path = self.checkpoints and "://" not in self.checkpoints
        return Settings(
            num_replicas=self.replicas,
            has_log=self.log,
            checkpoint_interval=self.checkpoint_interval,
            num_ranges=self.num_ranges,
            checkpoints=str(Path(self.checkpoints).absolute()) if is_path else self.checkpoints,
        )


def _given(folder: object) -> object:
    """Refuse None, which is what empty text is parsed to; the default is not checked. An empty
    option is a shell variable that is not set, and must not turn encryption off."""
    if folder is None:
        raise ValueError("empty")
    return folder


class TlsSettings(Section):
    """[tls].

    folder: with ca.crt, tls.crt and tls.key, see certificates.Certificates; None: nothing is
    encrypted.
    """

    folder: Annotated[
        FilePath | None,
        BeforeValidator(_given),
        Allowed("a path, not empty and no URL; leave it out if nothing is to be encrypted"),
    ] = None


class SchedulerConfig(Section):
    """The configuration of `xain-parameter-server scheduler`."""

    scheduler: SchedulerSettings = SchedulerSettings()
    tls: TlsSettings = TlsSettings()
    logging: LoggingSettings = LoggingSettings()


class ServerSettings(Section):
    """[server].

    scheduler, listen: "HOST:PORT"; port 0 takes a free one. advertised: host that others reach the
    server by; "": that of `listen`. name: kept over restarts; "": the host's.
    data: folder of the logs; each server has a folder of its name in it.
    leave_s: how long ranges may take to move away at the end. The scheduler may take 5 s more to
    let the server go.
    """

    scheduler: str = "127.0.0.1:50052"
    listen: str = "127.0.0.1:0"
    advertised: str = ""
    name: str = ""
    data: FilePath = Path("parameters")
    leave_s: Annotated[float, Field(ge=0)] = 30.0


class ServerConfig(Section):
    """The configuration of `xain-parameter-server serve`."""

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    logging: LoggingSettings = LoggingSettings()
