"""The common parts of the command lines of coordinator and participant."""

import pytest

from xain_coordinator.cli.main import app as coordinator
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.server import ServerSettings
from xain_foundation.commands import DEFAULT_PORT, parse_assignments, run_app, split_host_port
from xain_parameters import config as parameters
from xain_parameters.cli import app as parameter_server
from xain_participant.config import CoordinatorSettings
from xain_workloads.passes import PASSES, ROUNDS
from xain_workloads.workload import known_workloads


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("fleet:1", "fleet", "1"),
        ("fleet", "fleet", None),
        ("[::1]:1", "[::1]", "1"),
        ("[::1]", "[::1]", None),
        ("::1", "::1", None),
        ("fleet:", "fleet", ""),
    ],
)
def test_split_host_port(address, host, port):
    assert split_host_port(address) == (host, port)


def test_assignments_may_have_blanks_as_in_a_file():
    given = ["rounds.epochs=3", 'data.decimal = ","', "data.missing= -"]
    assert parse_assignments("xain-participant", given, "a=b") == {
        "rounds.epochs": "3",
        "data.decimal": '","',
        "data.missing": " -",
    }


def test_default_port_is_the_same_on_both_sides():
    assert DEFAULT_PORT == ServerSettings().port == CoordinatorSettings().port


@pytest.mark.parametrize(
    "words", [("--help",), ("status", "--help"), ("launch", "--help"), ("demo", "--help")]
)
def test_help_shows_no_value_of_a_flag_that_takes_none(words, capsys):
    """`--json <bool>` would read as if true or false had to follow."""
    assert run_app(coordinator, "xain-coordinator", words) == 0
    assert "--help" in (shown := capsys.readouterr().out)
    assert "<bool>" not in shown


def test_help_of_coordinator_shows_its_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run_app(coordinator, "xain-coordinator", ["--help"])
    shown = capsys.readouterr().out
    config = CoordinatorConfig()
    assert f"by default {config.server.host}. [server.host]" in shown
    assert f"by default {config.server.port}; 0 takes a free one. [server.port]" in shown
    assert f"by default {ROUNDS} for scripts, and" in shown
    assert f"by default {PASSES['sgd']}; rounds follow from them. [rounds.passes]" in shown
    assert f"by default {config.rounds.min_participants}. [rounds.min_participants]" in shown
    assert f"By default {config.journal.path.parent}." in shown
    assert all(name in shown for name in known_workloads())


def test_help_of_parameter_server_shows_its_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run_app(parameter_server, "xain-parameter-server", ["scheduler", "--help"])
    run_app(parameter_server, "xain-parameter-server", ["serve", "--help"])
    shown = capsys.readouterr().out
    scheduler, server = parameters.SchedulerSettings(), parameters.ServerSettings()
    assert f"by default {scheduler.listen}. [scheduler.listen]" in shown
    assert f"by default {scheduler.data}. [scheduler.data]" in shown
    assert f"by default {server.scheduler}. [server.scheduler]" in shown
    assert f"by default {server.data}. [server.data]" in shown


def test_version_names_program_and_version(capsys):
    """The parameter server's program has another name than its distribution."""
    assert run_app(parameter_server, "xain-parameter-server", ["--version"]) == 0
    assert capsys.readouterr().out.startswith("xain-parameter-server 0.")
