"""Rules that weigh whole updates, against versions that hold all vectors at once and do what the
papers say, step by step."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from xain_coordinator.aggregation.aggregator import Aggregator, RuleFailed, Surveyor, is_surveyor
from xain_coordinator.aggregation.robust.distances import (
    CentredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    gram,
    squares,
)
from xain_coordinator.aggregation.robust.order_statistics import TrimmedMean
from xain_coordinator.aggregation.rules import make_rule, rule_of_session
from xain_coordinator.extensions.options import WrongOption, options_of

Array = NDArray[Any]


def run(rule: Surveyor, updates: Array, base: Array, num_samples: Array | None = None) -> Array:
    """The rule on whole vectors. updates: (k, d) float64; base: (d,)."""
    counts = np.ones(len(updates), np.int64) if num_samples is None else num_samples
    weights = rule.weigh(rule.survey(updates - base), counts)
    assert weights.shape == (len(updates) + 1,)
    assert math.isclose(weights.sum(), 1, abs_tol=1e-12)
    return rule.combine(np.concatenate([updates, [base]]), weights)


@st.composite
def rounds(draw: st.DrawFn, min_rows: int = 1) -> tuple[Array, Array, Array]:
    """Updates (k, d), the global model (d,), and counts of samples (k,)."""
    k, d = draw(st.integers(min_rows, 9)), draw(st.integers(1, 6))
    values = st.floats(-100, 100, width=32)
    updates = draw(arrays(np.float64, (k, d), elements=values))
    base = draw(arrays(np.float64, d, elements=values))
    return updates, base, draw(arrays(np.int64, k, elements=st.integers(0, 1000)))


def norm(vector: Array) -> float:
    return math.sqrt(math.fsum(float(x) ** 2 for x in vector))


# --- Krum -----------------------------------------------------------------------------------------


def krum_scores(updates: Array, f: int) -> list[float]:
    scores = []
    for i, one in enumerate(updates):
        squared = sorted(norm(one - other) ** 2 for j, other in enumerate(updates) if j != i)
        scores.append(math.fsum(squared[: len(updates) - f - 2]))
    return scores


@settings(deadline=None)
@given(rounds(min_rows=3), st.data())
def test_krum(round_, data):
    """An update of the least score, to the bit."""
    updates, base, counts = round_
    f = data.draw(st.integers(0, (len(updates) - 3) // 2))
    rule = Krum(f)
    rule.check(len(updates))
    chosen = run(rule, updates, base, counts)
    scores = krum_scores(updates, f)
    matching = [s for s, one in zip(scores, updates, strict=True) if np.array_equal(one, chosen)]
    # Of two that are as good but for rounding, either.
    assert min(matching) <= min(scores) + 1e-8


@settings(deadline=None)
@given(rounds(min_rows=3), st.data())
def test_multi_krum(round_, data):
    """The mean of those with the least scores."""
    updates, base, counts = round_
    f = data.draw(st.integers(0, (len(updates) - 3) // 2))
    m = data.draw(st.integers(0, len(updates) - f - 2))
    rule = MultiKrum(f, m)
    rule.check(len(updates))
    weights = rule.weigh(rule.survey(updates - base), counts)
    chosen = np.flatnonzero(weights[:-1])
    assert len(chosen) == (m or len(updates) - f - 2)
    scores = krum_scores(updates, f)
    best = sorted(scores)[: len(chosen)]
    np.testing.assert_allclose(sorted(scores[i] for i in chosen), best, rtol=1e-9, atol=1e-8)
    expected = updates[chosen].mean(axis=0)
    np.testing.assert_allclose(run(rule, updates, base, counts), expected, atol=1e-10)


def test_first_of_equal_scores_is_taken():
    """The order is that of the names, so that a repeated aggregation gives the same model."""
    updates = np.zeros((5, 3))
    weights = Krum(1).weigh(gram(updates), np.ones(5, np.int64))
    assert weights.tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("rule", [Krum(2), MultiKrum(2)])
def test_krum_needs_enough_updates(rule):
    rule.check(7)
    with pytest.raises(RuleFailed, match=r"num_byzantine = 2 .* 7 updates, not 6"):
        rule.check(6)


def test_multi_krum_selects_among_those_it_can_trust():
    """At most n - f of them, and n - f - 2 if it is not told."""
    MultiKrum(1, 5).check(6)
    with pytest.raises(RuleFailed, match=r"num_selected = 6 .* 5 of 6"):
        MultiKrum(1, 6).check(6)
    updates = np.array([[0.0], [1.0], [2.0], [4.0], [8.0], [1e6]])
    assert run(MultiKrum(1, 5), updates, np.zeros(1)) == 3.0
    assert run(MultiKrum(1), updates, np.zeros(1)) == 1.0


# --- geometric median -----------------------------------------------------------------------------


@settings(deadline=None)
@given(rounds(), st.integers(1, 20))
def test_the_geometric_median(round_, num_iterations):
    """Weiszfeld's iterations on the vectors themselves, from the mean or from that of a majority:
    where they end nearer to all."""
    updates, base, counts = round_
    smoothing = 0.1

    def distances(point):
        return math.fsum(norm(point - one) for one in updates)

    def end_of(point):
        for _ in range(num_iterations):
            inverse = np.array([1 / max(smoothing, norm(point - one)) for one in updates])
            point = (inverse[:, np.newaxis] * updates).sum(axis=0) / inverse.sum()
        return point

    found = run(GeometricMedian(num_iterations, smoothing), updates, base, counts)
    least = sorted(distances(one) for one in updates)[len(updates) // 2]
    # Of updates that are as good but for rounding, either belongs to the majority.
    near = [one for one in updates if distances(one) < least - 1e-6]
    ties = [one for one in updates if abs(distances(one) - least) <= 1e-6]
    num_missing = len(updates) // 2 + 1 - len(near)
    majorities = [np.array([*near, *some]) for some in combinations(ties, num_missing)]
    ends = [end_of(rows.mean(axis=0)) for rows in (updates, *majorities)]
    assert min(norm(found - end) for end in ends) < 1e-4
    assert distances(found) <= distances(ends[0]) + 1e-4


@pytest.mark.parametrize(("n", "f"), [(5, 2), (9, 4), (101, 50)])
@pytest.mark.parametrize("size", [10.0, 1e6, 1e12, 1e30, 3e38])
def test_the_largest_minority_does_not_carry_the_median_away(n, f, size):
    """The median is within (1 - a) / sqrt(1 - 2a) times the radius of the honest, where a = f / n.
    Source: Minsker 2015, Geometric Median and Robust Estimation in Banach Spaces, Lemma 2.1."""
    honest = np.random.default_rng(0).normal(size=(n - f, 40))
    updates = np.concatenate([np.full((f, 40), size), honest])
    centre = honest.mean(axis=0)
    radius = max(norm(one - centre) for one in honest)
    bound = (1 - f / n) / math.sqrt(1 - 2 * f / n) * radius
    assert norm(run(GeometricMedian(), updates, np.zeros(40)) - centre) <= bound


def test_the_least_smoothing():
    """With less, updates that are all the same would give no weights."""
    with pytest.raises(WrongOption, match="smoothing must not be less than 1e-100"):
        make_rule("geometric_median", {"smoothing": 1e-101})
    weights = GeometricMedian(smoothing=1e-100).weigh(gram(np.ones((3, 2))), np.ones(3, np.int64))
    assert weights[:3].tolist() == pytest.approx([1 / 3] * 3)


# --- clipping -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(rounds(), st.floats(0.1, 300))
def test_norm_clipping(round_, threshold):
    """base + Σ n_k / N · min(1, C / |Δ_k|) Δ_k."""
    updates, base, counts = round_
    shares = counts / counts.sum() if counts.any() else np.full(len(counts), 1 / len(counts))
    expected = base.copy()
    for share, one in zip(shares, updates, strict=True):
        length = norm(one - base)
        expected += share * (one - base) * min(1, threshold / length if length else 1)
    combined = run(NormClipping(threshold), updates, base, counts)
    np.testing.assert_allclose(combined, expected, atol=1e-9)


@settings(deadline=None)
@given(rounds(), st.floats(0.01, 1))
def test_adaptive_norm_clipping(round_, quantile):
    """The threshold is the least norm that a share of the updates does not exceed."""
    updates, base, counts = round_
    norms = sorted(math.sqrt(x) for x in squares(updates - base))
    threshold = next(x for x in norms if sum(y <= x for y in norms) >= quantile * len(norms))
    weights = NormClipping(quantile=quantile).weigh(squares(updates - base), counts)
    if threshold > 0:
        assert (weights == NormClipping(threshold).weigh(squares(updates - base), counts)).all()
    else:
        clipped = np.sqrt(squares(updates - base)) > 0
        assert not weights[:-1][clipped].any()


def test_a_threshold_needs_no_quantile():
    """One of the two would be read by nothing."""
    with pytest.raises(WrongOption, match="nothing would read quantile beside a threshold"):
        make_rule("norm_clipping", {"threshold": 2.0, "quantile": 0.5})
    assert options_of(make_rule("norm_clipping", {"threshold": 2}), {}) == {"threshold": 2.0}
    assert options_of(make_rule("norm_clipping", {}), {}) == {"threshold": 0.0, "quantile": 0.5}


@settings(deadline=None)
@given(rounds(), st.just(0.0) | st.floats(0.1, 300), st.integers(1, 5))
def test_centred_clipping(round_, tau, num_iterations):
    """v + 1/n Σ (x_i - v) min(1, τ / |x_i - v|), again and again. τ = 0: their median distance."""
    updates, base, counts = round_
    point = base.copy()
    for _ in range(num_iterations):
        lengths = [norm(one - point) for one in updates]
        radius = tau or sorted(lengths)[(len(lengths) + 1) // 2 - 1]
        steps = [
            (one - point) * (min(1, radius / length) if length else 1)
            for one, length in zip(updates, lengths, strict=True)
        ]
        point = point + np.mean(steps, axis=0)
    combined = run(CentredClipping(tau, num_iterations), updates, base, counts)
    np.testing.assert_allclose(combined, point, atol=1e-5)


# --- participants that send whatever they like ----------------------------------------------------

ROBUST = [
    Krum(3),
    MultiKrum(3),
    GeometricMedian(),
    CentredClipping(5.0, 5),
    CentredClipping(),
    NormClipping(),
]


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("size", [10.0, 1e6, 1e30, 1e200, 1e308])
def test_a_minority_does_not_carry_it_away(rule, size):
    """However large: beyond what numbers can say of its norm too. Without them, or with them, the
    result is near to where the honest are."""
    chance = np.random.default_rng(6)
    honest = chance.normal(size=(7, 40))
    byzantine = np.full((3, 40), size) * np.array([[1.0], [-1.0], [1.0]])
    base = np.zeros(40)
    counts = np.ones(10, np.int64)
    combined = run(rule, np.concatenate([byzantine, honest]), base, counts)
    assert norm(combined - honest.mean(axis=0)) < 2 * math.sqrt(40)


@pytest.mark.parametrize("rule", [Krum(1), MultiKrum(1), GeometricMedian(), CentredClipping()])
def test_made_up_sample_counts_change_nothing(rule):
    """Sample counts are what a participant says of itself."""
    products = gram(np.random.default_rng(1).normal(size=(6, 9)))
    honest = rule.weigh(products, np.ones(6, np.int64))
    made_up = rule.weigh(products, np.array([2**60, 1, 1, 1, 1, 1]))
    assert (honest == made_up).all()


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
def test_updates_without_distances(rule):
    """Every norm is beyond the range of numbers: no model rather than a random one."""
    surveyed = rule.survey(np.full((10, 2), 1e300))
    with pytest.raises(RuleFailed, match="range of numbers"):
        rule.weigh(surveyed, np.ones(10, np.int64))


def test_updates_that_change_nothing():
    """All at the global model: no division by zero, and the model stays."""
    base = np.arange(4.0)
    for rule in (*ROBUST, NormClipping(0.0)):
        np.testing.assert_allclose(run(rule, np.tile(base, (10, 1)), base), base, atol=1e-12)


# --- learning beside participants that lie --------------------------------------------------------


def sign_flipped_digits_accuracy(rule: Aggregator) -> float:
    """Accuracy on held-out digits after 30 rounds of softmax regression at ten participants, three
    of which hand in their trained weights with the sign flipped."""
    features, labels = load_digits(return_X_y=True)
    features = np.hstack([features / 16, np.ones((len(features), 1))])
    order = np.random.default_rng(0).permutation(len(labels))
    test, *parts = np.array_split(order, 11)
    model = np.zeros((features.shape[1], 10))
    for _ in range(30):
        updates = []
        for number, part in enumerate(parts):
            weights = model.copy()
            for batch in np.array_split(part, 8):
                scores = np.exp(features[batch] @ weights)
                errors = scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[labels[batch]]
                weights -= 0.5 * features[batch].T @ errors / len(batch)
            updates.append((-weights if number < 3 else weights).ravel())
        rows, base = np.array(updates), model.ravel()
        if is_surveyor(rule):
            model = run(rule, rows, base).reshape(model.shape)
        else:
            model = rule.combine(rows, np.ones(10, np.int64)).reshape(model.shape)
    found: Array = np.argmax(features[test] @ model, axis=1)
    return float((found == labels[test]).mean())


def test_centred_clipping_learns_beside_sign_flippers_without_options():
    """A radius that does not depend on the updates clips nothing where they are small."""
    accuracy = sign_flipped_digits_accuracy(CentredClipping())
    assert accuracy > sign_flipped_digits_accuracy(TrimmedMean(3)) - 0.03
    assert accuracy > 0.9


def test_session_of_an_earlier_version_keeps_its_radius():
    kept = {"tau": 10.0, "num_iterations": 1}
    assert rule_of_session("centred_clipping", kept) == CentredClipping(10.0)
    assert options_of(make_rule("centred_clipping", {}), {})["tau"] == 0.0
