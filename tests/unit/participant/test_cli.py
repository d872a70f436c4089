"""The command line, as far as it goes without a coordinator."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from support.logs import restored
from xain_participant.cli import app
from xain_participant.state import StateDirectory


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restored():
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="xain-participant")


def test_help_teaches_with_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "--data digits --partition iid" in re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "data.source is not set; name a file with --data"),
        (["--data", "iris", "--index", "1"], 2, "partition.index is 1; it must be below num_parts"),
        (["--data", "iris", "--index", "x"], 2, 'partition.index is "x"; it must be a whole'),
        (["--data", "iris", "--num-parts", "1.5"], 2, 'partition.num_parts is "1.5"; it must be'),
        (["--data", "rows.xlsx"], 2, 'data.source is "rows.xlsx"; it must be one of'),
        (["--data", "http://user:hunter2@h/rows.csv"], 2, "data.source is ********; a URL is"),
        (["--data", "diabetes"], 2, "data.task"),
        (["--data", "iris", "--id", "Köln"], 2, "participant.id"),
        (["--data", "iris", "--coordinator", "host:0"], 2, "coordinator.port is 0"),
        (["--data", "iris", "--id", "a/b"], 2, "participant.id"),
        (["--data", "iris", "--set", "nonsense"], 2, "--set takes KEY=VALUE"),
        (["--data", "iris", "--tag", "north"], 2, "--tag takes KEY=VALUE, such as site=north"),
        (["--data", "iris", "--tag", "a b=x"], 2, 'participant.tags."a b" is "x"; its name'),
        (["--data", "iris", "--tag", "a=\t"], 2, "it must be printable text of at most 256 bytes"),
        (["--data", "iris", "--set", "data.sorce=x"], 2, "did you mean data.source"),
        (
            ["--data", "iris", "--set", "participant.alive_file=/nowhere/a"],
            2,
            "/nowhere/a: it cannot",
        ),
        (
            ["--data", "iris", "--state-dir", "/dev/null/state"],
            2,
            "participant.state_dir is /dev/null/state: it cannot be used: Not a directory",
        ),
        (["--config", "absent.toml"], 2, "absent.toml: there is no such file"),
    ],
)
def test_what_is_wrong_gets_one_line(arguments: list[str], status: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert message in result.output
    assert result.output.count("\n") == 1


def start(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """As a process of its own, because from here on the logs are configured."""
    command = [sys.executable, "-m", "xain_participant", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_no_rows_need_no_coordinator(tmp_path: Path) -> None:
    """An empty partition is no error: the others train without us."""
    (tmp_path / "empty.csv").write_text("a,b,label\n")
    done = start("--data", str(tmp_path / "empty.csv"), "--coordinator", "localhost:1")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["event"] == "nothing_to_train_on"


def test_a_state_directory_is_for_one_participant(tmp_path: Path) -> None:
    """While it is in use, and for another one ever after."""
    with StateDirectory(tmp_path, "ward-7"):
        in_use = run("--data", "iris", "--state-dir", str(tmp_path))
    assert in_use.exit_code == 2
    assert in_use.output == (
        f"xain-participant: participant.state_dir is {tmp_path}: another process uses it; each "
        "participant needs one of its own\n"
    )
    another = run("--data", "iris", "--state-dir", str(tmp_path), "--id", "ward-8")
    assert another.exit_code == 2
    assert "it is that of participant 'ward-7', not of 'ward-8'; give each" in another.output


def test_data_that_cannot_be_read_get_one_line() -> None:
    done = start("--data", "absent.csv")
    assert done.returncode == 1
    assert done.stderr == "xain-participant: absent.csv: no such file\n"
