"""The command line, as far as it goes without a coordinator."""

import pytest
from typer.testing import CliRunner, Result

from xain_coordinator import cli, demo


def run(*arguments: str) -> Result:
    environment = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, arguments, env=environment)


@pytest.mark.parametrize("command", ["demo", "status"])
@pytest.mark.parametrize(
    "flags",
    [["--config", "/nope"], ["--port", "0"], ["--set", "rounds.epochs=3"], ["--new-session"]],
)
def test_flags_that_nobody_would_read_are_refused(
    monkeypatch: pytest.MonkeyPatch, command: str, flags: list[str]
) -> None:
    """They stand before a command that has flags of its own."""
    monkeypatch.setattr(demo, "main", lambda _: 0)
    result = run(*flags, command)
    assert result.exit_code == 2
    assert result.stderr == (
        f"xain-coordinator: command line: {command} takes no flags before it; "
        f"see xain-coordinator {command} --help\n"
    )


def test_a_command_gets_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(demo, "main", lambda arguments: seen.append(list(arguments)) or 0)
    assert run("demo", "--rounds", "3").exit_code == 0
    assert seen == [["--rounds", "3"]]


def test_flags_before_check_config_are_its_own() -> None:
    told = " ".join(run("--rounds", "7", "check-config").stdout.split())
    assert "rounds.rounds 7 flag" in told


def test_one_participant_is_no_participants() -> None:
    """The sentences below the table count correctly."""
    told = run("check-config").stdout
    assert "The first round waits for 1 participant." in told
    assert "A round needs N = 1 connected participant, of whom k = 1 is selected" in told
    told = run("--min-participants", "2", "check-config").stdout
    assert "The first round waits for 2 participants." in told
    assert "N = 2 connected participants, of whom k = 2 are selected" in told
