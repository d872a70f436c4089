"""From tables at three sites to a file that scores the same in plain scikit-learn."""

import asyncio
import csv
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from support.commands import called, command
from support.process import CoordinatorProcess, SiteProcess, ended
from support.tables import write_rows

pytestmark = pytest.mark.frameworks

PAGE = Path(__file__).parents[2] / "docs/export.md"
ROUNDS = 4
SITES = ("north", "south", "west")
FORMATS = (".skops", ".npz", ".safetensors", ".json")

# Everything that one needs to use a pipeline: the packages that it is made of.
SCORE = """
import csv, sys
import numpy as np
from skops.io import load
pipeline = load(sys.argv[1], trusted=["numpy.dtype"])
rows = list(csv.DictReader(open(sys.argv[2])))
names = sys.argv[3].split(",")
numbers = {"income", "dose"}
table = np.empty((len(rows), len(names)), dtype=object)
for i, row in enumerate(rows):
    for j, name in enumerate(names):
        cell = None if row[name] in ("", "NA") else row[name]
        table[i, j] = float(cell or "nan") if name in numbers else cell
print(f"{np.mean(pipeline.predict(table) == [row['outcome'] for row in rows]):.4f}")
assert not any(name.startswith("xain") for name in sys.modules)
"""


@asynccontextmanager
async def trained(folder: Path) -> AsyncIterator[CoordinatorProcess]:
    """A coordinator whose session has ended."""
    coordinator = CoordinatorProcess(
        folder / "data",
        {"workload.name": "sgd", "rounds.rounds": ROUNDS, "rounds.min_participants": 3},
    )
    sites = [SiteProcess(folder, name) for name in SITES]
    async with ended(*sites, coordinator):
        await coordinator.start()
        for i, site in enumerate(sites):
            write_rows(folder / f"{SITES[i]}.csv", i, 150)
            data = f"--data={folder / SITES[i]}.csv"
            await site.start(coordinator.port, data, "--target=outcome")
        assert await asyncio.gather(*(site.died() for site in sites)) == [0, 0, 0]
        yield coordinator


async def test_an_exported_model_scores_the_same_everywhere(tmp_path):
    """The coordinator's commands and plain scikit-learn agree, for every format, and with what was
    exported while the coordinator ran. What was done to the columns is told beside the models, and
    no rare category is."""
    write_rows(tmp_path / "test.csv", 3, 300)
    data_dir = f"--data-dir={tmp_path / 'data'}"
    async with trained(tmp_path) as coordinator:
        address = f"--address=127.0.0.1:{coordinator.port}"
        status, out, err = await command("models", address, "--json")
        assert status == 0, err
        asked = json.loads(out)
        live = tmp_path / "live.npz"
        assert (await command("export", address, "--best", f"--to={live}"))[0] == 0
        page = tmp_path / "live.html"
        assert (await command("report", address, f"--html={page}"))[0] == 0
        status, out, err = await command("models", data_dir, "--json")
        assert status == 0, err
        # The coordinator that runs lists the same models through its socket.
        for one, before in zip(json.loads(out), asked, strict=True):
            assert one | {"exported_at": ""} == before | {"exported_at": ""}
        assert await coordinator.stop() == 0

    (recorded,) = (tmp_path / "data").rglob("preprocessing.json")
    columns = {column["name"]: column for column in json.loads(recorded.read_text())["columns"]}
    assert columns["ward"]["categories"] == ["A", "B", "C"]
    kept = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not any(b"secret ward" in path.read_bytes() for path in kept)

    status, out, _ = await command("models", data_dir, "--json")
    assert status == 0
    listed = json.loads(out)
    assert [(m["round"], m["digest"]) for m in listed] == [(m["round"], m["digest"]) for m in asked]
    assert [m["round"] for m in listed] == list(range(ROUNDS + 1))
    assert all(0 <= m["evaluation"]["metrics"]["accuracy"] <= 1 for m in listed)
    assert listed[-1]["is_last"]
    assert listed[-1]["num_updates"] == 3
    (best,) = [m for m in listed if m["is_best"]]
    status, out, _ = await command("models", data_dir)
    assert status == 0
    lines = out.splitlines()
    assert lines[1].split() == ["model", "updates", "samples", "accuracy", "auc", "log_loss"]
    assert [line.split()[0] for line in lines[2:]] == list("01234")
    accuracy = listed[-1]["evaluation"]["figures"]["accuracy"]
    limits = f"({accuracy['low']:.3g} to {accuracy['high']:.3g})"
    assert f"{accuracy['value']:.4g} {limits}" in lines[-1]

    status, out, err = await command("report", data_dir, f"--html={tmp_path / 'report.html'}")
    assert status == 0, err
    for written in (page, tmp_path / "report.html"):
        text = written.read_text()
        assert all(f">{site}<" in text for site in SITES)
        assert text.count("<figcaption>accuracy</figcaption>") == 1
        assert all(f">{part}<" in text for part in ("Data", "Confusion matrix", "Curves"))
        assert f">How good is model {best['round']}?<" in text

    scores, predictions = set(), set()
    for suffix in FORMATS:
        file = tmp_path / f"model{suffix}"
        status, out, err = await command("export", data_dir, "--best", f"--to={file}")
        assert status == 0, err
        assert {str(best["round"]), best["session"], str(file)} <= set(out.split())
    for file in (*(tmp_path / f"model{suffix}" for suffix in FORMATS), live):
        status, out, err = await command(
            "predict", f"--model={file}", f"--data={tmp_path}/test.csv"
        )
        assert status == 0, err
        predictions.add(out)
        scores.update(re.findall(r"^accuracy ([\d.]+) of 300 rows", err, re.MULTILINE))
    assert len(predictions) == 1
    (header,) = {next(csv.reader(text.splitlines()))[0] for text in predictions}
    assert header == "row"

    names = ",".join(column["name"] for column in best["columns"])
    words = (str(tmp_path / "model.skops"), str(tmp_path / "test.csv"), names)
    status, out, err = await called("-c", SCORE, *words)
    assert status == 0, err
    assert {out.strip()} == scores
    assert float(out) > 0.8

    # The code of the page, whose files have these names.
    page_code = re.search(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert page_code
    (tmp_path / "model.skops").rename(tmp_path / "wards.skops")
    (tmp_path / "test.csv").rename(tmp_path / "new-patients.csv")
    status, out, err = await called("-c", page_code[1], cwd=tmp_path)
    assert status == 0, err
    (lines,) = (list(csv.DictReader(text.splitlines())) for text in predictions)
    assert [line.split()[0] for line in out.splitlines()] == [line["outcome"] for line in lines]

    status, _, err = await command("export", data_dir, "--round=9", f"--to={tmp_path}/no.npz")
    assert status == 1
    assert re.search("'9': .*last, best.* 0 to 4", err)


def write_patients(
    path: Path, seed: int, *, sexes: tuple[str, str] = ("female", "male"), names: str = "age,sex"
) -> None:
    """Rows with an age, a dash where it is not known, and a sex, which tells the outcome."""
    chance = np.random.default_rng(seed)
    lines = [f"{names},outcome"]
    for _ in range(100):
        is_man = bool(chance.random() < 0.5)
        age = "-" if chance.random() < 0.05 else f"{chance.normal(50, 10):.0f}"
        lines.append(f"{age},{sexes[is_man]},{'yn'[is_man]}")
    path.write_text("\n".join([*lines, ""]))


async def test_a_site_takes_the_model_home_and_hears_what_it_does_not_know(tmp_path):
    """The file keeps how the site writes its tables. Where most of a column is unknown to the
    model, predictions are written, and the status is another one."""
    german = ("--rename=Alter=age", "--rename=Geschlecht=sex", "--set=data.missing=-")
    write_patients(tmp_path / "north.csv", 0)
    write_patients(tmp_path / "south.csv", 1, names="Alter,Geschlecht")
    write_patients(tmp_path / "new.csv", 2, names="Alter,Geschlecht")
    write_patients(tmp_path / "other.csv", 3, names="Alter,Geschlecht", sexes=("F", "M"))
    coordinator = CoordinatorProcess(
        tmp_path / "data",
        {"workload.name": "sgd", "rounds.rounds": ROUNDS, "rounds.min_participants": 2},
    )
    sites = [SiteProcess(tmp_path, name) for name in ("north", "south")]
    tables = [(f"--data={tmp_path / name}.csv", "--target=outcome") for name in ("north", "south")]
    program = ("-m", "xain_participant")
    model = tmp_path / "model.skops"
    async with ended(*sites, coordinator):
        await coordinator.start()
        await sites[0].start(coordinator.port, *tables[0], "--set=data.missing=-")
        await sites[1].start(coordinator.port, *tables[1], *german)
        assert await asyncio.gather(*(site.died() for site in sites)) == [0, 0]
        here = f"--coordinator=127.0.0.1:{coordinator.port}"
        fetch = (*program, "fetch", here, f"--to={model}", *german)
        status, out, err = await called(*fetch, "--round=best")
        assert (status, str(model) in out) == (0, True), err
        status, _, err = await called(*fetch, "--round=77")
        assert (status, "'77': take last, best, or a number, 0 to 4" in err) == (1, True), err

    predict = (*program, "predict", f"--model={model}", f"--to={tmp_path / 'out.csv'}")
    status, _, err = await called(*predict, f"--data={tmp_path / 'new.csv'}")
    assert status == 0, err
    assert re.search(r"^column 'age': \d of 100 values are missing, as were", err, re.MULTILINE)
    assert float(re.findall(r"^accuracy ([\d.]+) of 100 rows", err, re.MULTILINE)[0]) > 0.9
    (tmp_path / "out.csv").unlink()
    status, _, err = await called(*predict, f"--data={tmp_path / 'other.csv'}")
    assert status == 6, err
    assert (
        "column 'sex': 100 of 100 values are unknown to the model, which knows 'female', 'male';"
        " the file has "
    ) in err
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 101
