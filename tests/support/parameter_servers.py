"""A whole parameter server in this process: a real scheduler, servers and workers."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from support.waiting import wait_until
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_parameters.client.core import Core
from xain_parameters.client.sync import Server
from xain_parameters.node.server import ParameterServer
from xain_parameters.scheduler.journal import Journal
from xain_parameters.scheduler.service import SchedulerServer
from xain_parameters.scheduler.state import Settings
from xain_parameters.scheduler.worker_client import WorkerScheduler
from xain_parameters.specs import View

TIMES = {"lease_s": 1.0, "grace_s": 0.3, "worker_lease_s": 3.0}
LONG_S = 120.0  # for what takes milliseconds, on a machine that has other things to do

Identify = Callable[[str, Role], Certificates | None]


class Servers:
    """A scheduler, and what a test starts beside it; all are closed with the stack.

    tls: certificates by name and role. times: the scheduler's leases.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        tls: Identify = lambda name, role: None,
        times: dict[str, float] = TIMES,
        **settings: object,
    ) -> None:
        self.folder, self.stack, self._tls = folder, stack, tls
        journal = Journal(folder / "scheduler.db")
        chosen = Settings(num_ranges=4, **settings)
        own = tls("scheduler", Role.NODE)
        self.scheduler = stack.enter_context(SchedulerServer(journal, chosen, tls=own, **times))
        self.target = self.scheduler.target
        self.servers: dict[str, ParameterServer] = {}

    def start(self, name: str) -> ParameterServer:
        own = self._tls(name, Role.NODE)
        server = ParameterServer(self.target, name, folder=self.folder / name, tls=own)
        self.stack.callback(server.close)
        self.servers[name] = server
        return server

    def join(self, name: str) -> WorkerScheduler:
        scheduler = WorkerScheduler(self.target, name, self._tls(name, Role.PARTICIPANT))
        self.stack.callback(scheduler.close)
        scheduler.join(LONG_S)
        return scheduler

    def worker(self, name: str) -> Server:
        scheduler = self.join(name)
        server = Server(Core(scheduler, LONG_S, scheduler._tls))
        self.stack.callback(server.close)
        return server

    @property
    def view(self) -> View:
        return next(iter(self.servers.values()))._scheduler.view

    def wait_for_servers(self, number: int) -> None:
        """Wait until each range has this number of servers; a new server's view has no ranges."""

        def are_there() -> bool:
            ranges = self.view.ranges
            return bool(ranges) and all(len(each.servers) == number for each in ranges)

        wait_until(are_there)
