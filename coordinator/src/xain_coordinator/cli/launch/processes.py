"""Programs of a launch as processes.

Each process has two variables in its environment, the name of the launch and its launcher. A later
launcher finds by them in /proc, thus on Linux, what a killed one left behind. The log goes to a
file, so a process goes on writing it after the death of its launcher.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from xain_coordinator.cli.launch.plan import COORDINATE, PARAMETERS, PARTICIPATE, Program
from xain_coordinator.cli.launch.programs import STOP_TIMEOUT_S, LogFile, is_alive, launcher_id
from xain_foundation.commands import CommandFailed
from xain_foundation.fields import join_host_port
from xain_foundation.sockets import free_ports

NAME_VARIABLE, LAUNCHER_VARIABLE = "XAIN_LAUNCH_NAME", "XAIN_LAUNCH_BY"
SETTINGS = ("XAIN_COORDINATOR_", "XAIN_PARAMETERS_", "XAIN_PARTICIPANT_")
MODULES = {
    COORDINATE: "xain_coordinator",
    PARAMETERS: "xain_parameters",
    PARTICIPATE: "xain_participant",
}
POLL_S = 0.05
_ANY = ("0.0.0.0", "::")


class ProcessBackend:
    """name: of the launch. host: where programs listen."""

    def __init__(self, name: str, host: str) -> None:
        self._name = name
        self.bind_host = host
        self._logs = Path()

    def prepare(self, work: Path) -> None:
        """Make the folder of the logs."""
        if find_spec("xain_participant") is None:
            raise CommandFailed(
                "--with process runs participants here: pip install 'xain-participant[tables]'"
            )
        self._logs = work / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def data_dir(self, work: Path) -> str:
        return str(work.absolute())

    def config_path(self, config: Path | None) -> str | None:
        return None if config is None else str(config.absolute())

    def source(self, source: str, number: int = 0) -> str:
        return source

    def ports(self, wanted: tuple[int, int], *, http: bool) -> tuple[int, int]:
        # Workers find a coordinator that starts again at the port that it had.
        grpc_port, http_port = (
            port or free for port, free in zip(wanted, free_ports(2), strict=True)
        )
        return grpc_port, http_port

    def http_values(self) -> dict[str, object]:
        return {"http.host": self.bind_host}

    def start(self, program: Program) -> "LocalProcess":
        path = self._logs / f"{program.name}.log"
        with path.open("ab") as log:  # the lines before a restart stay
            lines = LogFile(path)
            popen = subprocess.Popen(
                [sys.executable, "-m", MODULES[program.command], *program.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(program.environment),
                # Ctrl-C is for the launcher, which then stops the others in order.
                start_new_session=True,
            )
        return LocalProcess(program.name, popen, lines)

    def _environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        inherited = {n: v for n, v in os.environ.items() if not n.upper().startswith(SETTINGS)}
        labels = {NAME_VARIABLE: self._name, LAUNCHER_VARIABLE: launcher_id()}
        return {**inherited, **settings, **labels}

    def address(self, listens: int) -> str:
        return join_host_port(self.host(""), listens)

    def host(self, name: str) -> str:
        return "127.0.0.1" if self.bind_host in _ANY else self.bind_host

    def close(self) -> None:
        """Do nothing: processes leave nothing to remove."""


class LocalProcess:
    """A process of a launch."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: LogFile) -> None:
        self.name = name
        self.new_lines = log.new_lines
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    def status(self) -> int | None:
        code = self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def terminate(self) -> None:
        if self.status() is None:
            self._popen.terminate()

    def remove(self, timeout_s: float) -> None:
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


# --- what an earlier launcher left behind ---------------------------------------------------------


def is_live(name: str) -> bool | None:
    """Whether the launcher of the launch with this name is alive; None if it has no processes."""
    launchers = [launcher for _, launcher in _labelled(name)]
    return any(map(is_alive, launchers)) if launchers else None


def clean(name: str) -> tuple[str, ...]:
    """Stop all processes of the launch. Returns their names."""
    found = tuple(pid for pid, _ in _labelled(name))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, _ in _labelled(name):  # again: a number may be that of another process by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(True for _ in _labelled(name)) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # no event tells of the end of a process that is no child
    return tuple(f"process {pid}" for pid in found)


def _labelled(name: str) -> Iterator[tuple[int, str]]:
    """(number, launcher) of each process of this user that belongs to the launch."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue  # root may read the environment of all
            labels = _labels(pid)
            if labels.get(NAME_VARIABLE) == name:
                yield pid, labels.get(LAUNCHER_VARIABLE, "")


def _labels(pid: int) -> dict[str, str]:
    """The environment of a process; empty if it has ended or may not be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in data.split(b"\0"))
    return {name: value for name, _, value in pairs}
