"""Results that nobody wants: each is told of, or the right one comes out, over real processes.

Tables that are only read, and cost one process each, stand in the table READ; trainings share their
sessions. What else there is: units of a target in test_wrong_units, files of two countries in
test_untidy_tables, categories that a model does not know in test_take_home, labels drawn by lot in
test_evaluation, and the first training of the README in test_first_training.
"""

import csv
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk
from sklearn.datasets import load_breast_cancer

from e2e.test_take_home import called, command
from integration.test_spoilt_tables import STUDIES, swapped
from support.process import CoordinatorProcess, SiteProcess
from support.spoilt import Rows, added, text_of

pytestmark = pytest.mark.e2e

PARTICIPANT = ("-m", "xain_participant")
# A setting that a message tells one to type into a shell.
FLAG = re.compile(r'\((--set "[^"]+")\)')


@dataclass
class Session:
    """A coordinator and its sites, each a process with a file of its own.

    folder: of the files. ended: exit statuses of the sites, when all have ended by themselves.
    """

    folder: Path
    coordinator: CoordinatorProcess
    sites: Mapping[str, SiteProcess]
    ended: dict[str, int] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"--address=127.0.0.1:{self.coordinator.port}"

    async def start_sites(self, *flags: str) -> None:
        for name, site in self.sites.items():
            table = [f"--data={self.folder / name}.csv", "--target=outcome"]
            await site.start(self.coordinator.port, *table, *flags)

    async def wait(self) -> None:
        self.ended = {name: await site.died() for name, site in self.sites.items()}

    async def status(self) -> dict[str, Any]:
        code, out, told = await command("status", self.address, "--json")
        assert code == 0, told
        shown: dict[str, Any] = json.loads(out)
        return shown

    async def export_best(self) -> Path:
        file = self.folder / "best.npz"
        code, _, told = await command("export", self.address, "--best", f"--to={file}")
        assert code == 0, told
        return file


@asynccontextmanager
async def session(
    folder: Path, tables: Mapping[str, str], settings: Mapping[str, object]
) -> AsyncIterator[Session]:
    """A coordinator that serves; its sites are not started."""
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)
    given = {"workload.name": "sgd", "rounds.min_participants": len(tables), **settings}
    coordinator = CoordinatorProcess(folder / "data", given)
    one = Session(folder, coordinator, {name: SiteProcess(folder, name) for name in tables})
    try:
        await coordinator.start()
        yield one
    finally:
        for process in (*one.sites.values(), coordinator):
            await process.end()


def csv_of(columns: Mapping[str, Sequence[object]]) -> str:
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    return "\n".join([*lines, ""])


# --- the best model -------------------------------------------------------------------------------


def rare(seed: int, num_rows: int = 800) -> str:
    """Rows of which 4 % are "yes", which two columns tell."""
    chance = np.random.default_rng(seed)
    is_yes = np.arange(num_rows) % 25 == 0
    columns = {name: chance.normal(2.0 * is_yes, 1.0).round(3) for name in ("a", "b")}
    columns["c"] = chance.normal(size=num_rows).round(3)
    return csv_of({**columns, "outcome": np.where(is_yes, "yes", "no")})


@pytest.mark.parametrize(
    ("workload", "metric"), [("sgd", "log_loss"), ("xgboost", "auc")], ids=["sgd", "xgboost"]
)
async def test_best_model_of_rare_events_tells_them_apart(
    tmp_path: Path, workload: str, metric: str
) -> None:
    """Always "no" has the best accuracy. The untrained model is never the best, training does not
    stop there, and what is taken home ranks new rows as well as the last model does."""
    rounds = 12
    settings: dict[str, object] = {"workload.name": workload, "rounds.rounds": rounds}
    settings |= {"evaluate.metric": metric, "evaluate.patience": 3 if workload == "sgd" else 9}
    tables = {"north": rare(0), "south": rare(1)}
    (tmp_path / "new.csv").write_text(rare(2, 2000))
    async with session(tmp_path, tables, settings) as one:
        await one.start_sites()
        await one.wait()
        assert one.ended == {"north": 0, "south": 0}
        shown = await one.status()
        best = await one.export_best()
    measured = {
        each["round"]: each["evaluation"]["figures"]
        for each in shown["rounds"]
        if each["evaluation"]
    }
    chosen, last = shown["status"]["best_round"], max(measured)
    assert shown["status"]["metric"] == metric
    assert chosen > 0
    assert last > 4
    trained = {number: of for number, of in measured.items() if number > 0}
    sign = 1 if metric == "log_loss" else -1
    assert sign * measured[chosen][metric]["value"] == min(
        sign * of[metric]["value"] for of in trained.values()
    )
    assert measured[chosen]["auc"]["value"] > measured[last]["auc"]["value"] - 0.02
    out = tmp_path / "out.csv"
    words = ("predict", f"--model={best}", f"--data={tmp_path / 'new.csv'}", f"--to={out}")
    code, _, told = await command(*words)
    assert code == 0, told
    with out.open() as file:
        shares = [float(row["p(yes)"]) for row in csv.DictReader(file)]
    assert sk.roc_auc_score(np.arange(2000) % 25 == 0, shares) > 0.85

    # A message of predict names settings that predict has, and they work as they are shown.
    new = tmp_path / "marks.csv"
    new.write_text("a,b,c,outcome\n" + "".join(f"{x},1,{x},no\n" for x in ("n/a", 1, 2, 3, 4)))
    predict = [*PARTICIPANT, "predict", f"--model={best}", f"--data={new}", f"--to={out}"]
    code, _, told = await called(*predict, "--max-unknown=1")
    assert code == 1
    assert "'n/a'" in told
    typed = FLAG.search(told)
    assert typed, told
    code, _, told = await called(*predict, "--max-unknown=1", *shlex.split(typed[1]))
    assert code == 0, told


async def test_r2_is_that_of_all_rows_and_not_the_mean_of_sites(tmp_path: Path) -> None:
    """Between sites the target differs much, within a site little: a straight line explains it,
    though at each site it is worse than that site's mean."""
    chance = np.random.default_rng(0)
    tables, everything = {}, []
    for name, around in (("low", 1.0), ("middle", 4.0), ("high", 8.0)):
        a = chance.normal(around, 0.3, 120)
        b = chance.normal(size=120)
        columns = {"a": a.round(3), "b": b.round(3), "outcome": (a * a + b).round(3)}
        tables[name] = csv_of(columns)
        everything += tables[name].splitlines()[1:]
    (tmp_path / "all.csv").write_text("\n".join(["a,b,outcome", *everything, ""]))
    settings = {"workload.options.task": "regression", "rounds.rounds": 8}
    async with session(tmp_path, tables, settings) as one:
        await one.start_sites("--task=regression")
        await one.wait()
        assert set(one.ended.values()) == {0}
        shown = await one.status()
        best = await one.export_best()
    last = shown["rounds"][-1]
    r2 = last["evaluation"]["figures"]["r2"]["value"]
    at_sites = [site["evaluation"]["figures"]["r2"]["value"] for site in last["sites"]]
    assert np.mean(at_sites) < 0.0 < 0.8 < r2
    assert shown["status"]["metric"] == "mse"
    assert shown["status"]["best_round"] > 0
    out = tmp_path / "out.csv"
    code, _, told = await command(
        "predict", f"--model={best}", f"--data={tmp_path / 'all.csv'}", f"--to={out}"
    )
    assert code == 0, told
    with out.open() as file:
        found = [float(row["outcome"]) for row in csv.DictReader(file)]
    truth = [float(line.rpartition(",")[2]) for line in everything]
    assert sk.r2_score(truth, found) == pytest.approx(r2, abs=0.1)


# --- units, cells and labels ----------------------------------------------------------------------


async def test_site_in_another_unit_and_one_wrong_cell_are_named_and_spoil_nothing(
    tmp_path: Path,
) -> None:
    """Both ends are told, and with a robust scale, too, the model of all sites learns."""
    data = load_breast_cancer()
    names = [str(name) for name in data.feature_names]
    order = np.random.default_rng(0).permutation(len(data.target))
    tables = {}
    for site, rows in zip(("days", "cell", "south", "west"), np.array_split(order, 4), strict=True):
        columns = dict(zip(names, data.data[rows].T.copy(), strict=True))
        if site == "days":
            columns["worst concave points"] *= 365.25
        if site == "cell":
            columns["mean radius"][7] = 1e9
        tables[site] = csv_of({**columns, "outcome": data.target_names[data.target[rows]]})
    settings = {"rounds.rounds": 6, "workload.preprocessing.scaling": "robust"}
    async with session(tmp_path, tables, settings) as one:
        await one.start_sites()
        await one.wait()
        assert set(one.ended.values()) == {0}
        shown = await one.status()
    told = {(each["check"], each["participant_id"], each["column"]) for each in found_in(shown)}
    assert told == {
        ("units", "days", "worst concave points"),
        ("outlier", "cell", "mean radius"),
    }
    assert 'data.factors.\\"worst concave points\\" = 0.0027' in one.sites["days"].log()
    assert "column 'mean radius'" in one.sites["cell"].log()
    assert "data_finding" not in one.sites["south"].log()
    last = shown["rounds"][-1]
    assert last["evaluation"]["figures"]["accuracy"]["value"] > 0.85
    assert last["num_contributors"] == 4


def found_in(shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shown["status"]["findings"]
    return found


async def test_columns_that_tell_the_outcome_or_nothing_and_opposite_labels_are_named(
    tmp_path: Path,
) -> None:
    """The training goes on with its warnings."""
    rows: dict[str, Rows] = {}
    for name, of in STUDIES["wards"].sites.items():
        seen = added(of, "days", lambda row, at: str(at % 97 + 60 * (row["outcome"] == "alive")))
        rows[name] = added(seen, "nr", lambda _, at: str(at + 1))
    rows["south"] = swapped(rows["south"])
    tables = {name: text_of(of) for name, of in rows.items()}
    async with session(tmp_path, tables, {"rounds.rounds": 2}) as one:
        await one.start_sites()
        await one.wait()
        shown = await one.status()
    told = {(each["check"], each["participant_id"], each["column"]) for each in found_in(shown)}
    assert told == {
        ("identifier", "", "nr"),
        ("follow_up", "", "days"),
        ("reversed_labels", "south", "outcome"),
    }
    assert "data_finding" in one.sites["south"].log()


async def test_metric_that_the_workload_does_not_measure_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    settings = {"workload.name": "sgd", "evaluate.metric": "dice", "evaluate.direction": "max"}
    coordinator = CoordinatorProcess(tmp_path / "data", settings)
    assert await coordinator.fails() == 2
    assert 'evaluate.metric is "dice"; the models of this workload are measured by' in (
        coordinator.log()
    )


async def test_sites_of_four_rows_are_refused_by_name_until_they_tell_more(
    tmp_path: Path,
) -> None:
    """Nothing is trained unscaled. The setting of the message, typed at each site, lets the same
    coordinator begin."""
    tables = {name: text_of(of[:4]) for name, of in STUDIES["wards"].sites.items()}
    async with session(tmp_path, tables, {"rounds.rounds": 2}) as one:
        await one.start_sites()
        for site in one.sites.values():
            await site.until_logged("no site tells anything of its columns")
        shown = await one.status()
        for site in one.sites.values():
            await site.stop()
        waits_for = shown["status"]["waiting_for"]
        assert all(f"{name} 4" in waits_for for name in tables)
        assert not shown["models"]
        (typed,) = re.findall(r"set (data\.min_known = 1)", waits_for)
        await one.start_sites(f"--set={typed}")
        await one.wait()
        shown = await one.status()
    assert set(one.ended.values()) == {0}
    assert shown["status"]["cause"] == "completed"


# --- what is read ---------------------------------------------------------------------------------


def untidy() -> str:
    """Marks that are asked about, all in one file."""
    lines = ["lactate,income,share,dose,price,seen,dead"]
    for i in range(60):
        lactate = "-999" if i % 15 == 3 else f"{1 + i % 13 / 4}"
        cells = f'{lactate},"${1000 + i * 37:,}",{i % 23}.5%,"{i % 9 + 1}0,000",${i % 7}.50'
        lines.append(f"{cells},0{i % 9 + 1}/0{i % 8 + 1}/2024,{'' if i == 4 else 'ny'[i % 2]}")
    return "\n".join([*lines, ""])


def totalled() -> str:
    rows = [
        "ward,age,outcome",
        *(f"{'AB'[i % 2]},{30 + i % 40},{'ny'[i % 3 % 2]}" for i in range(60)),
    ]
    return "\n".join([*rows, "Total,,60", ""])


READ: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # The file, what is told, and what inspect --fix shows of the table as it is mended.
    "marks": (
        untidy(),
        (
            "column 'lactate', row 4: '-999', in 4 rows, and no other value is below 0;"
            ' set data.missing_in."lactate" = [-999]',
            "column 'income', rows 1, 2, 3: '1,000', '1,037', '1,074' are not numbers",
            "column 'dose', rows 1, 2, 3: '10,000', '20,000', '30,000' are not numbers where the"
            " decimal mark is '.'; set data.thousands = \",\"",
            "column 'seen', rows 1, 2, 3: '01/01/2024', '02/02/2024', '03/03/2024': dates are"
            " neither numbers nor categories",
            "column 'dead', row 5: the value is missing, and the target needs one in every row, 1"
            ' of 60 have none; set data.missing_target = "drop"',
        ),
        (
            "left out: 1 row without a target",
            "lactate  number        4",
            "income   number        0",
            "share    number        0",
            "dose     number        0        47 values, 9 distinct, mean 4.83e+04",
            "price    number        0        47 values, 7 distinct, mean 3.33",
        ),
    ),
    "a line of totals": (
        totalled(),
        ("row 61: 'Total' is rather a total than a row; set data.totals = \"drop\"",),
        ("classes  'n', 'y'",),
    ),
    "numbers as classes": (
        csv_of({"age": range(445), "progression": range(25, 25 + 3 * 445, 3)}),
        (
            "column 'progression': the target has 445 different numbers in 445 rows, which would be"
            ' as many classes; set data.task = "regression"',
        ),
        ("progression, for regression",),
    ),
    "more columns than are compared": (
        csv_of({f"g{i}": [j % 5 for j in range(12)] for i in range(10_001)} | {"y": "ab" * 6}),
        (
            "there are 10001 columns, and at most 10000 are compared by name; choose some, set"
            ' data.columns = ["NAME"]',
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", READ)
async def test_ambiguous_table_is_refused_with_the_setting_that_mends_it(
    tmp_path: Path, name: str
) -> None:
    """All columns at once, and `--fix` reads what was meant."""
    text, told, mended = READ[name]
    (tmp_path / "a.csv").write_text(text)
    inspect = [*PARTICIPANT, "inspect", f"--data={tmp_path / 'a.csv'}"]
    code, _, err = await called(*inspect)
    assert code == 1
    for line in told:
        assert line in err
    if not mended:
        return
    code, out, err = await called(*inspect, "--fix")
    assert code == 0, err
    for line in mended:
        assert line in out
