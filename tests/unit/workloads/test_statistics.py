"""Statistics of sites merge to those of all their rows, tell no row, and are refused if damaged."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from xain_workloads.errors import DataError
from xain_workloads.tables.reading.statistics_json import from_json, to_json
from xain_workloads.tables.statistics import (
    MAX_CATEGORIES,
    MAX_NAME_BYTES,
    MAX_STATISTICS_BYTES,
    MIN_BUCKET,
    MIN_KNOWN,
    CategoryStatistics,
    NumberStatistics,
    Statistics,
    describe,
    merge,
)


def one_class(num_rows: int) -> NDArray[np.str_]:
    return np.full(num_rows, "y", dtype=np.str_)


def of_numbers(numbers: NDArray[np.float64]) -> Statistics:
    return describe({"x": numbers}, one_class(len(numbers)))


def number(statistics: Statistics, name: str = "x") -> NumberStatistics:
    column = statistics.columns[name]
    assert isinstance(column, NumberStatistics)
    return column


def category(statistics: Statistics, name: str = "x") -> CategoryStatistics:
    column = statistics.columns[name]
    assert isinstance(column, CategoryStatistics)
    return column


def texts(*values: str | None) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=60),
    offset=st.sampled_from([0.0, 1e6, -1e9]),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    data=st.data(),
)
def test_merged_moments_equal_those_of_the_pooled_rows(values, offset, cuts, data):
    """For any split into sites, some of them empty, and in any order of the sites. A site with
    fewer than MIN_KNOWN numbers tells none of them."""
    numbers = np.array(values) + offset
    pieces = np.split(numbers, sorted(cuts))
    parts = [of_numbers(piece) for piece in pieces]
    merged = merge(parts)
    shuffled = merge(data.draw(st.permutations(parts)))
    assert to_json(merged) == to_json(shuffled)
    known = np.concatenate(
        [piece[~np.isnan(piece)] for piece in pieces if np.sum(~np.isnan(piece)) >= MIN_KNOWN]
        or [np.empty(0)]
    )
    column = number(merged)
    assert (column.moments.count, column.missing) == (len(known), np.isnan(numbers).sum())
    if len(known):
        scaler = StandardScaler().fit(known[:, np.newaxis])
        size = max(1.0, float(np.abs(known).max()))
        assert column.moments.mean == pytest.approx(scaler.mean_[0], rel=1e-9, abs=1e-9)
        spread = float(np.square(known - known.mean()).mean())
        assert column.moments.variance == pytest.approx(
            spread, rel=1e-9, abs=(size * 1e-13) ** 2 + 1e-12
        )


def test_statistics_do_not_tell_numbers_of_fewer_than_five_rows():
    """The mean of one number is the number; mean and variance of two are both of them."""
    few = np.array([171.25, 93.5, np.nan, np.nan, np.nan, np.nan])
    statistics = describe({"x": few, "y": np.arange(6.0)}, few[:2])
    for value in (171.25, 93.5, few[:2].mean()):
        assert str(value) not in to_json(statistics)
    assert number(statistics, "x").missing == 4
    assert number(statistics, "y").moments.mean == 2.5
    # The column is scaled by the sites that know more of it.
    others = describe({"x": np.arange(10.0), "y": np.arange(10.0)}, np.arange(10.0))
    merged = merge([statistics, others])
    assert number(merged).moments.mean == 4.5
    assert number(merged).quantile(0.5) == pytest.approx(4.5)
    assert merged.target.count == 10


@given(
    labels=st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_merged_categories_are_counted_as_in_the_pooled_rows(labels, cuts):
    """Every row is missing, counted by its name, or infrequent."""
    column = texts(*labels)
    parts = np.split(column, sorted(cuts))
    target = [np.array(["y"] * len(part), dtype=np.str_) for part in parts]
    described = [
        describe({"x": part}, one, min_category_count=2)
        for part, one in zip(parts, target, strict=True)
    ]
    merged = category(merge(described))
    assert merged.missing == labels.count(None)
    assert sum(merged.counts.values()) + merged.infrequent == len(labels) - labels.count(None)
    for name, count in merged.counts.items():
        at_sites = [part.tolist().count(name) for part in parts]
        assert count == sum(number for number in at_sites if number >= 2)
    exact = category(
        merge(
            [
                describe({"x": part}, one, min_category_count=1)
                for part, one in zip(parts, target, strict=True)
            ]
        )
    )
    assert dict(exact.counts) == {n: labels.count(n) for n in ("a", "b", "c") if n in labels}


@pytest.mark.parametrize("sizes", [(1000,), (1000, 400), (400, 330, 500, 1000), (30, 7, 11, 700)])
@pytest.mark.parametrize("draw", ["normal", "exponential", "integers"])
def test_quantiles_of_merged_sketches_have_the_stated_rank_error(sizes, draw):
    """The rank of a quantile is off by one bucket of each site at most, two with ties."""
    chance = np.random.RandomState(len(sizes))
    parts = []
    for i, size in enumerate(sizes):
        match draw:
            case "normal":
                parts.append(chance.normal(i, 1, size))
            case "exponential":
                parts.append(np.exp(3 * chance.normal(0, 1, size)))
            case _:
                parts.append(chance.randint(0, 5, size).astype(np.float64))
    pooled = np.sort(np.concatenate(parts))
    column = number(merge([of_numbers(part) for part in parts]))
    allowed = sum(max(size / 64, MIN_BUCKET) + 1 for size in sizes) * 2
    for share in (0.25, 0.5, 0.75):
        value = column.quantile(share)
        below = np.searchsorted(pooled, value, "left")
        not_above = np.searchsorted(pooled, value, "right")
        assert below - allowed <= share * len(pooled) <= not_above + allowed


def test_quantiles_of_very_many_sites_have_the_stated_rank_error():
    """Buckets are joined while the sites are merged, which adds 1/100 of the rows at most."""
    chance = np.random.RandomState(1)
    parts = [chance.normal(i % 7, 1 + i % 3, 320) for i in range(300)]
    pooled = np.sort(np.concatenate(parts))
    others = {f"column {i}": np.arange(320.0) for i in range(249)}  # a wide table has less room
    wide = describe(others, one_class(320)).columns
    sites = [Statistics(320, {**wide, **of_numbers(part).columns}) for part in parts]
    merged = merge(sites)
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        rank = np.searchsorted(pooled, number(merged).quantile(share)) / len(pooled)
        assert rank == pytest.approx(share, abs=1 / 64 + 1 / 100)
    # Equal values stay as they are, however often they are joined.
    assert number(merged, "column 7").quantile(0.5) == pytest.approx(159.5, abs=320 / 64)
    constant = number(merge([of_numbers(np.full(320, 0.1))] * 300))
    assert {value for value, _ in constant.buckets} == {0.1}
    assert sum(size for _, size in constant.buckets) == 320 * 300


def test_no_single_row_is_in_the_sketch():
    """A bucket is the mean of several rows; neither the smallest nor the largest value travels."""
    numbers = np.random.RandomState(0).standard_normal(100)
    told = {value for value, _ in number(of_numbers(numbers)).buckets}
    assert len(told) == 100 // MIN_BUCKET
    assert not told & set(numbers.tolist())


def test_rare_categories_and_long_texts_do_not_travel():
    statistics = describe(
        {"x": texts(*["often"] * 5, *["rare"] * 4, *["t" * (MAX_NAME_BYTES + 1)] * 9, None)},
        one_class(19),
    )
    assert category(statistics) == CategoryStatistics(1, {"often": 5}, 13, 3)
    assert "rare" not in to_json(statistics)


def test_column_with_very_many_categories_tells_the_most_frequent():
    names = [f"c{i}" for i in range(MAX_CATEGORIES + 10)]
    column = category(
        describe(
            {"x": texts(*names, names[-1])}, one_class(MAX_CATEGORIES + 11), min_category_count=1
        )
    )
    assert len(column.counts) == MAX_CATEGORIES
    assert column.counts[names[-1]] == 2
    assert column.infrequent == 10


@pytest.mark.parametrize("num_columns", [1, 100, 1000])
def test_statistics_of_a_wide_table_are_bounded(num_columns):
    """Sketches of a wide table are coarser; means and variances are exact all the same."""
    chance = np.random.RandomState(0)
    values = {f"column number {i}": chance.standard_normal(400) for i in range(num_columns)}
    statistics = describe(values, chance.standard_normal(400))
    text = to_json(statistics)
    assert len(text) <= MAX_STATISTICS_BYTES
    assert from_json(text) == statistics
    last = f"column number {num_columns - 1}"
    assert number(statistics, last).moments.mean == pytest.approx(values[last].mean(), rel=1e-12)


def test_column_of_other_types_at_two_sites_is_named():
    numbers = describe({"age": np.array([1.0])}, one_class(1))
    names = describe({"age": texts("old")}, one_class(1))
    with pytest.raises(DataError, match="column 'age' holds numbers at some sites"):
        merge([numbers, names])


def test_column_that_a_site_lacks_is_missing_in_its_rows():
    both = describe({"a": np.ones(3), "b": np.ones(3)}, np.ones(3))
    one = describe({"a": np.ones(4)}, np.ones(4))
    merged = merge([one, both], ["b", "a", "nowhere"])
    assert list(merged.columns) == ["b", "a"]
    assert number(merged, "b").missing == 4
    assert number(merged, "a").missing == 0


def test_number_that_cannot_be_squared_is_refused_with_its_column():
    with pytest.raises(DataError, match="column 'x' has a value of 1e\\+200"):
        of_numbers(np.array([1.0, 1e200]))


GOOD = json.loads(to_json(describe({"n": np.arange(10.0), "c": texts(*"ab" * 5)}, np.arange(10.0))))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["version"], 7, "version 7, where this program reads 1"),
        (["rows"], -1, r"\$\.rows"),
        (["columns"], {}, r"\$\.columns"),
        (["columns", 0], [], r"\$\.columns\[0\]"),
        (["columns", 0, "name"], 5, r"\$\.columns\[0\]\.name"),
        (["columns", 0, "name"], "c", "column 'c' twice"),
        (["columns", 0, "type"], "date", "Invalid value 'date'"),
        (["columns", 0, "mean"], 1e200, r"<= 1e\+?140.*\.mean"),
        (["columns", 0, "mean"], float("nan"), "malformed"),
        (["columns", 0, "mean"], True, r"got `bool`.*\.mean"),
        (["columns", 0, "mean"], "0", r"got `str`.*\.mean"),
        (["columns", 0, "m2"], -1.0, r">= 0.*\.m2"),
        (["columns", 0, "m2"], float("inf"), "malformed"),
        (["columns", 0, "count"], 1.5, r"\.count"),
        (["columns", 0, "buckets"], [0.0] * 11, "11 buckets for 10 values"),
        (["columns", 0, "buckets"], [[]], r"\.buckets\[0\]"),
        (["columns", 1, "counts"], [], r"\.counts"),
        (["columns", 1, "counts", "a"], -5, r"\.counts"),
        (["columns", 0, "repeated"], "false", r"\.repeated"),
        (["target"], 3, r"\$\.target"),
    ],
)
def test_damaged_statistics_are_refused(path, value, complaint):
    """A profile comes from the network."""
    entry = json.loads(json.dumps(GOOD))
    inner = entry
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(DataError, match=complaint):
        from_json(json.dumps(entry))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "truncated"),
        ("[" * 100_000, "Expected `object`"),
        ("[]", "Expected `object`"),
        ('{"version":1,"rows":' + "9" * 5000 + "}", "out of range"),
        (" " * (MAX_STATISTICS_BYTES + 1), "more than"),
    ],
)
def test_text_that_is_no_statistics_is_refused(text, complaint):
    with pytest.raises(DataError, match=complaint):
        from_json(text)


def test_association_of_a_number_is_its_auc_and_pearson_r():
    """Associations equal those of scikit-learn and numpy to three digits; few rows have none."""
    chance = np.random.RandomState(0)
    x = chance.randint(0, 40, 200).astype(np.float64)
    x[::7] = np.nan
    labels = np.where(chance.rand(200) < 0.4, "b", "a").astype("U9")
    labels[:12] = "rare"
    labels[:4] = np.array(["few"] * 4)
    statistics = describe({"x": x}, labels)
    assert list(statistics.class_counts) == ["a", "b", "rare"]
    known = ~np.isnan(x) & (labels != "few")
    expected = [roc_auc_score(labels[known] == name, x[known]) for name in ("a", "b")]
    assert number(statistics).association[:2] == pytest.approx(expected, abs=5e-4)
    assert number(statistics).association[2] is None
    y = 3 * np.nan_to_num(x) + chance.standard_normal(200)
    known = ~np.isnan(x)
    told = number(describe({"x": x}, y)).association
    assert told == pytest.approx([np.corrcoef(x[known], y[known])[0, 1]], abs=5e-4)
    assert number(describe({"x": x[:9]}, y[:9])).association == ()


def test_association_of_a_category_tells_strength_and_side():
    """A category that decides the class has 0 or 1, whatever the order of its names; sites whose
    labels are exchanged are on opposite sides."""
    names = texts(*["mid"] * 20, *["high"] * 15, *["low"] * 15)
    labels = np.array(["ill"] * 20 + ["well"] * 30)
    told = category(describe({"x": names}, labels)).association
    assert set(told) == {0.0, 1.0}
    swapped = np.where(labels == "ill", "well", "ill")
    assert category(describe({"x": names}, swapped)).association == (told[1], told[0])
    few = texts(*["a", "b", "c", "d"] * 10)
    chance = np.random.RandomState(0)
    noise = category(describe({"x": few}, chance.permutation([1.0, 2.0] * 20))).association
    assert abs(noise[0] or 0) < 0.4


@pytest.mark.parametrize("min_known", [1, 5, 9])
def test_min_category_count_that_a_site_has_raised_stands(min_known):
    names = np.array(["a"] * 9 + ["b"] * 20, dtype=object)
    statistics = describe(
        {"c": names}, np.zeros(29), min_category_count=10, min_known=min_known
    ).columns["c"]
    assert isinstance(statistics, CategoryStatistics)
    assert statistics.counts == {"b": 20}
    assert statistics.infrequent == 9


@pytest.mark.parametrize("min_known", [1, 2, 5])
def test_min_known_decides_what_travels_of_few_rows(min_known):
    """Nothing of fewer known values travels but the number of those that are missing; names of
    categories and counts of classes included."""
    x, c = np.array([1.5, 2.5, np.nan]), texts("a", "a", "a")
    statistics = describe({"x": x, "c": c}, np.array(["u", "u", "v"]), min_known=min_known)
    text = to_json(statistics)
    assert from_json(text) == statistics
    assert number(statistics).moments.count == (2 if min_known <= 2 else 0)
    assert number(statistics).distinct == (2 if min_known <= 2 else None)
    assert category(statistics, "c").counts == ({"a": 3} if min_known <= 3 else {})
    assert category(statistics, "c").distinct == (1 if min_known <= 3 else None)
    counts = {1: {"u": 2, "v": 1}, 2: {"u": 2}, 5: {}}
    assert statistics.class_counts == counts[min_known]


def test_merged_statistics_have_target_buckets_and_class_counts():
    one, two = np.arange(20.0), np.arange(20.0, 60.0)
    parts = [describe({"x": part}, part) for part in (one, two)]
    merged = merge(parts)
    assert sum(rows for _, rows in merged.target_buckets) == 60
    classes = [describe({"x": one}, np.array(["a"] * 12 + ["b"] * 8)) for _ in range(3)]
    assert merge(classes).class_counts == {"a": 36, "b": 24}


def test_statistics_without_the_newer_keys_are_read():
    """Participants of earlier versions send none of them."""
    entry = json.loads(to_json(describe({"x": np.arange(30.0)}, np.arange(30.0))))
    del entry["target"]["buckets"]
    for key in ("distinct", "whole", "association"):
        del entry["columns"][0][key]
    read = from_json(json.dumps(entry))
    assert (number(read).distinct, number(read).whole, number(read).association) == (None, None, ())
    assert read.target_buckets == ()
    assert read.class_counts == {}
