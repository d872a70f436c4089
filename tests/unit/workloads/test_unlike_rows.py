"""Made-up rows for open votes: points of the columns over all sites, and what is replaced."""

from dataclasses import replace

import numpy as np
import pytest

from xain_workloads.errors import DataError
from xain_workloads.preprocessing import (
    CategoryColumn,
    Preprocessing,
    PreprocessingOptions,
    fit,
    prepare,
)
from xain_workloads.schema import Column
from xain_workloads.table import Table
from xain_workloads.unlike_rows import KEY, MAX_POINTS, fit_points, points_of, with_unlike_rows
from xain_workloads.workload import create, initial_model

OPEN = create("bagging", {"vote": "open"})


def patients(num_rows: int) -> Table:
    """Rows in the order of their age, so that sites with some of them know some ages only."""
    chance = np.random.default_rng(3)
    age = np.sort(chance.gamma(3, 20, num_rows))
    weight = chance.normal(70, 10, num_rows)
    weight[::4] = np.nan
    ward = np.array([*"aaab"] * (num_rows // 4), dtype=object)
    columns = Column("age"), Column("weight"), Column("ward", "category")
    values = {"age": age, "weight": weight, "ward": ward}
    return Table(columns, values, np.where(age > 60, "old", "young"))


def parts_of(table: Table, num_parts: int) -> list[Table]:
    return [table.subset(rows) for rows in np.array_split(np.arange(table.num_samples), num_parts)]


@pytest.mark.parametrize("scaling", ["standard", "robust", "none"])
def test_points_are_quantiles_of_the_prepared_rows_of_all_sites(scaling: str) -> None:
    """No site knows more than a third of the ages; indicators and categories keep their shares."""
    table = patients(1200)
    profiles = [part.profile() for part in parts_of(table, 3)]
    model = initial_model(OPEN, profiles, PreprocessingOptions(scaling, indicate_missing=True))
    points = points_of(model.metadata, 5)
    assert points.shape == (MAX_POINTS, 5)
    rows = prepare(model.metadata, table).features
    known = ~np.isnan(table.values["weight"])
    shares = (np.arange(MAX_POINTS) + 0.5) / MAX_POINTS
    for column, values in enumerate((rows[:, 0], rows[known, 1])):
        below = np.mean(values[:, None] < points[:, column], axis=0)
        assert np.abs(below - shares).max() < 0.03
    # Weight is missing in a quarter of the rows; wards a and b have 3 rows and 1 row of 4.
    assert points[:, 2:].mean(axis=0).tolist() == [0.25, 0.75, 0.25]


def test_points_do_not_depend_on_the_order_of_the_sites() -> None:
    profiles = [part.profile() for part in parts_of(patients(400), 4)]
    preprocessing = fit(profiles, PreprocessingOptions("standard", "median"))
    assert fit_points(profiles, preprocessing) == fit_points(profiles[::-1], preprocessing)


def test_rare_category_and_its_absence_both_occur() -> None:
    values = np.array([*"a" * 995, *"b" * 5], dtype=object)
    target = np.array(["yes", "no"] * 500)
    table = Table((Column("ward", "category"),), {"ward": values}, target)
    points = points_of(initial_model(OPEN, [table.profile()]).metadata, 2)
    assert points.sum(axis=0).tolist() == [MAX_POINTS - 1, 1]


def test_a_share_of_the_columns_of_made_up_rows_is_replaced_by_points() -> None:
    rows = np.arange(8000.0).reshape(200, 40)
    points = -1 - np.arange(120.0).reshape(3, 40)
    target = np.arange(200) % 3
    both, labels = with_unlike_rows(rows, target, 3, points, np.random.default_rng(0))
    assert np.array_equal(both[:200], rows)
    assert np.array_equal(labels, [*target, *[3] * 200])
    made = both[200:]
    is_point = (made[:, None, :] == points).any(axis=1)
    is_own = (made[:, None, :] == rows).any(axis=1)
    assert (is_point ^ is_own).all()
    share = is_point.mean(axis=1)
    assert share.min() < 0.1
    assert share.max() > 0.9
    assert abs(share.mean() - 0.5) < 0.1


def test_model_that_is_made_again_keeps_its_points() -> None:
    """After a restart of the coordinator the profiles have no statistics any more."""
    profiles = [part.profile() for part in parts_of(patients(400), 2)]
    model = initial_model(OPEN, profiles)
    bare = [replace(profile, statistics="") for profile in profiles]
    again = initial_model(OPEN, bare, made=model.metadata)
    assert again.metadata == model.metadata


def test_too_many_features_are_refused_with_what_to_do() -> None:
    wide = Preprocessing((CategoryColumn("ward", tuple(map(str, range(70_000)))),))
    with pytest.raises(DataError, match=r"70000 features, .*drop columns"):
        fit_points([], wide)


def test_points_are_in_the_metadata_with_open_votes_only() -> None:
    profile = patients(400).profile()
    assert KEY in initial_model(OPEN, [profile]).metadata
    assert KEY not in initial_model(create("bagging"), [profile]).metadata


def test_model_without_points_is_told_from_one_without_statistics() -> None:
    metadata = dict(initial_model(OPEN, [patients(40).profile()]).metadata)
    del metadata[KEY]
    with pytest.raises(DataError, match=r"earlier version; .*new session"):
        points_of(metadata, 3)
    with pytest.raises(DataError, match="one has sent none"):
        points_of({}, 3)
