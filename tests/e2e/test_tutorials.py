"""The tutorials: each command of a page, typed in its order, in one folder."""

import csv
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.tables import write_rows
from support.terminals import Terminals, added_by, commands_of, files_of

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


@asynccontextmanager
async def followed(
    name: str, folder: Path, scripts: tuple[str, ...] = ()
) -> AsyncIterator[dict[str, str]]:
    """Type all commands of a tutorial, step by step, and add to the files of a step before its
    first command. Yields the output of each that has ended; that of a second time has the number
    of the step behind it."""
    page = (TUTORIALS / name).read_text(encoding="utf-8")
    for file, text in files_of(page).items():
        (folder / file).write_text(text)
    (folder / "examples").symlink_to(ROOT / "examples")
    terminals = Terminals(folder, scripts)
    try:
        outputs: dict[str, str] = {}
        for number, part in enumerate(re.split(r"^(?=\*\*\d+\. )", page, flags=re.MULTILINE)):
            for file, text in added_by(part):
                with (folder / file).open("a") as opened:
                    opened.write(f"\n{text}")
            for line in commands_of(part):
                outputs[f"{line} # {number}" if line in outputs else line] = await terminals.do(
                    line
                )
        yield outputs
    finally:
        await terminals.end()


def only(outputs: dict[str, str], text: str) -> str:
    """The output of the one command that has this text."""
    (found,) = [output for line, output in outputs.items() if text in line]
    return found


async def test_csv_at_three_sites_takes_ten_commands(tmp_path: Path) -> None:
    """From a checkout to an exported pipeline that scores the same in plain scikit-learn."""
    for i, name in enumerate(("north", "south", "west", "test")):
        write_rows(tmp_path / f"{name}.csv", i, 200)
    async with followed("your-csv.md", tmp_path) as outputs:
        assert len(outputs) + len(["make setup"]) <= 10
        assert "outcome, for classification" in only(outputs, "inspect")
        assert "best" in only(outputs, " models ")
        score = only(outputs, " predict ")
        scored = only(outputs, "score.py")
        assert scored.strip() in score
        assert float(scored.split()[1]) > 0.8
    assert (tmp_path / "predictions.csv").read_text().startswith("row,outcome,p(")


async def test_pytorch_script_trains_with_six_changed_lines(tmp_path: Path) -> None:
    """The changes that the page shows are those between the two scripts; they train a model."""
    page = (TUTORIALS / "pytorch.md").read_text(encoding="utf-8")
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    before, after = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("torch_local.py", "torch_federated.py")
    )
    assert all(line[1:] in after and line[1:] not in before for line in shown if line[0] == "+")
    assert all(line[1:] in before and line[1:] not in after for line in shown if line[0] == "-")
    async with followed("pytorch.md", tmp_path, ("examples/torch_federated.py",)) as outputs:
        assert float(only(outputs, "use.py").split()[1]) > 0.9


async def test_trees_of_two_sites_load_in_xgboost(tmp_path: Path) -> None:
    """The tutorial on trees ends with a file that XGBoost reads."""
    async with followed("xgboost.md", tmp_path) as outputs:
        assert "best" in only(outputs, " models ")
        iterations = int(only(outputs, "look.py").split()[0])
        assert 0 < iterations <= 10


async def test_report_of_three_unlike_sites(tmp_path: Path) -> None:
    """The page of the report has the sections that the tutorial names."""
    async with followed("report.md", tmp_path) as outputs:
        assert json.loads(only(outputs, "--json"))[-1]["num_updates"] == 3
    shown = (tmp_path / "digits.html").read_text()
    for section in ("Learning", "Sites", "Who counted", "Timeline"):
        assert f">{section}" in shown, section


async def test_study_of_two_sites(tmp_path: Path) -> None:
    """Untidy files are mended by --fix, another unit and another language are found before the
    training, pooled figures have intervals and baselines, and new patients are predicted at their
    site, from an export as it is."""
    async with followed("study.md", tmp_path) as outputs:
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


def test_readme_links_every_tutorial() -> None:
    """A tutorial is found from the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in TUTORIALS.iterdir() if path.suffix in (".md", ".ipynb")]
    assert len(names) >= 5
    assert [name for name in names if f"(docs/tutorials/{name})" not in readme] == []
