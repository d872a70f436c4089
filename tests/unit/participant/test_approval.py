"""All that leaves a site is shown, approved by a person, and compared before the training."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xain_participant.cli.approval import approval_file
from xain_participant.cli.cli import app

ROWS = [f"{i % 50 + 20},{'f' if i % 3 else 'm'},{'yes' if i % 4 else 'no'}" for i in range(60)]


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    file = tmp_path / "patients.csv"
    file.write_text("\n".join(["age,sex,ill", *ROWS, ""]))
    return file


def test_approval_lies_in_the_state_directory_or_beside_the_configuration():
    assert approval_file(Path("state"), Path("a/ward.toml")) == Path("state/approval.json")
    assert approval_file(None, Path("a/ward.toml")) == Path("a/ward.approval.json")
    assert approval_file(None, None) == Path("approval.json")


def test_inspect_shows_what_leaves_and_what_the_site_alone_can_see(patients):
    """The text has values and findings, such as a column of row numbers; --json has all values."""
    rows = patients.read_text().splitlines()
    numbered = [f"{i},{row}" for i, row in enumerate(rows[1:])]
    patients.write_text("\n".join([f"nr,{rows[0]}", *numbered]))
    flags = ["inspect", "--data", str(patients), "--target", "ill"]
    text = CliRunner().invoke(app, flags).output
    assert "48 values, " in text
    assert "warn: column 'nr': all values are whole and differ" in text
    sent = json.loads(CliRunner().invoke(app, [*flags, "--json"]).output)
    assert sent["num_samples"] == 48
    few = CliRunner().invoke(app, [*flags, "--set", "data.min_known=61"]).output
    assert "nothing, fewer than data.min_known of them are known" in few
    assert [one["name"] for one in sent["statistics"]["columns"]] == ["nr", "age", "sex"]


def test_participant_starts_only_with_the_approval_of_these_data(patients, tmp_path):
    """Without a yes, and after a change of the data, it ends with status 1 and says what to do."""
    data = ["--data", str(patients), "--target", "ill"]
    state = ["--set", f"participant.state_dir={tmp_path / 'state'}"]
    start = [
        *data,
        *state,
        "--set",
        "participant.require_approval=true",
        "--coordinator",
        "[::1]:1",
    ]
    inspect = ["inspect", *data, *state, "--approve"]
    runner = CliRunner()
    refused = runner.invoke(app, start)
    assert refused.exit_code == 1
    assert "nobody has approved" in refused.output + refused.stderr
    assert runner.invoke(app, inspect, input="n\n").exit_code == 1
    assert not (tmp_path / "state" / "approval.json").exists()
    assert runner.invoke(app, inspect, input="y\n").exit_code == 0
    approval = json.loads((tmp_path / "state" / "approval.json").read_text())
    assert set(approval) == {"who", "when", "digest"}
    patients.write_text(patients.read_text().replace("20,", "21,"))
    changed = runner.invoke(app, start)
    assert changed.exit_code == 1
    assert "not those that were approved" in changed.output + changed.stderr


def test_where_chooses_the_rows_that_are_described(patients):
    flags = ["inspect", "--data", str(patients), "--target", "ill"]
    chosen = [*flags, "--set", "data.where=\"age < 30 and sex == 'f'\""]
    text = CliRunner().invoke(app, chosen).output
    fitting = sum(int(row.split(",")[0]) < 30 and ",f," in row for row in ROWS)
    numbers = [int(word) for word in text.splitlines()[0].split() if word.isdecimal()]
    assert sum(numbers) == fitting


def test_approval_that_cannot_be_written_gets_one_line(patients, tmp_path):
    flags = ["inspect", "--data", str(patients), "--target", "ill", "--approve"]
    flags += ["--set", f"participant.state_dir={patients}"]  # a file where a folder is needed
    told = CliRunner().invoke(app, flags, input="y\n")
    assert told.exit_code == 2
    assert f"no approval is recorded: {patients}: " in told.stderr


@pytest.mark.parametrize("kind", [KeyError, OSError])
def test_user_without_a_name_is_recorded_by_number(patients, tmp_path, monkeypatch, kind):
    """As in a container that runs as --user 12345; Python raises the one or the other."""

    def unknown(uid):
        raise kind(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    flags = ["inspect", "--data", str(patients), "--target", "ill", "--approve"]
    flags += ["--set", f"participant.state_dir={tmp_path / 'state'}"]
    assert CliRunner().invoke(app, flags, input="y\n").exit_code == 0
    approval = json.loads((tmp_path / "state" / "approval.json").read_text())
    assert approval["who"] == f"user {os.getuid()}"
