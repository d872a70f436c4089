"""CSV files as spreadsheets of several countries write them."""

import re
from pathlib import Path
from typing import Any

import pytest

from xain_workloads.data import load_rows, load_table
from xain_workloads.errors import DataError
from xain_workloads.reading.dialect import Dialect
from xain_workloads.table import Table

PLAIN = "age,weight,sex,outcome\n63,71.5,f,alive\n41,,m,dead\n58,1066.25,f,alive\n"
GERMAN = "age;weight;sex;outcome\n63;71,5;f;alive\n41;;m;dead\n58;1066,25;f;alive\n"


def write(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(complaint: str) -> Any:
    return pytest.raises(DataError, match=re.escape(complaint))


def cells(table: Table) -> dict[str, list[Any]]:
    return {
        name: [None if cell != cell else cell for cell in column.tolist()]
        for name, column in table.values.items()
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("german.csv", GERMAN),
        ("mark.csv", "\ufeff" + GERMAN),
        ("marked.csv", "\ufeff" + PLAIN),
        ("windows.csv", GERMAN.replace("\n", "\r\n")),
        ("quoted.csv", GERMAN.replace("age", '"age"').replace("71,5", '"71,5"')),
        ("points.csv", PLAIN.replace(",", ";")),
        ("tabs.csv", PLAIN.replace(",", "\t")),
        ("german.tsv", "\ufeff" + GERMAN.replace(";", "\t")),
        ("pipes.csv", GERMAN.replace(";", "|")),
    ],
)
def test_separator_and_decimal_mark_are_told_by_the_file(
    tmp_path: Path, name: str, text: str
) -> None:
    """The same table, whatever spreadsheet has written it, to train on and to predict."""
    expected = load_table(write(tmp_path, PLAIN, "plain.csv"))
    path = write(tmp_path, text, name)
    table = load_table(path)
    assert (table.columns, table.target_name) == (expected.columns, "outcome")
    assert cells(table) == cells(expected)
    assert cells(table)["weight"] == [71.5, None, 1066.25]
    assert table.target.tolist() == expected.target.tolist()
    types = {column.name: column.type for column in table.columns}
    rows = load_rows(path, types, target="outcome")
    assert rows.truth.tolist() == expected.target.tolist()
    assert cells(rows.table) == cells(expected)


def test_regression_target_may_have_decimal_commas(tmp_path: Path) -> None:
    table = load_table(write(tmp_path, "a;y\n1;0,5\n2;1,25\n"), task="regression")
    assert table.target.tolist() == [0.5, 1.25]


def test_header_with_other_separators_in_its_names(tmp_path: Path) -> None:
    """The first row divides the candidates that the header leaves."""
    table = load_table(write(tmp_path, "weight, kg;height, m;age\n70,5;1,82;63\n"), target="age")
    assert cells(table) == {"weight, kg": [70.5], "height, m": [1.82]}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a;b;y\n1,5;2.5;u\n", "decimal commas, '1,5' in column 'a', row 1, and points, '2.5' in"),
        ("a;b;y\n1;1,234;u\n", "may have thousands or be a fraction, '1,234' in column 'b', row 1"),
        (
            "a;b;y\n1;7;u\n1;1.234;v\n",
            "may have thousands or be a fraction, '1.234' in column 'b', row 2",
        ),
    ],
)
def test_unclear_decimal_mark_is_asked_for(tmp_path: Path, text: str, complaint: str) -> None:
    with refused(complaint):
        load_table(write(tmp_path, text))


def test_stated_decimal_mark_decides(tmp_path: Path) -> None:
    path = write(tmp_path, "a;y\n1,234;u\n2,345;v\n")
    assert cells(load_table(path, dialect=Dialect(decimal=",")))["a"] == [1.234, 2.345]
    with refused(
        "column 'a', rows 1, 2: '1,234', '2,345' are not numbers where the decimal mark is '.'"
    ):
        load_table(path, dialect=Dialect(decimal="."))


def test_a_point_where_commas_are_decimal_is_no_decimal_point(tmp_path: Path) -> None:
    """In a German file 1.234 is more than a thousand; it must not be read as 1.234."""
    path = write(tmp_path, "a;b;y\n0,5;999,5;u\n0,5;999,5;u\n0,5;1.234;u\n")
    with refused("column 'b', row 3: '1.234' is not a number where the decimal mark is ','; set"):
        load_table(path)
    assert cells(load_table(path, dialect=Dialect(thousands=".")))["b"] == [999.5, 999.5, 1234]


def test_stated_separator_decides(tmp_path: Path) -> None:
    path = write(tmp_path, "a;b,y\n1;2,0\n3;4,1\n")
    assert load_table(path, dialect=Dialect(separator=",")).columns[0].name == "a;b"
    assert load_table(path, dialect=Dialect(separator=";")).columns[0].name == "a"


def test_header_longer_than_a_cell_may_be(tmp_path: Path) -> None:
    """The csv module takes a header without this separator for one cell, and refuses it."""
    header = ",".join(f"a_column_with_a_long_name_{i}" for i in range(6000))
    table = load_table(write(tmp_path, f"{header}\n{','.join(['1'] * 6000)}\n"))
    assert len(table.columns) == 5999
