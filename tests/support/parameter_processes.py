"""A parameter server in processes of its own, to be killed."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from support import parameter_worker, request_worker
from support.waiting import PATIENCE_S, wait_until
from xain_foundation.net.sockets import free_ports
from xain_parameters.scheduler.client import SchedulerCalls
from xain_parameters.scheduler.reports import Status

PROGRAM = ["-c", "import sys; from xain_parameters.cli import main; sys.exit(main())"]
# A killed worker is back within its lease on a slow machine too.
WORKER_LEASE_S = 60


class Fleet:
    """A scheduler with these flags, on a port that it keeps, and whatever a test starts."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.target = f"127.0.0.1:{free_ports(1)[0]}"
        self._flags = flags
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_starts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self.start_scheduler()
        self._calls = SchedulerCalls(self.target)
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, *command: str) -> None:
        # SIGABRT makes faulthandler print where each thread is.
        with self.log_path(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *command], stderr=log, cwd=self.folder
            )

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text()

    def start_scheduler(self) -> None:
        data = str(self.folder / "scheduler")
        self._start(
            "scheduler",
            *PROGRAM,
            "scheduler",
            "--listen",
            self.target,
            "--data",
            data,
            f"--set=scheduler.worker_lease_s={WORKER_LEASE_S}",
            *self._flags,
        )

    def start_servers(self, *names: str, flags: tuple[str, ...] = ()) -> None:
        """Returns when they are members of the group."""
        for name in names:
            data = str(self.folder / name)
            self._num_starts[name] += 1
            self._start(
                name,
                *PROGRAM,
                "serve",
                *("--scheduler", self.target, "--name", name, "--data", data, *flags),
            )
        wait_until(
            lambda: all(
                self.log(name).count(" serving on ") == self._num_starts[name] for name in names
            )
        )

    def start_workers(self, *names: str, num_workers: int = 2) -> None:
        for name in names:
            program = (parameter_worker.__file__, self.target, name)
            self._start(name, *program, str(num_workers), str(self.folder))

    def start_answering_workers(self, *names: str, job: str) -> None:
        """Workers that do nothing but answer requests, by answer() of handlers.py in the folder.
        Returns when they are members of the group."""
        for name in names:
            self._start(name, request_worker.__file__, self.target, name, job)
        self.until_there(*(f"ready-{name}" for name in names))

    def until_there(self, *files: str) -> None:
        wait_until(lambda: all((self.folder / file).exists() for file in files))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        process = self._processes[name]
        assert process.poll() is None, self.log(name)
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()

    def ended(self, *names: str) -> None:
        """Wait until these have ended well. One that does not end says where it is."""
        for name in names:
            process = self._processes[name]
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                process.wait(PATIENCE_S)
            assert process.returncode == 0, self.log(name)

    def status(self) -> Status:
        return self._calls.status(PATIENCE_S)

    def until(self, condition: Callable[[Status], bool]) -> None:
        wait_until(lambda: condition(self.status()))

    def until_replicated(self) -> None:
        """Wait until each range has its backup."""
        self.until(lambda status: all(len(each.servers) == 2 for each in status.ranges))

    # --- workers that wait in the middle of a clock ---

    def hold(self, worker: str, *clocks: int) -> None:
        for clock in clocks:
            (self.folder / f"hold-{worker}-{clock}").touch()

    def until_held(self, worker: str, clock: int) -> None:
        wait_until((self.folder / f"held-{worker}-{clock}").exists)

    def release(self, worker: str, clock: int) -> None:
        (self.folder / f"hold-{worker}-{clock}").unlink()
