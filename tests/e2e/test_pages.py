"""Pages whose commands are typed in their order, and whose programs are run."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.tables import write_rows
from support.terminals import files_of, followed
from xain_foundation.net.sockets import free_ports
from xain_parameters import LocalGroup

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LONG_S = 300.0


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def only(outputs: dict[str, str], text: str) -> str:
    """The output of the one command that has this text."""
    (found,) = [output for line, output in outputs.items() if text in line]
    return found


async def test_csv_at_three_sites_takes_ten_commands(tmp_path):
    """From a checkout to an exported pipeline that scores the same in plain scikit-learn."""
    for i, name in enumerate(("north", "south", "west", "test")):
        write_rows(tmp_path / f"{name}.csv", i, 200)
    async with followed(read("tutorials/your-csv.md"), tmp_path) as (outputs, _):
        assert len(outputs) + len(["make setup"]) <= 10
        assert "outcome, for classification" in only(outputs, "inspect")
        assert "best" in only(outputs, " models ")
        score = only(outputs, " predict ")
        scored = only(outputs, "score.py")
        assert scored.strip() in score
        assert float(scored.split()[1]) > 0.8
    assert (tmp_path / "predictions.csv").read_text().startswith("row,outcome,p(")


async def test_pytorch_script_trains_with_six_changed_lines(tmp_path):
    """The changes that the page shows are those between the two scripts; they train a model."""
    page = read("tutorials/pytorch.md")
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    before, after = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("torch_local.py", "torch_federated.py")
    )
    assert all(line[1:] in after and line[1:] not in before for line in shown if line[0] == "+")
    assert all(line[1:] in before and line[1:] not in after for line in shown if line[0] == "-")
    async with followed(
        read("tutorials/pytorch.md"), tmp_path, scripts=("examples/torch_federated.py",)
    ) as (outputs, _):
        assert float(only(outputs, "use.py").split()[1]) > 0.9


async def test_trees_of_two_sites_load_in_xgboost(tmp_path):
    """The tutorial on trees ends with a file that XGBoost reads."""
    async with followed(read("tutorials/xgboost.md"), tmp_path) as (outputs, _):
        assert "best" in only(outputs, " models ")
        iterations = int(only(outputs, "look.py").split()[0])
        assert 0 < iterations <= 10


async def test_report_of_three_unlike_sites(tmp_path):
    """The page of the report has the sections that the tutorial names."""
    async with followed(read("tutorials/report.md"), tmp_path) as (outputs, _):
        assert json.loads(only(outputs, "--json"))[-1]["num_updates"] == 3
    shown = (tmp_path / "digits.html").read_text()
    for section in ("Learning", "Sites", "Who counted", "Timeline"):
        assert f">{section}" in shown, section


async def test_study_of_two_sites(tmp_path):
    """Untidy files are mended by --fix, another unit and another language are found before the
    training, pooled figures have intervals and baselines, and new patients are predicted at their
    site, from an export as it is."""
    async with followed(read("tutorials/study.md"), tmp_path) as (outputs, _):
        assert "written into north.toml" in only(outputs, "north.toml --fix")
        assert "rows without a target" in only(outputs, "south.toml --fix")
        looked, trained = (outputs[line] for line in outputs if " status " in line)
        for site, column in (("north", "weight"), ("south", "weight"), ("north", "sex")):
            assert re.search(rf"^warn +{site} +{column} ", looked, re.MULTILINE), looked
        assert not re.search(r"^(refuse|warn|note) +", trained, re.MULTILINE)
        pooled = re.sub(r"\s+", " ", trained)
        auc = re.search(r"auc (0\.\d+) \((0\.\d+) to (0\.\d+), baseline 0\.5\)", pooled)
        assert auc
        assert float(auc[1]) > 0.7
        assert "best model" in pooled
        assert "of 2 sites" in only(outputs, "describe --address")
        by_site = only(outputs, "describe --data-dir table-one")
        assert re.search(r"north +south +all", by_site)
        assert re.search(r"^rows +n +220 +173 +393$", by_site, re.MULTILINE)
        assert " rows to train on" in only(outputs, "data.where")
        folds, left_out = (outputs[line] for line in outputs if " study --address" in line)
        assert re.search(r"^fold 5 +all sites ", folds, re.MULTILINE)
        assert re.search(r"^all folds +all sites +3\d\d ", folds, re.MULTILINE)
        assert re.search(r"^without north,north,.*,auc,0", left_out, re.MULTILINE)
    with (tmp_path / "predicted.csv").open() as file:
        predictions = list(csv.DictReader(file))
    assert len(predictions) == 42
    assert predictions[0].keys() == {"Patient", "worse", "p(no)", "p(yes)"}
    shown = (tmp_path / "study.html").read_text()
    for told in ("How was it made?", "federated averaging", "calibration slope"):
        assert told in shown, told
    assert "All folds: accuracy" in (tmp_path / "folds.html").read_text()


def test_readme_links_every_tutorial():
    """A tutorial is found from the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [
        path.name for path in (DOCS / "tutorials").iterdir() if path.suffix in (".md", ".ipynb")
    ]
    assert len(names) >= 5
    assert [name for name in names if f"(docs/tutorials/{name})" not in readme] == []


# --- workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "shorter"),
    [
        ("gradients.md", {}),
        ("neural.md", {"digits-neural &": "digits-neural --rounds 4 &"}),  # PyTorch
        ("pipeline.md", {"digits-pipeline &": "digits-pipeline --rounds 2 &"}),
    ],
    ids=["gradients", "neural", "pipeline"],
)
async def test_commands_of_a_workload_reach_nine_tenths(tmp_path, page, shorter):
    """Accuracy on the rows that the sites have held out."""
    as_json = {" models --address": " models --json --address"}
    async with followed(read(page), tmp_path, shorter={**shorter, **as_json}) as (outputs, _):
        models = [json.loads(text) for line, text in outputs.items() if " models " in line]
    assert models
    for shown in models:
        assert shown[-1]["evaluation"]["metrics"]["accuracy"] >= 0.9


# --- programs -------------------------------------------------------------------------------------

PS_LITE = {"kv.py": "[1. 2. 3.]\n[2. 4. 6.]\n", "tables.py": "[0.9375 0.9375 0.9375]\n"}
SERVERS = {"server.py": r"r2 (0\.9\d|1\.00)\n", "async_server.py": r"loss 0\.0\d after 5 rounds\n"}
SITES = ("north", "lakeside")


def output_of(folder: Path, name: str) -> str:
    return subprocess.run(
        [sys.executable, name],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LONG_S,
        check=True,
    ).stdout


def write_files(page: str, folder: Path, address: str, ours: str) -> None:
    """Write the files of a page, whose address is that of this test."""
    for name, text in files_of(read(page)).items():
        assert address in text
        (folder / name).write_text(text.replace(address, ours))


@pytest.mark.parametrize("name", PS_LITE)
def test_programs_of_ps_lite_run(tmp_path, name):
    with LocalGroup(2) as group:
        write_files("from-ps-lite.md", tmp_path, "127.0.0.1:50052", group.target)
        assert output_of(tmp_path, name) == PS_LITE[name]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A folder with the programs of docs/session.md."""
    write_files("session.md", tmp_path, "127.0.0.1:50051", f"127.0.0.1:{free_ports(1)[0]}")
    return tmp_path


@contextmanager
def sites(folder: Path) -> Iterator[None]:
    """The sites of the page, which end by themselves."""
    started = [subprocess.Popen([sys.executable, "ward.py", name], cwd=folder) for name in SITES]
    try:
        yield
        assert [site.wait(LONG_S) for site in started] == [0, 0]
    finally:
        for site in started:
            site.kill()
            site.wait()


@pytest.mark.parametrize("name", SERVERS)
def test_server_of_the_page_runs_with_its_sites(session, name):
    with sites(session):
        shown = output_of(session, name)
    assert re.fullmatch(SERVERS[name], shown), shown


async def test_server_of_the_page_runs_as_a_cell_of_a_notebook(session):
    cell = nbformat.v4.new_code_cell((session / "server.py").read_text())
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(session)}})
    with sites(session):
        await client.async_execute()
    printed = "".join(
        output["text"] for output in notebook.cells[0].outputs if output.get("name") == "stdout"
    )
    assert re.fullmatch(SERVERS["server.py"], printed), printed


def test_every_program_of_these_pages_is_run():
    assert set(files_of(read("from-ps-lite.md"))) == set(PS_LITE)
    assert set(files_of(read("session.md"))) == {*SERVERS, "ward.py"}
