"""Permutation importance: of the columns of a table, at a site and added over sites."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.inspection import permutation_importance

from support.learning import table_of, trained
from xain_workloads.comparing.importance import MAX_COLUMNS, REPEATS, Importance, added, check
from xain_workloads.comparing.permuting import importances_of, permuted_by
from xain_workloads.exported.formats import pipeline_of
from xain_workloads.model import Model
from xain_workloads.tables.preprocessing import PreprocessingOptions, prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import Workload, from_metadata

ROWS = 90


def patients(task: str = "classification") -> Table:
    """A number with gaps, a category that matters, and a column that says nothing."""
    chance = np.random.default_rng(7)
    age, noise = chance.normal(60, 10, ROWS), chance.normal(size=ROWS)
    ward = np.array(["a", "b", "c"], object)[chance.integers(0, 3, ROWS)]
    score = (age - 60) / 10 + 2.0 * (ward == "b") + 0.1 * noise
    age[::7] = nan
    target = np.where(score > 0.5, "ill", "well") if task == "classification" else score * 30
    values = {"age": age, "ward": ward, "noise": noise}
    return table_of(values, target)


def learned(name: str, options: Mapping[str, Any], table: Table) -> tuple[Workload, Model]:
    indicated = PreprocessingOptions(indicate_missing=name != "xgboost")
    return trained(name, options, table, epochs=5, preprocessing=indicated)


def orders_of_sklearn(seed: int) -> Mapping[tuple[str, int, int], NDArray[np.intp]]:
    """The permutations of permutation_importance(), the same ones for each column."""
    drawn = np.random.RandomState(np.random.RandomState(seed).randint(np.iinfo(np.int32).max + 1))
    order, index, found = np.arange(ROWS), np.arange(ROWS), {}
    for number in range(REPEATS):
        drawn.shuffle(index)
        order = order[index]
        for column in patients().values:
            found[column, number, ROWS] = order
    return found


@pytest.mark.parametrize(
    ("name", "options", "scoring"),
    [
        ("sgd", {}, "neg_log_loss"),
        ("sgd", {"class_weight": "balanced"}, "neg_log_loss"),
        ("sgd", {"loss": "hinge"}, "accuracy"),
        ("sgd", {"task": "regression"}, "neg_mean_squared_error"),
        ("mlp", {"hidden_layers": [4]}, "neg_log_loss"),
    ],
)
def test_importances_are_those_of_scikit_learn_on_the_columns_of_the_table(name, options, scoring):
    """The permutations are the same. Categories and indicators of missing values are prepared
    before they are permuted here, and after that by the pipeline."""
    table = patients(str(options.get("task", "classification")))
    _, model = learned(name, options, table)
    orders = orders_of_sklearn(3)
    (found,) = importances_of(
        from_metadata(model.metadata),
        {4: model},
        prepare(model.metadata, table),
        inf,
        lambda *key: orders[key],
    )
    weights = None
    if "class_weight" in options:
        counts = {name: float(np.mean(table.target == name)) for name in table.classes}
        weights = np.array([1 / (2 * counts[one]) for one in table.target.tolist()])
    features = np.array([table.values[column] for column in table.values], dtype=object).T
    expected = permutation_importance(
        pipeline_of(model),
        features,
        table.target,
        scoring=scoring,
        n_repeats=REPEATS,
        random_state=np.random.RandomState(3),
        sample_weight=weights,
    )
    total = ROWS if weights is None else weights.sum()
    assert np.array(found.totals) / total == pytest.approx(expected.importances_mean, rel=1e-6)
    assert (found.round, found.repeats, found.columns) == (4, REPEATS, (0, 1, 2))
    assert found.totals[0] > 0
    assert found.totals[1] > 0


def test_trees_of_rows_with_gaps_are_measured_too():
    table = patients()
    _, model = learned("xgboost", {"mode": "bagging", "max_depth": 2}, table)
    (found,) = at_site(model, table)
    assert found.totals[1] > abs(found.totals[2])
    unused = replace(table, values={**table.values, "noise": np.zeros(ROWS)})
    options = {"mode": "bagging", "max_depth": 3, "class_weight": "balanced"}
    (found,) = at_site(learned("xgboost", options, unused)[1], unused)
    assert (found.totals[2], found.squares[2]) == (0.0, 0.0), "no tree asks for it"


def at_site(
    model: Model, table: Table, limit_s: float = inf, **more: Any
) -> tuple[Importance, ...]:
    rows, permute = prepare(model.metadata, table), permuted_by("north/0")
    workload = from_metadata(model.metadata)
    return importances_of(workload, {1: model}, rows, limit_s, permute, **more)


def test_permutations_follow_from_the_seed_and_the_name_of_the_column():
    """A site that was killed makes the same ones again; each column and site has its own."""
    permute = permuted_by("north/0")
    assert permute("age", 0, 50).tolist() == permute("age", 0, 50).tolist()
    assert sorted(permute("age", 0, 50).tolist()) == list(range(50))
    others = [permute("age", 1, 50), permute("ward", 0, 50), permuted_by("south/0")("age", 0, 50)]
    assert not any((one == permute("age", 0, 50)).all() for one in others)


@pytest.mark.parametrize("num_predicted", [1, 3 * ROWS * 6, 10**9])
def test_sums_do_not_depend_on_how_many_permutations_are_predicted_at_once(num_predicted):
    table = patients()
    _, model = learned("sgd", {}, table)
    (expected,), (found,) = (
        at_site(model, table),
        at_site(model, table, num_predicted=num_predicted),
    )
    assert found.totals == pytest.approx(expected.totals, rel=1e-12)
    assert found.squares == pytest.approx(expected.squares, rel=1e-12)


@pytest.mark.parametrize(
    ("limit_s", "columns", "repeats"),
    [(100.0, 3, REPEATS), (4.0, 3, 2), (3.0, 2, 1), (1.5, 1, REPEATS), (0.5, 0, 0)],
)
def test_short_time_leaves_out_permutations_and_then_columns(limit_s, columns, repeats):
    """Each look at the clock is a second later."""
    table, seconds = patients(), count()
    _, model = learned("sgd", {}, table)
    found = at_site(model, table, limit_s, clock=lambda: next(seconds), num_predicted=1)
    told = [(len(one.columns), one.repeats) for one in found]
    assert told == ([(columns, repeats)] if columns else [])


def test_table_without_names_of_columns_has_no_importances():
    table = patients()
    _, model = learned("sgd", {}, table)
    rows = prepare(model.metadata, table)
    bare = replace(
        model, metadata={k: v for k, v in model.metadata.items() if k != "preprocessing"}
    )
    assert not importances_of(from_metadata(bare.metadata), {1: bare}, rows, inf, permuted_by(""))


def sums(number: int, columns: tuple[int, ...], *totals: float) -> Importance:
    return Importance(number, 9.0, 5, columns, totals, tuple(t * t for t in totals))


def test_importances_of_sites_add_up_by_model_and_column():
    """A site that had no time for the last column is in the others, whose rows are more."""
    north, south = sums(3, (0, 1), 4.0, 1.0), replace(sums(3, (0,), 2.0), repeats=2)
    of_best = sums(2, (0, 1), 7.0, 5.0)
    best, last = added([(10, (north, of_best)), (30, (south,))])
    assert last == Importance(3, 18.0, 2, (0, 1), (6.0, 1.0), (20.0, 1.0), 40, (40, 10))
    assert (best.round, best.rows) == (2, (10, 10))
    figures = last.figures
    assert list(figures) == [0, 1]
    assert figures[0].value == 6.0 / 40
    assert figures[0].low is not None
    assert last.of([1]).figures == {1: figures[1]}


def test_sum_of_many_sites_does_not_depend_on_their_order():
    chance = np.random.default_rng(1)
    sites = [(10, (sums(1, (0,), one),)) for one in (chance.normal(size=50) * 10.0**20).tolist()]
    assert added(sites) == added(sites[::-1])


@pytest.mark.parametrize(
    "wrong",
    [
        [sums(1, (0, 1), 1.0)],
        [sums(1, (1, 0), 1.0, 1.0)],
        [sums(1, (0, 0), 1.0, 1.0)],
        [sums(1, (-1,), 1.0)],
        [sums(1, (MAX_COLUMNS,), 1.0)],
        [sums(1, (0,), nan)],
        [sums(-1, (0,), 1.0)],
        [replace(sums(1, (0,), 1.0), squares=(-1.0,))],
        [replace(sums(1, (0,), 1.0), repeats=0)],
        [replace(sums(1, (0,), 1.0), loss=inf)],
        [replace(sums(1, (0,), 1.0), loss=-1.0)],
        [replace(sums(1, (0,), 1.0), totals=(1e200,))],
        [replace(sums(1, (0,), 1.0), squares=(1e300,))],
        [sums(1, (0,), 1.0), sums(1, (0,), 1.0)],
        [sums(number, (0,), 1.0) for number in range(3)],
    ],
)
def test_importances_that_cannot_be_those_of_a_site_are_refused(wrong):
    check([sums(1, (0, 2), 1.0, -1.0), sums(0, (), *())])
    with pytest.raises(ValueError, match="importance"):
        check(wrong)
