"""Interfaces of a launch backend and of a started program."""

import os
import platform
from pathlib import Path
from typing import Protocol

from xain_coordinator.cli.launch.plan import Program

KILLED = 128 + 9  # exit status of a program that was killed, as a shell and Docker have it
STOP_TIMEOUT_S = 20.0  # above the drain of a coordinator


class Running(Protocol):
    """A program that was started."""

    @property
    def name(self) -> str:
        """The program's name, such as that of a worker."""

    def status(self) -> int | None:
        """Exit status, above 128 after a signal; None while it runs."""

    def new_lines(self) -> list[str]:
        """Whole lines of the program's log since the last call."""

    def terminate(self) -> None:
        """Ask the program to stop. No effect on a program that has ended."""

    def remove(self, timeout_s: float) -> None:
        """Wait for the program's end for so long, then kill it, and remove its container or
        files."""


class Backend(Protocol):
    """Starts programs on this machine."""

    @property
    def bind_host(self) -> str:
        """The host on which programs listen."""

    def prepare(self, work: Path) -> None:
        """Make the folders, networks or images that the programs need. Raises CommandFailed if one
        is missing."""

    def data_dir(self, work: Path) -> str:
        """The work folder where programs run."""

    def config_path(self, config: Path | None) -> str | None:
        """The file of settings where the coordinator runs."""

    def source(self, source: str, number: int = 0) -> str:
        """A program's data where it runs. number: of the source among Program.data."""

    def ports(self, wanted: tuple[int, int], *, http: bool) -> tuple[int, int]:
        """The ports on which the published program listens where it runs."""

    def http_values(self) -> dict[str, object]:
        """Settings of the HTTP face, but for its port."""

    def start(self, program: Program) -> Running:
        """Raises CommandFailed."""

    def address(self, listens: int) -> str:
        """HOST:PORT at which this machine reaches a port of the published program."""

    def host(self, name: str) -> str:
        """The host at which programs of the launch reach the program of this name."""

    def close(self) -> None:
        """Remove what prepare() made."""


class LogFile:
    """A log that a program appends to, from where it ends now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size
        self._rest = b""  # the beginning of a line that is not whole yet

    def new_lines(self) -> list[str]:
        """See Running."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


def launcher_id() -> str:
    """Identity of this process, distinct from a later process with the same number."""
    return f"{platform.node()}:{os.getpid()}:{start_of(os.getpid())}"


def is_alive(launcher: str) -> bool:
    """Whether the process that launcher_id() described is alive.

    A process of another machine, whose containers an engine may show, is not known to be dead.
    """
    host, _, rest = launcher.rpartition(":")[0].rpartition(":")
    if host != platform.node():
        return True
    return rest.isdecimal() and launcher.endswith(f":{start_of(int(rest))}")


def start_of(pid: int) -> str:
    """Start of a process in ticks since the boot; "" if there is no process, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the name before it may have blanks
    return "" if fields[0] == "Z" else fields[19]
