"""Programs of a launch as processes.

The log goes to a file, which shows the lines before a program was killed and started again.
"""

import subprocess
from importlib.util import find_spec
from pathlib import Path

from xain_coordinator.cli.launch.logs import LogFile
from xain_coordinator.cli.launch.plan import COORDINATE, PARAMETERS, PARTICIPATE, Program, Running
from xain_foundation import child
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net.sockets import free_ports
from xain_foundation.settings.fields import join_host_port
from xain_foundation.wheels import pip_install

SETTINGS = ("XAIN_COORDINATOR_", "XAIN_PARAMETERS_", "XAIN_PARTICIPANT_")
MODULES = {
    COORDINATE: "xain_coordinator",
    PARAMETERS: "xain_parameters",
    PARTICIPATE: "xain_participant",
}
ANY = ("0.0.0.0", "::")


class ProcessBackend:
    """Starts programs on this machine. bind_host: where they listen."""

    def __init__(self, bind_host: str) -> None:
        self.bind_host = bind_host
        self._logs = Path()

    def prepare(self, work: Path) -> None:
        """Check that participants are installed, and note the folder of logs. Raises CommandFailed.
        work: a folder with a folder `logs`."""
        if find_spec("xain_participant") is None:
            raise CommandFailed(
                "--with process runs participants here: "
                + pip_install("xain-participant", "tables")
            )
        self._logs = work / "logs"

    def data_dir(self, work: Path) -> str:
        """The work folder where programs run."""
        return str(work.absolute())

    def config_path(self, config: Path | None) -> str | None:
        """The file of settings where the coordinator runs."""
        return None if config is None else str(config.absolute())

    def source(self, source: str, number: int = 0) -> str:
        """A program's data where it runs. number: of the source among Program.data."""
        return source

    def ports(self, wanted: tuple[int, int], *, http: bool) -> tuple[int, int]:
        """The ports on which the published program listens: those wanted, or free ones for 0."""
        # Workers find a coordinator that starts again at the port that it had.
        grpc_port, http_port = (
            port or free for port, free in zip(wanted, free_ports(2), strict=True)
        )
        return grpc_port, http_port

    def start(self, program: Program) -> Running:
        """Start a program, whose output goes to its log. Raises CommandFailed."""
        path = self._logs / f"{program.name}.log"
        with path.open("ab") as log:  # the lines before a restart stay
            lines = LogFile(path)
            popen = child.start(
                MODULES[program.command],
                *program.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child.environment(program.environment, SETTINGS),
                # Ctrl-C is for the launcher, which then stops the others in order.
                start_new_session=True,
            )
        return LocalProcess(program.name, popen, lines)

    def address(self, listens: int) -> str:
        """HOST:PORT at which this machine reaches a port of the published program."""
        return join_host_port(self.host(""), listens)

    def host(self, name: str) -> str:
        """The host at which programs of the launch reach the program of this name."""
        return "127.0.0.1" if self.bind_host in ANY else self.bind_host

    def close(self) -> None:
        """Remove what prepare() made."""


class LocalProcess:
    """A program that was started, as a process; see Running."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: LogFile) -> None:
        self.name = name
        self.pid = popen.pid
        self.new_lines = log.new_lines
        self._popen = popen

    def status(self) -> int | None:
        code = self._popen.poll()
        return None if code is None else child.exit_status(code)

    def terminate(self) -> None:
        if self.status() is None:
            self._popen.terminate()

    def remove(self, timeout_s: float) -> None:
        """Wait timeout_s for the end of the process, then kill it."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
