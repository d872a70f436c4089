"""Preprocessing fitted from several sites prepares rows as one fitted on all rows does."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import skops.io
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import StandardScaler

from support.learning import table_of
from xain_workloads.errors import DataError
from xain_workloads.model import Model
from xain_workloads.tables.data import load_table
from xain_workloads.tables.preprocessing import (
    KEY,
    MAX_PREPROCESSING_BYTES,
    SCALINGS,
    CategoryColumn,
    NumberColumn,
    Preprocessing,
    PreprocessingOptions,
    at_site,
    fit,
    prepare,
    preprocessing_of,
    target_center,
)
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.tables.schema import MAX_COLUMNS, Column
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, evaluate, initial_model, predict

SITE = PreprocessingOptions("site")
STANDARD = PreprocessingOptions("standard", clip=0)


def mixed_table(num_rows: int = 300, seed: int = 0, *, task: str = "regression") -> Table:
    """Numbers of several scales with gaps, categories with gaps, and a constant."""
    chance = np.random.RandomState(seed)
    income = np.exp(chance.normal(10, 1, num_rows))
    income[chance.random_sample(num_rows) < 0.2] = np.nan
    colour = np.array(
        [None if i == 0 else "xabcde"[i] for i in chance.randint(0, 6, num_rows)], dtype=object
    )
    noise = chance.normal(0, 1e-4, num_rows)
    target: Any = np.nan_to_num(np.log(income), nan=10.0) + 1e3 * noise
    if task == "classification":
        target = np.where(target > 10, "rich", "poor")
    return table_of(
        {"income": income, "colour": colour, "noise": noise, "constant": np.full(num_rows, 0.1)},
        target,
    )


def parts_of(table: Table, num_parts: int) -> list[Table]:
    return [table.subset(rows) for rows in np.array_split(np.arange(table.num_samples), num_parts)]


def matrix_of(table: Table, preprocessing: Preprocessing) -> Any:
    """The rows as objects, in the order of the columns that scikit-learn's transformer expects."""
    columns = [table.values[column.name].astype(object) for column in preprocessing.columns]
    return np.column_stack(columns)


@pytest.mark.parametrize("num_sites", [1, 3, 7])
def test_standard_scaling_over_sites_equals_one_on_the_pooled_rows(num_sites):
    """scikit-learn's StandardScaler on all rows gives the same numbers, to 1e-9, but for those
    beyond the limit."""
    table = load_table("breast_cancer")
    profiles = [part.profile() for part in parts_of(table, num_sites)]
    pooled = StandardScaler().fit_transform(table.to_dataset().features)
    for clip in (0.0, 5.0):
        prepared = fit(profiles, PreprocessingOptions("standard", clip=clip)).apply(table).features
        expected = np.clip(pooled, -clip or None, clip or None)
        np.testing.assert_allclose(prepared, expected, rtol=0, atol=1e-9)


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6),
    scaling=st.sampled_from(SCALINGS),
    indicate=st.booleans(),
    missing=st.sampled_from(["mean", "median", "keep"]),
    clip=st.sampled_from([0.0, 0.5, 5.0]),
    cell=st.sampled_from([1.0, -1e9, 1e9]),
)
def test_sklearn_transformer_gives_the_same_numbers(cuts, scaling, indicate, missing, clip, cell):
    """For any split into sites and all options; unknown and missing categories are zeros."""
    table = mixed_table(60)
    table.values["noise"][3] = cell
    parts = [table.subset(rows) for rows in np.split(np.arange(60), sorted(cuts)) if len(rows)]
    options = PreprocessingOptions(scaling, missing, indicate, clip)
    preprocessing = fit([part.profile(2) for part in parts], options)
    table.values["colour"][0] = "never seen"
    prepared = preprocessing.apply(table).features
    transformer = preprocessing.to_sklearn()
    assert isinstance(transformer, ColumnTransformer)
    rows = matrix_of(table, preprocessing)
    np.testing.assert_allclose(transformer.transform(rows), prepared, rtol=0, atol=1e-12)
    rows[[cell is None for cell in rows.ravel()] and np.equal(rows, None)] = np.nan  # as pandas
    np.testing.assert_allclose(transformer.transform(rows), prepared, rtol=0, atol=1e-12)
    assert not prepared[0, [i for i, n in enumerate(preprocessing.feature_names) if "=" in n]].any()


@pytest.fixture
def table() -> Table:
    return mixed_table()


@pytest.mark.parametrize("clip", [0.0, 2.0])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_skops_and_onnx_give_the_same_numbers(scaling, clip, table):
    """skops reads the transformer without trusting more than numpy's dtype; ONNX has float32."""
    table.values["noise"][3] = 5e-4
    preprocessing = fit([table.profile()], PreprocessingOptions(scaling, "median", clip=clip))
    prepared = preprocessing.apply(table).features
    is_clipped = clip > 0 and scaling != "none"
    assert (np.abs(prepared[:, :3]).max() <= clip) == is_clipped
    transformer, rows = preprocessing.to_sklearn(), matrix_of(table, preprocessing)
    read = skops.io.loads(skops.io.dumps(transformer), trusted=["numpy.dtype"])
    np.testing.assert_allclose(read.transform(rows), prepared, rtol=0, atol=1e-12)

    kinds = {"number": FloatTensorType, "category": StringTensorType}
    types = preprocessing.types
    inputs = [(name, kinds[kind]([None, 1])) for name, kind in types.items()]
    session = InferenceSession(to_onnx(transformer, initial_types=inputs).SerializeToString())
    columns = {}
    for name, kind in types.items():
        values = table.values[name][:, np.newaxis]
        values = np.where(np.equal(values, None), "", values) if kind == "category" else values
        columns[name] = values.astype(np.float32 if kind == "number" else object)
    (found,) = session.run(None, columns)
    sizes = np.maximum(np.abs(prepared).max(axis=0), 1)
    np.testing.assert_allclose(found / sizes, prepared / sizes, rtol=0, atol=1e-5)


def test_order_of_sites_changes_nothing_but_the_order_of_columns():
    profiles = [part.profile() for part in parts_of(mixed_table(), 5)]
    text = fit(profiles, STANDARD).to_json()
    assert fit(profiles[::-1], STANDARD).to_json() == text


def test_constant_column_becomes_zeros(table):
    """The column's standard deviation is 0 but for rounding, which is not divided by."""
    for scaling in ("standard", "robust"):
        options = PreprocessingOptions(scaling)
        prepared = fit([part.profile() for part in parts_of(table, 3)], options).apply(table)
        at = prepared.feature_names.index("constant")
        np.testing.assert_allclose(prepared.features[:, at], 0.0, atol=1e-12)


def test_missing_numbers_become_the_median_or_the_mean(table):
    gaps = np.isnan(table.values["income"])
    known = table.values["income"][~gaps]
    profiles = [part.profile() for part in parts_of(table, 3)]
    for missing, expected, tolerance in (
        ("mean", known.mean(), 1e-9),
        ("median", np.median(known), 0.1),  # from sketches
    ):
        prepared = fit(profiles, PreprocessingOptions("none", missing)).apply(table)
        at = prepared.feature_names.index("income")
        assert prepared.features[gaps, at] == pytest.approx(expected, rel=tolerance)


def test_indicator_tells_where_numbers_were_missing(table):
    options = PreprocessingOptions(indicate_missing=True)
    prepared = fit([table.profile()], options).apply(table)
    assert [name for name in prepared.feature_names if "missing" in name] == ["income is missing"]
    at = prepared.feature_names.index("income is missing")
    assert (prepared.features[:, at] == np.isnan(table.values["income"])).all()


def test_robust_scaling_ignores_one_wild_value():
    numbers = np.random.RandomState(0).standard_normal(640)
    numbers[0] = 1e9
    table = table_of({"x": numbers}, numbers)
    scale = fit([table.profile()], PreprocessingOptions("robust")).numbers[0].scale
    assert scale.center == pytest.approx(0.0, abs=0.15)
    assert scale.scale == pytest.approx(1.35, abs=0.15)


@pytest.mark.parametrize("scaling", ["standard", "robust"])
@pytest.mark.parametrize("factor", [1e-3, 0.01, 100.0, 365.25, 1e6])
def test_one_of_three_sites_with_another_unit_does_not_set_the_scale(factor, scaling):
    """Not even where it has the most rows: numbers of the others keep centre and spread, and those
    of the site end at the limit. The target likewise."""
    chance = np.random.default_rng(0)
    sites = [chance.normal(100, 10, size) for size in (90, 90, 200)]
    sites[2] *= factor
    tables = [table_of({"x": numbers}, numbers) for numbers in sites]
    preprocessing = fit([table.profile() for table in tables], PreprocessingOptions(scaling))
    prepared = [preprocessing.apply(table).features[:, 0] for table in tables]
    assert 0.4 < np.std(np.concatenate(prepared[:2])) < 1.6
    assert abs(np.median(np.concatenate(prepared[:2]))) < 1
    assert (np.abs(prepared[2]) == preprocessing.clip).mean() > 0.5
    assert preprocessing.target.center == pytest.approx(100, abs=5)
    assert 5 < preprocessing.target.scale < 20


def test_robust_scaling_of_a_column_that_is_mostly_one_value_trains():
    """The quartiles are a thousandth of the other values apart. Divided by them, these made the
    training diverge."""
    chance = np.random.default_rng(0)
    is_given = chance.random(600) < 0.15
    dose = np.where(is_given, chance.normal(100, 10, 600), chance.normal(0, 1e-3, 600))
    table = table_of({"dose": dose}, dose / 100)
    model = initial_model(
        create("sgd", {"task": "regression"}), [table.profile()], PreprocessingOptions("robust")
    )
    assert evaluate(federated([table], model, rounds=10), table)["r2"] > 0.95


@pytest.mark.parametrize("scaling", ["standard", "robust"])
def test_rare_values_of_a_column_are_kept(scaling):
    """Quantiles of a column of zeros say nothing, and its few ones differ from the zeros."""
    rare = np.zeros(2000)
    rare[:3] = 1.0
    table = table_of({"rare": rare}, rare)
    profiles = [part.profile() for part in parts_of(table, 2)]
    prepared = fit(profiles, PreprocessingOptions(scaling)).apply(table).features[:, 0]
    assert (prepared[:3] - prepared[-1] >= 1).all()


def test_column_of_which_no_site_tells_anything_is_bounded():
    """Four numbers at each site are no statistics, and are not taken as they are either."""
    few = np.array([1e6, -2e6, 0.5, 3.0])
    table = table_of({"x": np.arange(4.0), "few": few}, few)
    prepared = fit([table.profile()] * 3, PreprocessingOptions("standard")).apply(table)
    assert prepared.features[:, 1].tolist() == [5.0, -5.0, 0.5, 3.0]


def test_sites_that_tell_one_number_each_have_the_scale_of_all():
    """Where nothing is known of the spread within the sites, that between them counts."""
    numbers = np.random.default_rng(0).normal(50, 10, 40)
    tables = [table_of({"x": x}, x) for x in np.array_split(numbers, 40)]
    fitted = fit([table.profile(min_known=1) for table in tables], STANDARD)
    assert fitted.numbers[0].scale.center == pytest.approx(numbers.mean())
    assert fitted.numbers[0].scale.scale == pytest.approx(numbers.std())
    # And where no site tells anything of the target, none of its values is too large.
    untold = fit([table.profile() for table in tables], PreprocessingOptions("standard"))
    metadata = {KEY: untold.to_json()}
    assert prepare(metadata, tables[0], to_train=True).num_samples == 1


def test_each_site_scales_by_its_own_statistics():
    """An instrument that is off, and a gap, are as at the other site. The pooled scale stays in the
    model, and the metadata of a site hold its own, for rows that come later."""
    chance = np.random.default_rng(3)
    true = chance.normal(50, 10, 400)
    tables = []
    for numbers in (true.copy(), 2 * true + 30):
        numbers[7] = np.nan
        few = np.full(400, np.nan)
        few[:3] = 4.0
        values = {"x": numbers, "few": few, "same": np.full(400, float(len(tables)))}
        tables.append(Table(tuple(map(Column, values)), values, true))
    profiles = [table.profile() for table in tables]
    model = initial_model(create("sgd", {"task": "regression"}), profiles, SITE)
    own = [at_site(model.metadata, table) for table in tables]
    prepared = [prepare(o, table).features for o, table in zip(own, tables, strict=True)]
    np.testing.assert_allclose(prepared[0], prepared[1], rtol=0, atol=1e-7)
    assert np.std(prepared[1][:, 0]) == pytest.approx(1, abs=0.01)
    pooled, at_second = (preprocessing_of(one) for one in (model.metadata, own[1]))
    assert replace(pooled, is_per_site=False) == fit(profiles, PreprocessingOptions("standard"))
    assert at_second.target == pooled.target
    assert at_second.numbers[1] == pooled.numbers[1]  # three values say too little
    assert at_second.numbers[2].scale.scale == pooled.numbers[2].scale.scale  # one value no spread
    assert at_site(own[1], tables[0]) is own[1]
    assert at_site({}, tables[0]) == {}


def test_row_whose_target_is_far_outside_is_not_trained_on():
    """The row is evaluated. A site with no other rows is refused, in words without a value."""
    target = np.random.default_rng(0).normal(50, 10, 300)
    target[5] = 1e9
    table = table_of({"x": np.arange(300.0)}, target, "price")
    for name in ("sgd", "xgboost"):
        workload = create(name, {"task": "regression"})
        model = initial_model(workload, [table.profile()])
        assert prepare(model.metadata, table).num_samples == 300
        trained = prepare(model.metadata, table, to_train=True)
        assert trained.num_samples == 299
        assert trained.target.max() < 100
        assert target_center(model.metadata) == pytest.approx(50, abs=3)
        cents = replace(table, target=100 * target)
        with pytest.raises(DataError, match="all values of the target 'price'") as told:
            prepare(model.metadata, cents, to_train=True)
        assert "5000" not in str(told.value)
        assert 'set data.factors."price" = 0.01' in str(told.value).split(". ")[0]
        unlimited = initial_model(workload, [table.profile()], PreprocessingOptions(clip=0))
        assert prepare(unlimited.metadata, cents, to_train=True).num_samples == 300


def test_preprocessing_is_read_back_as_it_was_written():
    options = PreprocessingOptions("site", indicate_missing=True)
    preprocessing = fit([mixed_table().profile()], options)
    assert Preprocessing.from_json(preprocessing.to_json()) == preprocessing
    assert Preprocessing.from_json(preprocessing.to_readable_json()) == preprocessing


def test_names_beyond_ascii_can_be_read_by_people():
    table = table_of({"Größe": np.arange(9.0)}, np.arange(9.0))
    assert '"Größe"' in fit([table.profile()], PreprocessingOptions()).to_readable_json()


GOOD = Preprocessing(
    (NumberColumn("age", 50.0, Scale(50.0, 10.0)), CategoryColumn("ward", ("a", "b"))),
    Scale(1.0, 2.0),
)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["version"], 2, "version 2, where this program reads 1"),
        (["columns"], None, r"\$\.columns"),
        (["columns", 0], 1, r"\$\.columns\[0\]"),
        (["columns", 0, "name"], None, r"\.name"),
        (["columns", 0, "name"], "ward", "has column 'ward' twice"),
        (["columns", 0, "type"], "text", "Invalid value 'text'"),
        (["columns", 0, "scale"], 0.0, r"> 0.*\.scale"),
        (["columns", 0, "scale"], -1, r"> 0.*\.scale"),
        (["columns", 0, "center"], float("inf"), "malformed"),
        (["columns", 0, "fill"], "x", r"\.fill"),
        (["columns", 0, "indicate_missing"], 1, r"\.indicate_missing"),
        (["columns", 1, "categories"], "ab", r"\.categories"),
        (["columns", 1, "categories"], ["a", 1], r"\.categories\[1\]"),
        (["columns", 1, "categories"], ["a", "a"], "a category twice"),
        (["target"], 5, r"\$\.target"),
        (["location"], {"center": 0, "scale": 0}, r"\$\.location\.scale"),
        (["clip"], -1, r">= 0.*\$\.clip"),
        (["limit"], "x", r"\$\.limit"),
    ],
)
def test_damaged_preprocessing_is_refused(path, value, complaint):
    """At a participant it comes from the network."""
    entry = json.loads(GOOD.to_json())
    inner = entry
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(DataError, match=complaint):
        prepare({KEY: json.dumps(entry)}, mixed_table())


def test_text_that_is_no_preprocessing_is_refused():
    for text in ("[]", "{", "[" * 100_000, " " * (MAX_PREPROCESSING_BYTES + 1)):
        with pytest.raises(DataError):
            Preprocessing.from_json(text)


def test_table_without_a_needed_column_is_refused_with_its_name(table):
    preprocessing = fit([table.profile()], STANDARD)
    with pytest.raises(DataError, match="needs column 'colour'"):
        preprocessing.apply(table.arranged(["income", "noise", "constant"]))
    other = replace(
        table,
        columns=(Column("income"), Column("colour"), Column("noise"), Column("constant")),
        values={**table.values, "colour": table.values["noise"]},
    )
    with pytest.raises(DataError, match="column 'colour' holds numbers"):
        preprocessing.apply(other)


def test_absent_column_may_count_as_missing(table):
    """A session's schema may allow it; the numbers are then the fill of that column."""
    preprocessing = fit([table.profile()], STANDARD)
    without = table.arranged(["noise", "constant"])
    prepared = preprocessing.apply(without, fill_absent=True)
    income = preprocessing.numbers[0]
    expected = (income.fill - income.scale.center) / income.scale.scale
    assert (prepared.features[:, prepared.feature_names.index("income")] == expected).all()
    assert not prepared.features[:, 3:].any()


def test_columns_in_another_order_are_prepared_alike(table):
    preprocessing = fit([table.profile()], STANDARD)
    arranged = table.arranged(["constant", "noise", "colour", "income"])
    assert (preprocessing.apply(arranged).features == preprocessing.apply(table).features).all()


def test_without_preprocessing_columns_are_matched_by_name():
    """A site of an earlier version sends no statistics; the others still agree on the order."""
    target = np.array(["no", "yes"])
    values = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0])}
    first = table_of(values, target)
    second = table_of(dict(reversed(values.items())), target)
    earlier = replace(first.profile(), columns=(), statistics="", target="", task="")
    model = initial_model(create("sgd"), [earlier, first.profile(), second.profile()])
    assert KEY not in model.metadata
    for table in (first, second):
        assert prepare(model.metadata, table).feature_names == ("a", "b")
    with pytest.raises(DataError, match="no column 'b'"):
        prepare(model.metadata, first.arranged(["a"]))
    with pytest.raises(DataError, match="Expected `str`"):
        prepare({"columns": '{"names": [1]}'}, first)


def test_without_statistics_of_every_site_nothing_is_prepared():
    """A participant of an earlier version has none, and could not prepare its rows."""
    iris = load_table("iris").to_dataset()
    with_statistics = Table.from_dataset(iris).profile()
    model = initial_model(create("sgd"), [with_statistics, iris.profile()])
    assert KEY not in model.metadata
    assert model.layout == create("sgd").initial_model([iris.profile()]).layout
    assert prepare(model.metadata, iris) is iris


def test_category_without_preprocessing_is_refused_without_a_value():
    """The message is told to the coordinator as the reason of the failure."""
    with pytest.raises(DataError, match="'ward' is a category") as caught:
        prepare({"columns": '{"names": ["ward"]}'}, mixed_wards("intensive care"))
    assert "intensive" not in str(caught.value)


def mixed_wards(*names: str) -> Table:
    wards = np.array(names, dtype=object)
    return table_of({"ward": wards}, np.zeros(len(names)))


def wide(number: int) -> Table:
    values = {f"feature number {i}": np.ones(2) for i in range(number)}
    return Table(tuple(map(Column, values)), values, np.array(["a", "b"]))


def test_table_whose_statistics_take_too_much_is_refused_at_the_site():
    """Without them nothing would be prepared for any site, and nothing checked."""
    with pytest.raises(DataError, match=r"8000 columns take \d+ bytes, and at most 524288 .*drop"):
        wide(8000).profile()


def test_array_of_too_many_columns_to_be_named_sends_no_statistics():
    """The model takes the columns as they are."""
    profile = wide(MAX_COLUMNS + 1).profile()
    assert (profile.columns, profile.statistics) == ((), "")
    assert KEY not in initial_model(create("sgd"), [profile]).metadata


def test_too_many_categories_are_refused_before_a_model_is_made():
    names = np.array([f"c{i:04}" + "x" * 190 for i in range(900)] * 5, dtype=object)
    columns = tuple(Column(f"k{i}", "category") for i in range(2))
    table = Table(columns, {c.name: names for c in columns}, np.arange(4500.0))
    profiles = []
    for i in range(4):  # each site has categories of its own
        at_site = {c.name: np.array([f"{i}{n[1:]}" for n in names], object) for c in columns}
        profiles.append(replace(table, values=at_site).profile())
    with pytest.raises(DataError, match="drop columns, or raise min_category_count"):
        initial_model(create("sgd", {"task": "regression"}), profiles)


def federated(tables: list[Table], model: Model, rounds: int) -> Model:
    """Rounds of training and weighted averaging, without a network."""
    workload = create(model.metadata["workload"], json.loads(model.metadata["options"]))
    for round_ in range(rounds):
        results = [
            workload.train(
                model, prepare(model.metadata, table), epochs=1, epoch_base=round_, seed=i
            )
            for i, table in enumerate(tables)
        ]
        total = sum(result.num_samples for result in results)
        vector = sum(result.num_samples / total * result.vector for result in results)
        model = replace(model, vector=np.asarray(vector, dtype=model.vector.dtype))
    return model


@pytest.mark.parametrize("name", ["sgd", "mlp"])
def test_regression_trains_on_a_scaled_target_and_predicts_in_its_unit(name):
    """A target around 1e6 needs no other step size than one around 0."""
    table = mixed_table(400)
    table = replace(table, target=1e6 + 1e4 * np.asarray(table.target))
    parts = parts_of(table, 3)
    workload = create(name, {"task": "regression"})
    model = federated(parts, initial_model(workload, [p.profile() for p in parts]), rounds=20)
    metrics = evaluate(model, table)
    errors = predict(model, table) - np.asarray(table.target, dtype=np.float64)
    assert metrics["r2"] >= 0.5
    assert metrics["mse"] == pytest.approx(float(np.square(errors).mean()), rel=1e-6)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("name", ["sgd", "mlp"])
def test_exported_estimator_predicts_the_same_from_the_same_rows(name, task):
    """Preprocessing and estimator of plain scikit-learn, without this package's code."""
    table = mixed_table(task=task)
    workload = create(name, {"task": task, "dtype": "float64"})
    model = federated([table], initial_model(workload, [table.profile()]), rounds=3)
    preprocessing = Preprocessing.from_json(model.metadata[KEY])
    rows = preprocessing.to_sklearn().transform(matrix_of(table, preprocessing))
    predicted = workload.to_sklearn(model).predict(rows)
    if task == "classification":
        assert predicted.tolist() == predict(model, table).tolist()
    else:
        np.testing.assert_allclose(predicted, predict(model, table), rtol=1e-12)


FIT_MANY_SITES = """
import numpy as np
from xain_workloads.tables.preprocessing import PreprocessingOptions, fit
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table

def peak_mib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

chance = np.random.RandomState(0)
columns = tuple(Column(f"c{i}") for i in range(100))
target = np.array(["a", "b"] * 160)
tables = [
    Table(columns, {c.name: chance.normal(size=320) for c in columns}, target) for _ in range(5)
]
profiles = [table.profile() for table in tables] * 40
before = peak_mib()
fitted = fit(profiles, PreprocessingOptions("robust", "median"))
print(fitted.num_features, peak_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_of_fitting_does_not_grow_with_the_number_of_sites():
    """The statistics of 200 sites and 100 columns once took 160 MiB beside their texts."""
    done = subprocess.run(
        [sys.executable, "-c", FIT_MANY_SITES], check=True, capture_output=True, text=True
    )
    num_features, added_mib = done.stdout.split()
    assert int(num_features) == 100
    assert float(added_mib) < 100
