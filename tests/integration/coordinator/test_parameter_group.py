"""A parameter server in the coordinator's process: [parameters] of its configuration."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import xain_parameters as parameters
from support.certificates import make_authority, write_folder
from support.process import CoordinatorProcess, ParticipantProcess, ran
from support.waiting import until
from xain_coordinator.assembly.parameter_group import ParameterGroup
from xain_coordinator.cli import main as coordinator_cli
from xain_coordinator.config.sections.parameters import ParametersSettings
from xain_foundation.net.sockets import free_ports
from xain_foundation.security.identity import Role
from xain_parameters import cli as server_cli
from xain_parameters.node.server import ParameterServer
from xain_parameters.scheduler.client import SchedulerCalls
from xain_parameters.scheduler.reports import Status

SERVER = "import sys; from xain_parameters.cli import main; sys.exit(main())"
LONG_S = 60.0
ROWS = np.arange(100.0, dtype=np.float32).reshape(25, 4)


class Group(CoordinatorProcess):
    """A coordinator process with a parameter server at `target`."""

    def __init__(self, folder: Path, **settings: object) -> None:
        port = free_ports(1)[0]
        self.target = f"127.0.0.1:{port}"
        others = {f"parameters.{key}": value for key, value in settings.items()}
        super().__init__(folder, {"parameters.port": port, "rounds.rounds": 3, **others})

    def parameters(self) -> Status:
        with SchedulerCalls(self.target) as calls:
            return calls.status(LONG_S)

    async def until(self, condition: Callable[[Status], bool]) -> None:
        await until(lambda: condition(self.parameters()))

    async def until_served_by(self, *names: str) -> None:
        """Wait until these are the servers, and no range is on its way to another one."""
        await self.until(
            lambda status: (
                sorted(status.addresses) == sorted(names)
                and all(each.servers and not each.learners for each in status.ranges)
            )
        )


def said_by(program: typer.Typer, *arguments: str) -> str:
    environment = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(program, arguments, env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout


def pushed(target: str) -> None:
    """Rows are pushed, once, by a worker."""
    with parameters.connect_sync(target, worker="w0") as server:
        server.dense("w", ROWS.shape).push(ROWS)


def pulled(target: str) -> np.ndarray:
    with parameters.connect_sync(target, worker="reader") as server:
        return server.dense("w", ROWS.shape).pull()


async def test_status_of_the_coordinator_shows_its_parameter_server(tmp_path, keep):
    """The same lines, and the same JSON, as `xain-parameter-server status`."""
    group = keep(Group(tmp_path))
    await group.start()
    await group.until_served_by("coordinator")
    await asyncio.to_thread(pushed, group.target)
    address = f"127.0.0.1:{group.port}"

    def told() -> tuple[str, str]:
        return (
            said_by(coordinator_cli.app, "status", "--address", address),
            said_by(server_cli.app, "status", "--scheduler", group.target),
        )

    await group.until(
        lambda status: (
            (load := status.loads.get("coordinator")) is not None and load.bytes == ROWS.nbytes
        )
    )
    # Rates are of the last half second, so that they are the same when nothing is pushed any more.
    async with asyncio.timeout(LONG_S):
        while True:
            whole, part = await asyncio.to_thread(told)
            if whole.endswith(part):
                break
    assert part.startswith("parameters: 1 servers, 1 jobs, 8 ranges, 1 tables, 0 workers;")
    assert "server coordinator at 127.0.0.1:" in part
    as_json = await asyncio.to_thread(
        said_by, coordinator_cli.app, "status", "--address", address, "--json"
    )
    mine = json.loads(as_json)["parameters"]
    theirs = await asyncio.to_thread(
        said_by, server_cli.app, "status", "--scheduler", group.target, "--json"
    )
    views = [each["jobs"]["table:w"]["view"] for each in (mine, json.loads(theirs))]
    assert views[0] == views[1]


async def test_ranges_move_to_another_server_before_the_coordinator_stops(tmp_path, keep):
    """Without a log they would be lost with its process."""
    group = keep(Group(tmp_path))
    await group.start()
    await group.until_served_by("coordinator")
    await asyncio.to_thread(pushed, group.target)
    command = ["-c", SERVER, "serve", "--scheduler", group.target, "--name", "s1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--data", str(tmp_path / "s1"), stderr=subprocess.DEVNULL
    )
    try:
        await group.until_served_by("coordinator", "s1")
        assert {each.servers for each in group.parameters().ranges} == {("coordinator",), ("s1",)}
        assert await group.stop() == 0
        await group.start()
        await group.until_served_by("coordinator", "s1")
        np.testing.assert_array_equal(await asyncio.to_thread(pulled, group.target), ROWS)
        assert group.parameters().num_rollbacks == 0
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def test_rounds_and_pushes_go_on_side_by_side(tmp_path, keep):
    group = keep(Group(tmp_path))
    await group.start()
    participant = ParticipantProcess(tmp_path / "a", "a", f"127.0.0.1:{group.port}", "--size=1000")
    has_ended = threading.Event()
    num_pushes = 0

    def push() -> None:
        nonlocal num_pushes
        with parameters.connect_sync(group.target, worker="w0") as server:
            w = server.dense("w", ROWS.shape)
            while not has_ended.is_set():
                w.push(ROWS)
                num_pushes += 1
            np.testing.assert_array_equal(w.pull(), num_pushes * ROWS)

    pushing = asyncio.create_task(asyncio.to_thread(push))
    try:
        await participant.start()
        assert await participant.died() == 0
    finally:
        has_ended.set()
        await participant.end()
    await pushing
    assert num_pushes > 0
    assert {round_ for what, round_ in participant.book() if what == "handed_in"} >= {0, 1, 2}


def test_port_or_folder_that_is_taken_is_an_error_of_one_line(tmp_path):
    with closing(ParameterGroup(ParametersSettings(port=0, path=tmp_path / "a"))) as group:
        port = int(group.target.rpartition(":")[2])
        with pytest.raises(
            OSError, match=r"\[parameters\] cannot be served: cannot listen on"
        ) as at:
            ParameterGroup(ParametersSettings(port=port, path=tmp_path / "b"))
        assert "\n" not in str(at.value)
        with pytest.raises(OSError, match=r"cannot be served: another scheduler has .*a/scheduler"):
            ParameterGroup(ParametersSettings(port=0, path=tmp_path / "a"))
    ParameterGroup(ParametersSettings(port=port, path=tmp_path / "a")).close()


def test_group_with_certificates_takes_workers_that_have_them(tmp_path):
    authority = make_authority()
    own = write_folder(tmp_path / "own", authority, Role.COORDINATOR, "coordinator.example.org")
    folder = write_folder(tmp_path / "w", authority, Role.PARTICIPANT, "w", hosts=())
    settings = ParametersSettings(port=0, path=tmp_path / "a")
    with closing(ParameterGroup(settings, parameters.Certificates(own))) as group:
        with parameters.connect_sync(
            group.target, worker="w", tls=parameters.Certificates(folder)
        ) as server:
            w = server.dense("w", (5,))
            w.push(np.ones(5, np.float32))
            np.testing.assert_array_equal(w.pull(), np.ones(5))
        with pytest.raises(parameters.Unavailable):
            parameters.connect_sync(group.target, worker="stranger", timeout_s=1.0)


def test_coordinator_without_a_parameter_server_does_not_import_one():
    program = (
        "import sys, xain_coordinator.process.run, xain_coordinator.cli.main; "
        "import xain_coordinator.config.coordinator; "
        "print([name for name in sys.modules if name.startswith('xain_parameters')])"
    )
    done = ran("-c", program)
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_server_that_failed_is_started_again_and_has_its_log(tmp_path):
    """Rounds of the process go on meanwhile; nothing acknowledged is lost."""
    with closing(ParameterGroup(ParametersSettings(port=0, path=tmp_path, log=True))) as group:
        pushed(group.target)
        first = group._server
        first._fail(OSError("no space left on device"))
        while group._server is first:  # until then it may answer a pull
            time.sleep(0.01)  # a poll: the test has a time limit
        np.testing.assert_array_equal(pulled(group.target), ROWS)
        assert json.loads(group.status())["jobs"]["table:w"]["num_rollbacks"] == 0


def test_scheduler_alone_waits_for_servers_of_other_processes(tmp_path):
    with closing(ParameterGroup(ParametersSettings(port=0, path=tmp_path, server=False))) as group:
        assert json.loads(group.status())["addresses"] == {}
        with ParameterServer(group.target, "s1"):
            pushed(group.target)
            np.testing.assert_array_equal(pulled(group.target), ROWS)
