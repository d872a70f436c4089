"""A parameter server for benchmarks: a scheduler and servers, each a process as users start it."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import results
from processes import PATIENCE_S, POLL_S

from xain_foundation.net.sockets import free_ports
from xain_parameters.client.connecting import connect_sync
from xain_parameters.client.sync import Server
from xain_parameters.scheduler.client import SchedulerCalls
from xain_parameters.scheduler.reports import Status

PROGRAM = ["-c", "import sys; from xain_parameters.cli import main; sys.exit(main())"]


class Group:
    """`xain-parameter-server scheduler` with these flags, and `serve` processes.

    folder: for the scheduler's journal, and of each server the log. Files of the error output, too.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.target = f"127.0.0.1:{free_ports(1)[0]}"
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_starts: Counter[str] = Counter()
        self._calls = SchedulerCalls(self.target)
        self._start("scheduler", "scheduler", "--listen", self.target, *flags)

    def start_servers(self, *names: str) -> None:
        """Start servers without waiting for them; see wait_serving."""
        for name in names:
            self._start(name, "serve", "--scheduler", self.target, "--name", name)

    def wait_serving(self, *names: str) -> None:
        """Wait until these servers are members of the group."""
        self.wait(lambda: all(self._is_serving(name) for name in names))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} has ended:\n{self._errors(name).read_text()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"the group was not ready within {PATIENCE_S:g} s")
            time.sleep(POLL_S)  # a poll: it ends when the condition holds

    def status(self) -> Status:
        return self._calls.status(PATIENCE_S)

    def checkpoint(self) -> None:
        """Returns when it is whole."""
        self._calls.checkpoint(PATIENCE_S)

    def processor_seconds(self) -> float:
        """Processor time of all processes of the group so far; 0 where the system does not tell."""
        total_ns = 0
        for process in self._processes.values():
            for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                total_ns += int(task.read_text(encoding="ascii").split()[0])
        return total_ns / 1e9

    def kill(self, name: str) -> None:
        """SIGKILL. The server may be started again under its name."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        self._calls.close()
        for name in list(self._processes):
            self.kill(name)

    def _start(self, name: str, *command: str) -> None:
        arguments = [sys.executable, *PROGRAM, *command, "--data", str(self._folder / name)]
        with self._errors(name).open("ab") as errors, results.uninterrupted():
            self._processes[name] = subprocess.Popen(arguments, stderr=errors)
        self._num_starts[name] += 1

    def _is_serving(self, name: str) -> bool:
        return self._errors(name).read_text().count(" serving on ") == self._num_starts[name]

    def _errors(self, name: str) -> Path:
        return self._folder / f"{name}.err"


@contextmanager
def group_of(num_servers: int, *flags: str) -> Iterator[Group]:
    """A group whose servers s0, s1, ... are there. flags: of the scheduler."""
    with results.scratch() as folder:
        group = Group(folder, *flags)
        try:
            names = [f"s{index}" for index in range(num_servers)]
            group.start_servers(*names)
            group.wait_serving(*names)
            yield group
        finally:
            group.close()


def connected(group: Group, worker: str = "w") -> Server:
    return connect_sync(group.target, worker=worker, timeout_s=PATIENCE_S)
