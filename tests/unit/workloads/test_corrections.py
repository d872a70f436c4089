"""Corrections of a site are made alike for training and prediction."""

import numpy as np
import pytest

from xain_workloads.errors import DataError
from xain_workloads.tables.data import load_rows, load_table
from xain_workloads.tables.reading.dialect import Dialect

TEXT = "Alter,temp,sex,outcome\n13500,310.15,M,yes\n14000,311.15,F,no\n"
DIALECT = Dialect(
    rename={"Alter": "age"},
    factors={"age": 0.01},
    offsets={"temp": -273.15, "age": 1.0},
    replace={"sex": {"M": "male", "F": "female"}, "outcome": {"yes": "no", "no": "yes"}},
)


def test_corrections_are_made_after_reading(tmp_path):
    """Factors come before offsets, by names in the session; labels can be exchanged."""
    (file := tmp_path / "a.csv").write_text(TEXT)
    table = load_table(file, dialect=DIALECT)
    assert table.values["age"].tolist() == [136.0, 141.0]
    assert table.values["temp"] == pytest.approx([37.0, 38.0])
    assert table.values["sex"].tolist() == ["male", "female"]
    assert table.target.tolist() == ["no", "yes"]
    assert set(table.classes) == {"no", "yes"}
    rows = load_rows(
        file,
        {"age": "number", "sex": "category"},
        dialect=Dialect(
            rename={"Alter": "age"}, factors={"age": 0.01}, replace={"sex": {"M": "male"}}
        ),
    )
    assert rows.table.values["age"].tolist() == [135.0, 140.0]
    assert rows.table.values["sex"].tolist() == ["male", "F"]


def test_target_of_numbers_is_corrected(tmp_path):
    (file := tmp_path / "a.csv").write_text("x,price\n1,100\n2,250\n")
    table = load_table(file, task="regression", dialect=Dialect(factors={"price": 0.01}))
    assert table.target == pytest.approx(np.array([1.0, 2.5]))


@pytest.mark.parametrize(
    ("dialect", "why"),
    [
        (Dialect(factors={"nowhere": 2.0}), "factors names 'nowhere', which is no column"),
        (Dialect(offsets={"sex": 2.0}), "offsets names 'sex', which is no number"),
        (Dialect(replace={"temp": {"a": "b"}}), "replace names 'temp', which holds numbers"),
    ],
)
def test_correction_of_another_column_is_refused_by_name(dialect, why, tmp_path):
    (file := tmp_path / "a.csv").write_text(TEXT)
    with pytest.raises(DataError, match=why):
        load_table(file, dialect=dialect)
