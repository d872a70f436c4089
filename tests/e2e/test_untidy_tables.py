"""Untidy exports of two sites: mended, trained on, and new rows of one of them predicted."""

import asyncio
import csv
from random import Random

import pytest

from support.commands import called
from support.process import CoordinatorProcess, SiteProcess

pytestmark = pytest.mark.frameworks

Row = tuple[str, str, str, str, str]


def rows_of(seed: int) -> list[Row]:
    """(age, weight, smoker, date, outcome), the outcome of which follows from age and smoker."""
    chance = Random(seed)
    rows = []
    for i in range(120):
        age, smoker = chance.uniform(20, 90), chance.random() < 0.5
        outcome = "dead" if age + 20 * smoker > 65 else "alive"
        day = f"{1 + i % 28:02d}.{1 + i % 12:02d}.2021"
        weight = f"{chance.uniform(50, 99):.1f}"
        rows.append((f"{age:.1f}", weight, "yes" if smoker else "no", day, outcome))
    return rows


def german(rows: list[Row], *, without: range) -> str:
    """The rows as a German spreadsheet exports them. without: rows that have no outcome."""
    lines = ["Station 7", "", "Alter;Gewicht;Âge group;raucht;seit;outcome"]
    for i, (age, weight, smoker, day, outcome) in enumerate(rows):
        label = "" if i in without else outcome
        spoken = {"yes": "Ja", "no": "nein "}[smoker]
        lines.append(f"{age};{weight} kg;;{spoken};{day};{label}".replace(".", ",", 2))
    return "\r\n".join(lines)


def american(rows: list[Row]) -> str:
    """The rows as an American spreadsheet exports them on a Mac."""
    lines = ["age,weight,A\u0302ge group,smokes,since,outcome"]
    for i, (age, weight, smoker, day, outcome) in enumerate(rows):
        dd, mm, yyyy = day.split(".")
        cells = [age, "n/a" if i == 5 else weight, "ab"[i % 2], smoker.upper()]
        lines.append(",".join([*cells, f"{mm}/{dd}/{yyyy}", outcome]))
    return "\n".join(lines) + "\nTotal,,,,,\n"


RENAMED = """[data.rename]
"Alter" = "age"
"Gewicht" = "weight"
"raucht" = "smokes"
"seit" = "since"
"""


async def test_untidy_tables_are_mended_trained_on_and_predicted(keep, tmp_path):
    """`inspect --fix` mends both; the sites' columns and categories are the same ones; rows without
    an outcome are left out of the training, and predicted at the site as it reads its files."""
    rows = rows_of(1)
    (tmp_path / "north.csv").write_text(german(rows, without=range(100, 120)), encoding="cp1252")
    (tmp_path / "south.csv").write_text(american(rows_of(2)), encoding="utf-16")
    shown = {}
    for name, text in (("north", RENAMED), ("south", "")):
        (tmp_path / f"{name}.toml").write_text(text)
        inspect = ["-m", "xain_participant", "inspect", f"--config={tmp_path / name}.toml"]
        inspect += [f"--data={tmp_path / name}.csv", "--target=outcome"]
        status, _, err = await called(*inspect)
        assert status == 1
        assert "run `xain-participant inspect --fix`" in err
        status, out, err = await called(*inspect, "--fix")
        assert status == 0, out + err
        shown[name] = out
    assert "read as: encoding cp1252, cells separated by ';', decimal mark ','" in shown["north"]
    assert "left out: 20 rows without a target" in shown["north"]
    assert "read as: encoding utf-16, cells separated by ','" in shown["south"]
    mended = (tmp_path / "south.toml").read_text()
    for line in ('totals = "drop"', 'missing = ["n/a"]', 'since = "days since 2000-01-01"'):
        assert line in mended

    settings = {"workload.name": "sgd", "rounds.rounds": 4, "rounds.min_participants": 2}
    coordinator = keep(CoordinatorProcess(tmp_path / "data", settings))
    sites = {name: keep(SiteProcess(tmp_path, name)) for name in ("north", "south")}
    model = tmp_path / "model.skops"
    await coordinator.start()
    for name, site in sites.items():
        files = [f"--config={tmp_path / name}.toml", f"--data={tmp_path / name}.csv"]
        await site.start(coordinator.port, *files, "--target=outcome")
    ended = await asyncio.gather(*(site.died() for site in sites.values()))
    assert ended == [0, 0], [site.log_path.read_text() for site in sites.values()]
    fetch = ["-m", "xain_participant", "fetch", f"--to={model}"]
    fetch += [f"--coordinator=127.0.0.1:{coordinator.port}", f"--config={tmp_path}/north.toml"]
    status, out, err = await called(*fetch)
    assert status == 0, out + err

    (tmp_path / "new.csv").write_text(german(rows, without=range(120)), encoding="utf-16")
    status, out, err = await called(
        *("-m", "xain_participant", "predict", f"--model={model}", f"--data={tmp_path}/new.csv"),
        *("--max-unknown=1",),  # the empty column is one that the model knows
    )
    assert status == 0, err
    predicted = [row["outcome"] for row in csv.DictReader(out.splitlines())]
    assert len(predicted) == len(rows)
    assert sum(one == row[4] for one, row in zip(predicted, rows, strict=True)) > 0.8 * len(rows)
