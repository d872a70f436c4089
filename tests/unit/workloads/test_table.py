"""Tables: types of columns, gaps, chosen and renamed columns."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.learning import refused
from xain_workloads.tables.data import MISSING, Table, load_table
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.schema import Column

WriteCsv = Callable[[str], Path]

PATIENTS = """age,sex,ward,weight,outcome
63,f,3,71.5,alive
41,m,7,,dead
?,f,3,80,alive
58,,12,66,alive
"""


@pytest.fixture
def write(tmp_path: Path) -> WriteCsv:
    def _write(text: str) -> Path:
        path = tmp_path / "a.csv"
        path.write_text(text)
        return path

    return _write


def _cells(table: Table, name: str) -> list[Any]:
    return [None if cell != cell else cell for cell in table.values[name].tolist()]


def test_csv_columns_are_typed_by_their_values(write):
    """A column whose values are all numbers is one of numbers; gaps are missing values."""
    table = load_table(write(PATIENTS))
    assert table.columns == (
        Column("age"),
        Column("sex", "category"),
        Column("ward"),
        Column("weight"),
    )
    assert _cells(table, "age") == [63, 41, None, 58]
    assert _cells(table, "sex") == ["f", "m", "f", None]
    assert _cells(table, "weight") == [71.5, None, 80, 66]
    assert (table.values["age"].dtype, table.values["sex"].dtype) == (np.float64, np.dtype(object))
    assert (table.target.tolist(), table.target_name) == (
        ["alive", "dead", "alive", "alive"],
        "outcome",
    )


def test_profile_holds_names_and_types_alone(write):
    """A profile tells columns, target, task and classes."""
    profile = load_table(write(PATIENTS), units={"age": "years"}).profile()
    assert (profile.num_samples, profile.num_features) == (4, 4)
    assert profile.columns[0] == Column("age", "number", "years")
    assert (profile.target, profile.task, profile.classes) == (
        "outcome",
        "classification",
        ("alive", "dead"),
    )


@pytest.mark.parametrize("text", MISSING)
def test_texts_for_missing_values(write, text):
    """Each documented text is a missing value among numbers and among categories."""
    table = load_table(write(f'a,b,y\n1,u,0\n"{text}", {text} ,1\n'))
    assert (_cells(table, "a"), _cells(table, "b")) == ([1, None], ["u", None])


def test_sodium_is_no_missing_value(write):
    """Texts that only look like a missing value stay categories."""
    assert _cells(load_table(write("a,y\nNa,0\nnone,1\n")), "a") == ["Na", "none"]


def test_codes_of_digits_are_categories_if_declared(write):
    """Ward 3 is no quantity; its name is the same in every format."""
    table = load_table(write(PATIENTS), types={"ward": "category"})
    assert table.columns[2] == Column("ward", "category")
    assert _cells(table, "ward") == ["3", "7", "3", "12"]


def test_column_of_numbers_with_texts_may_be_one_of_categories(write):
    path = write("age,y\n50,0\n61,1\nn/a,1\n")
    for types in ({}, {"age": "number"}):
        with refused("column 'age', row 3: 'n/a' is not a number, 2 of the column's 3 values are"):
            load_table(path, types=types)
    assert _cells(load_table(path, types={"age": "category"}), "age") == ["50", "61", "n/a"]


def test_columns_are_selected_dropped_and_renamed(write):
    """Selection gives the order; all keys speak of the names in the file."""
    path = write(PATIENTS)
    table = load_table(
        path,
        select=["weight", "sex", "outcome", "age"],
        drop=["sex"],
        units={"weight": "kg"},
        dialect=Dialect(rename={"weight": "weight_kg", "outcome": "status"}),
    )
    assert table.columns == (Column("weight_kg", "number", "kg"), Column("age"))
    assert table.target_name == "status"
    assert _cells(table, "weight_kg") == [71.5, None, 80, 66]
    for arguments, complaint in (
        ({"select": ["hight"]}, "[data] columns names 'hight', which is no column of the file"),
        ({"drop": ["hight"]}, "drop names 'hight'"),
        ({"dialect": Dialect(rename={"hight": "height"})}, "rename names 'hight'"),
        ({"types": {"hight": "number"}}, "types names 'hight'"),
        ({"units": {"hight": "cm"}}, "units names 'hight'"),
        ({"drop": ["outcome"]}, "drop names 'outcome', which is the target"),
        ({"dialect": Dialect(rename={"age": "sex"})}, "more than one column is called 'sex'"),
        (
            {"dialect": Dialect(rename={"age": "outcome"})},
            "more than one column is called 'outcome'",
        ),
        ({"select": ["age"], "drop": ["age"]}, "no column of features is left"),
    ):
        with refused(complaint):
            load_table(path, **arguments)


def test_parquet_columns_have_the_types_of_the_file(tmp_path):
    """Numbers of text stay text, and a column of another type can be left out."""
    path = tmp_path / "a.parquet"
    columns = {
        "code": ["1", None],
        "site": pa.array(["n", "s"]).dictionary_encode(),
        "age": [None, 4],
        "smokes": [True, None],
        "seen": [date(2020, 1, 1), None],
        "y": [1, 2],
    }
    parquet.write_table(pa.table(columns), path)
    with refused(
        "column 'seen', row 1: '2020-01-01': dates are neither numbers nor categories; set"
    ):
        load_table(path)
    table = load_table(path, drop=["seen"], types={"smokes": "category"})
    assert [column.type for column in table.columns] == [
        "category",
        "category",
        "number",
        "category",
    ]
    assert _cells(table, "code") == ["1", None]
    assert _cells(table, "age") == [None, 4]
    assert _cells(table, "smokes") == ["yes", None]
    assert _cells(load_table(path, drop=["seen"], types={"code": "number"}), "code") == [1, None]


def test_arrays_may_have_gaps(tmp_path):
    """NaN in an array is a missing value of a table, and refused in a data set."""
    np.savez(tmp_path / "a.npz", X=[[1.0, np.nan]], y=[1])
    table = load_table(
        tmp_path / "a.npz", types={"x1": "category"}, dialect=Dialect(rename={"target": "y"})
    )
    assert (_cells(table, "x0"), _cells(table, "x1"), table.target_name) == ([1], [None], "y")
    with refused("column 'x1', row 1: the value is missing"):
        load_table(tmp_path / "a.npz").to_dataset()


def test_declared_classes_stay_with_every_part(write):
    """A part of a file lists all classes, also those that it has no row of."""
    table = load_table(write(PATIENTS))
    assert table.subset([0]).profile().classes == ("alive", "dead")
    declared = load_table(write(PATIENTS), classes=["unknown", "dead", "alive"])
    assert declared.profile().classes == ("alive", "dead", "unknown")
    with refused("column 'outcome', row 2: label 'dead' is none of the declared classes: 'alive'"):
        load_table(write(PATIENTS), classes=["alive"])
    assert load_table("digits").subset([]).profile().classes == tuple("0123456789")


def test_arranged_takes_columns_by_name(write):
    """The order of another table's columns; what is missing is named."""
    table = load_table(write("a,b,y\n1,2,0\n"))
    assert table.arranged(["b", "a"]).to_dataset().features.tolist() == [[2, 1]]
    assert table.arranged(["b"]).to_dataset().feature_names == ("b",)
    with refused("a.csv: no column 'c'; there are: 'a', 'b'"):
        table.arranged(["c"])


def test_dataset_needs_complete_numbers(write):
    """A cell that prevents training on a table is named with column and row."""
    with refused("column 'sex', row 1: 'f' is not a number, the column is a category"):
        load_table(write(PATIENTS), drop=["age", "weight"]).to_dataset()
    with refused("column 'age', row 3: the value is missing"):
        load_table(write(PATIENTS), drop=["sex", "weight"]).to_dataset()


def test_table_checks_its_arrays():
    """A Table that exists is consistent, wherever it came from."""
    target = np.array(["a", "b"])
    with refused("column 'x' is of shape (3,) and dtype float64; a number column"):
        Table((Column("x"),), {"x": np.zeros(3)}, target)
    with refused("column 'x' is of shape (2,) and dtype float64; a category column"):
        Table((Column("x", "category"),), {"x": np.zeros(2)}, target)
    with refused("column 'x', row 2: inf is not finite"):
        Table((Column("x"),), {"x": np.array([0, np.inf])}, target)
    with refused("no column of features is left"):
        Table((), {}, target)
