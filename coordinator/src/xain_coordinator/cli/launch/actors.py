"""Participants of a launch as actors of a Ray cluster (extra `xain-coordinator[ray]`).

Ray places them on its nodes. The other programs run on this machine, which is a node, too. What
participants print comes to this machine in a queue, and goes into the files of their logs.
"""

import time
from contextlib import suppress
from pathlib import Path
from queue import Empty

from xain_coordinator.cli.launch.logs import LogFile
from xain_coordinator.cli.launch.plan import KILLED, PARTICIPATE, Program, Running
from xain_coordinator.cli.launch.processes import (
    ANY,
    MODULES,
    SETTINGS,
    ProcessBackend,
)
from xain_coordinator.config.sections.launch import LaunchSettings
from xain_foundation.backends.port import BackendError
from xain_foundation.backends.program import ProgramCall
from xain_foundation.backends.ray_backend import RayBackend
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.settings.fields import is_loopback
from xain_foundation.wheels import pip_install

LOOK_S = 0.05  # between two looks at the cluster, however many programs ask
MAX_PRINTED = 100  # pieces of output on their way, beyond which participants wait


class ActorBackend(ProcessBackend):
    """Starts participants as actors, and other programs as ProcessBackend does.

    The supervisor starts an actor again whose node is lost, as it does with all programs: it counts
    its deaths and tells them.
    """

    def __init__(self, settings: LaunchSettings, *, is_insecure: bool) -> None:
        """Connect to the Ray cluster. Raises CommandFailed without Ray, without a cluster, and if
        participants on other machines would call the coordinator in the clear, and is_insecure is
        not set."""
        self._cluster = RayBackend(
            settings.ray_address,
            {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
            "--with ray needs Ray: " + pip_install("xain-coordinator", "ray"),
            max_restarts=0,
        )
        try:
            self._cluster.__enter__()
        except BackendError as error:
            raise CommandFailed(str(error)) from None
        self._reached_at = self._cluster.host
        super().__init__(self._reached_at if is_loopback(settings.host) else settings.host)
        if not (is_loopback(self.bind_host) or is_insecure):
            self.close()
            raise CommandFailed(
                f"workers on other machines reach this one at {self.host('')}, and have no "
                "certificates there: --set server.insecure=true lets them call the coordinator in "
                "the clear"
            )
        self._output = self._cluster.queue(MAX_PRINTED)
        self._running: dict[str, Actor] = {}
        self._looked_at = 0.0

    def prepare(self, work: Path) -> None:
        self._logs = work / "logs"

    def start(self, program: Program) -> Running:
        """Start a participant as an actor, whose output goes to its log, and any other program as a
        process."""
        if program.command != PARTICIPATE:
            return super().start(program)
        call = ProgramCall(
            program.name,
            MODULES[program.command],
            program.arguments,
            program.environment,
            SETTINGS,
            self._output,
        )
        path = self._logs / f"{program.name}.log"
        path.touch()
        actor = Actor(program.name, LogFile(path), self)
        self._cluster.start(program.name, call.run)
        self._running[program.name] = actor
        return actor

    def host(self, name: str) -> str:
        return self._reached_at if self.bind_host in ANY else self.bind_host

    def look(self) -> None:
        """Note which actors have ended, and write what participants have printed."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            for name, status in self._cluster.wait(0).items():
                self._running.pop(name).code = int(status)
        except BackendError as error:
            self._running.pop(error.died).code = KILLED
            self._write(error.died, f"{error}\n".encode())
        # After that: the last output of a participant comes before its end.
        with suppress(Empty):  # the queue has died meanwhile
            for name, data in self._output.get_nowait_batch(self._output.qsize()):
                self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        """Append output to a program's log."""
        with (self._logs / f"{name}.log").open("ab") as log:
            log.write(data)

    def stop(self, name: str) -> None:
        """Kill an actor, and its program with it. No effect on one that has ended."""
        self._running.pop(name, None)
        self._cluster.stop(name)

    def close(self) -> None:
        self._cluster.__exit__()


class Actor:
    """A program that was started, as an actor; see Running.

    code: its exit status; None while it runs, or waits for a node with room for it.
    """

    def __init__(self, name: str, log: LogFile, backend: ActorBackend) -> None:
        self.name = name
        self.code: int | None = None
        self._log = log
        self._backend = backend

    def status(self) -> int | None:
        self._backend.look()
        return self.code

    def new_lines(self) -> list[str]:
        self._backend.look()
        return self._log.new_lines()

    def terminate(self) -> None:
        self._backend.stop(self.name)

    def remove(self, timeout_s: float) -> None:
        self._backend.stop(self.name)
