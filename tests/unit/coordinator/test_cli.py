"""The command line, as far as it goes without a coordinator."""

import re
import sys

import pytest
from typer.testing import CliRunner, Result

from xain_coordinator.cli import main as cli
from xain_coordinator.cli.demo import cli as demo


def run(*arguments: str) -> Result:
    environment = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, arguments, env=environment)


@pytest.mark.parametrize("command", ["check-config", "demo", "status"])
@pytest.mark.parametrize(
    "flags",
    [["--config", "/nope"], ["--port", "0"], ["--set", "rounds.epochs=3"], ["--new-session"]],
)
def test_flags_before_a_command_with_its_own_flags_are_refused(monkeypatch, command, flags):
    monkeypatch.setattr(demo, "main", lambda _: 0)
    result = run(*flags, command)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"{command} takes no flags before it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ports", "1"], "there is no flag --ports; did you mean --port?"),
        (["--zzz=hunter2"], "there is no flag --zzz; see --help"),
        (["--set.storage.token:hunter2"], "there is no such flag; see --help"),
        (["--port"], "Option '--port' requires an argument."),
        (["status", "--zzz"], "there is no flag --zzz; see --help"),
        (["demo", "--rounds", "x"], "Invalid value for '--rounds': "),
        (["--set", "storage.secret_access_key=", "hunter2"], "one argument is neither a flag nor"),
        (["status", "hunter2"], "one argument is neither a flag nor the value of one (write"),
        (["--set", "rounds.zzz:hunter2==x"], "command line: unknown key rounds.********; "),
    ],
)
def test_a_wrong_command_line_is_one_line_without_its_values(
    monkeypatch, capsys, arguments, message
):
    """Exit status 2; an argument that is not understood may be a secret."""
    monkeypatch.setattr(sys, "argv", ["xain-coordinator", *arguments])
    assert cli.main() == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(("xain-coordinator: ", "xain-coordinator demo: "))
    assert ": command line: " in told.err
    assert message in told.err
    assert told.err.count("\n") == 1
    assert "hunter2" not in told.err


def test_status_does_not_repeat_a_password_in_the_address():
    """A URL with a password is no address, and is not shown."""
    told = run("status", "--address", "user:hunter2@localhost:1").stderr
    assert "hunter2" not in told
    assert told.count("\n") == 1


def test_a_command_gets_its_own_flags(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "main", lambda arguments: seen.append(list(arguments)) or 0)
    assert run("demo", "--rounds", "3").exit_code == 0
    assert seen == [["--rounds", "3"]]


def test_one_participant_is_no_participants():
    """The sentences below the table count correctly."""
    told = run("check-config").stdout
    assert "The first round waits for 1 participant." in told
    assert re.search("N = 1 connected participant, .*k = 1 is ", told)
    told = run("check-config", "--min-participants", "2").stdout
    assert "The first round waits for 2 participants." in told
    assert re.search("N = 2 connected participants, .*k = 2 are ", told)
