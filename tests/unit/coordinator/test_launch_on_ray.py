"""`xain-coordinator launch --with ray` without a cluster: what it needs, and whom it lets in."""

import sys
from pathlib import Path
from typing import Any, Self

import pytest

from xain_coordinator.cli.launch import actors, cli
from xain_coordinator.config.sections.launch import LaunchSettings
from xain_foundation.backends.port import BackendError
from xain_foundation.backends.program import ProgramCall
from xain_foundation.backends.ray_backend import RayBackend
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net.sockets import free_ports


def told(capsys: pytest.CaptureFixture[str], work: Path, *arguments: str) -> str:
    """The one line in which a launch says why it does not begin."""
    common = ("--data=iris", "--workload=sgd", "--with=ray", f"--work={work}")
    assert cli.main([*common, *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_missing_ray_is_told_with_the_extra_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    line = told(capsys, tmp_path)
    assert "--with ray needs Ray: pip install 'xain_coordinator-" in line
    assert line.endswith(".whl[ray]'")


def test_address_without_a_cluster_is_told_at_once(capsys, tmp_path):
    """Ray itself would try for ever."""
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    line = told(capsys, tmp_path, f"--set=launch.ray_address={address}")
    assert f"no Ray cluster at '{address}': nobody listens at " in line


class Cluster:
    """A cluster whose other nodes are on other machines."""

    host = "192.0.2.7"

    def __init__(self, *_: object, **__: object) -> None:
        self.is_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_left = True

    def queue(self, size: int) -> None: ...


def test_other_machines_call_the_coordinator_in_the_clear_only_if_told(monkeypatch):
    """The coordinator listens where they reach it, or on the host of [launch]."""
    cluster = Cluster()
    monkeypatch.setattr(actors, "RayBackend", lambda *_, **__: cluster)
    with pytest.raises(CommandFailed, match=r"at 192\.0\.2\.7, .* server\.insecure=true"):
        actors.ActorBackend(LaunchSettings(), is_insecure=False)
    assert cluster.is_left
    for host, listens in (("127.0.0.1", "192.0.2.7"), ("0.0.0.0", "0.0.0.0")):
        backend = actors.ActorBackend(LaunchSettings(host=host), is_insecure=True)
        assert backend.bind_host == listens
        assert backend.address(7) == "192.0.2.7:7"


class Output:
    """A queue of the test's own."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: tuple[str, bytes]) -> None:
        self.items.append(item)


def test_program_gives_its_output_and_its_exit_status(monkeypatch):
    """The program inherits no settings of another one."""
    pytest.importorskip("ray")
    monkeypatch.setenv("OTHER_SETTING", "1")
    monkeypatch.setenv("KEPT", "1")
    output = Output()
    shows = "import os; print(sorted({'OTHER_SETTING', 'KEPT', 'OWN'} & set(os.environ)))"
    call = ProgramCall("a", "timeit", ["-n1", "-r1", shows], {"OWN": "1"}, ("OTHER_",), output)
    assert call.run() == "0"
    assert {name for name, _ in output.items} == {"a"}
    printed = b"".join(data for _, data in output.items).decode()
    assert printed.startswith("started on ")
    assert "['KEPT', 'OWN']" in printed
    kills = "import os; os.kill(os.getpid(), 9)"
    assert ProgramCall("a", "timeit", ["-n1", "-r1", kills], {}, (), output).run() == "137"


def test_errors_of_ray_are_those_of_the_port():
    pytest.importorskip("ray")
    with pytest.raises(BackendError, match="no Ray cluster at 'no address'"), _at("no address"):
        raise AssertionError("it does not begin")


def _at(address: str) -> RayBackend:
    return RayBackend(address, {}, "it needs Ray")
