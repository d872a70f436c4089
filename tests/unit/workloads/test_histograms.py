"""Trees that grow from the histograms of all participants, against plain XGBoost."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import xgboost

from support.learning import by_target, table_of
from xain_workloads.errors import DataError, InvalidContent
from xain_workloads.model import Model
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table
from xain_workloads.trees import histograms, trees
from xain_workloads.trees.growing import grown
from xain_workloads.trees.histograms import Bins
from xain_workloads.trees.trees import BoosterKind, Tree
from xain_workloads.workload import Workload, create, evaluate, initial_model

TASKS = ("two classes", "three classes", "regression")


def workload_of(task: str, **options: Any) -> Workload:
    kind = "regression" if task == "regression" else "classification"
    return create("xgboost", {"mode": "histogram", "task": kind, "max_depth": 3, **options})


@cache
def rows_of_task(task: str, num_rows: int = 600) -> Table:
    """Features of ten values each, a tenth of which are missing, so that the bins of XGBoost and
    ours divide the rows alike."""
    chance = np.random.default_rng(4)
    features = chance.integers(0, 10, size=(num_rows, 5)).astype(np.float64)
    score = features[:, 0] + np.square(features[:, 1] - 4) / 3 + chance.normal(0, 2, num_rows)
    features[chance.random(features.shape) < 0.1] = np.nan
    if task == "regression":
        target: Any = 5 + 3 * score
    else:
        borders = [7.0] if task == "two classes" else [5.0, 9.0]
        target = np.array(["a", "b", "c"])[np.digitize(score, borders)]
    columns = tuple(Column(f"x{i}") for i in range(5))
    return Table(columns, {c.name: features[:, i] for i, c in enumerate(columns)}, target)


def next_model(workload: Workload, model: Model, parts: Sequence[Dataset], seed: int = 0) -> Model:
    """The model after one round, as participants and coordinator make it."""
    before = model.vector.tobytes()
    state = histograms.growing(before, model.metadata)
    results = [workload.train(model, part, epochs=1, epoch_base=0, seed=seed) for part in parts]
    sums = [histograms.parse_sums(result.vector.tobytes(), state) for result in results]
    return replace(model, vector=np.frombuffer(grown(before, model.metadata, sums), np.uint8))


def federated(
    workload: Workload, sites: Sequence[Table], rounds: int, start: Model | None = None
) -> Model:
    model = start or initial_model(workload, [site.profile() for site in sites])
    parts = [prepare(model.metadata, site) for site in sites]
    for _ in range(rounds):
        model = next_model(workload, model, parts)
    return model


def booster_of(model: Model) -> xgboost.Booster:
    return xgboost.Booster({"nthread": 1}, model_file=bytearray(model.vector.tobytes()))


def trees_of(model: Model) -> list[Any]:
    saved = json.loads(model.vector.tobytes())
    return list(saved["learner"]["gradient_booster"]["model"]["trees"])


def xgboost_of(workload: Any, model: Model, data: Dataset, iterations: int) -> xgboost.Booster:
    """Plain XGBoost on all rows."""
    kind = BoosterKind.from_metadata(model.metadata)
    classes = sorted(set(data.target.tolist()))
    target = data.target
    if kind.objective != "reg:squarederror":
        target = np.array([classes.index(name) for name in data.target.tolist()])
    parameters = {
        name: getattr(workload.options, name)
        for name in ("eta", "max_depth", "min_child_weight", "gamma", "reg_lambda", "reg_alpha")
    }
    parameters |= {"objective": kind.objective, "tree_method": "hist", "nthread": 1}
    if kind.num_classes:
        parameters["num_class"] = kind.num_classes
    matrix = xgboost.DMatrix(data.features, target, nthread=1)
    return xgboost.train(parameters, matrix, num_boost_round=iterations)


@pytest.mark.parametrize(
    "options",
    [{}, {"gamma": 2.0, "min_child_weight": 6.0}, {"reg_alpha": 1.5, "reg_lambda": 0.0}],
    ids=["defaults", "gamma and min_child_weight", "reg_alpha without reg_lambda"],
)
@pytest.mark.parametrize("task", TASKS)
def test_one_site_makes_the_trees_that_xgboost_makes(task, options):
    """Same margins after five iterations, with missing values; and the same numbers in the trees
    but for thresholds, which lie elsewhere between the same values."""
    table = rows_of_task(task)
    workload = workload_of(task, **options)
    model = initial_model(workload, [table.profile()])
    data = prepare(model.metadata, table)
    theirs = xgboost_of(workload, model, data, 5)
    while booster_of(model).num_boosted_rounds() < 5 or b'"xain_level"' in model.vector.tobytes():
        model = next_model(workload, model, [data])
    matrix = xgboost.DMatrix(data.features)
    np.testing.assert_allclose(
        booster_of(model).predict(matrix, output_margin=True),
        theirs.predict(matrix, output_margin=True),
        rtol=1e-3,
        atol=1e-3,
    )
    saved = json.loads(bytes(theirs.save_raw("json")))
    for ours, other in zip(
        trees_of(model), saved["learner"]["gradient_booster"]["model"]["trees"], strict=True
    ):
        for name in ("left_children", "right_children", "split_indices", "parents"):
            assert ours[name] == other[name]
        for name in ("base_weights", "loss_changes", "sum_hessian"):
            np.testing.assert_allclose(ours[name], other[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("task", TASKS)
def test_trees_do_not_depend_on_how_rows_are_divided(task):
    """The same splits, and the same values but for rounding, for 1, 2 and 7 sites, of which most
    have one class only."""
    workload, table = workload_of(task), rows_of_task(task)
    start = initial_model(workload, [table.profile()])
    whole = trees_of(federated(workload, [table], 9, start))
    assert len(whole) == 3 * (3 if task == "three classes" else 1)
    for num_sites in (2, 7):
        parts = trees_of(federated(workload, by_target(table, num_sites), 9, start))
        for ours, other in zip(parts, whole, strict=True):
            for name in ("left_children", "split_indices", "default_left"):
                assert ours[name] == other[name]
            for name in ("split_conditions", "base_weights", "sum_hessian"):
                np.testing.assert_allclose(ours[name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_each_model_on_the_way_is_a_booster_that_predicts_better(task):
    """A round adds a level; the loss on the training rows falls in every round."""
    workload, table = workload_of(task, eta=0.5), rows_of_task(task)
    model = initial_model(workload, [table.profile()])
    data = prepare(model.metadata, table)
    name = "mse" if task == "regression" else "loss"
    losses, depths = [workload.measure(model, data).metrics[name]], []
    for number in range(1, 7):
        result = workload.train(model, data, epochs=1, epoch_base=0, seed=0)
        assert result.metrics == pytest.approx(workload.measure(model, data).metrics, rel=1e-5)
        model = next_model(workload, model, [data])
        booster = booster_of(model)
        assert booster.num_boosted_rounds() == (number + 2) // 3
        assert bytes(booster.save_raw("json")).count(b'"split_type"') == len(trees_of(model))
        losses.append(workload.measure(model, data).metrics[name])
        depths.append(depth(trees_of(model)[-1]))
    assert losses == sorted(losses, reverse=True)
    assert depths == [1, 2, 3, 1, 2, 3]


def depth(tree: dict[str, Any]) -> int:
    levels = [0]
    for parent in tree["parents"][1:]:
        levels.append(levels[parent] + 1)
    return max(levels)


def test_training_begins_with_the_shares_of_the_classes_over_all_sites():
    """So that a few rounds beat always predicting them; a class too rare to be told of is one row,
    and classes that nobody tells of are equally likely."""
    target = np.repeat(["a", "b", "c"], [150, 48, 2])
    columns = (Column("x0"),)
    parts = [Table(columns, {"x0": np.arange(100.0)}, target[one::2]) for one in (0, 1)]
    profiles = [replace(part.profile(), classes=("a", "b", "c")) for part in parts]
    start = initial_model(workload_of("three classes"), profiles)
    predicted = booster_of(start).predict(xgboost.DMatrix(np.zeros((1, 1))))
    np.testing.assert_allclose(predicted[0], np.array([150, 48, 1]) / 199, rtol=1e-6)
    untold = [replace(one, statistics="") for one in profiles]
    start = create("xgboost", {"mode": "bagging"}).initial_model(untold)
    predicted = booster_of(start).predict(xgboost.DMatrix(np.zeros((1, 1))))
    np.testing.assert_allclose(predicted[0], 1 / 3, rtol=1e-6)


def test_iteration_without_a_split_ends_at_once():
    """A round whose rows cannot be split still takes a step; the next one opens a new iteration."""
    table = rows_of_task("two classes")
    model = federated(workload_of("two classes", gamma=1e6), [table], 3)
    assert [tree["left_children"] for tree in trees_of(model)] == [[-1]] * 3
    assert trees_of(model)[0]["split_conditions"][0] != 0


def test_iteration_ends_when_no_node_has_rows_enough():
    """150 hessians at the root; two children of 60 cannot be split again, so depth 6 takes one
    round."""
    workload = workload_of("two classes", max_depth=6, min_child_weight=60.0)
    model = federated(workload, [rows_of_task("two classes")], 4)
    assert [depth(tree) for tree in trees_of(model)] == [1] * 4


def test_missing_values_are_told_from_all_known_ones():
    """The label is whether the value is missing, which no edge could stand for."""
    chance = np.random.default_rng(3)
    values = chance.normal(size=200)
    missing = chance.random(200) < 0.5
    values[missing] = np.nan
    columns = (Column("a"), Column("b"))
    target = np.where(missing, "yes", "no")
    table = Table(columns, {"a": values, "b": chance.normal(size=200)}, target)
    model = federated(workload_of("two classes", max_depth=1), by_target(table, 2), 5)
    assert evaluate(model, table)["accuracy"] == 1.0


def test_categories_indicators_and_scaled_numbers_have_bins():
    """One edge between zeros and ones; edges of a number are in its prepared unit."""
    chance = np.random.default_rng(0)
    age = chance.integers(20, 40, 300).astype(np.float64)
    ward = np.array(["north", "south"], dtype=object)[chance.integers(0, 2, 300)]
    table = table_of({"age": age, "ward": ward}, np.where((age > 30) ^ (ward == "north"), "a", "b"))
    model = federated(workload_of("two classes"), by_target(table, 3), 12)
    assert evaluate(model, table)["accuracy"] > 0.95
    state = histograms.growing(model.vector.tobytes(), model.metadata)
    assert [edges.tolist() for edges in state.bins.edges[1:]] == [[0.5], [0.5]]


@pytest.mark.parametrize("max_bin", [2, 8, 256])
def test_edges_are_few_and_divide_the_rows(max_bin):
    """The sketches of three sites; with two bins the edge is near the median."""
    values = np.random.default_rng(1).exponential(size=900)
    table = table_of({"a": values}, np.where(values > 1, "x", "y"))
    sites = [table.subset(rows) for rows in np.array_split(np.arange(900), 3)]
    model = initial_model(
        workload_of("two classes", max_bin=max_bin), [site.profile() for site in sites]
    )
    bins = Bins.from_text(model.metadata[histograms.KEY], 1)
    (edges,) = bins.edges
    assert max_bin // 2 <= len(edges) < max_bin
    counts = np.bincount(bins.positions(values[:, None])[:, 0])
    assert counts.max() < 3 * 900 / min(max_bin, 64)
    assert Bins.from_text(bins.to_text(), 1).edges[0].tolist() == edges.tolist()


def test_rows_and_columns_are_drawn_once_for_an_iteration():
    """`subsample` takes the same rows for all levels; `colsample_bytree` two of five columns."""
    table = rows_of_task("two classes")
    workload = workload_of("two classes", subsample=0.5, colsample_bytree=0.4)
    model = federated(workload, [table], 18)
    for tree in trees_of(model):
        split = {
            feature
            for feature, left in zip(tree["split_indices"], tree["left_children"], strict=True)
            if left != -1
        }
        assert 1 <= len(split) <= 2
        hessians = tree["sum_hessian"]
        inner = [node for node, left in enumerate(tree["left_children"]) if left != -1]
        for node in inner:
            left = tree["left_children"][node]
            assert hessians[left] + hessians[left + 1] == pytest.approx(hessians[node], rel=1e-5)
    assert trees_of(model)[0]["sum_hessian"][0] == pytest.approx(75, rel=0.15)
    assert federated(workload, [table], 18).vector.tobytes() == model.vector.tobytes()


def test_histograms_that_do_not_fit_are_refused():
    table = rows_of_task("two classes")
    workload = workload_of("two classes")
    model = federated(workload, [table], 1)
    state = histograms.growing(model.vector.tobytes(), model.metadata)
    data = prepare(model.metadata, table)
    good = workload.train(model, data, epochs=1, epoch_base=0, seed=0).vector.tobytes()
    size = len(good)

    def changed(index, value):
        values = np.frombuffer(good, "<f8").copy()
        values[index] = value
        return values.tobytes()

    for sent, why in (
        (good[:-8], f"the update has {size - 8} bytes; histograms of 2 nodes and"),
        (b"", f"the update has 0 bytes; histograms of 2 nodes .* have {size}"),
        (model.vector.tobytes(), "the update has"),
        (changed(3, np.nan), "a value that is not finite"),
        (changed(0, -np.inf), "a value that is not finite"),
        (changed(-1, -0.5), "a negative sum of hessians"),
        (changed(0, -1e31), r"a sum above 1e\+30"),
    ):
        with pytest.raises(InvalidContent, match=why):
            histograms.parse_sums(sent, state)
    assert histograms.parse_sums(good, state).shape == state.shape


def test_largest_sums_make_finite_trees():
    """Wrong numbers may harm the model; they must not stop the session."""
    workload = workload_of("two classes", reg_lambda=0.0, min_child_weight=0.0)
    model = initial_model(workload, [rows_of_task("two classes").profile()])
    state = histograms.growing(model.vector.tobytes(), model.metadata)
    sums = np.zeros(state.shape)
    sums[0] = np.random.default_rng(0).choice([-1e30, 1e30], size=state.shape[1:])
    sums[1] = 1e-300
    whole = grown(model.vector.tobytes(), model.metadata, [sums, sums])
    booster = trees.last_iteration(whole, state.kind)
    assert isinstance(booster[0], Tree)


def test_model_without_sketches_is_not_made():
    """The message names the mode that needs none."""
    workload = workload_of("two classes")
    told = 'needs statistics of the columns.* set aggregation.options.mode = "bagging"'
    with pytest.raises(DataError, match=told):
        initial_model(workload, [DataProfile(9, 3, ("a", "b"))])
    few = rows_of_task("two classes").subset(range(4))
    with pytest.raises(DataError, match="no participant has rows enough"):
        initial_model(workload, [few.profile()])


def test_histograms_larger_than_an_update_are_refused_at_the_start():
    chance = np.random.default_rng(0)
    columns = tuple(Column(f"x{i}") for i in range(150))
    values = {column.name: chance.normal(size=2000) for column in columns}
    table = Table(columns, values, np.where(values["x0"] > 0, "a", "b"))
    workload = workload_of("two classes", max_depth=14)
    with pytest.raises(DataError, match=r"lower workload.options.max_bin or max_depth"):
        initial_model(workload, [table.profile()])


def test_model_of_another_mode_has_no_histograms():
    table = rows_of_task("two classes")
    bagging = create("xgboost", {"max_depth": 3})
    model = initial_model(bagging, [table.profile()])
    data = prepare(model.metadata, table)
    with pytest.raises(ValueError, match="the model has no bins"):
        workload_of("two classes").train(model, data, epochs=1, epoch_base=0, seed=0)
