import numpy as np
import pytest
from scipy.sparse import random_array

from xain_workloads.sparse.models import (
    FactorisationMachine,
    LogisticRegression,
    area_under_curve,
    classes_of,
)


def slow_score(x: np.ndarray, rows: np.ndarray, bias: float) -> float:
    """The score by its definition, pair by pair."""
    score = bias + sum(rows[i, 0] * x[i] for i in range(len(x)))
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            score += float(rows[i, 1:] @ rows[j, 1:]) * x[i] * x[j]
    return score


@pytest.mark.parametrize("model", [LogisticRegression(), FactorisationMachine(3)])
def test_scores_are_those_of_the_definition(model):
    chance = np.random.default_rng(0)
    features = random_array((7, 5), density=0.6, rng=chance, format="csr")
    rows = chance.normal(size=(5, model.dim))
    slow = [slow_score(x, rows, 0.3) for x in features.toarray()]
    assert np.allclose(model.scores(features, rows, 0.3), slow)


@pytest.mark.parametrize("model", [LogisticRegression(l2=0.1), FactorisationMachine(3, l2=0.1)])
def test_gradients_are_those_of_the_loss(model):
    chance = np.random.default_rng(1)
    features = random_array((9, 6), density=0.5, rng=chance, format="csr")
    classes = classes_of(chance.normal(size=9))
    rows = chance.normal(size=(6, model.dim))

    def loss(rows, bias):
        return model.step(features, classes, rows, bias).loss + 0.05 * (rows**2).sum()

    step = model.step(features, classes, rows, 0.2)
    for index in np.ndindex(rows.shape):
        nudge = np.zeros_like(rows)
        nudge[index] = 1e-6
        slope = (loss(rows + nudge, 0.2) - loss(rows - nudge, 0.2)) / 2e-6
        assert step.gradient[index] == pytest.approx(slope, abs=1e-7)
    slope = (loss(rows, 0.2 + 1e-6) - loss(rows, 0.2 - 1e-6)) / 2e-6
    assert step.bias == pytest.approx(slope, abs=1e-7)


def test_large_scores_do_not_overflow():
    features = random_array((4, 2), density=1, rng=np.random.default_rng(2), format="csr")
    step = LogisticRegression().step(features, np.array([0.0, 1, 0, 1]), np.full((2, 1), 1e6), 0.0)
    assert np.isfinite(step.gradient).all()
    assert np.isfinite(step.loss)
    assert step.num_right == 2


def test_area_under_curve_is_the_share_of_ordered_pairs():
    """The reference counts all pairs, with many equal scores."""
    chance = np.random.default_rng(5)
    scores = chance.integers(0, 20, 200) / 4.0
    classes = (chance.random(200) < scores / 6).astype(np.float64)
    ones, zeros = scores[classes == 1], scores[classes == 0]
    slow = np.mean([(a > b) + 0.5 * (a == b) for a in ones for b in zeros])
    assert area_under_curve(scores, classes) == pytest.approx(slow)
    assert area_under_curve(np.array([1.0, 2.0]), np.array([0.0, 1.0])) == 1
    assert np.isnan(area_under_curve(np.array([1.0, 2.0]), np.array([1.0, 1.0])))
