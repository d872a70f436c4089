"""[study] and [search]: what can be asked for, and the plans and rules that follow."""

import json
from typing import Any

import pytest

from support import configured
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.study import plan_of
from xain_coordinator.core.view.study import next_step
from xain_coordinator.core.vocabulary.values import Step

ALPHA, EPOCHS = "workload.options.alpha", "rounds.epochs"
LOSS, WEIGHT = "workload.options.loss", "workload.options.class_weight"


def config(**overrides: Any) -> CoordinatorConfig:
    return configured.config(**{"workload__name": "sgd", **overrides})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"study__folds": 1}, "study.folds is 1"),
        ({"study__folds": 5, "workload__name": ""}, "it needs a workload"),
        ({"study__folds": 5, "workload__name": "describe"}, "it needs a workload"),
        ({"study__folds": 5, "workload__name": "bagging"}, "publish = true"),
        ({"study__folds": 5, "http__port": 0}, "http.port"),
        ({"study__leave_out": "site", "study__folds": 5}, "study.folds is 5; leave it out"),
        ({"study__leave_out": "site", "study__final": True}, "first training is that of all"),
        ({"study__final": True}, "nothing would read it"),
        ({"study__rows": "all"}, "nothing would read it"),
        ({"study__folds": 3, "search__options": {ALPHA: [1.0, 2.0]}}, "leave it out, or [study]"),
        ({"search__options": {ALPHA: [1.0]}}, "there are 1 options"),
        ({"search__options": {ALPHA: 0.1}}, "must be a list of values"),
        ({"search__options": {ALPHA: {"from": 1, "to": 2}}}, "needs search.draw"),
        (
            {"search__options": {ALPHA: {"from": 2, "to": 1}}, "search__draw": 3},
            "second one larger",
        ),
        (
            {"search__options": {ALPHA: {"from": 0, "to": 1, "scale": "log"}}, "search__draw": 3},
            "above 0",
        ),
        ({"search__options": {"server.port": [1, 2]}}, "server.port cannot be searched"),
        ({"search__options": {"rounds.rounds": [1, 2]}}, "rounds.rounds cannot be searched"),
        ({"search__options": {ALPHA: [1.0, "x"]}}, "option 2: "),
        ({"search__options": {"workload.options.alhpa": [1.0, 2.0]}}, "option 1: "),
        ({"search__options": {ALPHA: [1.0, 2.0]}, "evaluate__every": 0}, "evaluate.every"),
    ],
)
def test_studies_that_cannot_be_done(given, told):
    message = configured.error_of(**{"workload__name": "sgd", **given})
    assert told in message, message


def test_grid_has_all_combinations_and_a_list_is_taken_as_it_is():
    grid = {ALPHA: [0.1, 0.2], EPOCHS: [1, 3]}
    plan = plan_of(config(search__options=grid).rules().study)
    expected = [{ALPHA: a, EPOCHS: e} for e in ("1", "3") for a in ("0.1", "0.2")]
    assert list(plan.options) == expected
    listed = [{ALPHA: 0.1, EPOCHS: 1}, {ALPHA: 0.2}]
    plan = plan_of(config(search__list=listed).rules().study)
    assert list(plan.options) == [{ALPHA: "0.1", EPOCHS: "1"}, {ALPHA: "0.2"}]


def test_draw_is_that_of_its_seed():
    ranges = {ALPHA: {"from": 1e-6, "to": 0.1, "scale": "log"}, EPOCHS: {"from": 1, "to": 5}}

    def drawn(seed):
        given = {"search__options": ranges, "search__draw": 20, "search__seed": seed}
        return list(plan_of(config(**given).rules().study).options)

    assert drawn(1) == drawn(1) != drawn(2)
    epochs = {json.loads(one[EPOCHS]) for one in drawn(1)}
    alphas = [json.loads(one[ALPHA]) for one in drawn(1)]
    assert epochs <= {1, 2, 3, 4, 5}
    assert all(1e-6 <= alpha <= 0.1 for alpha in alphas)
    assert min(alphas) < 1e-3 < max(alphas)


def test_last_two_options_train_for_half_of_the_rounds():
    alphas = [n / 100 for n in range(1, 13)]
    rules = config(rounds__rounds=48, search__options={ALPHA: alphas}).rules()
    assert plan_of(rules.study).budget == 3  # 3, 6, 12, 24
    assert plan_of(config(search__options={ALPHA: alphas}).rules().study).budget == 3, (
        "of 50 passes"
    )


def test_rules_of_a_step_are_those_of_its_task_sites_and_options():
    given = config(
        rounds__rounds=48,
        rounds__min_participants=4,
        evaluate__patience=3,
        search__options={ALPHA: [0.1, 0.2]},
    )
    step = Step("x", "train", "", sites=("a", "b"), options={ALPHA: "0.2"}, budget=6)
    rules = given.rules(step)
    assert json.loads(rules.workload_options)["alpha"] == 0.2
    assert (rules.rounds, rules.min_participants, rules.start_participants) == (6, 2, 2)
    measured = given.rules(Step("x", "measure", "", sites=("a",), model="y/3"))
    assert (measured.rounds, measured.evaluate_patience, measured.num_required) == (0, 0, 1)


def test_plan_in_the_journal_is_that_of_the_settings():
    rules = config(study__folds=3, study__seed=9, study__final=True).rules()
    step = next_step(plan_of(rules.study), "x", ())
    assert (step.division.folds, step.division.seed, step.shown) == (3, 9, "fold 1 of 3")


@pytest.mark.parametrize(
    ("searched", "given", "metric"),
    [
        ({ALPHA: [1.0, 2.0]}, {}, ""),
        ({LOSS: ["log_loss", "modified_huber"]}, {}, ""),
        ({LOSS: ["log_loss", "hinge"]}, {}, "balanced_accuracy"),
        ({WEIGHT: ["", "balanced"]}, {}, "auc"),
        ({WEIGHT: ["", "balanced"], LOSS: ["log_loss", "hinge"]}, {}, "balanced_accuracy"),
        ({WEIGHT: ["", "balanced"]}, {"evaluate__metric": "f1"}, "f1"),
        ({ALPHA: [1.0, 2.0]}, {"workload__options": {"task": "regression"}}, ""),
    ],
)
def test_options_of_a_search_are_compared_by_a_metric_that_all_of_them_have(
    searched, given, metric
):
    """The log loss is too high on purpose with class weights, and not known without
    probabilities."""
    settings = config(search__options=searched, **given)
    plan = plan_of(settings.rules().study)
    for options in plan.options:
        step = Step("x", "train", "rung 1, option 1", options=options, budget=1)
        assert settings.rules(step).evaluate_metric == metric
