"""Three sites fit a regression in processes of their own: the figures of all rows in one place."""

import csv
from pathlib import Path

import numpy as np

from support.commands import command
from support.process import CoordinatorProcess, Keep, SiteProcess
from unit.workloads.test_glm import REFERENCES, study

SITES = ("north", "south", "west")
COLUMNS = ("age", "dose", "sex", "ward", "ill")
RULES: dict[str, object] = {
    "workload.name": "glm",
    "workload.options.reference_class": "well",
    "workload.options.references": '{ sex = "f", ward = "B" }',
    "rounds.min_participants": len(SITES),
    "server.heartbeat_time_s": 1.0,
    "server.heartbeat_timeout_s": 200.0,
}


def write_tables(folder: Path) -> None:
    """A table for each site; the sites have unlike ages."""
    folder.mkdir()
    values = study()
    rows = list(zip(*(values[name].tolist() for name in COLUMNS), strict=True))
    order = np.argsort(values["age"], kind="stable")
    for site, part in zip(SITES, np.array_split(order, [50, 130]), strict=True):
        with (folder / f"{site}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *(rows[at] for at in part)])


async def fitted(keep: Keep, folder: Path) -> Path:
    """The data folder after a fit."""
    write_tables(folder)
    coordinator = keep(CoordinatorProcess(folder / "data", RULES))
    sites = [keep(SiteProcess(folder, name)) for name in SITES]
    await coordinator.start()
    for site in sites:
        data = f"--data={folder / site.log_path.stem}.csv"
        await site.start(coordinator.port, data, "--target=ill", "--test-fraction=0")
    assert [await site.died() for site in sites] == [0] * len(sites)
    assert await coordinator.stop() == 0
    return folder / "data"


async def told(data: Path, name: str, *words: str) -> str:
    """The file that a command writes."""
    file = data.parent / name
    status, _, error = await command(*words[:1], f"--data-dir={data}", f"{words[1]}={file}")
    assert status == 0, error
    return file.read_text(encoding="utf-8")


async def test_coefficients_are_those_of_all_rows(keep, tmp_path):
    """The report and the CSV have the coefficients that statsmodels computes."""
    data = await fitted(keep, tmp_path / "study")
    table = await told(data, "coefficients.csv", "export", "--to")
    lines = list(csv.DictReader(table.splitlines()))
    terms = ["intercept", "age", "dose", "sex = m", "ward = A", "ward = C"]
    assert [line["term"] for line in lines] == terms
    expected = REFERENCES["logistic"]
    errors = np.array(expected.error)
    for ours, theirs in (
        ("coefficient", expected.coef),
        ("std_error", expected.error),
        ("low", expected.low),
        ("high", expected.high),
    ):
        found = np.array([float(line[ours]) for line in lines])
        assert np.abs((found - theirs) / errors).max() < 1e-6, ours
    page = await told(data, "report.html", "report", "--html")
    low, high = (f"{np.exp(limit[3]):.4g}" for limit in (expected.low, expected.high))
    assert f"<b>{np.exp(expected.coef[3]):.4g}</b>" in page
    assert f">{low} to {high}<" in page
