"""The tutorials: each command of a page, typed in its order, in one folder."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.tables import write_rows
from support.terminals import Terminals, commands_of, files_of

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


@asynccontextmanager
async def followed(
    name: str, folder: Path, scripts: tuple[str, ...] = ()
) -> AsyncIterator[dict[str, str]]:
    """Type all commands of a tutorial. Yields the output of each that has ended."""
    page = (TUTORIALS / name).read_text(encoding="utf-8")
    for file, text in files_of(page).items():
        (folder / file).write_text(text)
    (folder / "examples").symlink_to(ROOT / "examples")
    terminals = Terminals(folder, scripts)
    try:
        yield {line: await terminals.do(line) for line in commands_of(page)}
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


def test_readme_links_every_tutorial() -> None:
    """A tutorial is found from the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in TUTORIALS.iterdir() if path.suffix in (".md", ".ipynb")]
    assert len(names) >= 5
    assert [name for name in names if f"(docs/tutorials/{name})" not in readme] == []
