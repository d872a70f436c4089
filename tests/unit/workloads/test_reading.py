"""Tables as people export them: each is read as the plain one, or refused with the settings that
mend it, and with those it is read."""

import csv
import io
import re
import sys
import tomllib
import unicodedata
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.stata_files import write_stata
from support.workbooks import write_workbook
from xain_foundation.settings.hints import hint, quoted
from xain_foundation.settings.settings import load
from xain_participant.config import DataSettings, ParticipantConfig
from xain_participant.tables.fixes import with_fixes
from xain_workloads.errors import DataError
from xain_workloads.tables.data import load_rows, load_table
from xain_workloads.tables.preprocessing import PreprocessingOptions, fit
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.reading.errors import DoesNotFit
from xain_workloads.tables.schema import MAX_COLUMNS
from xain_workloads.tables.table import Table

HEADER = ("Âge", "weight", "sex", "smoker", "cost", "outcome")
ROWS = [
    (
        str(20 + i),
        f"{50 + 0.7 * i:.1f}",
        "fm"[i % 2],
        ("yes", "no")[i % 3 > 0],
        str(1200 + 37 * i),
        ("alive", "dead")[i % 4 == 0],
    )
    for i in range(40)
]
Lines = list[list[str]]


def lines() -> Lines:
    return [list(HEADER), *map(list, ROWS)]


def text(
    table: Lines, *, separator: str = ",", above: str = "", below: str = "", end: str = "\n"
) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, lineterminator=end).writerows(table)
    return above + file.getvalue() + below


def changed(**columns: Callable[[int, str], str]) -> Lines:
    """The table with other cells in these columns: (row from 0, cell) -> cell."""
    table = lines()
    for name, change in columns.items():
        at = HEADER.index(name.replace("age", "Âge"))
        for i, row in enumerate(table[1:]):
            row[at] = change(i, row[at])
    return table


def with_column(name: str, cell: Callable[[int], str]) -> Lines:
    """The table with one more column, before the others."""
    return [[name, *HEADER], *([cell(i), *row] for i, row in enumerate(ROWS))]


def german(table: Lines) -> Lines:
    """Decimal commas in the weights."""
    return [[cell.replace(".", ",") for cell in row] for row in table]


def at_rows(rows: set[int], other: str) -> Callable[[int, str], str]:
    return lambda i, cell: other if i in rows else cell


@dataclass
class Case:
    """content: of a CSV file. line: in the message; "" if the table is read at once.

    column: what differs from the plain table in the end, as {name: values}; None is a gap.
    rows: those that are read, by default all.
    """

    content: str | bytes
    line: str = ""
    column: dict[str, Any] | None = None
    rows: Callable[[int], bool] = lambda _: True


def gaps(name: str, rows: set[int], values: list[Any]) -> dict[str, Any]:
    return {name: [None if i in rows else value for i, value in enumerate(values)]}


AGES = [float(row[0]) for row in ROWS]
COSTS = [float(row[4]) for row in ROWS]
SEXES = [row[2] for row in ROWS]
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
DAYS = [f"2021-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(40)]
SINCE = [
    float(np.datetime64(day).astype(int) - np.datetime64("2000-01-01").astype(int)) for day in DAYS
]

FIRST_DAYS = [since - i % 28 for i, since in enumerate(SINCE)]


def dated(write: Callable[[str, str, str], str]) -> Lines:
    return with_column("seen", lambda i: write(*DAYS[i].split("-")))


def thousands(mark: str) -> Callable[[int, str], str]:
    return lambda _, cell: f"{int(cell):,}".replace(",", mark)


CASES = {
    # Encodings
    "utf-8": Case(text(lines())),
    "cp1252": Case(
        text(changed(sex=lambda _, cell: cell + "€")).encode("cp1252"),
        column={"sex": [cell + "€" for cell in SEXES]},
    ),
    "utf-16 without a mark": Case(text(lines()).encode("utf-16-le")),
    "utf-16 of Excel": Case(text(german(lines()), separator="\t", end="\r\n").encode("utf-16")),
    "old mac": Case(text(lines(), end="\r")),
    # Separators and lines that are no rows
    "semicolons and points": Case(text(lines(), separator=";")),
    "bars, decimal commas in quotes": Case(
        "\n".join("|".join(f'"{cell}"' for cell in row) for row in german(lines())) + "\n"
    ),
    "separator named": Case(text(lines(), separator=";", above="sep=;\n")),
    "title": Case(text(lines(), above="Ward 7\n\n")),
    "padded title": Case(text(lines(), above="Ward 7,,,,,\n,,,,,\n")),
    "title with a comma": Case(text(lines(), above="Ward 7, 2021\n"), "set data.skip_lines = 1"),
    "blank columns": Case("".join(f"{line},,\n" for line in text(lines()).splitlines())),
    "blank rows": Case(text(lines(), below=",,,,,\n,,,,,\n")),
    "total": Case(
        text(lines(), below="Total,,,,9000,\n"),
        "row 41: 'Total' is rather a total than a row; set data.totals = \"drop\"",
    ),
    "summe": Case(text(lines(), below="Summe:,,,,9000,\n,,,,,\n"), 'set data.totals = "drop"'),
    **{
        f"label {label!r} with a number": Case(
            text(lines(), below=f",,{label},,,\n"), "is rather a total than a row"
        )
        for label in ("Total: 29", "Mean = 4.5", "Summe 1\u00a0200")
    },
    "two totals": Case(
        text(lines(), below="Mean,,,,90,\nTotal,,,,9000,\n"), 'set data.totals = "drop"'
    ),
    # Numbers
    "decimal commas": Case(text(german(lines())), 'set data.decimal = ","'),
    "thousands": Case(text(changed(cost=thousands(","))), 'set data.thousands = ","'),
    "German thousands": Case(
        text(
            german(changed(cost=lambda i, cell: f"{thousands('#')(i, cell)}.0".replace("#", "@"))),
            separator=";",
        ).replace("@", "."),
        "",
    ),
    "thousands with blanks": Case(
        text(german(changed(cost=thousands("\u202f"))), separator=";"), 'set data.thousands = " "'
    ),
    "Swiss thousands": Case(text(changed(cost=thousands("'"))), 'set data.thousands = "\'"'),
    "euros": Case(text(german(changed(cost=lambda _, cell: f"{cell} €")), separator=";")),
    "dollars and thousands": Case(
        text(changed(cost=lambda i, cell: "$" + thousands(",")(i, cell))),
        'set data.thousands = ","',
    ),
    "some dollars": Case(
        text(changed(cost=lambda i, cell: f"${cell}" if i > 9 else cell)),
        'set data.marks."cost" = "$"',
    ),
    "units": Case(text(changed(weight=lambda _, cell: f"{cell} kg"))),
    "two units": Case(
        text(changed(weight=lambda i, cell: f"{cell} {'kg' if i else 'lb'}")),
        "convert them to one unit",
        {"weight": [f"{row[1]} {'kg' if i else 'lb'}" for i, row in enumerate(ROWS)]},
    ),
    "below the limit": Case(
        text(changed(cost=at_rows({3, 5}, "<50"))),
        "row 4: '<50' is a value below a limit of detection; set data.below_limit = \"half\"",
        {"cost": [25.0 if i in (3, 5) else cost for i, cost in enumerate(COSTS)]},
    ),
    "compact dates are numbers": Case(
        text(dated(lambda y, m, d: y + m + d)), 'set data.dates."seen" =', {"seen": SINCE}
    ),
    # Missing values
    **{
        f"missing {mark}": Case(
            text(changed(age=at_rows({2, 7}, mark))),
            f"row 3: '{mark}' is not a number, 38 of the column's 40 values are; correct it, or set"
            f' data.missing = ["{mark}"]',
            gaps("Âge", {2, 7}, AGES),
        )
        for mark in (".", "n/a", "#N/A", "-")
    },
    "missing texts of one column": Case(
        text(changed(age=at_rows({2}, "left"))),
        'set data.missing_in."Âge" = ["left"]',
        gaps("Âge", {2}, AGES),
    ),
    "missing code": Case(
        text(changed(age=at_rows({2, 7}, "-999"))),
        "row 3: '-999', in 2 rows, and no other value is below 0; set data.missing_in."
        '"Âge" = [-999]',
        gaps("Âge", {2, 7}, AGES),
    ),
    "missing codes of a survey": Case(
        text(changed(age=lambda i, cell: {2: "-9", 7: "-8", 9: "-9"}.get(i, cell))),
        "rows 3, 8: '-9', '-8', in 3 rows, and no other value is below 0; set data.missing_in."
        '"Âge" = [-9, -8]',
        gaps("Âge", {2, 7, 9}, AGES),
    ),
    "missing code, written otherwise": Case(
        text(changed(age=at_rows({2, 7}, "-999.0"))),
        'set data.missing_in."Âge" = [-999]',
        gaps("Âge", {2, 7}, AGES),
    ),
    "empty column": Case(text(with_column("note", lambda _: "")), column={"note": [None] * 40}),
    # Categories
    "booleans": Case(
        text(
            changed(
                smoker=lambda i, cell: (
                    cell,
                    cell.upper() + " ",
                    {"yes": "true", "no": "False"}[cell],
                    {"yes": "Ja", "no": "nein"}[cell],
                )[i % 4]
            )
        )
    ),
    "blanks in categories": Case(
        text(changed(sex=lambda i, cell: (" group  f", "group f", "group\u00a0f ")[i % 3])),
        column={"sex": ["group f"] * 40},
    ),
    "NFD categories": Case(
        text(changed(sex=lambda i, _: unicodedata.normalize(("NFC", "NFD")[i % 2], "weiß é"))),
        column={"sex": ["weiß é"] * 40},
    ),
    "codes with points": Case(
        text(changed(sex=lambda i, _: f"1.2.{i % 3}")),
        column={"sex": [f"1.2.{i % 3}" for i in range(40)]},
    ),
    "groups around a limit": Case(
        text(changed(sex=lambda i, _: ("<1", "≥1")[i % 2])), column={"sex": ["<1", "≥1"] * 20}
    ),
    "phone numbers": Case(
        text(changed(sex=lambda i, _: f"0171 {2345 + i}")),
        column={"sex": [f"0171 {2345 + i}" for i in range(40)]},
    ),
    # Dates
    "dates": Case(
        text(dated(lambda y, m, d: f"{y}-{m}-{d}")),
        "rows 1, 2, 3: '2021-01-01', '2021-02-02', '2021-03-03': dates are neither numbers nor"
        ' categories; set data.dates."seen" = "days since 2000-01-01"',
        {"seen": SINCE},
    ),
    "German dates": Case(
        text(dated(lambda y, m, d: f"{int(d)}.{int(m)}.{y}")), "set data.dates", {"seen": SINCE}
    ),
    "dates with times": Case(
        text(dated(lambda y, m, d: f"{y}-{m}-{d}T12:00:00Z")),
        "set data.dates",
        {"seen": [since + 0.5 for since in SINCE]},
    ),
    "dates with names": Case(
        text(dated(lambda y, m, d: f"{d}-{MONTHS[int(m) - 1]}-{y}")),
        "set data.dates",
        {"seen": SINCE},
    ),
    "American dates": Case(
        text(dated(lambda y, m, d: f"{m}/{d}/{y}")), "set data.dates", {"seen": SINCE}
    ),
    **{
        f"months as {name}": Case(
            text(dated(write)),
            "dates are neither numbers nor categories; set data.dates",
            {"seen": FIRST_DAYS},
        )
        for name, write in {
            "2021-03": lambda y, m, _: f"{y}-{m}",
            "03/2021": lambda y, m, _: f"{m}/{y}",
            "Mar 2021": lambda y, m, _: f"{MONTHS[int(m) - 1]} {y}",
        }.items()
    },
    "times": Case(
        text(with_column("at", lambda i: f"{i % 24}:30")),
        'times of the day are no numbers; set data.dates."at" = "hours"',
        {"at": [i % 24 + 0.5 for i in range(40)]},
    ),
    # The target
    "no outcome": Case(
        text(changed(outcome=at_rows({1, 2, 30, 31}, ""))),
        "column 'outcome', rows 2, 3, 31: the value is missing, and the target needs one in every"
        ' row, 4 of 40 have none; set data.missing_target = "drop"',
        rows=lambda i: i not in (1, 2, 30, 31),
    ),
    "numbers as classes": Case(
        text(changed(outcome=lambda i, _: str(100 + i))),
        "column 'outcome': the target has 40 different numbers in 40 rows, which would be as many"
        ' classes; set data.task = "regression"',
    ),
}


def cells(table: Table) -> dict[str, list[Any]]:
    return {
        name: [None if cell != cell else cell for cell in column.tolist()]
        for name, column in table.values.items()
    }


def settings(folder: Path, content: str | bytes, toml: str = "") -> DataSettings:
    file = folder / "a.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "a.toml").write_text(toml)
    return load(ParticipantConfig, folder / "a.toml", overrides={"data.source": str(file)}).data


@pytest.mark.parametrize("name", CASES)
def test_a_table_is_read_or_refused_with_what_mends_it(name, tmp_path):
    """Each line that a message tells one to type is typed, and then the table is read."""
    case = CASES[name]
    try:
        table = settings(tmp_path, case.content).load()
        told = ""
    except DoesNotFit as error:
        told = str(error)
        toml = with_fixes("", error.fixes)
        assert toml, told
        table = settings(tmp_path, case.content, toml).load()
    except DataError as error:  # such as a header that is none
        told = str(error)
        table = settings(tmp_path, case.content, "[data]\nskip_lines = 1").load()
    assert case.line in told
    assert bool(case.line) == bool(told)
    expected = cells(settings(tmp_path, text(lines())).load()) | (case.column or {})
    kept = [i for i in range(len(ROWS)) if case.rows(i)]
    assert cells(table) == {column: [of[i] for i in kept] for column, of in expected.items()}
    assert table.without_target == len(ROWS) - len(kept)
    assert len(table.target) == len(kept)


def test_all_columns_that_do_not_fit_are_told_at_once(tmp_path):
    """Three columns, a line each, and settings that mend all of them."""
    content = text(
        changed(
            age=at_rows({2}, "n/a"),
            weight=lambda _, cell: cell.replace(".", ","),
            cost=at_rows({1}, "-"),
            sex=lambda i, _: DAYS[i],
        )
    )
    with pytest.raises(DoesNotFit) as caught:
        settings(tmp_path, content).load()
    first, *others = str(caught.value).splitlines()
    assert first.endswith("a.csv: 4 problems:")
    assert [line.split("'")[1] for line in others] == ["Âge", "weight", "sex", "cost"]
    toml = with_fixes("[data] # ours\nmissing = ['x']\n", caught.value.fixes)
    assert toml.startswith("[data] # ours\n")
    assert tomllib.loads(toml)["data"]["missing"] == ["x", "n/a", "-"]
    table = settings(tmp_path, content, toml).load()
    assert [column.type for column in table.columns] == ["number"] * 3 + ["category", "number"]


@pytest.mark.parametrize(
    ("row", "task", "line"),
    [
        ("1.201;a", "classification", "a number may have thousands or be a fraction, '1.201'"),
        ("7;1.201", "regression", "a number may have thousands or be a fraction, '1.201'"),
        ("3,5;4.5;a", "classification", "numbers have decimal commas, '3,5'"),
    ],
)
def test_neither_totals_nor_unclear_marks_hide_the_other_problems(row, task, line, tmp_path):
    """A line for the totals, one for the marks, and one for the dates, which have points too."""
    cells_ = row.count(";")
    header = ";".join(["seen", *"abc"[:cells_], "y"])
    total = "Total: 20" + ";" * (cells_ + 1)
    content = "\n".join([header, *(f"{1 + i}.02.2021;{row}" for i in range(20)), total])
    with pytest.raises(DoesNotFit) as caught:
        settings(tmp_path, content, f'data.task = "{task}"').load()
    _, *told = str(caught.value).splitlines()
    assert len(told) == 3
    assert "'Total: 20' is rather a total" in told[0]
    assert line in told[1]
    assert "column 'seen', rows 1, 2, 3: '1.02.2021'" in told[2]


@pytest.mark.parametrize(
    ("content", "typed", "expected"),
    [
        ("a;y\n1,234;u\n2,345;v\n", "decimal = ','", {"a": [1.234, 2.345]}),
        (
            "a;y\n1,234;u\n2,345;v\n",
            "decimal = '.'",
            "column 'a', rows 1, 2: '1,234', '2,345' are not numbers where the decimal mark is '.'",
        ),
        # In a German file 1.234 is more than a thousand, and never read as 1.234.
        (
            "a;b;y\n0,5;999,5;u\n0,5;999,5;u\n0,5;1.234;u\n",
            "thousands = '.'",
            {"a": [0.5] * 3, "b": [999.5, 999.5, 1234.0]},
        ),
        (
            "a;b;y\n0,5;999,5;u\n0,5;999,5;u\n0,5;1.234;u\n",
            "",
            "column 'b', row 3: '1.234' is not a number where the decimal mark is ','; set",
        ),
        (
            "a;b;y\n1,5;2.5;u\n",
            "",
            "decimal commas, '1,5' in column 'a', row 1, and points, '2.5' in",
        ),
        (
            "a;b;y\n1;1,234;u\n",
            "",
            "may have thousands or be a fraction, '1,234' in column 'b', row 1",
        ),
        (
            "a;b;y\n1;7;u\n1;1.234;v\n",
            "",
            "may have thousands or be a fraction, '1.234' in column 'b', row 2",
        ),
        ("a;b,y\n1;2,0\n3;4,1\n", "separator = ','", {"a;b": ["1;2", "3;4"]}),
        ("a;b,y\n1;2,0\n3;4,1\n", "separator = ';'", {"a": [1.0, 3.0]}),
        # The first row divides the candidates that the header leaves.
        (
            "weight, kg;height, m;age\n70,5;1,82;63\n",
            "",
            {"weight, kg": [70.5], "height, m": [1.82]},
        ),
    ],
)
def test_separator_and_marks_are_told_by_the_file_or_declared(content, typed, expected, tmp_path):
    data = settings(tmp_path, content, f"data.{typed}" if typed else "")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=re.escape(expected)):
            data.load()
    else:
        assert cells(data.load()) == expected


def test_regression_target_may_have_decimal_commas(tmp_path):
    data = settings(tmp_path, "a;y\n1;0,5\n2;1,25\n", "data.task = 'regression'")
    assert data.load().target.tolist() == [0.5, 1.25]


def test_header_longer_than_a_cell_may_be(tmp_path):
    """The csv module takes a header without this separator for one cell, and refuses it."""
    header = ",".join(f"a_column_with_a_long_name_{i}" for i in range(6000))
    table = settings(tmp_path, f"{header}\n{','.join(['1'] * 6000)}\n").load()
    assert len(table.columns) == 5999


@pytest.mark.parametrize(
    "before", ["", "data = {drop = ['z']}\n", "[data.missing_in]\nz = ['a']\n"]
)
def test_settings_that_mend_are_written_into_any_configuration(before):
    """Tables may be inline, and a text may have characters that TOML has as escapes only."""
    delete = quoted("\x7f")
    fix = hint("xain-participant", f"data.missing_in.z = [{delete}]")
    written = tomllib.loads(with_fixes(before, [fix]))["data"]
    assert written["missing_in"]["z"][-1] == "\x7f"
    assert written.get("drop", ["z"]) == ["z"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ('target = "Age"', "no column 'Age'"),
        ('encoding = "klingon"', "there is no encoding 'klingon'; set data.encoding"),
        (
            'encoding = "ascii"',
            'the file is no text in ascii; save it in UTF-8, which Excel calls "CSV UTF-8"',
        ),
        ('missing_in.height = ["-"]', "[data] missing_in names 'height', which is no column"),
        ('marks.height = "cm"', "[data] marks names 'height', which is no column"),
        ('dates.sex = "parts"', "column 'sex', rows 1, 2: 'f', 'm': no date with a year of four"),
        (
            'types.sex = "number"',
            "rows 1, 2: 'f', 'm' are not numbers, 0 of the column's 40 values are; correct them, or"
            ' set data.types."sex" = "category"',
        ),
    ],
)
def test_declarations_that_do_not_fit_the_file(typed, line, tmp_path):
    with pytest.raises(DataError) as caught:
        settings(tmp_path, text(lines()), f"data.{typed}").load()
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "column"),
    [
        (
            'below_limit = "missing"',
            {"cost": [None if i == 3 else cost for i, cost in enumerate(COSTS)]},
        ),
        (
            'below_limit = "half"',
            {"cost": [25.0 if i == 3 else cost for i, cost in enumerate(COSTS)]},
        ),
        (
            'below_limit = "half"\ndata.types.smoker = "number"',
            {"smoker": [float(row[3] == "yes") for row in ROWS]},
        ),
        ('below_limit = "half"\ndata.rename."A\u0302ge" = "age"', {"age": AGES}),
        ('below_limit = "half"\ndata.scale = 2.0', {"Âge": [2 * age for age in AGES]}),
    ],
)
def test_declarations_that_say_what_cells_mean(typed, column, tmp_path):
    content = text(changed(cost=at_rows({3}, "< 50")))
    table = settings(tmp_path, content, f"data.{typed}").load()
    assert cells(table) | column == cells(table)


@pytest.mark.parametrize(
    ("use", "made"),
    [
        ("days since 2021-01-01", {"seen": [0.0, 31.5]}),
        ("age at 2022-01-01", {"seen": [365 / 365.25, 333.5 / 365.25]}),
        ("parts", {"seen year": [2021] * 2, "seen month": [1, 2], "seen weekday": [5, 1]}),
        ("hours", {"seen": [0, 12]}),
    ],
)
def test_uses_of_dates(use, made, tmp_path):
    content = "seen,y\n2021-01-01,u\n2021-02-01 12:00:00,v\n,u\n"
    table = settings(tmp_path, content, f'data.dates.seen = "{use}"').load()
    assert cells(table) == {name: [*values, None] for name, values in made.items()}


@pytest.mark.parametrize(
    ("cells_", "line"),
    [
        (["03/02/2021", "04/05/2021"], 'have day or month first; set data.date_order = "day"'),
        (["31.02.2021", "04.05.2021"], "row 1: '31.02.2021': no date with a year of four digits"),
        (["03.02.21", "04.05.21"], "'03.02.21', '04.05.21': no date with a year of four digits"),
        (["0001-01-01T00:00:00+01:00"], "00:00+01:00': no date"),  # .NET's default
    ],
)
def test_declared_dates_that_are_unclear(cells_, line, tmp_path):
    content = "seen,y\n" + "".join(f"{cell},{i}\n" for i, cell in enumerate(cells_))
    with pytest.raises(DoesNotFit) as caught:
        settings(tmp_path, content, 'data.dates.seen = "parts"').load()
    assert line in str(caught.value)


@pytest.mark.parametrize("unit", ["", " €"])
@pytest.mark.parametrize(("separator", "mark"), [(",", ","), (";", ","), (";", ".")])
def test_a_person_chooses_between_thousands_and_a_fraction(separator, mark, unit, tmp_path):
    """1,200 where nothing else in the file tells: both ways out are told, and none is a fix."""
    costs = changed(cost=lambda i, cell: thousands(mark)(i, cell) + unit, weight=lambda *_: "7")
    content = text(costs, separator=separator)
    with pytest.raises(DoesNotFit) as caught:
        settings(tmp_path, content).load()
    assert caught.value.fixes == ()
    for key, factor in (("thousands", 1), ("decimal", 1000)):
        setting = f'data.{key} = "{mark}"'
        assert f"set {setting}" in str(caught.value)
        read = settings(tmp_path, content, setting).load().values["cost"] * factor
        np.testing.assert_allclose(read, COSTS)


SHORT_YEARS = [f"0{1 + i % 9}/0{1 + i % 7}/21" for i in range(40)]


@pytest.mark.parametrize(
    ("cells_", "typed", "line"),
    [
        (SHORT_YEARS, "", "no year of four digits; write them as 2021-03-31 in the file, or set"),
        (SHORT_YEARS[:7] * 4, "", "no year of four digits; write them as 2021-03-31"),
        (SHORT_YEARS[:7] * 4, 'data.dates.x = "parts"', "no date with a year of four digits"),
        (SHORT_YEARS, 'data.dates.x = "parts"', "no date with a year of four digits"),
        (["a", "a", "5"], 'data.types.x = "number"', "rows 1: 'a' is not a number"),
        (["-999", "-999", "5"], "", "'-999', in 2 rows"),
        (["-9", "-9", "-9"], "", "'-9', in 3 rows"),
    ],
)
def test_no_fix_takes_most_values_of_a_column_for_missing(cells_, typed, line, tmp_path):
    """A fix does not lead to another fix that would."""
    content = "x,y\n" + "".join(f"{cell},{i % 2}\n" for i, cell in enumerate(cells_))
    with pytest.raises(DoesNotFit) as caught:
        settings(tmp_path, content, typed).load()
    assert line.replace("rows 1:", "row 1:") in str(caught.value)
    assert caught.value.fixes == ()
    if not cells_[0].startswith("-"):
        assert "missing_in" not in str(caught.value) or typed.startswith("data.types")


def test_detected_marks_and_encoding_are_in_the_dialect_of_the_table(tmp_path):
    content = text(german(changed(cost=lambda _, cell: f"{cell} €")), separator=";", above="Ward\n")
    found = settings(tmp_path, content.encode("cp1252")).load().dialect
    assert (found.encoding, found.separator, found.decimal) == ("cp1252", ";", ",")
    assert (found.skip_lines, found.marks) == (1, {"cost": "€"})
    kept = found.meaning()
    assert kept == Dialect(marks={"cost": "€"})
    assert Dialect.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    "junk", ["", "{", "[]", '{"scale": 0}', '{"dates": {"a": "now"}}', '{"x": 1}']
)
def test_dialect_of_a_model_is_checked(junk):
    if not junk:
        assert Dialect.from_json(junk) == Dialect()
        return
    with pytest.raises(DataError, match="the model's dialect cannot be read"):
        Dialect.from_json(junk)


def test_rows_to_predict_are_read_as_those_of_training_were(tmp_path):
    """The dialect of the site is kept; the form of the file may be another one."""
    table = dated(lambda y, m, d: f"{d}.{m}.{y}")
    for row in table[1:]:
        row[5] = f"{row[5]} $"
    toml = """[data]
rename = {"Âge" = "age", outcome = "status", seen = "first"}
dates = {seen = "parts"}
scale = 2.0
missing_in = {weight = ["50.7"]}
"""
    trained = settings(tmp_path, text(table), toml).load()
    kept = Dialect.from_json(trained.dialect.meaning().to_json())
    types = {column.name: column.type for column in trained.columns}
    assert list(types)[:4] == ["first year", "first month", "first weekday", "age"]
    (tmp_path / "new.csv").write_bytes(text(table, separator="\t").encode("utf-16"))
    arguments = {"target": "status", "dialect": kept}
    rows = load_rows(tmp_path / "new.csv", types, **arguments)
    assert rows.table.columns == trained.columns
    assert cells(rows.table) == cells(trained)
    assert rows.truth.tolist() == trained.target.tolist()


def test_excel_is_read_as_csv_is(tmp_path):
    """Titles, booleans, dates, texts among numbers and totals; the sheet can be named."""
    rows = [["Ward 7"], [None], ["Âge", "sex", "ok", "seen", "score", "y"]]
    days = [date(2021, 1, 1 + i) for i in range(20)]
    rows += [
        [20 + i, "fm"[i % 2], i % 2 == 0, days[i], "n/a" if i == 3 else i, f"c{i % 2}"]
        for i in range(20)
    ]
    rows += [["Total", None, None, None, 190, None]]
    path = tmp_path / "a.xlsx"
    write_workbook(path, rows, sheet="Ward")
    with pytest.raises(DoesNotFit, match="is rather a total than a row"):
        load_table(path)
    with pytest.raises(
        DoesNotFit, match=r"column 'seen', .*\n.*column 'score', row 4: 'n/a'"
    ) as caught:
        load_table(path, dialect=Dialect(totals="drop"))
    assert '"days since 2000-01-01"' in caught.value.fixes[0]
    dialect = Dialect(
        totals="drop", dates={"seen": "days since 2021-01-01"}, missing=["n/a"], sheet="Ward"
    )
    table = load_table(path, dialect=dialect)
    assert cells(table) == {
        "Âge": [float(20 + i) for i in range(20)],
        "sex": ["f", "m"] * 10,
        "ok": [1.0, 0.0] * 10,
        "seen": [float(i) for i in range(20)],
        "score": [None if i == 3 else float(i) for i in range(20)],
    }
    assert table.dialect.skip_lines == 2
    with pytest.raises(DataError, match="no sheet 'Data'; there are: 'Ward'"):
        load_table(path, dialect=Dialect(sheet="Data"))


def test_ids_of_a_workbook_are_whole_numbers_as_people_see_them(tmp_path):
    """A workbook has all its numbers as fractions; text such as 007 stays."""
    rows = [["patient", "age"], [1234567, 50], ["007", 60], [None, 70]]
    write_workbook(tmp_path / "a.xlsx", rows)
    read = load_rows(tmp_path / "a.xlsx", {"age": "number"}, id_column="patient")
    assert read.ids == ["1234567", "007", ""]
    write_workbook(tmp_path / "b.xlsx", rows[:2])
    assert load_rows(tmp_path / "b.xlsx", {}, id_column="patient").ids == ["1234567"]


@pytest.mark.parametrize("suffix", [".xlsx", ".sav", ".dta", ".sas7bdat", ".xpt"])
def test_libraries_that_are_missing_or_fail_are_named_by_ours(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a{suffix}"
    path.write_text("junk")
    with pytest.raises(DataError, match=r"^\S+: the file is no (Excel file|file of SAS)"):
        load_table(path)
    module, extra = (
        ("python_calamine", "excel") if suffix == ".xlsx" else ("pyreadstat", "readstat")
    )
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"without {module}: pip install '.*\[{extra}\]'"):
        load_table(path)


def test_a_table_with_more_names_than_are_compared_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text(
        ",".join(f"c{i}" for i in range(MAX_COLUMNS + 2)) + "\n" + "1," * (MAX_COLUMNS + 1) + "u\n"
    )
    with pytest.raises(
        DataError, match=f"there are {MAX_COLUMNS + 1} columns, and at most {MAX_COLUMNS}"
    ):
        load_table(tmp_path / "a.csv")
    assert len(load_table(tmp_path / "a.csv", drop=["c0"]).columns) == MAX_COLUMNS


@pytest.mark.parametrize(
    ("kind", "num_classes", "num_rows", "is_taken"),
    [
        ("", 20, 20, True),
        ("", 21, 209, False),
        ("", 21, 210, True),
        ("c", 20, 20, True),
        ("c", 21, 41, False),
        ("c", 21, 42, True),
    ],
)
def test_target_of_many_labels_is_no_class(tmp_path, kind, num_classes, num_rows, is_taken):
    """More than 20 numbers in a tenth of the rows, or texts in half of them."""
    file = tmp_path / "a.csv"
    lines = [f"{i},{kind}{i % num_classes}" for i in range(num_rows)]
    file.write_text("\n".join(["x,y", *lines]))
    with nullcontext() if is_taken else pytest.raises(DataError, match="would be as many classes"):
        assert len(load_table(file).classes) == num_classes
    assert load_table(file, classes=[f"{kind}{i}" for i in range(num_classes)]).num_samples


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_is_empty_at_a_site_is_prepared_as_at_the_others(first, tmp_path):
    """Numbers or categories, whichever site comes first; and empty at all sites, as numbers."""
    tables = [
        settings(tmp_path, text(changed(sex=sex, age=age, weight=lambda *_: ""))).load()
        for sex, age in (
            (lambda _, cell: cell, lambda *_: ""),
            (lambda *_: "", lambda _, cell: cell),
        )
    ]
    assert [table.columns[2].type for table in tables] == ["category", "empty"]
    profiles = [tables[first].profile(), tables[1 - first].profile()]
    fitted = fit(profiles, PreprocessingOptions())
    types = dict.fromkeys(HEADER[:-1], "number") | {"sex": "category", "smoker": "category"}
    assert fitted.types == types
    for table in tables:
        prepared = fitted.apply(table)
        assert prepared.num_features == 3 + 2 + 2
        assert np.isfinite(prepared.features).all()


def test_stata_is_read_with_its_labels_and_dates(tmp_path):
    """Numbers that all have a label are categories; a label of some is none of the others."""
    write_stata(
        tmp_path / "a.dta",
        {
            "age": [40.0, None, 60.5],
            "sex": [1.0, 2.0, 1.0],
            "pulse": [80.0, -9.0, 90.0],
            "seen": [22280.0, 22281.0, None],
            "ward": ["A", "", "Bé"],
            "y": ["u", "v", "u"],
        },
        {"sex": {1: "male", 2: "female"}, "pulse": {-9: "not measured"}},
        dates=["seen"],
    )
    with pytest.raises(DoesNotFit, match="column 'seen', rows 1, 2: '2020-12-31', '2021-01-01'"):
        load_table(tmp_path / "a.dta")
    dialect = Dialect(dates={"seen": "days since 2020-12-31"}, missing_in={"pulse": [-9]})
    assert cells(load_table(tmp_path / "a.dta", dialect=dialect)) == {
        "age": [40, None, 60.5],
        "sex": ["male", "female", "male"],
        "pulse": [80, None, 90],
        "seen": [0, 1, None],
        "ward": ["A", None, "Bé"],
    }


def test_booleans_among_ones_and_zeros_are_numbers_and_none_is_missing(tmp_path):
    """The setting of the message keeps the values that are numbers already."""
    path = tmp_path / "site.csv"
    path.write_text("smoker,outcome\nYES,a\nno,b\n1,a\n0,b\n,a\n0,b\n", encoding="utf-8")
    with pytest.raises(DoesNotFit) as caught:
        load_table(path)
    (fix,) = caught.value.fixes
    assert 'data.types."smoker" = "number"' in fix
    table = load_table(path, types={"smoker": "number"})
    np.testing.assert_equal(table.values["smoker"], [1, 0, 1, 0, np.nan, 0])


@pytest.mark.parametrize("codes", [["007", "012", "7"], ["01067", "80331", "99084"]])
def test_digits_with_a_leading_zero_are_no_numbers_unless_declared(codes, tmp_path):
    """Neither 007 and 7 become one number, nor is the size of a postcode learnt from."""
    file = tmp_path / "a.csv"
    file.write_text("\n".join(["code,y", *(f"{code},{at % 2}" for at, code in enumerate(codes))]))
    with pytest.raises(DataError, match="digits with a leading zero are rather codes") as told:
        load_table(file, target="y")
    assert 'set data.types."code" = "category"' in str(told.value)
    as_codes = load_table(file, target="y", types={"code": "category"})
    assert as_codes.values["code"].tolist() == codes
    as_numbers = load_table(file, target="y", types={"code": "number"})
    assert as_numbers.values["code"].tolist() == [float(code) for code in codes]


@pytest.mark.parametrize("types", [{}, {"icd": "category"}])
def test_codes_that_are_equal_as_numbers_are_not_joined(types, tmp_path):
    """250 and 250.0 are two diagnoses of ICD-9, or one that is written in two ways: a person
    decides. 250 and 250.1 are two."""
    file = tmp_path / "a.csv"
    file.write_text("icd,y\n250,0\nV27,1\nE11,0\nV45,1\n250.0,0\n250.1,1\nV1,0\n")
    with pytest.raises(DataError, match=r"rows 1, 5: '250', '250.0' would be one"):
        load_table(file, target="y", types=types)
    file.write_text(file.read_text().replace("250.0", "V28"))
    read = load_table(file, target="y", types=types).values["icd"].tolist()
    assert read == ["250", "V27", "E11", "V45", "V28", "250.1", "V1"]


def test_numbers_of_millions_are_no_metres(tmp_path):
    """5M is left as it is, and told of by the checks; 5 m is a length."""
    for cell, is_length in (("5M", False), ("5 m", True)):
        (file := tmp_path / "a.csv").write_text(f"x,y\n{cell},0\n{cell.replace('5', '7')},1\n")
        (column,) = load_table(file, target="y").columns
        assert (column.type == "number") is is_length


@pytest.mark.parametrize("stray", ["V10", "45-", "1/2"])
def test_text_with_digits_among_numbers_is_never_made_missing_by_itself(tmp_path, stray):
    """Codes, and numbers that are written in another way, are left to a person by --fix."""
    file = tmp_path / "a.csv"
    file.write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(19)) + f"{stray},1\n")
    with pytest.raises(DoesNotFit, match=stray) as caught:
        load_table(file)
    assert caught.value.fixes == ()


def test_code_among_classes_of_numbers_is_no_class_of_its_own(tmp_path):
    """-9 for a patient who was lost would be a third class beside 0 and 1."""
    file = tmp_path / "a.csv"
    file.write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(18)) + "9,-9\n8,-9\n")
    with pytest.raises(DoesNotFit, match=r"'y', row 19: '-9', in 2 rows, and no other value"):
        load_table(file)
    left_out = Dialect(missing_in={"y": ("-9",)}, missing_target="drop")
    assert {*load_table(file, dialect=left_out).target} == {"0", "1"}
    assert {*load_table(file, dialect=Dialect(missing_in={"y": ()})).target} == {"-9", "0", "1"}


def test_code_in_a_target_of_numbers_is_told_with_both_ways_out(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("x,y\n" + "".join(f"{i},{i * i}\n" for i in range(9)) + "9,-999\n")
    with pytest.raises(DoesNotFit, match=r"'y', row 10: '-999', in 1 rows"):
        load_table(file, task="regression")
    kept = Dialect(missing_in={"y": ()})
    assert load_table(file, task="regression", dialect=kept).target[-1] == -999
    left_out = Dialect(missing_in={"y": ("-999",)}, missing_target="drop")
    assert load_table(file, task="regression", dialect=left_out).num_samples == 9


def test_column_of_groups_is_no_feature_and_equal_in_all_formats(tmp_path):
    """The digest follows from the value however it is written, and was computed once: a patient
    stays on the same side of every split. Rows without a value are one group."""
    import pyarrow as pa
    from pyarrow import parquet

    (file := tmp_path / "a.csv").write_text("x,No,y\n1,7,a\n2,08,b\n3,7.0,a\n4,,b\n5,NA,a\n6,7,\n")
    dialect = Dialect(missing_target="drop", rename={"No": "patient"})
    table = load_table(file, target="y", group="No", dialect=dialect)
    assert [column.name for column in table.columns] == ["x"]
    assert table.group == "patient"
    seven, missing = 16667848380713045890, 16476032584258269876
    assert table.groups[[0, 2, 3, 4]].tolist() == [seven, seven, missing, missing]
    assert table.num_groups == 3
    parquet.write_table(pa.table({"x": [1, 2], "No": [7, None], "y": "ab"}), tmp_path / "a.parquet")
    typed = load_table(tmp_path / "a.parquet", target="y", group="No").groups
    assert typed.tolist() == table.groups[[0, 3]].tolist()
    with pytest.raises(DataError, match="group names 'id', which is no column"):
        load_table(file, target="y", group="id", dialect=dialect)
    with pytest.raises(DataError, match="group names 'y', which is the target"):
        load_table(file, target="y", group="y", dialect=dialect)
    with pytest.raises(DataError, match="a column of groups can be chosen in"):
        load_table("iris", group="id")
