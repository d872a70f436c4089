"""Every program does its work and ends when it is told to, whatever becomes of its standard
streams: a pipe that nobody reads, a terminal after Ctrl-S, a reader that has gone, no streams."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from support.certificates import make_authority, write_folder
from support.command_lines import APPS
from support.streams import broken_streams
from support.terminals import BIN
from xain_coordinator.inspection import client as inspection_client
from xain_foundation.net.sockets import free_ports
from xain_foundation.security.identity import Role
from xain_parameters.errors import ParameterError
from xain_parameters.scheduler.client import SchedulerCalls
from xain_workloads.sparse.generator import SHAPES, write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

PATIENCE_S = 120.0
# Commands that go on beside what they print; each is started below.
SERVICES = {
    "xain-coordinator",
    "xain-coordinator demo",
    "xain-coordinator evaluate",  # by the same function as xain-coordinator
    "xain-coordinator launch",
    "xain-parameter-server scheduler",
    "xain-parameter-server serve",
    "xain-participant",
    "xain-participant sparse",
    "xain-participant tunnel",
}
# Commands that only print, for a reader that they may wait for: SIGTERM ends them at once.
PRINTERS = {
    *(
        "audit",
        "backup",
        "certs",
        "check-config",
        "describe",
        "export",
        "extend",
        "fetch",
        "gains",
        "importance",
        "jobs",
        "join",
        "models",
        "participants",
        "predict",
    ),
    *("renew", "repair", "report"),
    *(
        "restore",
        "session",
        "status",
        "study",
        "timings",
        "tokens",
        "checkpoint",
        "roll-back",
        "inspect",
        "new",
        "renew",
        "sparse-data",
    ),
}

Start = Callable[..., "subprocess.Popen[bytes]"]


def with_streams(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize a test by kinds of streams. All programs call one function, streams.unblock():
    two programs meet all kinds, and the others those that differ for processes that they start."""
    return pytest.mark.parametrize("start", kinds, indirect=True)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a program with such streams; whatever still runs is killed at the end."""
    with broken_streams(request.param) as function:
        yield function


def until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        time.sleep(0.05)  # a poll, not a race


def stopped(process: "subprocess.Popen[bytes]") -> int:
    """The exit status after SIGTERM, which the process must heed in time."""
    process.terminate()
    return process.wait(PATIENCE_S)


def program(name: str) -> str:
    return str(BIN / name)


def test_each_command_is_tested_or_only_prints():
    """A new command calls streams.unblock() and is started below, or waits for its reader."""
    commands = set()
    for name, app in APPS.items():
        command = typer.main.get_command(app)
        if getattr(command, "invoke_without_command", True):
            commands.add(name)
        commands |= {f"{name} {sub}" for sub in getattr(command, "commands", {})}
    printers = {name for name in commands if name.split()[-1] in PRINTERS}
    assert commands - printers == SERVICES


@with_streams("full", "stopped", "broken", "closed")
def test_coordinator_and_participant_train_and_end(start, tmp_path):
    """The log at level debug is longer than what a pipe holds."""
    port_file = tmp_path / "address"
    coordinator = start(
        program("xain-coordinator"),
        *("--workload=sgd", "--rounds=20", "--port=0", f"--data-dir={tmp_path}"),
        *(f"--set=server.port_file={port_file}", "--set=logging.level=debug"),
    )
    until(port_file.exists, coordinator)
    address = port_file.read_text().strip()
    participant = start(
        program("xain-participant"),
        *("--data=iris", f"--coordinator={address}", "--set=logging.level=debug"),
    )
    assert participant.wait(PATIENCE_S) == 0
    snapshot = inspection_client.fetch(address)
    assert snapshot.status.num_trained == 20
    waiting = start(program("xain-participant"), "--data=iris", "--coordinator=127.0.0.1:1")
    assert stopped(coordinator) == 0
    until(lambda: is_handling(waiting.pid, signal.SIGTERM), waiting)
    assert stopped(waiting) == 128 + signal.SIGTERM


def is_handling(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)


@with_streams("full")
def test_parameter_server_and_its_worker_train_and_end(start, tmp_path):
    write(tmp_path / "rows.svm", SHAPES["kdd12"].scaled(4e-5), 1, 0, 1)
    target = f"127.0.0.1:{free_ports(1)[0]}"
    parameter_server = program("xain-parameter-server")
    scheduler = start(
        parameter_server, "scheduler", f"--listen={target}", f"--data={tmp_path / 'scheduler'}"
    )
    server = start(
        *(parameter_server, "serve", f"--scheduler={target}", "--name=s"),
        f"--data={tmp_path / 'servers'}",
    )
    with SchedulerCalls(target) as calls:

        def has_server() -> bool:
            try:
                return "s" in calls.status(1.0).addresses
            except ParameterError:
                return False

        until(has_server, scheduler)
        worker = start(
            *(program("xain-participant"), "sparse", f"--server={target}", "--batch=100"),
            *(f"--data={tmp_path / 'rows.svm'}", f"--test={tmp_path / 'rows.svm'}"),
        )
        assert worker.wait(PATIENCE_S) == 0
        (job,) = calls.status(PATIENCE_S).jobs.values()
        assert job.opened > 1
    assert stopped(server) == 0
    assert stopped(scheduler) == 0


@with_streams("full", "closed")
def test_launch_trains_to_its_end(start, tmp_path):
    launch = start(
        *(program("xain-coordinator"), "launch", "--workload=sgd", "--data=iris", "--workers=2"),
        *("--rounds=2", "--work=work"),
        cwd=tmp_path,
    )
    assert launch.wait(PATIENCE_S) == 0
    assert "session_finished" in (tmp_path / "work/logs/coordinator.log").read_text()


@with_streams("stopped")
def test_demo_ends_when_it_is_told_to(start, tmp_path):
    """A demo is a launch, too."""
    demo = start(
        *(program("xain-coordinator"), "demo", "--participants=2", "--rounds=100000"),
        f"--keep={tmp_path / 'work'}",
    )
    log = tmp_path / "work/logs/coordinator.log"
    until(lambda: log.exists() and "model_published" in log.read_text(), demo)
    assert stopped(demo) == 128 + signal.SIGTERM


SCRIPT = """
import sys
import numpy as np
import xain

def main(site):
    for round_ in xain.rounds({"w": np.zeros(3, np.float32)}):
        print("x" * 100_000)
        print("x" * 100_000, file=sys.stderr)
        round_.submit({"w": round_.weights["w"] + 1}, samples=1)

if __name__ == "__main__":
    done = xain.simulate(main, 4, workers=2, rounds=2)
    with open(sys.argv[1], "w") as file:
        file.write(repr(done.weights["w"].tolist()))
"""


@with_streams("full")
def test_tunnel_listens_and_ends(start, tmp_path):
    write_folder(tmp_path / "tls", make_authority(), Role.PARTICIPANT, "ward-7")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tunnel = start(
        program("xain-participant"),
        *("tunnel", f"--state-dir={tmp_path}", f"--listen={port}", "--coordinator=localhost:1"),
    )

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    until(listens, tunnel)
    assert stopped(tunnel) == 0


@with_streams("full", "closed")
def test_simulation_trains_and_ends(start, tmp_path):
    """The script itself prints nothing; what its sites and the simulation print holds up nobody."""
    (tmp_path / "script.py").write_text(SCRIPT)
    script = start(sys.executable, "script.py", "result", cwd=tmp_path)
    assert script.wait(PATIENCE_S) == 0
    assert (tmp_path / "result").read_text() == "[2.0, 2.0, 2.0]"


@with_streams("full", "broken")
def test_watched_status_ends(start, tmp_path):
    """The command may wait for its reader; SIGTERM or the end of the reader ends the command."""
    port_file = tmp_path / "address"
    coordinator = subprocess.Popen(
        [
            *(program("xain-coordinator"), "--workload=sgd", "--port=0"),
            *(f"--data-dir={tmp_path}", f"--set=server.port_file={port_file}"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        until(port_file.exists, coordinator)
        address = port_file.read_text().strip()
        watch = start(program("xain-coordinator"), "status", "--watch", f"--address={address}")
        inspection_client.fetch(address)
        assert stopped(watch) in (-signal.SIGTERM, 1)
    finally:
        assert stopped(coordinator) == 0
