"""The programs of the parameter server: those that serve as processes, the others in this one."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from xain_foundation.net.sockets import free_ports
from xain_parameters import KVWorker, LocalGroup, connect_sync
from xain_parameters.cli import app
from xain_parameters.config import SchedulerSettings

PROGRAM = [
    sys.executable,
    "-c",
    "import sys; from xain_parameters.cli import main; sys.exit(main())",
]
LONG_S = 240.0  # for what takes seconds, on a machine that has other things to do


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def refused(*arguments: str) -> str:
    """The line that refuses the settings of a command."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    return str(result.stderr)


@contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A command, killed at the end if it still runs."""
    with subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def scheduler_in(folder: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    started = running("scheduler", "--listen", "127.0.0.1:0", "--data", str(folder), *arguments)
    with started as process:
        yield process, process.stderr.readline().split()[-1]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_scheduler_tells_its_status_and_stops_cleanly(tmp_path, stop):
    with scheduler_in(tmp_path) as (process, target):
        status = run("status", "--scheduler", target)
        assert (status.exit_code, status.stderr) == (0, "")
        assert status.stdout.startswith(
            "parameters: 0 servers, 0 jobs, 0 ranges, 0 tables, 0 workers;"
        )
        second = run("scheduler", "--listen", "127.0.0.1:0", "--data", str(tmp_path))
        assert second.exit_code == 1
        assert "another scheduler has" in second.stderr
        failed = run("checkpoint", "--scheduler", target)
        assert failed.exit_code == 1
        assert "without --checkpoints" in failed.stderr
        process.send_signal(stop)
        assert process.wait(LONG_S) == 0


def test_job_without_a_name_is_listed_and_removed_as_it_is_shown():
    with LocalGroup(1) as group, group.connect("a") as server:
        kv = KVWorker(server)
        kv.wait(kv.push([1], np.ones(1, np.float32)))
        kv.close()
        server.close()
        assert run("jobs", "list", "--scheduler", group.target).stdout == "(no name)\n"
        removed = run("jobs", "remove", "(no name)", "--scheduler", group.target)
        assert (removed.exit_code, removed.stderr) == (0, "")
        assert run("jobs", "list", "--scheduler", group.target).stdout == ""


def test_server_joins_and_leaves_with_sigterm(tmp_path):
    """When its process has ended, the scheduler does not list it any more."""
    with scheduler_in(tmp_path / "a") as (scheduler, target):
        with running("serve", "--scheduler", target, "--name", "s1") as server:
            assert "s1 serving on 127.0.0.1:" in server.stderr.readline()
            assert "server s1 at 127.0.0.1:" in run("status", "--scheduler", target).stdout
            server.send_signal(signal.SIGTERM)
            assert server.wait(LONG_S) == 0
        assert "server s1" not in run("status", "--scheduler", target).stdout
        scheduler.send_signal(signal.SIGTERM)
        assert scheduler.wait(LONG_S) == 0


def test_server_that_waits_for_the_scheduler_ends_at_ctrl_c(tmp_path):
    (port,) = free_ports(1)
    with running("serve", "--scheduler", f"127.0.0.1:{port}", "--name", "s1") as server:
        assert f"waits for the scheduler at 127.0.0.1:{port}" in server.stderr.readline()
        server.send_signal(signal.SIGINT)
        assert server.wait(LONG_S / 2) == 0


def test_checkpoints_in_a_relative_folder_are_found_from_other_working_directories(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = SchedulerSettings(checkpoints="cuts").settings()
    assert settings.checkpoints == str(tmp_path / "cuts")
    url = SchedulerSettings(checkpoints="s3://bucket/cuts").settings()
    assert url.checkpoints == "s3://bucket/cuts"


def test_wrong_settings_are_refused_in_one_line(tmp_path):
    for arguments, text in (
        (["--replicas", "many"], "scheduler.replicas is"),
        (["--listen", "localhost:x"], "is no address"),
        (["--checkpoint-interval", "5"], "scheduler.checkpoints must be given too"),
    ):
        assert text in refused("scheduler", "--data", str(tmp_path), *arguments)


def test_server_that_others_cannot_connect_to_is_refused():
    assert "server.advertised" in refused("serve", "--listen", "0.0.0.0:50060", "--insecure")


def test_checkpoint_without_a_scheduler_is_not_waited_for():
    """A checkpoint itself may take ten minutes, beyond the time limit of this test."""
    result = run("checkpoint", "--scheduler", f"127.0.0.1:{free_ports(1)[0]}")
    assert result.exit_code == 1
    assert "does not answer" in result.stderr


def test_status_of_an_absent_scheduler_is_one_line():
    asked = run("status", "--scheduler", "127.0.0.1:1", "--timeout", "0.5")
    assert asked.exit_code == 1
    assert asked.stderr.startswith("xain-parameter-server: the scheduler at 127.0.0.1:1 does not")


@pytest.mark.parametrize("command", ["scheduler", "serve"])
def test_program_that_others_reach_needs_certificates_or_consent(tmp_path, command):
    told = refused(command, "--listen", "0.0.0.0:0", "--set", f"{command_section(command)}.data=x")
    for text in ("certs init", "tokens create", "tls.folder", "--insecure"):
        assert text in told
    flags = ("--listen", "0.0.0.0:0", "--data", str(tmp_path), "--insecure")
    if command == "scheduler":
        with running(command, *flags) as process:
            assert " serving on 0.0.0.0:" in process.stderr.readline()
    else:
        with (
            scheduler_in(tmp_path / "scheduler") as (_, target),
            running(
                command, *flags, "--scheduler", target, "--set=server.advertised=127.0.0.1"
            ) as process,
        ):
            assert " serving on 127.0.0.1:" in process.stderr.readline()


def command_section(command: str) -> str:
    return "server" if command == "serve" else command


def test_port_alone_is_no_address():
    """A host with the name of a number would be looked up, and not be found."""
    told = refused("scheduler", "--listen", "50052")
    assert "'50052' is no address; write HOST:PORT" in told


@pytest.mark.parametrize("command", ["serve", "status", "checkpoint", "roll-back"])
def test_scheduler_on_another_machine_is_not_called_in_the_clear(command):
    """The tables would go to whoever answers there."""
    told = refused(command, "--scheduler", "fleet.example.org")
    for text in ("fleet.example.org", "--insecure"):
        assert text in told
    with pytest.raises(ValueError, match=r"another machine.*insecure=True"):
        connect_sync("fleet.example.org:50052", worker="w")
