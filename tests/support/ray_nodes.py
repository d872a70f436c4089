"""Nodes of a Ray cluster on this machine."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.process import PATIENCE_S
from xain_foundation.net.sockets import free_ports

ENVIRONMENT = {
    **os.environ,
    # Workers import the scripts by name.
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else a token in the user's home would be asked of some of the processes.
    "RAY_AUTH_MODE": "disabled",
    # Within 2 s a node's loss is noticed.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}


class Node:
    """A node of a cluster; one without an address is its head. name: in the environment of its
    workers."""

    def __init__(self, num_cpus: int, folder: Path, address: str = "") -> None:
        self.name = secrets.token_hex(8)
        self.address = address or f"127.0.0.1:{free_ports(1)[0]}"
        port, clients = self.address.rpartition(":")[2], free_ports(1)[0]
        head = ("--head", f"--port={port}", f"--ray-client-server-port={clients}")
        joins = (f"--address={address}",) if address else (*head, "--include-dashboard=false")
        self._log = folder / f"{self.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *joins),
                    *(f"--num-cpus={num_cpus}", "--object-store-memory=80000000"),
                    *("--node-ip-address=127.0.0.1", "--disable-usage-stats"),
                    *("--min-worker-port=0", "--max-worker-port=0"),  # whichever are free
                    "--dashboard-agent-listen-port=0",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**ENVIRONMENT, "NODE": self.name},
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        def is_up() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            return "Ray runtime started." in self._log.read_text()

        wait_for(is_up)

    def kill(self) -> None:
        """Kill all processes of the node, as a power cut does."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def _pids(self) -> list[int]:
        """Processes of the session that the node began. Some overwrite their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(") ")[2].split()
                if int(fields[3]) == self._process.pid:
                    found.append(int(folder.name))
        return found


@contextlib.contextmanager
def running(num_cpus: int, folder: Path, address: str = "") -> Iterator[Node]:
    """A node that is up, and is killed at the end."""
    node = Node(num_cpus, folder, address)
    try:
        node.wait_until_up()
        yield node
    finally:
        node.kill()


def wait_for(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)  # a poll, not a race: it ends when it is so
