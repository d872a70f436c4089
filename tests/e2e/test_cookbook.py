"""The recipes of examples/cookbook, each run as a script in a folder of its own."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from support.code_lines import beside_model_and_data

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
COOKBOOK = ROOT / "examples" / "cookbook"
PAGE = ROOT / "docs" / "cookbook.md"


def figures(output: str) -> list[float]:
    """All numbers with a decimal point, in their order."""
    return [float(text) for text in re.findall(r"\d+\.\d+", output)]


def is_ordered(*claims: Callable[[float], bool]) -> Callable[[str], bool]:
    """A claim about the figures of an output, one after the other."""

    def holds(output: str) -> bool:
        found = figures(output)
        return len(found) == len(claims) and all(
            claim(value) for claim, value in zip(claims, found, strict=True)
        )

    return holds


def above(least: float) -> Callable[[float], bool]:
    return lambda value: value > least


def below(most: float) -> Callable[[float], bool]:
    return lambda value: value < most


def site_model_is_better(output: str) -> bool:
    of_all, own = figures(output)
    return own < 0.5 * of_all


def clusters_are_those_of_the_data(output: str) -> bool:
    lines = output.splitlines()
    chosen = {line.split(":")[0]: line.split("model ")[1][0] for line in lines}
    north = {model for name, model in chosen.items() if name.startswith("north")}
    south = {model for name, model in chosen.items() if name.startswith("south")}
    return len(north) == len(south) == 1 and north != south and max(figures(output)) < 0.1


CLAIMS: dict[str, Callable[[str], bool]] = {
    "fedadam": is_ordered(above(0.85)),
    "robust_rule": is_ordered(above(1.0), below(0.1)),
    "settings_by_site": lambda output: (
        is_ordered(above(0.7))(output) and "{'fast': 3, 'other': 3, 'slow': 1}" in output
    ),
    "scaffold": is_ordered(above(0.01), below(1e-4)),
    "fedbn": is_ordered(below(0.4), above(0.6)),
    "personal_heads": is_ordered(above(0.7), above(0.7), above(0.7)),
    "ditto": site_model_is_better,
    "partial_fit": is_ordered(above(0.9)),
    "cyclic": lambda output: (
        is_ordered(above(0.9))(output) and output.split()[3:6] == ["north", "east", "south"]
    ),
    # numpy's own mean and deviation of the column, and the number of its rows.
    "histograms": lambda output: (
        figures(output) == [14.127, 3.521]
        and sum(map(int, output.split("histogram")[1].split())) == 569
    ),
    "clusters": clusters_are_those_of_the_data,
    "across_sites": is_ordered(*[above(0.9)] * 8),
    "xgboost_trees": lambda output: (
        is_ordered(above(0.9))(output) and output.endswith("of 30 trees\n")
    ),
    "split_learning": is_ordered(above(0.9)),
    "trackers": lambda output: output == "rounds.csv has 5 lines\n",
    "lightning_trainer": is_ordered(above(0.9)),
    "keras_model": is_ordered(above(0.9)),
    "jax_tree": is_ordered(above(0.9)),
    "lora_trainer": is_ordered(above(0.6), below(0.2), above(0.9)),
}


@pytest.mark.filterwarnings("default")  # PEFT, Keras and Lightning warn of their own calls
@pytest.mark.parametrize("name", CLAIMS)
def test_recipe_does_what_it_claims(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(COOKBOOK / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert CLAIMS[name](output), output


def test_every_recipe_is_run_and_has_its_line_in_the_page():
    names = {path.stem for path in COOKBOOK.glob("*.py")}
    assert names == set(CLAIMS)
    page = PAGE.read_text(encoding="utf-8")
    counted = {
        name: int(lines)
        for name, lines in re.findall(r"^\| \[(\w+)\.py\]\(.*?\) \| (\d+) ", page, re.MULTILINE)
    }
    assert counted == {
        path.stem: beside_model_and_data(path.read_text(encoding="utf-8"))
        for path in COOKBOOK.glob("*.py")
    }
