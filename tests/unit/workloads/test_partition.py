"""All participants compute the same partition, and every row has exactly one owner."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_workloads.tables.data import Dataset, from_arrays, load
from xain_workloads.tables.division import Division
from xain_workloads.tables.partition import (
    MAX_ALPHA,
    Partition,
    by_column,
    dirichlet,
    divided,
    folds,
    iid,
    partition,
    quantity,
    split_train_test,
)

labels = st.lists(st.sampled_from(["a", "b", "7", "10"]), max_size=60)
numbers = st.lists(st.floats(-1e6, 1e6), max_size=60)
seeds = st.integers(0, 2**70)
part_counts = st.integers(1, 9)
alphas = st.one_of(st.floats(1e-300, 1e-2), st.floats(1e-2, MAX_ALPHA))


def _target(values: list[Any]) -> Any:
    is_text = not values or isinstance(values[0], str)
    return np.array(values, dtype=np.str_ if is_text else np.float64)


def _covers(parts: list[Any], num_samples: int) -> None:
    rows = np.concatenate(parts)
    assert len(rows) == num_samples
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_samples))


@given(
    st.sampled_from(["iid", "dirichlet", "quantity"]),
    st.one_of(labels, numbers),
    part_counts,
    alphas,
    seeds,
)
def test_every_row_is_in_one_part(kind, values, num_parts, alpha, seed):
    """For labels and numbers, in the order of the rows, however extreme alpha is; sizes of "iid"
    are as even as can be."""
    parts = {
        "iid": lambda: iid(len(values), num_parts, seed=seed),
        "dirichlet": lambda: dirichlet(_target(values), num_parts, alpha=alpha, seed=seed),
        "quantity": lambda: quantity(len(values), num_parts, alpha=alpha, seed=seed),
    }[kind]()
    assert len(parts) == num_parts
    _covers(parts, len(values))
    assert all(np.all(np.diff(part) > 0) for part in parts)
    if kind == "iid":
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_quantity_differs_more_with_a_smaller_alpha():
    """The largest part of ten has most rows, or little more than a tenth."""
    few, many = (quantity(1000, 10, alpha=alpha, seed=3) for alpha in (0.1, 1000.0))
    assert max(map(len, few)) > 300
    assert max(map(len, many)) < 120


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=60), seeds)
def test_column_divides_no_value(values, seed):
    """Every row in one part, each value in one, and no part without a row."""
    num_parts = min(3, len(set(values)))
    parts = by_column(np.array(values), num_parts, seed=seed)
    _covers(parts, len(values))
    owners = [{values[row] for row in part} for part in parts]
    assert all(owners)
    assert sum(map(len, owners)) == len(set(values))


def test_column_evens_out_the_sizes():
    """The largest value goes first, to the part with the fewest rows."""
    values = np.array(list("aaaaabbbccdd"))
    assert sorted(len(part) for part in by_column(values, 2, seed=0)) == [5, 7]
    assert [len(part) for part in by_column(values, 4, seed=0)] == [5, 3, 2, 2]


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_script_divides_labels_as_the_command_line_does(kind):
    """xain.partition() has the parts of --partition, of labels that are numbers, too."""
    x, y = np.arange(60.0).reshape(30, 2), np.arange(30) % 3
    data = from_arrays(x, y)
    parts = partition(y.tolist(), 4, by=kind, alpha=0.3, seed=5)
    for index, part in enumerate(parts):
        kept = Partition(kind, 4, index, 0.3, 5).apply(data)
        np.testing.assert_array_equal(kept.features, data.features[part])


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"by": "size"}, "by is 'size'; it must be one of iid, dirichlet, quantity, column"),
        ({"num_parts": 0}, "num_parts is 0"),
        ({"by": "dirichlet", "alpha": 0.0}, "alpha is 0.0"),
        ({"labels": [[1, 2]]}, r"labels have the shape \(1, 2\)"),
        ({"by": "column", "num_parts": 3}, "2 different values, fewer than the 3 parts"),
    ],
)
def test_partition_that_makes_no_sense_is_refused(given_, message):
    with pytest.raises(ValueError, match=message):
        partition(**{"labels": [1, 2], "num_parts": 2, **given_})


def test_partition_is_pinned():
    """These rows were computed once. If they change, participants of two releases would train on
    overlapping parts without noticing."""
    target = _target(list("aabbccaabbcc"))
    assert [part.tolist() for part in iid(10, 3, seed=7)] == [[4, 5, 8, 9], [1, 6, 7], [0, 2, 3]]
    assert [part.tolist() for part in dirichlet(target, 3, alpha=0.5, seed=7)] == [
        [3, 4, 9],
        [2, 8, 11],
        [0, 1, 5, 6, 7, 10],
    ]


def test_regression_is_skewed_by_decile():
    """A measurement has no labels, so parts differ in its range instead."""
    target = np.arange(1000.0)[::-1] * 7 % 1000  # every value once, in no order
    parts = dirichlet(target, 3, alpha=1e-9, seed=1)
    for part in parts:
        deciles = Counter((target[part] // 100).tolist())
        assert set(deciles.values()) <= {100}


# Train and test


@given(st.one_of(labels, numbers), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
def test_split_covers_exactly(values, fraction, seed):
    """Each row is for training or for testing, and no label is only tested."""
    target = _target(values)
    rows = np.arange(len(target), dtype=np.float64)[:, np.newaxis]
    dataset = Dataset(rows, target)
    train, test = split_train_test(dataset, fraction, seed)

    _covers([train.features[:, 0], test.features[:, 0]], len(target))
    if dataset.task == "classification":
        assert set(test.target) <= set(train.target)
        singles = len(set(target))
        assert test.num_samples <= len(target) - singles
    if fraction == 0:
        assert test.num_samples == 0
    again = split_train_test(dataset, fraction, seed)
    np.testing.assert_array_equal(again[1].features, test.features)


def test_split_is_stratified():
    """Each digit has its share in the test set, to a row."""
    dataset = load("digits")
    train, test = split_train_test(dataset, 0.2, seed=1)
    assert (train.num_samples, test.num_samples) == (1438, 359)
    counts, tested = Counter(dataset.target.tolist()), Counter(test.target.tolist())
    assert all(abs(tested[label] - 0.2 * counts[label]) <= 1 for label in counts)
    other = split_train_test(dataset, 0.2, seed=2)[1]
    assert not np.array_equal(other.features, test.features)


@pytest.mark.parametrize(
    ("target", "fraction", "least", "num_test"),
    [
        ([], 0.1, 1, 0),
        (["a"], 0.1, 1, 0),
        (["a", "b"], 0.1, 1, 0),
        (["a", "a", "b"], 0.1, 1, 1),
        (["a"] * 9 + ["b"], 0.1, 1, 1),
        ([1.5], 0.1, 1, 0),
        (["a"] * 10 + ["b"] * 15, 0.2, 5, 5),
        (["a"] * 10 + ["b"] * 15, 0.2, 6, 0),
    ],
)
def test_split_of_tiny_sets(target, fraction, least, num_test):
    """One test row if one can be spared, or at least so many or none; the last row of a label is
    for training."""
    dataset = Dataset(np.ones((len(target), 1)), _target(target))
    train, test = split_train_test(dataset, fraction, seed=0, least=least)
    assert (train.num_samples, test.num_samples) == (len(target) - num_test, num_test)


def test_rows_that_are_added_move_few_others():
    """A row is drawn by its place, so that a table that grows is not measured on trained rows."""
    target = _target(["a", "b"] * 100)
    rows = np.arange(200, dtype=np.float64)[:, np.newaxis]
    before = split_train_test(Dataset(rows, target), 0.2, seed=0)[1]
    after = split_train_test(Dataset(rows[:190], target[:190]), 0.2, seed=0)[1]
    moved = set(before.features[before.features < 190]) ^ set(after.features.ravel())
    assert len(moved) <= 4


def test_split_names_a_wrong_fraction():
    """A fraction of 1 or more would leave nothing to train on."""
    dataset = load("iris")
    for fraction in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="test_fraction is"):
            split_train_test(dataset, fraction, seed=0)


@given(st.one_of(labels, numbers), st.integers(1, 9), seeds)
def test_folds_cover_exactly(values, num_folds, seed):
    """Every row is in one fold, the same one for the same seed, and folds differ by one row."""
    target = _target(values)
    found = folds(target, num_folds, seed=seed)
    np.testing.assert_array_equal(found, folds(target, num_folds, seed=seed))
    sizes = np.bincount(found, minlength=num_folds)
    assert len(sizes) == num_folds
    assert sizes.max() - sizes.min() <= 1


def test_each_fold_has_its_share_of_each_class():
    target = _target(["a"] * 50 + ["b"] * 10)
    found = folds(target, 5, seed=3)
    assert [Counter(target[found == fold].tolist()) for fold in range(5)] == [
        Counter(a=10, b=2)
    ] * 5


def test_a_division_keeps_a_fold_out_of_training_and_measures_on_it():
    """Without a fold, its rows are neither trained on nor held out; all rows may be one fold."""
    data = from_arrays(np.arange(60.0)[:, None], _target(["a", "b"] * 30))

    def rows(part):
        return set(part.features[:, 0].tolist())

    kept = [divided(data, Division(3, fold, 1), 0.25, 0) for fold in range(3)]
    measured = [divided(data, Division(3, fold, 1, measures=True), 0.25, 0) for fold in range(3)]
    for (train, held_out), (outside, inside) in zip(kept, measured, strict=True):
        assert rows(train) | rows(held_out) == rows(outside)
        assert len(rows(held_out)) == 10
        assert rows(outside) | rows(inside) == rows(data)
        assert not rows(outside) & rows(inside)
    assert set.union(*(rows(inside) for _, inside in measured)) == rows(data)
    everything = divided(data, Division(1, measures=True), 0.25, 0)
    assert [rows(part) for part in everything] == [rows(data)] * 2
    few = divided(data, Division(20, measures=True), 0.25, 0, least=5)
    assert few[1].num_samples == 0


# Groups of rows


@given(
    st.one_of(labels, numbers),
    st.lists(st.integers(0, 12), min_size=60, max_size=60),
    st.floats(0, 1, exclude_max=True),
    seeds,
    part_counts,
)
def test_no_group_is_divided(values, groups, fraction, seed, num_parts):
    """Held-out rows, folds and parts of a data set have all rows of a group or none, and no label
    is only tested."""
    target = _target(values)
    of_rows = np.array(groups[: len(target)], np.uint64)
    data = Dataset(np.arange(float(len(target)))[:, np.newaxis], target, groups=of_rows)
    found = folds(target, num_parts, seed=seed, groups=of_rows)
    divisions = [
        [data.subset(np.flatnonzero(found == fold)) for fold in range(num_parts)],
        [*split_train_test(data, fraction, seed)],
        *(
            [Partition(kind, num_parts, i, seed=seed).apply(data) for i in range(num_parts)]
            for kind in ("iid", "dirichlet")
        ),
    ]
    for parts in divisions:
        _covers([part.features[:, 0] for part in parts], len(target))
        assert sum(len(np.unique(part.groups)) for part in parts) == len(np.unique(of_rows))
    train, test = divisions[1]
    if data.task == "classification":
        assert set(test.target) <= set(train.target)
    assert train.num_samples or not data.num_samples


def _visits(num_patients: int) -> Dataset:
    """Four visits of each patient, in no order; a third of the patients have the outcome."""
    groups = np.random.RandomState(0).permutation(np.repeat(np.arange(num_patients), 4))
    target = np.where(groups % 3 == 0, "ill", "well")
    rows = np.arange(float(len(groups)))[:, np.newaxis]
    return Dataset(rows, target, groups=groups.astype(np.uint64))


def test_groups_meet_the_share_of_rows_of_each_label():
    data = _visits(150)
    test = split_train_test(data, 0.2, seed=1)[1]
    assert Counter(test.target.tolist()) == {"ill": 40, "well": 80}
    found = folds(data.target, 5, seed=1, groups=data.groups)
    each = [Counter(data.target[found == fold].tolist()) for fold in range(5)]
    assert each == [Counter(ill=40, well=80)] * 5


def test_held_out_groups_of_a_session_are_of_several_folds():
    """Folds and test rows are independent of each other, although both seeds are 0 by default."""
    data = _visits(150)
    found = folds(data.target, 5, seed=0, groups=data.groups)
    fold_of = dict(zip(data.groups.tolist(), found.tolist(), strict=True))
    for fold in range(5):
        test = divided(data, Division(5, fold, 0), 0.2, 0)[1]
        assert len({fold_of[group] for group in test.groups.tolist()}) >= 3  # two others


def test_a_group_stays_on_its_side_where_others_are_added_or_rows_are_sorted():
    """The side follows from the value of the group, as far as the share of rows allows it."""
    data = _visits(150)
    known = set(range(120))
    tested = set(split_train_test(data, 0.2, seed=1)[1].groups.tolist()) & known
    fewer = data.subset(np.flatnonzero(data.groups < 120)[::-1])
    assert len(tested ^ set(split_train_test(fewer, 0.2, seed=1)[1].groups.tolist())) <= 3


def test_side_of_a_group_is_pinned():
    """The groups that are held out were computed once. If they change, rows that a model was
    trained on in an earlier release are held out in a later one."""
    test = split_train_test(_visits(30), 0.2, seed=7)[1]
    assert sorted(set(test.groups.tolist())) == [2, 6, 19, 21, 23, 29]


def test_rows_of_too_few_groups_are_not_held_out():
    """Figures over many visits of a few patients tell of each patient."""
    data = _visits(20)
    for measured in (
        lambda least: split_train_test(data, 0.2, seed=0, least=least),
        lambda least: divided(data, Division(5, 0, 0, measures=True), 0.2, 0, least=least),
    ):
        groups = measured(1)[1].groups
        units = len(set(groups.tolist()))
        assert 1 < units < len(groups)
        assert measured(units)[1].num_samples == len(groups)
        assert measured(units + 1)[1].num_samples == 0


@pytest.mark.parametrize(("num_groups", "num_test"), [(1, 0), (2, 0), (3, 20), (5, 20)])
def test_few_groups_are_held_out_where_the_share_is_nearest(num_groups, num_test):
    groups = np.arange(num_groups * 20, dtype=np.uint64) % num_groups
    data = Dataset(np.ones((len(groups), 1)), np.arange(float(len(groups))), groups=groups)
    assert split_train_test(data, 0.2, seed=0)[1].num_samples == num_test
