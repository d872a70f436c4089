"""The command line, as far as it goes without a coordinator."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from xain_foundation.wheels import pip_install
from xain_participant.cli.cli import app
from xain_participant.keep.state import StateDirectory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="xain-participant")


def test_help_teaches_with_examples():
    result = run("--help")
    assert result.exit_code == 0
    assert "--data digits --partition iid" in re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "data.source is not set; add --data FILE"),
        (["--data", "iris", "--index", "1"], 2, "partition.index is 1; it must be below num_parts"),
        (["--data", "iris", "--index", "x"], 2, 'partition.index is "x"; it must be a whole'),
        (["--data", "iris", "--num-parts", "1.5"], 2, 'partition.num_parts is "1.5"; it must be'),
        (["--data", "rows.docx"], 2, 'data.source is "rows.docx"; it must be one of'),
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
        (["sparse"], 2, "--data is not set; run `xain-participant sparse-data clicks`"),
        (["sparse", "--data", "x", "--index", "3", "--workers", "3"], 2, "it is at most 2"),
        (["sparse", "--data", "x", "--model", "lr"], 2, "there are: logistic, fm"),
        (["sparse", "--data", "x", "--staleness", "asp"], 2, "a whole number, or none"),
        (["sparse", "--data", "x", "--server", ":1"], 2, "write HOST or HOST:PORT"),
        (["sparse", "--epochs", "0"], 2, "--test is not set: there is nothing to do"),
        (["sparse", "--data", "x", "--tls", ""], 2, "leave it out if nothing is to be encrypted"),
        (["sparse-data", "--shape", "mnist", "f"], 2, "there are: kdd12, webspam"),
        (["sparse-data", "--scale", "2", "f"], 2, "above 0 and at most 1"),
        (["sparse-data", "/dev/null/f"], 1, "/dev/null/f cannot be written: Not a directory"),
    ],
)
def test_wrong_arguments_get_one_line(arguments, status, message):
    result = run(*arguments)
    assert result.exit_code == status
    assert message in result.output
    assert result.output.count("\n") == 1


def start(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run in a process of its own, because the logs are configured from here on."""
    command = [sys.executable, "-m", "xain_participant", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


WARD = "name,age,sex,city,status\n" + "".join(
    f"p{i},{'' if i == 3 else 40 + i},{'f' if i % 2 else 'm'},{'Ulm' if i < 9 else f'C{i}'},alive\n"
    for i in range(12)
)


def test_inspect_shows_the_profile_of_a_table(tmp_path):
    """Names, types, gaps and frequent categories; names of rare categories stay here."""
    (tmp_path / "a.csv").write_text(WARD)
    result = run("inspect", "--data", str(tmp_path / "a.csv"), "--set", "data.units.age=years")
    assert result.exit_code == 0
    lines = {line.split("  ")[0]: line for line in result.output.splitlines()}
    assert "a.csv: 12 rows to train on, 0 to test with" in result.output
    assert lines["age"].split()[:4] == ["age", "number", "years", "1"]
    assert lines["sex"].endswith("'f' 6, 'm' 6")
    assert lines["city"].endswith("'Ulm' 9, 3 in categories with fewer than 5 rows, without names")
    assert "C10" not in result.output
    assert "p1" not in result.output
    assert "status, for classification" in lines["target"]
    assert "note: the target has one class only" in result.output
    assert "no category of 'name'" in result.output
    dropped = run("inspect", "--data", str(tmp_path / "a.csv"), "--drop", "name,city")
    assert "city" not in dropped.output


def test_inspect_finds_a_cell_far_outside_among_the_rows_that_are_held_out(tmp_path):
    """No coordinator is told anything of these rows, and one cell would spoil every figure."""
    ages = [f"{40 + i % 30}" for i in range(200)]
    for at, is_told in ((2, True), (3, False)):  # the third row is held out, and the fourth is not
        cells = [*ages[:at], "1000000000", *ages[at + 1 :]]
        rows = "".join(f"{age},{'yes' if i % 3 else 'no'}\n" for i, age in enumerate(cells))
        (tmp_path / "a.csv").write_text(f"age,outcome\n{rows}")
        result = run("inspect", "--data", str(tmp_path / "a.csv"))
        assert result.exit_code == 0
        told = "rows that are held out: column 'age': about 1 of 40 values is about 1,000,000,000"
        assert (told in result.output) == is_told, result.output


EXPORT = (
    "Ward 7\n\n"
    + "Größe;seit;CRP;Ausgang\n"
    + "".join(
        f"{160 + i},5;0{1 + i % 9}.02.2021;{'<5' if i == 4 else 10 + i};{'' if i == 7 else 'tot'}\n"
        for i in range(12)
    )
)


def test_inspect_tells_how_a_file_was_read_and_writes_what_mends_it(tmp_path):
    """Into the configuration beside what is there, or to standard output without one."""
    (tmp_path / "a.csv").write_text(EXPORT, encoding="cp1252")
    data = ["--data", str(tmp_path / "a.csv")]
    refused = run("inspect", *data)
    assert refused.exit_code == 1
    assert "3 problems:" in refused.output
    assert "run `xain-participant inspect --fix`" in refused.output
    shown = run("inspect", *data, "--fix")
    assert shown.exit_code == 0, shown.output
    config = tmp_path / "ward.toml"
    config.write_text("# ours\n[training]\nseed = 3\n")
    written = run("inspect", *data, "--config", str(config), "--fix")
    assert written.exit_code == 0
    assert f"written into {config}:" in written.output
    text = config.read_text()
    assert text.startswith("# ours\n[training]\nseed = 3\n")
    for line in ('below_limit = "half"', 'missing_target = "drop"', 'seit = "days since 2000'):
        assert line in text
        assert line in shown.output
    again = run("inspect", *data, "--config", str(config))
    assert again.exit_code == 0
    assert "read as: encoding cp1252, cells separated by ';', decimal mark ','" in again.output
    assert "2 lines above the header" in again.output
    assert "left out: 1 row without a target" in again.output
    assert config.read_text() == text


def test_configuration_that_cannot_be_written_gets_one_line(tmp_path, monkeypatch):
    """Not by a file's mode, which does not hold for root."""
    (tmp_path / "a.csv").write_text(EXPORT, encoding="cp1252")
    config = tmp_path / "ward.toml"
    config.write_text("# ours\n")
    written = Path.write_text

    def refuse(path, *arguments, **more):
        if path == config:
            raise PermissionError(13, "Permission denied", str(path))
        return written(path, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", refuse)
    flags = ["--data", str(tmp_path / "a.csv"), "--config", str(config), "--fix"]
    refused = run("inspect", *flags)
    assert refused.exit_code == 2
    assert f"the settings are not written: {config}: Permission denied" in refused.output
    assert refused.output.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "flags", "status", "message"),
    [
        (WARD, ["--drop", "hight"], 1, "[data] drop names 'hight', which is no column"),
        (WARD, ["--type", "sex=number"], 1, "column 'sex', rows 1, 2: 'm', 'f' are not numbers"),
        (WARD, ["--type", "sex=text"], 2, 'data.types.sex is "text"; it must be one of'),
        (WARD, ["--type", "sex"], 2, "--type takes KEY=VALUE, such as ward=category"),
        (WARD, ["--rename", "age=sex"], 1, "more than one column is called 'sex'"),
        (WARD, ["--task", "regression"], 1, "column 'status', row 1: 'alive' is not a number"),
        ("a,b\n", [], 1, "there are no rows to train on"),
        ("a\ab,y\n1,0\n", [], 1, "column 1 has the name 'a\\x07b'; it must have at most 200"),
        (f"{'x' * 201},y\n1,0\n", [], 1, "it must have at most 200 printable characters"),
        ("a,y\n1,0\nn/a,1\n2,0\n", [], 1, "column 'a', row 2: 'n/a' is not a number"),
    ],
)
def test_inspect_refuses_as_the_participant_does(tmp_path, text, flags, status, message):
    """One line with column and row, and the exit status of the participant itself."""
    (tmp_path / "a.csv").write_text(text)
    result = run("inspect", "--data", str(tmp_path / "a.csv"), *flags)
    assert result.exit_code == status
    assert message in result.output
    assert result.output.count("\n") == 1


def test_inspect_takes_its_flags_after_it():
    """A flag before the command would not be read."""
    result = run("--data", "iris", "inspect")
    assert result.exit_code == 2
    assert "inspect takes no flags before it" in result.output


def test_no_rows_need_no_coordinator(tmp_path):
    """An empty partition is no error, and no success: the others train without us."""
    (tmp_path / "empty.csv").write_text("a,b,label\n")
    done = start("--data", str(tmp_path / "empty.csv"), "--coordinator", "localhost:1")
    assert done.returncode == 5
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events == ["loading_data", "data_loaded", "nothing_to_train_on"]


def test_a_state_directory_is_for_one_participant(tmp_path):
    """While it is in use, and for another one ever after."""
    with StateDirectory(tmp_path, "ward-7"):
        in_use = run("--data", "iris", "--state-dir", str(tmp_path))
    assert in_use.exit_code == 2
    assert in_use.output.count("\n") == 1
    assert f"participant.state_dir is {tmp_path}: another process uses it" in in_use.output
    another = run("--data", "iris", "--state-dir", str(tmp_path), "--id", "ward-8")
    assert another.exit_code == 2
    assert "'ward-7', not of 'ward-8'" in another.output


def test_data_that_cannot_be_read_get_one_line():
    done = start("--data", "absent.csv")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "xain-participant: absent.csv: no such file"


# Packages that are not installed, for a process of its own.
_WITHOUT = """
import sys

HIDDEN = {"boto3", "pyarrow", "sklearn", "torch", "xgboost"}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

original = __import__("importlib.util").util.find_spec
import importlib.util
importlib.util.find_spec = lambda name, *rest: None if name in HIDDEN else original(name, *rest)
sys.meta_path.insert(0, Hidden())
"""


def start_without(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a process in which scikit-learn, Arrow, PyTorch and boto3 are missing."""
    command = [sys.executable, "-c", _WITHOUT + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("command", [[], ["inspect"]])
def test_table_without_scikit_learn_names_the_extra(tmp_path, command):
    """The base installation has no packages for tables; one line says how to get them."""
    (tmp_path / "x.csv").write_text("a,y\n1,0\n2,1\n")
    program = "from xain_participant.cli.cli import main\nsys.exit(main())"
    done = start_without(program, *command, "--data", str(tmp_path / "x.csv"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f": {pip_install('xain-participant', 'tables')}")


def test_import_of_xain_loads_no_package_of_an_extra():
    """A loop over rounds loads no package for tables, and `import xain` does not either."""
    program = """
import xain
assert not {"numpy", "grpc"} & set(sys.modules)
xain.rounds, xain.simulate, xain.Round
assert not HIDDEN & set(sys.modules)
"""
    done = start_without(program)
    assert done.returncode == 0, done.stderr


def test_new_project_overwrites_nothing(tmp_path):
    """A folder that has a file is refused with one line, and stays as it is."""
    (tmp_path / "notes.txt").write_text("mine")
    result = run("new", "--template", "torch", str(tmp_path))
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert str(tmp_path) in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_new_names_the_templates_that_there_are(tmp_path):
    """The help and the message about an unknown template list the same names."""
    result = run("new", "--template", "keras", str(tmp_path / "study"))
    assert result.exit_code == 2
    assert result.output.endswith(
        "there is no template 'keras'; there are: sklearn, torch, xgboost\n"
    )
    assert not (tmp_path / "study").exists()
    help_text = re.sub(r"\s+", " ", run("new", "--help").output)
    assert all(name in help_text for name in ("sklearn", "torch", "xgboost"))
