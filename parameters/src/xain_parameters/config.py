"""The configuration of the programs of the parameter server.

Read by xain_foundation.settings.settings: TOML file, then XAIN_PARAMETERS_SECTION__KEY in the
environment, then flags.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from xain_foundation.commands import split_host_port
from xain_foundation.logs.logs import LoggingSettings
from xain_foundation.security.tls_settings import TlsSettings
from xain_foundation.settings.fields import (
    Check,
    Conflicts,
    FilePath,
    Section,
    WrongSetting,
    is_loopback,
)
from xain_foundation.settings.hints import hint
from xain_foundation.settings.settings import load
from xain_parameters.scheduler.state import Settings

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates

ENV_PREFIX = "XAIN_PARAMETERS_"


class SchedulerSettings(Section):
    """[scheduler].

    listen: "HOST:PORT". data: folder of the journal. worker_lease_s: how long the other
    workers wait for one that is gone. insecure: without certificates also on a host that other
    machines reach. handler: "package.module:function" that answers requests of workers; "": none.
    For the others see scheduler.state.Settings.
    """

    listen: str = "127.0.0.1:50052"
    data: FilePath = Path("parameters")
    replicas: Annotated[int, Field(ge=0, le=16)] = 0
    log: bool = False
    checkpoint_interval: Annotated[int, Field(ge=0)] = 0
    checkpoints: str = ""
    num_ranges: Annotated[int, Field(ge=0, le=4096)] = 0
    worker_lease_s: Annotated[float, Field(ge=2.5, le=86_400)] = 10.0
    handler: str = ""
    insecure: bool = False

    @Check
    def _check_folder_for_checkpoints(self) -> Conflicts:
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


def _private(
    section: str, listen: str, *, insecure: bool, tls: TlsSettings, scheduler: str = ""
) -> Conflicts:
    """Yield conflicts of a program that other machines reach, or that calls them, in the clear.

    scheduler: that it calls; "": it calls none.
    """
    if insecure or tls.folder is not None:
        return
    risks = {
        "listen": (listen, "whoever reaches it can read and change all tables"),
        "scheduler": (scheduler, "the tables go to whoever answers there"),
    }
    for key, (address, risk) in risks.items():
        host = split_host_port(address)[0]
        # A number is no host, which the program says.
        if not address or is_loopback(host) or host.isdecimal():
            continue
        yield WrongSetting(
            f"{section}.{key}",
            f"without certificates {risk}, and nothing is encrypted; "
            + hint("xain-coordinator", "xain-coordinator certs init --host HOST")
            + " and "
            + hint("xain-coordinator", "xain-coordinator tokens create --name NAME --role node")
            + ", then "
            + hint("xain-parameter-server", 'tls.folder = "FOLDER"')
            + ", or, in a network that you trust, "
            + hint("xain-parameter-server", "--insecure"),
        )


class SchedulerConfig(Section):
    """The configuration of `xain-parameter-server scheduler`."""

    scheduler: SchedulerSettings = SchedulerSettings()
    tls: TlsSettings = TlsSettings()
    logging: LoggingSettings = LoggingSettings()

    @Check
    def _check_is_private(self) -> Conflicts:
        ours = self.scheduler
        yield from _private("scheduler", ours.listen, insecure=ours.insecure, tls=self.tls)


class ServerSettings(Section):
    """[server].

    scheduler, listen: "HOST:PORT"; port 0 takes a free one. advertised: host that others reach the
    server by; "": that of `listen`. name: kept over restarts; "": the host's.
    data: folder of the logs; each server has a folder of its name in it.
    leave_s: how long ranges may take to move away at the end. The scheduler may take 5 s more to
    let the server go.
    handler: "package.module:function" that answers requests of workers; "": none.
    insecure: without certificates also on a host that other machines reach.
    """

    scheduler: str = "127.0.0.1:50052"
    listen: str = "127.0.0.1:0"
    advertised: str = ""
    name: str = ""
    data: FilePath = Path("parameters")
    leave_s: Annotated[float, Field(ge=0)] = 30.0
    handler: str = ""
    insecure: bool = False


class ServerConfig(Section):
    """The configuration of `xain-parameter-server serve`."""

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    logging: LoggingSettings = LoggingSettings()

    @Check
    def _check_is_private(self) -> Conflicts:
        ours = self.server
        yield from _private(
            "server",
            ours.listen,
            insecure=ours.insecure,
            tls=self.tls,
            scheduler=ours.scheduler,
        )


class _Asking(Section):
    """Settings of programs that connect to a group. Those of its schedulers and servers may be in
    the same environment, and count for nothing here."""

    scheduler: SchedulerSettings = SchedulerSettings()
    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    logging: LoggingSettings = LoggingSettings()


def certificates_of(folder: str | None) -> "Certificates | None":
    """Certificates in the folder that a command line names, or else XAIN_PARAMETERS_TLS__FOLDER;
    names in them are read as XAIN_PARAMETERS_TLS__IDENTITY and the like say. None: nothing is
    encrypted. Raises ConfigError and InvalidCertificates.
    """
    return load(_Asking, None, ENV_PREFIX, {"tls.folder": folder}).tls.certificates()
