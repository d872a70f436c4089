"""Tallies of sites, added up, against scikit-learn on all rows together."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from xain_workloads.measures.figures import Figure, class_figures, figures
from xain_workloads.measures.tallies import (
    MAX_ROWS,
    NUMBER_SUMS,
    Tallies,
    Target,
    add,
    check,
    records,
    tally_classes,
    tally_numbers,
)
from xain_workloads.supervised import regression_metrics

seeds = st.integers(0, 2**32 - 1)
num_sites = st.integers(1, 7)
# Rare classes, sharp scores and scores that hardly differ.
spreads = st.sampled_from([0.001, 0.3, 3.0, 30.0])


def divided(num_rows: int, num_parts: int, chance: np.random.Generator) -> list[np.ndarray]:
    """Rows of each site; a site may have none of some class, and none is empty."""
    order = chance.permutation(num_rows)
    cuts = np.sort(chance.choice(np.arange(1, num_rows), num_parts - 1, replace=False))
    return [part for part in np.split(order, cuts) if len(part)]


def classified(
    num_classes: int, num_rows: int, spread: float, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(target, probabilities), with every class among the targets."""
    shares = chance.dirichlet(np.full(num_classes, 0.5))
    target = chance.choice(num_classes, num_rows, p=shares)
    target[:num_classes] = np.arange(num_classes)
    scores = spread * chance.normal(size=(num_rows, num_classes))
    scores[np.arange(num_rows), target] += spread * chance.random()
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return target, exponentials / exponentials.sum(axis=1, keepdims=True)


def require_same_with_a_late_site(sites: Sequence[Tallies], found: Mapping[str, Figure]) -> None:
    """The last site is added to the sum of the others, as one that has measured late."""
    sums = [one for one in (add(sites[:-1]), sites[-1]) if one is not None]
    together = add(sums)
    assert together is not None
    for name, one in figures(together).items():
        assert one.value == pytest.approx(found[name].value, rel=1e-9, abs=1e-9), name


@settings(deadline=None, max_examples=60)
@given(seeds, num_sites, st.integers(2, 6), st.integers(12, 600), spreads)
def test_figures_of_a_classification_are_those_of_scikit_learn_for_any_division(
    seed, parts, num_classes, num_rows, spread
):
    chance = np.random.default_rng(seed)
    target, p = classified(num_classes, num_rows, spread, chance)
    predicted = p.argmax(axis=1)
    sites = [
        tally_classes(num_classes, target[rows], predicted[rows], p[rows])
        for rows in divided(num_rows, parts, chance)
    ]
    for one in sites:
        check(one)
    together = add(sites)
    assert add([sites[at] for at in chance.permutation(len(sites))]) == together

    matrix = np.zeros((num_classes, num_classes), int)
    for of_class, as_class, rows in records(together.confusion, 3):
        matrix[of_class, as_class] = rows
    assert matrix.tolist() == sk.confusion_matrix(target, predicted).tolist()
    found = figures(together)
    require_same_with_a_late_site(sites, found)
    average = "binary" if num_classes == 2 else "macro"
    scores = p[:, 1] if num_classes == 2 else p
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = {
            "accuracy": sk.accuracy_score(target, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(target, predicted),
            "sensitivity": sk.recall_score(target, predicted, average=average),
            "f1": sk.f1_score(target, predicted, average=average),
            "log_loss": sk.log_loss(target, p, labels=range(num_classes)),
            "brier": sk.brier_score_loss(target, scores),
        }
        auc = sk.roc_auc_score(target, scores, multi_class="ovr")
    for name, value in exact.items():
        assert found[name].value == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert abs(found["auc"].value - auc) <= found["auc"].bound + 1e-9
    for name, one in found.items():
        if one.low is not None and one.high is not None:
            assert one.low <= one.value + 1e-12, name
            assert one.value <= one.high + 1e-12, name


@settings(deadline=None, max_examples=60)
@given(seeds, num_sites, st.integers(8, 400), st.sampled_from([0.0, 1e3, 1e6]))
def test_figures_of_a_regression_are_those_of_scikit_learn_for_any_division(
    seed, parts, num_rows, offset
):
    """Also of targets that are far from 0, and of sites whose means differ by much."""
    chance = np.random.default_rng(seed)
    target = offset + chance.normal(size=num_rows) * 10
    predicted = target + chance.normal(size=num_rows) * chance.choice([0.1, 1.0, 100.0])
    order = np.argsort(target)  # sites of low and of high targets
    target, predicted = target[order], predicted[order]
    cuts = np.sort(chance.choice(np.arange(1, num_rows), parts - 1, replace=False))
    rows = [part for part in np.split(np.arange(num_rows), cuts) if len(part)]
    sites = [tally_numbers(target[part], predicted[part]) for part in rows]
    assert None not in sites
    known = [one for one in sites if one is not None]
    for one in known:
        check(one)
    together = add(known)
    assert together is not None
    assert add([known[at] for at in chance.permutation(len(known))]) == together
    found = figures(together)
    require_same_with_a_late_site(known, found)
    squares = np.square(target - target.mean()).mean()
    assert found["r2"].value == pytest.approx(sk.r2_score(target, predicted), rel=1e-9, abs=1e-9)
    assert found["mse"].value == pytest.approx(sk.mean_squared_error(target, predicted), rel=1e-9)
    assert found["rmse"].value == pytest.approx(
        sk.root_mean_squared_error(target, predicted), rel=1e-9
    )
    assert found["mae"].value == pytest.approx(sk.mean_absolute_error(target, predicted), rel=1e-9)
    assert found["mse"].baseline == pytest.approx(squares, rel=1e-9)
    whole = tally_numbers(target, predicted)
    assert whole is not None
    at_once = figures(whole)
    for name, one in found.items():
        assert one.low == pytest.approx(at_once[name].low, rel=1e-6, abs=1e-6), name
        assert one.high == pytest.approx(at_once[name].high, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9 / 7])
def test_target_that_is_constant_but_for_rounding_has_no_r2(value):
    """The mean of equal numbers may differ from them in the last digit: R2 was -1e20."""
    target = value * np.array([1, 1 + 2.0**-52] * 50)
    sites = [tally_numbers(target[part], target[part] + 1) for part in (slice(33), slice(33, 100))]
    together = add(one for one in sites if one is not None)
    assert together is not None
    assert figures(together).keys() == {"rmse", "mse", "mae"}
    assert regression_metrics(target + 1, target)["r2"] == 0.0
    varied = tally_numbers(target + np.linspace(0, 1e-6 * (value + 1), 100), target)
    assert varied is not None
    assert "r2" in figures(varied)


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1", "auc", "log_loss"])
def test_intervals_hold_the_true_figure_in_nineteen_of_twenty_samples(name):
    """Samples of 400 rows of one population of 200,000."""
    chance = np.random.default_rng(7)
    target, p = classified(2, 200_000, 1.0, chance)
    whole = figures(tally_classes(2, target, p.argmax(axis=1), p))[name].value
    held = 0
    for _ in range(200):
        rows = chance.choice(len(target), 400, replace=False)
        one = figures(tally_classes(2, target[rows], p[rows].argmax(axis=1), p[rows]))[name]
        assert one.low is not None
        assert one.high is not None
        held += one.low <= whole <= one.high
    assert 0.92 <= held / 200 <= 0.985


def test_interval_of_r2_holds_the_true_figure_in_nineteen_of_twenty_samples():
    chance = np.random.default_rng(8)
    target = chance.normal(size=200_000)
    predicted = 0.7 * target + 0.4 * chance.normal(size=len(target))
    whole = sk.r2_score(target, predicted)
    held = 0
    for _ in range(200):
        rows = chance.choice(len(target), 400, replace=False)
        tallies = tally_numbers(target[rows], predicted[rows])
        assert tallies is not None
        one = figures(tallies)["r2"]
        assert one.low is not None
        assert one.high is not None
        held += one.low <= whole <= one.high
    assert 0.92 <= held / 200 <= 0.985


@pytest.mark.parametrize(("num_classes", "num_rows"), [(10, 20_000), (300, 20_000), (5000, 20_000)])
def test_tallies_of_many_classes_stay_within_their_bound(num_classes, num_rows):
    chance = np.random.default_rng(1)
    target = chance.integers(0, num_classes, num_rows)
    predicted = np.where(chance.random(num_rows) < 0.5, target, target[::-1])
    p = chance.dirichlet(np.full(num_classes, 0.1), 500)[chance.integers(0, 500, num_rows)]
    tallies = tally_classes(num_classes, target, predicted, p)
    check(tallies)
    assert len(repr((tallies.confusion, tallies.counts, tallies.scores)).replace(" ", "")) < 65_536
    found = figures(tallies)
    assert found["accuracy"].value == np.mean(target == predicted)
    assert ("auc" in found) == (num_classes <= 300)
    assert ("balanced_accuracy" in found) == (num_classes <= 300)
    if num_classes <= 300:
        parts = [tally_classes(num_classes, target[i::3], predicted[i::3]) for i in range(3)]
        together = add(parts)
        assert together is not None
        assert class_figures(together)[7]["f1"] == class_figures(tallies)[7]["f1"]


def good() -> Tallies:
    chance = np.random.default_rng(0)
    target, p = classified(3, 40, 1.0, chance)
    return tally_classes(3, target, p.argmax(axis=1), p)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_rows": 41}, "not to 41 rows"),
        ({"num_rows": 0}, "are none"),
        ({"num_rows": MAX_ROWS + 1}, "are none"),  # such of many sites overflow 64 bits
        ({"num_classes": 1}, "are none"),
        ({"num_classes": 10_001}, "are none"),
        ({"level": 16}, "are none"),
        ({"right": 3}, "not to 40 rows"),
        ({"confusion": (0, 0, 40, 0, 0, 1)}, "follows"),
        ({"confusion": (0, 3, 40)}, "follows None"),
        ({"confusion": (0, 0, 41, 0, 1, -1)}, "has the counts"),
        ({"confusion": (0, 0)}, "no records"),
        ({"scores": ((0, 1, 39),) * 3}, "are not those of 40 rows"),
        ({"scores": ((0, 1, 39),)}, "of 1 of 3 classes"),
        ({"scores": (tuple(n for at in range(5000) for n in (at, 1, 0)),) * 3}, "at most 10000"),
        ({"sums": {"log_loss": -1.0}}, "the sum 'log_loss'"),
        ({"sums": {"log_loss": float("nan")}}, "the sum 'log_loss'"),
        ({"sums": {"log_loss": 1e9}}, "the sum 'log_loss'"),
        ({"sums": {"brier": 1e300}}, "the sum 'brier'"),
        ({"confusion": (), "right": 30, "counts": (0, 20, 30, 30, 1, 20, 10, 0)}, "30 are both"),
        ({"sums": {"squared_error": 1.0}}, "the sum 'squared_error'"),
    ],
)
def test_tallies_that_no_site_makes_are_refused(changes, why):
    check(good())
    with pytest.raises(ValueError, match=why):
        check(replace(good(), **changes))


sizes = st.sampled_from([0.0, 5e-324, 1e-150, 1.0, 1e15, 1e59, 1e60, 1e120, 1e180, 1e240, 1e300])


# Most are refused; how many of the first few are is chance.
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 5, MAX_ROWS]),
            st.lists(sizes, min_size=3, max_size=3),
            st.lists(sizes, min_size=6, max_size=6),
            st.sampled_from([1.0, -1.0]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_tallies_that_are_taken_have_finite_figures_whatever_is_in_them(sent):
    """A coordinator that has journalled them could never start again."""
    sites = []
    for rows, sums, moments, sign in sent:
        target = Target(sign * moments[0], moments[1], *(sign * one for one in moments[2:]))
        sites.append(Tallies(rows, sums=dict(zip(NUMBER_SUMS, sums, strict=True)), target=target))
        try:
            check(sites[-1])
        except ValueError:
            sites.pop()
    assume(sites)
    together = add(sites)
    assert together is not None
    for name, one in figures(together).items():
        told = (one.value, one.low, one.high, one.baseline)
        assert all(isfinite(value) for value in told if value is not None), name
        assert isfinite(one.value * one.value), "as the spread over sites has it"


def test_predictions_too_far_off_to_be_squared_have_no_tallies():
    far = tally_numbers(np.zeros(5), np.full(5, 1e50))
    assert far is not None
    check(far)
    assert tally_numbers(np.zeros(5), np.full(5, 1e61)) is None


def test_class_that_is_never_predicted_lowers_the_mean_precision():
    target, predicted = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 1, 0, 1])
    found = figures(tally_classes(3, target, predicted))
    exact = sk.precision_score(target, predicted, average="macro", zero_division=0)
    assert found["precision"].value == pytest.approx(exact)


def test_limits_of_a_share_of_none_or_all_rows_are_exact():
    """Terms cancel there but for rounding, and a report would show a limit of 5.6e-17."""
    target = np.arange(24) % 2
    for rows in range(1, 25):
        none, all_ = (
            tally_classes(2, target[:rows], right) for right in (1 - target[:rows], target[:rows])
        )
        assert figures(none)["accuracy"].low == 0.0
        assert figures(all_)["accuracy"].high == 1.0
