"""The sessions of a study follow from those that there are, and so does its table."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
from tests.unit.core.test_evaluation import bench_of, hand_in_tallies

from xain_coordinator.core.view.study import (
    Line,
    Outcome,
    Plan,
    best_option,
    lines,
    next_step,
    outcome_of,
    spreads,
)
from xain_coordinator.core.vocabulary.values import Division, Evaluation, Step
from xain_coordinator.export.studies import as_json, remarks, rows
from xain_workloads.measures.tallies import Tallies, tally_classes

SITES = ("a", "b", "c")


def tallies(right: int, wrong: int) -> Tallies:
    """Tallies of a model of two classes."""
    predicted = np.array([0] * right + [1] * wrong)
    return tally_classes(2, np.zeros_like(predicted), predicted)


def outcome(index: int, step: Step, **known: object) -> Outcome:
    done = Outcome(f"s{index}", step, number=3, sites=step.sites or SITES)
    return replace(done, **known)


def steps(plan: Plan, come_to: Callable[[int, Step], Outcome] = outcome) -> Iterator[Step]:
    """All steps of a study whose sessions come to this."""
    outcomes: list[Outcome] = []
    while (step := next_step(plan, "x", outcomes)) is not None:
        yield step
        outcomes.append(come_to(len(outcomes), step))


def test_each_fold_is_measured_by_the_model_that_was_trained_without_it():
    """Sites that come later take part in none of the sessions."""
    found = list(steps(Plan("folds", folds=3, seed=5, final=True)))
    for fold in range(3):
        trained, measured = found[2 * fold : 2 * fold + 2]
        assert trained.division == Division(3, fold, 5)
        assert measured.division == Division(3, fold, 5, measures=True)
        assert measured.model == f"s{2 * fold}/3"
        assert trained.shown == f"fold {fold + 1} of 3"
    assert [one.sites for one in found] == [(), *[SITES] * 6]
    assert found[-1] == Step("x", "train", "all rows", sites=SITES)


def test_a_site_that_is_left_out_measures_all_its_rows():
    found = list(steps(Plan("leave_out")))
    assert [(one.task, one.sites) for one in found] == [
        ("train", ()),
        ("train", ("b", "c")),
        ("measure", ("a",)),
        ("train", ("a", "c")),
        ("measure", ("b",)),
        ("train", ("a", "b")),
        ("measure", ("c",)),
    ]
    assert found[1].division is None
    assert found[2].division == Division(1, measures=True)
    assert found[1].shown == "without a, 1 of 3"


def test_each_model_is_measured_at_each_site_on_rows_that_no_model_was_trained_on():
    found = list(steps(Plan("cross", folds=4)))
    assert [one.sites for one in found if one.task == "train"] == [(), ("a",), ("b",), ("c",)]
    assert [one.sites for one in found if one.task == "measure"] == [SITES] * 4
    assert {one.division for one in found} == {Division(4), Division(4, measures=True)}


def test_half_of_the_options_leave_at_each_rung():
    """12, 6, 3 and 2 options are compared, each rung with twice the rounds, and the best one has
    the least loss in the last rung; equal ones stay in their order."""
    options = tuple({"workload.options.alpha": str(n)} for n in range(12))
    plan = Plan("search", options=options, budget=2, final=True)
    outcomes = []
    while (step := next_step(plan, "x", outcomes)) is not None:
        number = options.index(step.options)
        assert best_option(plan, outcomes) is None
        outcomes.append(outcome(len(outcomes), step, loss=abs(number - 7) // 2))
    assert [one.step.budget for one in outcomes] == [2] * 12 + [4] * 6 + [8] * 3 + [16] * 2 + [0]
    assert best_option(plan, outcomes) == 6
    assert outcomes[-1].step.options == options[6]
    assert outcomes[13].step.shown == "rung 2, option 2 of 6"


def test_options_that_fail_leave_the_search():
    options = tuple({"workload.options.alpha": str(n)} for n in range(4))
    plan = Plan("search", options=options)
    outcomes = []
    while (step := next_step(plan, "x", outcomes)) is not None:
        failed = {"why": "diverged", "number": None}
        is_bad = step.options != options[2]
        outcomes.append(outcome(len(outcomes), step, **(failed if is_bad else {"loss": 1.0})))
    assert len(outcomes) == 4
    assert best_option(plan, outcomes) == 2
    assert [one.note for one in lines(plan, outcomes)].count("diverged") == 3


def test_option_whose_model_lacks_the_metric_leaves_the_search_and_says_why():
    options = tuple({"workload.options.loss": f'"{name}"'} for name in ("log_loss", "hinge"))
    plan = Plan("search", options=options)
    outcomes = []
    for loss in (1.0, None):
        step = next_step(plan, "x", outcomes)
        assert step is not None
        of = {"a": Evaluation(10, {}, tallies(8, 2))}
        known = {"metric": "log_loss", "loss": loss, "tallies": of["a"].tallies, "by_site": of}
        outcomes.append(outcome(len(outcomes), step, **known))
    assert next_step(plan, "x", outcomes) is None
    assert best_option(plan, outcomes) == 0
    notes = [one.note for one in lines(plan, outcomes)]
    assert notes == [
        "rung 1, 0 rounds",
        "rung 1, 0 rounds; not compared: its model has no log_loss",
    ]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("", ("log_loss", -np.log(0.8))),
        ("brier", ("brier", 0.04)),
        ("auc", ("auc", -1.0)),
        ("mse", ("mse", None)),
    ],
)
def test_options_are_compared_by_the_metric_of_their_sessions(metric, expected):
    """The model that is taken counts, 2 here, and not 3, which is the last one."""
    step = Step("x", "train", "rung 1, option 1", options={"workload.options.alpha": "1"}, budget=1)
    rules = {"evaluate_metric": metric, "evaluate_minimised": metric == "brier"}
    bench = bench_of("a", rounds=3, step=step, **rules)
    hand_in_tallies(bench, 0.5, 0.7, 0.8, 0.6)
    found = outcome_of(bench.session, bench.history)
    assert (found.metric, found.loss) == (expected[0], pytest.approx(expected[1]))


def test_table_of_a_search_shows_the_metric_that_options_are_compared_by():
    plan = Plan("search", options=tuple({"rounds.epochs": str(n)} for n in (1, 2)))
    step = next_step(plan, "x", ())
    assert step is not None
    of_site = tallies(8, 2)
    by_site = {"a": Evaluation(10, {}, of_site)}
    known = {"metric": "balanced_accuracy", "loss": -0.8, "tallies": of_site, "by_site": by_site}
    table = json.loads(as_json(plan, step, [outcome(0, step, **known)]))
    (head, line) = rows(table, intervals=False)
    assert line[head.index("balanced_accuracy")] == "0.8"
    assert "Options are compared by balanced_accuracy." in remarks(table)


def test_a_training_without_a_model_is_not_measured():
    def come_to(number, step):
        return outcome(number, step, number=None, why="cancelled")

    assert [one.task for one in steps(Plan("folds", folds=3), come_to)] == ["train"] * 3


@pytest.mark.parametrize("right", [(8, 5), (9, 9)])
def test_folds_are_pooled_by_their_sums(right):
    """Pooled accuracy is that of all rows; mean and standard deviation are over folds."""
    plan = Plan("folds", folds=2)
    outcomes = []
    while (step := next_step(plan, "x", outcomes)) is not None:
        known = {}
        if step.task == "measure":
            fold = step.division.fold
            of_site = tallies(right[fold], 10 - right[fold])
            known = {"by_site": {"a": Evaluation(10, {}, of_site)}, "tallies": of_site}
        outcomes.append(outcome(len(outcomes), step, **known))
    found = {(one.model, one.site): one for one in lines(plan, outcomes)}
    assert found["all folds", ""].num_rows == 20
    assert accuracy(found["all folds", "a"]) == accuracy(found["all folds", ""]) == sum(right) / 20
    assert accuracy(found["fold 1", "a"]) == right[0] / 10
    spread = spreads(plan, outcomes)["accuracy"]
    shares = [one / 10 for one in right]
    assert (spread.mean, spread.std) == pytest.approx((mean(shares), stdev(shares)))


def accuracy(line: Line) -> float:
    figure = line.figures["accuracy"]
    assert figure.low < figure.value
    return figure.value
