"""Seventy variants of two tables, spoilt as people spoil them: each is read as it was meant, or
somebody is told of it, and what the message tells one to type works.

A variant is the file of one site of three, or all files. Everything is in one process, over real
files; tests/e2e/test_first_training.py does it over processes.
"""

import io
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_diabetes

from support.spoilt import (
    Finding,
    Read,
    Rows,
    Study,
    added,
    cells,
    findings,
    read,
    scaled,
    set_cells,
    text_of,
)
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.commands import parse_assignments
from xain_foundation.settings.settings import load
from xain_participant.config import ParticipantConfig

SITE = "west"  # the spoilt one
SITES = ("north", "south", SITE)
# A setting that a message tells one to type, as on a command line or in a file.
FLAG = r'\(--set "([^"]+)"\)'
LINE = r'\bset ([^\s="]+(?:"[^"]+"[^\s="]*)* = (?:"[\w.:%/+-]*"|[\w.:%/+-]+))(?! \(|\.?\w)'
TYPED = re.compile(f"{FLAG}|{LINE}")
PLACEHOLDER = re.compile(r"\b(NAME|VALUE|N)\b")


def wards() -> Study:
    """Patients with numbers, categories, gaps and a name with an umlaut."""
    sites = {}
    for seed, site in enumerate(SITES):
        chance = np.random.RandomState(seed)
        rows = []
        for _ in range(150):
            age, lactate = chance.normal(61, 12), np.exp(chance.normal(0.6, 0.6))
            sex, ward = "mf"[chance.randint(2)], ("Süd", "Nord", "West")[chance.randint(3)]
            risk = (age - 61) / 12 + 1.2 * np.log(lactate) - 0.7 + (sex == "m") * 0.5
            rows.append(
                {
                    "age": f"{age:.1f}",
                    "income": f"{chance.normal(52000, 9000):.1f}",
                    "lactate": "" if chance.rand() < 0.05 else f"{lactate:.2f}",
                    "sex": {"m": "male", "f": "female"}[sex],
                    "ward": ward,
                    "Größe": f"{chance.normal(172, 9):.1f}",
                    "smoker": ("yes", "no")[chance.randint(2)],
                    "outcome": "dead" if chance.rand() < 1 / (1 + np.exp(-1.5 * risk)) else "alive",
                }
            )
        sites[site] = rows
    return Study("wards", "outcome", sites)


def diabetes() -> Study:
    """Regression on a table that scikit-learn brings along."""
    data = load_diabetes(scaled=False)
    names = [str(name) for name in data.feature_names]
    rows = [
        {**{n: f"{v:.6g}" for n, v in zip(names, row, strict=True)}, "progression": f"{y:g}"}
        for row, y in zip(data.data.tolist(), data.target.tolist(), strict=True)
    ]
    sites = {site: rows[at::3] for at, site in enumerate(SITES)}
    return Study("diabetes", "progression", sites, "regression")


STUDIES = {"wards": wards(), "diabetes": diabetes()}

Spoil = Callable[[Rows], Rows]
Write = Callable[[Rows], bytes]


def utf8(rows: Rows) -> bytes:
    return text_of(rows).encode()


def keep(rows: Rows) -> Rows:
    return rows


@dataclass(frozen=True, slots=True)
class Case:
    """A variant.

    told: what is said of it, parts of one message separated by " | "; "" if it is read as if it
    were not spoilt. everywhere: all sites are spoilt. suffix: of the file.
    """

    study: str
    spoil: Spoil = keep
    told: str = ""
    write: Write = utf8
    everywhere: bool = False
    suffix: str = ".csv"


def parquet(rows: Rows) -> bytes:
    """Columns of numbers and of text, as a database writes them."""
    columns = {}
    for name in rows[0]:
        texts = [row[name] or None for row in rows]
        try:
            columns[name] = [None if text is None else float(text) for text in texts]
        except ValueError:
            columns[name] = texts
    return written(columns)


def written(columns: Mapping[str, list[Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def with_bytes(rows: Rows) -> bytes:
    """A Parquet file with a column that is neither numbers nor text."""
    columns = {name: [row[name] or None for row in rows] for name in rows[0]}
    return written({"scan": [b"\1\2"] * len(rows), **columns})


def decimal_comma(rows: Rows) -> bytes:
    """The rows with decimal commas, as a German spreadsheet writes them."""
    study = STUDIES["diabetes"]
    numbers = (
        [name for name in rows[0] if study.is_number(name)]
        if "bmi" in rows[0]
        else ["age", "income", "lactate", "Größe"]
    )
    for name in numbers:
        rows = cells(rows, name, lambda text, _: text.replace(".", ","))
    return text_of(rows, ";").encode()


def renamed(rows: Rows, change: Callable[[str], str]) -> Rows:
    return [{change(name): value for name, value in row.items()} for row in rows]


def column(name: str, change: Callable[[str], str]) -> Spoil:
    return lambda rows: cells(rows, name, lambda text, _: change(text))


def some(name: str, text: str, every: int = 15) -> Spoil:
    return lambda rows: set_cells(rows, name, text, every)


def one(name: str, text: str) -> Spoil:
    return lambda rows: set_cells(rows, name, text)


def swapped(rows: Rows) -> Rows:
    other = {"dead": "alive", "alive": "dead"}
    return cells(rows, "outcome", lambda text, _: other[text])


def total(rows: Rows) -> Rows:
    return [
        *rows,
        {name: "Total" if name == "age" else "" for name in rows[0]} | {[*rows[0]][-1]: "9"},
    ]


def dated(form: Callable[[int], str]) -> Spoil:
    return lambda rows: added(rows, "admitted", lambda _, at: form(at))


def follow_up(rows: Rows) -> Rows:
    return added(
        rows, "days", lambda row, at: str(at % 90 + 3 if row["outcome"] == "dead" else 365 - at % 9)
    )


def leaking(rows: Rows) -> Rows:
    return added(rows, "code", lambda row, at: str(7 if row["outcome"] == "dead" else at % 5))


CASES: dict[str, Case] = {
    # how the file is written
    "byte order mark": Case("wards", write=lambda rows: b"\xef\xbb\xbf" + utf8(rows)),
    "UTF-16": Case("wards", write=lambda rows: text_of(rows).encode("utf-16")),
    "Latin-1": Case("wards", write=lambda rows: text_of(rows).encode("cp1252")),
    "semicolons and commas": Case("wards", write=decimal_comma),
    "semicolons and commas, numbers": Case("diabetes", write=decimal_comma),
    "tabs": Case("wards", write=lambda rows: text_of(rows, "\t").encode()),
    "bars": Case("diabetes", write=lambda rows: text_of(rows, "|").encode()),
    "title": Case("wards", write=lambda rows: b"Ward 7\nexported 2024-03-01\n\n" + utf8(rows)),
    "blank lines": Case("diabetes", write=lambda rows: utf8(rows) + b"\n\n\n"),
    "line ends": Case("wards", write=lambda rows: utf8(rows).replace(b"\n", b"\r\n")),
    "names of a Mac": Case(
        "wards", lambda rows: renamed(rows, lambda name: unicodedata.normalize("NFD", name))
    ),
    "blanks around names": Case("wards", lambda rows: renamed(rows, lambda name: f" {name} ")),
    "blanks around categories": Case("wards", column("sex", lambda text: f"{text} ")),
    "categories of a Mac": Case(
        "wards", column("ward", lambda text: unicodedata.normalize("NFD", text))
    ),
    "half a file of bytes": Case(
        "wards", told="the file is no text in", write=lambda rows: utf8(rows)[:900] + b"\0\0\0"
    ),
    "another cell": Case(
        "wards",
        told="row 3 has 8 cells, and the header 9",
        write=lambda rows: utf8(rows).replace(b"\n", b",\n", 3),
    ),
    # marks
    "n/a": Case("wards", some("lactate", "n/a"), "'lactate' | 'n/a'"),
    "#N/A": Case("wards", some("lactate", "#N/A"), "'lactate' | '#N/A'"),
    "point": Case("wards", some("lactate", "."), "'lactate' | '.'"),
    "dash": Case("diabetes", some("bmi", "-"), "'bmi' | '-'"),
    "-999": Case("wards", some("lactate", "-999"), "'lactate' | -999"),
    "-999, numbers": Case("diabetes", some("bp", "-999"), "'bp' | -999"),
    "below a limit": Case("wards", some("lactate", "<0.5"), "'lactate' | <0.5"),
    "thousands": Case("wards", column("income", lambda text: f"{float(text):,.0f}"), "thousands"),
    "dollars": Case(
        "wards", column("income", lambda text: f"${float(text):,.2f}"), "'income' | thousands"
    ),
    "dollars without thousands": Case("wards", column("income", lambda text: f"${text}")),
    "per cent": Case("wards", column("lactate", lambda text: f"{text}%")),
    "units": Case("wards", some("income", "52000 EUR"), "'income' | EUR"),
    "some units": Case("wards", some("Größe", "172 cm"), "'Größe' | cm"),
    "words": Case("diabetes", some("bmi", "obese", 80), "'bmi' | 'obese'"),
    "decimal commas and points": Case(
        "wards",
        lambda rows: cells(rows, "income", lambda text, _: text.replace(".", ",")),
        "decimal commas | points",
        write=lambda rows: text_of(rows, ";").encode(),
    ),
    # of a database
    "Parquet": Case("wards", write=parquet, suffix=".parquet"),
    "Parquet, dollars": Case(
        "wards",
        column("income", lambda text: f"${float(text) // 5000 * 5000}"),
        "'income' | look like numbers with a mark",
        write=parquet,
        suffix=".parquet",
        everywhere=True,
    ),
    "Parquet, below a limit": Case(
        "wards",
        lambda rows: cells(rows, "lactate", lambda _, at: ("<5", "<10")[at % 2]),
        "'lactate' | look like numbers with a mark",
        write=parquet,
        suffix=".parquet",
        everywhere=True,
    ),
    "Parquet, -999": Case(
        "wards", some("lactate", "-999"), "'lactate' | -999", write=parquet, suffix=".parquet"
    ),
    "Parquet, bytes": Case(
        "wards", told="'scan' | neither a number nor text", write=with_bytes, suffix=".parquet"
    ),
    # dates and totals
    "dates": Case(
        "wards",
        dated(lambda at: f"2024-03-{at % 28 + 1:02}"),
        "'admitted' | dates",
        everywhere=True,
    ),
    "dates, day or month": Case(
        "wards",
        dated(lambda at: f"0{at % 9 + 1}/0{at % 8 + 1}/2024"),
        "'admitted' | dates",
        everywhere=True,
    ),
    "dates in German": Case(
        "wards",
        dated(lambda at: f"{at % 28 + 1:02}.03.2024"),
        "'admitted' | dates",
        everywhere=True,
    ),
    "times": Case(
        "wards", dated(lambda at: f"{at % 24:02}:15"), "'admitted' | times", everywhere=True
    ),
    "total": Case("wards", total, "'Total'"),
    "total of numbers": Case("diabetes", total, "'Total'"),
    # units and offsets
    "months for years": Case("wards", lambda rows: scaled(rows, "age", 12), "'age'"),
    "days for years": Case("wards", lambda rows: scaled(rows, "age", 365.25), "'age'"),
    "thousands of euros": Case("wards", lambda rows: scaled(rows, "income", 0.001), "'income'"),
    "metres": Case("wards", lambda rows: scaled(rows, "Größe", 0.01), "'Größe'"),
    "inches": Case("wards", lambda rows: scaled(rows, "Größe", 1 / 2.54), "'Größe'"),
    "mg/dl": Case("wards", lambda rows: scaled(rows, "lactate", 9.0), "'lactate'"),
    "kPa": Case("diabetes", lambda rows: scaled(rows, "bp", 0.133), "'bp'"),
    "offset": Case("diabetes", lambda rows: scaled(rows, "bmi", 1.0, 273.15), "'bmi'"),
    "cents": Case("diabetes", lambda rows: scaled(rows, "progression", 100), "'progression'"),
    # cells
    "1e9": Case("wards", one("income", "1000000000"), "'income'"),
    "1e9, numbers": Case("diabetes", one("bmi", "1e9"), "'bmi'"),
    "1e9, target": Case("diabetes", one("progression", "1e9"), "'progression'"),
    "infinite": Case("diabetes", one("bmi", "inf"), "'bmi' | inf"),
    # labels
    "swapped labels": Case("wards", swapped, "'outcome'"),
    "labels in capitals": Case("wards", column("outcome", str.upper), "DEAD"),
    "other labels": Case(
        "wards", column("outcome", lambda text: f"{int(text == 'dead')}"), "'outcome'"
    ),
    "third label": Case("wards", some("outcome", "lost"), "lost"),
    "number as class": Case("diabetes", told="'progression' | regression"),
    # categories
    "capitals": Case("wards", column("sex", str.upper), "'sex'"),
    "letters": Case("wards", column("sex", lambda text: text[0]), "'sex'"),
    "another language": Case(
        "wards", column("sex", lambda text: {"male": "Mann", "female": "Frau"}[text]), "'sex'"
    ),
    "Yes and No": Case("wards", column("smoker", lambda text: text.capitalize())),
    "true and false": Case("wards", column("smoker", lambda text: str(text == "yes"))),
    # columns
    "empty column": Case("wards", column("lactate", lambda _: ""), "'lactate'"),
    "empty column, numbers": Case("diabetes", column("bmi", lambda _: ""), "'bmi'"),
    "constant": Case(
        "wards", lambda rows: added(rows, "country", lambda *_: "DE"), "'country'", everywhere=True
    ),
    "id": Case(
        "wards", lambda rows: added(rows, "id", lambda _, at: f"P{at:04}"), "'id'", everywhere=True
    ),
    "row number": Case(
        "diabetes",
        lambda rows: added(rows, "nr", lambda _, at: f"{at + 1}"),
        "'nr'",
        everywhere=True,
    ),
    "follow-up": Case("wards", follow_up, "'days'", everywhere=True),
    "leak": Case("wards", leaking, "'code'", everywhere=True),
    "another column": Case(
        "wards", lambda rows: added(rows, "bed", lambda _, at: f"{at % 30}"), "'bed'"
    ),
    "missing column": Case(
        "wards",
        lambda rows: renamed(rows, lambda name: "Age" if name == "age" else name),
        "'age' | 'Age'",
    ),
    # outcomes
    "blank outcomes": Case("wards", some("outcome", ""), "'outcome' | missing"),
    "blank outcomes, numbers": Case("diabetes", some("progression", ""), "'progression' | missing"),
    "few rows": Case("wards", lambda rows: rows[:12], "12 rows"),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Read]]:
    """The studies as they are."""
    folder = tmp_path_factory.mktemp("honest")
    return {name: files_of(study, folder, study.sites, utf8) for name, study in STUDIES.items()}


def files_of(
    study: Study,
    folder: Path,
    sites: Sequence[str] | Mapping[str, Rows],
    write: Write,
    settings: Mapping[str, object] | None = None,
    suffix: str = ".csv",
) -> dict[str, Read]:
    """Read what some sites have."""
    found = {}
    for site in sites:
        file = folder / f"{site}{suffix}"
        file.write_bytes(write(study.sites[site]))
        found[site] = read(file, study.target, study.task, settings)
    return found


def typed(message: str) -> list[dict[str, str]]:
    """Settings that a message tells one to type, without those that have placeholders."""
    lines = [flag or setting for flag, setting in TYPED.findall(message)]
    return [
        parse_assignments("xain-participant", [line], "a=b")
        for line in lines
        if not PLACEHOLDER.search(line)
    ]


def is_of_participant(setting: Mapping[str, str]) -> bool:
    return all(key.split(".")[0] in ParticipantConfig.model_fields for key in setting)


@pytest.mark.parametrize("name", CASES)
def test_spoilt_table_is_read_as_it_was_meant_or_told_of(name, honest, tmp_path):
    case = CASES[name]
    study = STUDIES[case.study]
    if name == "number as class":
        study, case = replace(study, task="classification"), replace(case, everywhere=True)
    chosen = SITES if case.everywhere else (SITE,)
    for site in chosen:
        study = study.with_rows(site, case.spoil(study.sites[site]))
    known = dict(honest[case.study])

    def told(settings: Mapping[str, object] | None = None) -> tuple[dict[str, Read], list[Finding]]:
        now = known | files_of(study, tmp_path, chosen, case.write, settings, case.suffix)
        return now, findings(now.items())

    now, found = told()
    if not case.told:
        assert found == []
        assert now == known
        return
    about = [str(each) for each in found if each.site in ("", *chosen)]
    parts = case.told.split(" | ")
    assert any(all(part in each for part in parts) for each in about), about
    for each in about:
        settings = typed(each)
        for setting in settings:
            if not is_of_participant(setting):
                load(CoordinatorConfig, overrides={"workload.name": "sgd"} | setting)
                continue
            # Some are needed beside the first one.
            for tried in (setting, settings[0] | setting):
                _, after = told(tried)
                if each not in map(str, after):
                    break
            else:
                raise AssertionError(f"{setting} changes nothing: {each}")
