"""Results that nobody wants: each is told of, or the right one comes out, over real processes."""

import csv
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sk

from support.commands import called, command, status_json
from support.process import CoordinatorProcess, SiteProcess, ended

pytestmark = pytest.mark.frameworks

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
    async with ended(*one.sites.values(), coordinator):
        await coordinator.start()
        yield one


def csv_of(columns: Mapping[str, Sequence[object]]) -> str:
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    return "\n".join([*lines, ""])


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
async def test_best_model_of_rare_events_tells_them_apart(tmp_path, workload, metric):
    """Always "no" has the best accuracy. The untrained model is never the best, training does not
    stop there, and what is taken home ranks new rows as well as the last model does."""
    rounds = 12
    settings = {"workload.name": workload, "rounds.rounds": rounds}
    settings |= {"evaluate.metric": metric, "evaluate.patience": 3 if workload == "sgd" else 9}
    tables = {"north": rare(0), "south": rare(1)}
    (tmp_path / "new.csv").write_text(rare(2, 2000))
    async with session(tmp_path, tables, settings) as one:
        await one.start_sites()
        await one.wait()
        assert one.ended == {"north": 0, "south": 0}
        shown = await status_json(one.coordinator.port)
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


async def test_r2_is_that_of_all_rows_and_not_the_mean_of_sites(tmp_path):
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
        shown = await status_json(one.coordinator.port)
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


async def test_metric_that_the_workload_does_not_measure_is_refused_at_the_start(tmp_path):
    settings = {"workload.name": "sgd", "evaluate.metric": "dice", "evaluate.direction": "max"}
    coordinator = CoordinatorProcess(tmp_path / "data", settings)
    assert await coordinator.fails() == 2
    assert 'evaluate.metric is "dice"; the models of this workload are measured by' in (
        coordinator.log()
    )
