"""Table one equals the figures of the pooled rows, and hides those of too few sites."""

import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest

from xain_workloads.errors import DataError
from xain_workloads.tables.checks.describe import MAX_SITES, TableOne
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model


def site(num_rows: int, seed: int) -> Table:
    chance = np.random.RandomState(seed)
    age = chance.normal(60, 10, num_rows)
    age[::9] = np.nan
    sex = np.empty(num_rows, dtype=object)
    sex[:] = chance.choice(["female", "male"], num_rows).tolist()
    target = np.where(chance.rand(num_rows) < 0.3, "dead", "alive")
    columns = (Column("age", "number", "years"), Column("sex", "category"))
    return Table(columns, {"age": age, "sex": sex}, target, "outcome", ("alive", "dead"))


def table_one(tables: dict[str, Table]) -> TableOne:
    return TableOne.of((name, table.profile()) for name, table in tables.items())


TABLES = {"north": site(90, 0), "south": site(140, 1), "tiny": site(4, 2)}


def test_figures_are_those_of_the_pooled_rows():
    """Sites of which nothing is told do not count in them, and the table says how many do."""
    table = table_one(TABLES)
    told = [TABLES["north"], TABLES["south"]]
    age = np.concatenate([one.values["age"] for one in told])
    (row, sex) = table.rows
    assert (row.name, row.unit, row.together.num_sites) == ("age", "years", 2)
    assert row.together.mean == pytest.approx(np.nanmean(age))
    assert row.together.spread == pytest.approx(np.nanstd(age, ddof=1))
    assert row.together.quantiles[2] == pytest.approx(np.nanmedian(age), abs=1.0)
    assert row.together.missing == sum(np.isnan(one.values["age"]).sum() for one in TABLES.values())
    assert row.sites["tiny"].mean is None
    names = np.concatenate([one.values["sex"] for one in told])
    assert sex.together.counts == {n: int((names == n).sum()) for n in ("male", "female")}
    classes = np.concatenate([one.target for one in told])
    assert table.target.together.counts["dead"] == (classes == "dead").sum()
    assert table.num_samples == {"north": 90, "south": 140, "tiny": 4}


def test_columns_of_some_sites_are_described():
    """[schema] allow_missing lets a site join without a column, also the first one; allow_extra
    ignores columns that the schema does not have, whatever they hold."""
    north, south = site(90, 0), site(140, 1)
    without_age = replace(
        north,
        columns=(*north.columns[1:], Column("note", "category")),
        values={"sex": north.values["sex"], "note": north.values["sex"]},
    )
    further = replace(
        south,
        columns=(*south.columns, Column("note")),
        values={**south.values, "note": np.ones(140)},
    )
    table = TableOne.of(
        (name, replace(one.profile(), columns=south.columns))
        for name, one in (("north", without_age), ("south", further))
    )
    rows = {row.name: row.together for row in table.rows}
    assert rows["age"].mean == pytest.approx(np.nanmean(south.values["age"]))
    assert rows["age"].missing == 90 + np.isnan(south.values["age"]).sum()
    assert rows["note"].num_sites == 1


def test_table_is_read_back_from_json():
    table = table_one(TABLES)
    assert TableOne.from_json(table.to_json()) == table
    for text in ("", "[]", "{}", '{"num_sites": 1}'):
        with pytest.raises(DataError, match="cannot be read"):
            TableOne.from_json(text)


def test_csv_has_a_line_for_each_figure():
    lines = list(csv.DictReader(io.StringIO(table_one(TABLES).to_csv())))
    means = {one["site"]: float(one["value"]) for one in lines if one["figure"] == "mean"}
    assert set(means) == {"north", "south", "all"}
    assert means["north"] == pytest.approx(np.nanmean(TABLES["north"].values["age"]))


def test_text_shows_sites_and_all():
    text = table_one(TABLES).to_text()
    assert text.splitlines()[0].split() == ["north", "south", "tiny", "all"]
    for words in ("age (years)", "median (quartiles)", "outcome, target", "female", "missing"):
        assert words in text


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_without_a_target_are_counted_as_missing_ones(task):
    """Dropped rows are not among the known ones, and fewer than five at a site are not told."""
    tables = {
        name: replace(table, without_target=number)
        for (name, table), number in zip(TABLES.items(), (7, 4, 12), strict=True)
    }
    if task == "regression":
        tables = {
            name: replace(table, target=np.arange(table.num_samples) * 1.0, classes=())
            for name, table in tables.items()
        }
    target = table_one(tables).target
    assert {name: cell.missing for name, cell in target.sites.items()} == {
        "north": 7,
        "south": 0,
        "tiny": 12,
    }
    assert (target.together.missing, target.together.known) == (19, 234)
    text = table_one({"north": tables["north"]}).to_text()
    assert re.search(r"missing +7 +7$", text, re.MULTILINE)


def test_two_sites_are_told_that_each_can_compute_the_others_figures():
    told = "each can compute the other's figures"
    two = table_one({name: TABLES[name] for name in ("north", "south")})
    assert told in two.for_sites(2).to_text()
    assert told in two.to_text()
    assert told not in table_one(TABLES).to_text()


def test_sites_see_no_figure_of_fewer_than_min_sites():
    table = table_one(TABLES).for_sites(2)
    assert table.rows[0].together.mean is not None
    assert (table.num_samples, table.rows[0].sites) == ({}, {})
    hidden = table_one(TABLES).for_sites(3)
    assert hidden.rows[0].together.mean is None
    assert hidden.target.together.counts == {}
    assert re.search(r"age \(years\) +withheld +2 of 3 sites$", hidden.to_text(), re.MULTILINE)


def test_sites_see_no_category_of_fewer_than_min_sites():
    """Rows of a name that one site alone has are that site's own figure; they are among others."""
    south = site(140, 1)
    south.values["sex"][south.values["sex"] == "male"] = "m"
    table = table_one({"north": site(90, 0), "south": south})
    (_, sex) = table.rows
    assert set(sex.together.counts) == {"female", "male", "m"}
    (_, shown) = table.for_sites(2).rows
    females = sex.together.counts["female"]
    assert shown.together.counts == {"female": females}
    assert shown.together.other == 230 - females


def test_rows_of_one_site_do_not_follow_from_those_of_all():
    """Known rows less those that are told would be the one site's, so one more is not told."""
    sites = {name: site(90, seed) for seed, name in enumerate(("north", "south", "west"))}
    sites["west"].values["sex"][:20] = "other"
    table = table_one(sites)
    (_, sex) = table.rows
    fewest = min(("male", "female"), key=lambda name: sex.together.counts[name])
    (_, shown) = table.for_sites(2).rows
    assert fewest not in shown.together.counts
    assert shown.together.other == 20 + sex.together.counts[fewest]
    assert table.for_sites(2).target.together.counts == table.target.together.counts


@pytest.mark.parametrize("kind", ["category", "number"])
def test_missing_values_of_one_site_are_withheld(kind):
    """Withheld counts do not follow from others: known values are withheld, and one category."""
    sites = {name: site(90, seed) for seed, name in enumerate(("north", "south", "west"))}
    for one in sites.values():
        one.values["age"][:] = np.nan_to_num(one.values["age"], nan=50.0)
    column = {"category": "sex", "number": "age"}[kind]
    sites["west"].values[column][:7] = None if kind == "category" else np.nan
    table = table_one(sites)
    shown = table.for_sites(2)
    row = next(row for row in shown.rows if row.name == column)
    assert (row.together.known, row.together.missing, row.together.other) == (0, 0, 0)
    assert len(row.together.counts) == (kind == "category")
    assert (row.together.mean is None) is (kind == "category")
    assert re.search(r"missing +withheld$", shown.to_text(), re.MULTILINE)
    assert not re.search(r"missing +7$", shown.to_text(), re.MULTILINE)
    told = [line for line in csv.reader(io.StringIO(shown.to_csv())) if line[0] == column]
    assert not {"known", "missing"} & {line[2] for line in told}
    assert TableOne.from_json(shown.to_json()) == shown


def test_column_of_one_site_alone_is_withheld_with_the_reason():
    north, south = site(90, 0), site(90, 1)
    north.values["age"][:] = np.nan
    text = table_one({"north": north, "south": south}).for_sites(2).to_text()
    assert re.search(r"age \(years\) +withheld +1 of 2 sites$", text, re.MULTILINE)


def test_figures_of_single_sites_are_kept_for_a_bounded_number():
    profile = site(40, 0).profile()
    many = TableOne.of((f"s{i}", profile) for i in range(MAX_SITES + 5))
    assert len(many.num_samples) == len(many.rows[0].sites) == MAX_SITES
    assert many.num_sites == many.rows[0].together.num_sites == MAX_SITES + 5


def test_sites_without_rows_or_statistics_are_passed_over():
    empty = TableOne.of([("none", DataProfile(0, 2)), ("plain", DataProfile(9, 2))])
    assert (empty.num_sites, empty.num_samples, empty.rows) == (1, {"plain": 9}, ())
    assert empty.to_text()


def test_groups_of_rows_are_counted_where_they_are_enough():
    """Table one tells the number of patients beside that of their visits, sites that of all."""

    def grouped(table, num_groups):
        groups = np.arange(table.num_samples, dtype=np.uint64) % num_groups
        return replace(table, groups=groups, group="patient")

    sites = {"north": grouped(TABLES["north"], 30), "south": grouped(TABLES["south"], 35)}
    table = TableOne.from_json(table_one(sites).to_json())
    assert table.cells()[2] == ["patient", "groups of rows", "30", "35", "65"]
    assert ["patient", "north", "groups", "30"] in list(csv.reader(io.StringIO(table.to_csv())))
    assert table.for_sites(2).cells()[2] == ["patient", "groups of rows", "65"]
    assert "patient" not in table.for_sites(3).to_text()
    profiles = [TABLES["south"].profile(), sites["north"].profile()]
    assert initial_model(create("sgd", {}), profiles).metadata["group"] == "patient"
    few = table_one({**sites, "tiny": grouped(TABLES["tiny"], 2)})
    assert few.cells()[2] == ["patient", "groups of rows", "30", "35", "", "65 of 2 sites"]
