"""Learning rates of the rule "gradient", and when it stops."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import SGDRegressor
from tests.unit.core.bench import Bench, make_rules, replay, stored

from xain_coordinator.aggregation.averages import Gradient
from xain_coordinator.core.machine.evolve import begin
from xain_coordinator.core.parts.descent import NOT_BEGUN, after_step, learning_rate
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import update_key
from xain_coordinator.core.vocabulary.values import Lineage
from xain_coordinator.extensions.options import options_of


def options(**given: Any) -> Any:
    return options_of(Gradient(**given), {})


@pytest.mark.parametrize("schedule", ["constant", "invscaling", "optimal"])
def test_rates_are_those_of_scikit_learn(schedule):
    """With one row of target 1 and weights of 0 the gradient by the intercept is -1, so that the
    intercept after the third update of SGDRegressor is the rate of the third step."""
    chosen = options(learning_rate=schedule, eta0=0.1, power_t=0.4, alpha=0.01)
    rate = learning_rate(chosen, 2, NOT_BEGUN)
    estimator = SGDRegressor(learning_rate=schedule, eta0=0.1, power_t=0.4, alpha=0.01)
    estimator.coef_, estimator.intercept_, estimator.t_ = np.zeros(1), np.zeros(1), 3.0
    estimator.partial_fit([[0.0]], [1.0])
    assert rate == pytest.approx(float(estimator.intercept_[0]))


def test_adaptive_rate_is_divided_by_five_when_the_loss_does_not_fall():
    chosen = options(learning_rate="adaptive", eta0=0.5, tol=0.1, n_iter_no_change=2)
    descent = NOT_BEGUN
    rates = []
    for loss in (3.0, 2.0, 1.95, 1.91, 1.5, 1.45, 1.45):
        descent = after_step(chosen, descent, loss)
        rates.append(learning_rate(chosen, 7, descent))
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.02])
    assert descent.ended_because == ""


def test_adaptive_descent_ends_when_the_rate_is_tiny():
    chosen = options(learning_rate="adaptive", eta0=1e-3, n_iter_no_change=1)
    descent = NOT_BEGUN
    num_steps = 0
    while not descent.ended_because:
        descent = after_step(chosen, descent, 1.0)
        num_steps += 1
        assert num_steps < 100
    assert num_steps == 1 + 5  # 1e-3 / 5**5 is below 1e-6


def test_tolerance_ends_a_descent():
    chosen = options(tol=0.01, n_iter_no_change=3)
    descent = NOT_BEGUN
    for loss in (1.0, 0.5, 0.495, 0.494, 0.46, 0.459, 0.458):
        descent = after_step(chosen, descent, loss)
        assert descent.ended_because == ""
    descent = after_step(chosen, descent, 0.457)
    assert re.fullmatch(r"converged: .* 0\.01 in 3 steps", descent.ended_because)


def test_without_tolerance_or_loss_nothing_ends():
    assert after_step(options(), NOT_BEGUN, 1.0) == NOT_BEGUN
    assert after_step(options(tol=1.0), NOT_BEGUN, None) == NOT_BEGUN


def descending(*names: str, **given: Any) -> Bench:
    """A session of the rule "gradient" whose participants wait to hand in their first gradient."""
    rules = replace(
        make_rules(rounds=3, epochs=1, min_participants=len(names)),
        aggregation="gradient",
        aggregation_options=options(**given),
    )
    bench = Bench(rules, answers=False)
    bench.join(*names)
    bench.answer()
    return bench


def hand_in(bench: Bench, name: str, loss: float, digest: str = "good") -> None:
    number = bench.session.round
    weights = stored(update_key(number, name), digest)
    bench.send(c.EndTrainingRound(name, number, 1, weights, training={"loss": loss}))


def test_loss_of_a_damaged_update_is_forgotten():
    """The sender has gone for good, and the step is taken with the gradient of another one."""
    bench = descending("a", "b", tol=0.1)
    hand_in(bench, "a", 1.0)
    hand_in(bench, "b", 9.0)
    bench.leave("b")
    bench.join("d")
    key = bench.session.opened.updates["b"].weights.ref.key
    bench.send(c.NoteDamagedUpdates({key: "its bytes have another digest"}))
    hand_in(bench, "d", 2.0)
    bench.owed = bench.owed[-1:]
    bench.answer()
    assert bench.session.round == 1
    assert bench.session.evaluation.descent.best == 1.5
    assert replay(bench.journal) == bench.session


def test_extended_session_goes_on_with_the_schedule():
    rules = replace(
        make_rules(rounds=2, epochs=1),
        aggregation="gradient",
        aggregation_options=options(learning_rate="invscaling", eta0=1.0, power_t=1.0),
    )
    lineage = Lineage("s0/3", num_rounds=3, num_epochs=3, configured_rounds=3)
    bench = Bench(rules)
    bench.session = begin(e.SessionOpened("s1", rules, 0.0, lineage))
    bench.journal = [e.SessionOpened("s1", rules, 0.0, lineage)]
    bench.join("a")
    bench.end_all()
    bench.end_all()
    assert [one.learning_rate for one in bench.aggregates] == [1 / 4, 1 / 5]
