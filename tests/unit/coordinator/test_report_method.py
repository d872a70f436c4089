"""The report: what it says for the methods section of a paper, and of a study's figures."""

import re
from dataclasses import replace
from html import unescape
from json import dumps, loads
from math import nan
from typing import Any

import numpy as np
import pytest

from support.inspected import snapshot
from xain_coordinator.cli.report.page import page
from xain_coordinator.core.view.study import Outcome, Plan
from xain_coordinator.core.vocabulary.values import Evaluation, Step
from xain_coordinator.export.studies import as_json
from xain_coordinator.inspection.client import Snapshot
from xain_coordinator.server.calls.translate import tallies_message
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.measures.tallies import Tallies, tally_classes
from xain_workloads.tables.preprocessing import CategoryColumn, NumberColumn, Preprocessing
from xain_workloads.tables.reading.scales import Scale

PREPARED = Preprocessing(
    (
        NumberColumn("age", 50.5, Scale(48.0, 13.0)),
        NumberColumn("pressure", 93.0, Scale(94.5, 13.1), unknown=0.099),
        CategoryColumn("sex", ("female", "male")),
    ),
    clip=5.0,
)
SGD = {"loss": "log_loss", "penalty": "l2", "alpha": 0.0001, "mode": "federated"}


def tallied(num_rows: int = 80, seed: int = 3) -> Tallies:
    chance = np.random.default_rng(seed)
    odds = chance.normal(0.0, 1.0, num_rows)
    p = 1 / (1 + np.exp(-odds))
    target = (chance.random(num_rows) < p).astype(int)
    return tally_classes(2, target, (p > 0.5).astype(int), np.column_stack([1 - p, p]))


def trained(
    prepared: Preprocessing | None = PREPARED,
    contributors: tuple[str, ...] = ("north", "south"),
    metadata: dict[str, str] | None = None,
    **status: Any,
) -> Snapshot:
    """A session that ended after 12 rounds, with model 3 the best."""
    evaluation = tallies_message(tallied())
    assert evaluation is not None
    sites = [
        inspection.SiteMetrics(participant_id=name, num_samples=160, evaluation=evaluation)
        for name in contributors
    ]
    rounds = [
        inspection.RoundStatus(
            round=number,
            task=pb.TRAIN,
            num_samples=320,
            contributors=contributors,
            evaluation=evaluation,
            sites=sites,
        )
        for number in range(12)
    ]
    known = {"workload": "sgd", "options": dumps(SGD), "classes": '["no", "yes"]'}
    if prepared is not None:
        known["preprocessing"] = prepared.to_json()
    models = [inspection.ModelStatus(metadata={**known, **(metadata or {})})]
    of: dict[str, Any] = {
        "session_id": "5e5510",
        "state": pb.FINISHED,
        "num_rounds": 50,
        "num_trained": 12,
        "best_round": 3,
        "metric": "log_loss",
        "metric_is_minimised": True,
        "measured": evaluation,
        "measured_round": 3,
        **status,
    }
    return snapshot(rounds=rounds, models=models, **of)


def read(whole: Snapshot, study: Any = None) -> str:
    """The text of the page, without the charts."""
    text = page(whole, study_table=study)
    text = re.sub(r"<(style|svg)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", "\n", text))


def test_methods_name_model_training_length_held_out_rows_and_preparation():
    """Sentences tell how the model was made, as a paper must, with the numbers of the session."""
    text = read(trained(ended_because="stopped early: log_loss has not improved since round 3"))
    for told in (
        "a logistic regression with the penalty l2, alpha = 0.0001, by stochastic gradient descent",
        "of 4 features made of 3 columns",
        "each weighted by its number of rows (federated averaging)",
        "Length: 12 of 50 rounds; stopped early: log_loss has not improved since round 3.",
        "Rows: 400, of which 80 (20.0%) were held out.",
        "replaced by the median of the training rows of all sites",
        "centred and divided by mean and SD of the training rows of all sites",
        "cut off at ±5",
        "a missing or other one is all zeros",
        "What left a site:",
        "No row.",
    ):
        assert told in text, told
    assert re.search(r"pressure\s+9\.9%\s+93\s+94\.5\s+13\.1", text)
    assert re.search(r"sex\s+0\.0%\s+female, male", text)


def test_methods_follow_the_settings_that_are_not_the_defaults():
    columns = (replace(PREPARED.numbers[0], fill=nan, has_indicator=True, scale=Scale()),)
    settings = {"aggregation.rule": '"gradient"', "aggregation.optimizer": '"fedadam"'}
    options = {"options": dumps({**SGD, "mode": "gradient", "penalty": "none", "eta0": 0.1})}
    text = read(trained(Preprocessing(columns), metadata=options, settings=settings))
    for told in (
        "a logistic regression without a penalty, by gradient descent with step 0.1",
        "adds them up and takes the step; the step is fedadam's.",
        "a missing one stays missing, and told by a column of zeros and ones, not scaled.",
    ):
        assert told in text, told
    text = read(trained(settings={"aggregation.rule": '"krum"'}))
    assert "combines what the sites send by the rule krum." in text
    text = read(trained(settings={"workload.remedy": '"scaffold"'}))
    assert "control variates of the sites correct the local steps (SCAFFOLD)." in text
    assert "an update of the model with the change of the site's control variate" in text
    permuted = trained(importance=inspection.ColumnImportances())
    assert "sums of the losses with each column permuted" in read(permuted)
    assert "permuted" not in text


def test_rows_that_weigh_by_class_are_told_with_what_it_does_to_probabilities():
    """Figures of such probabilities look like those of a bad model, of every workload."""
    metadata = {"workload": "xgboost", "options": dumps({"class_weight": "balanced"})}
    text = read(trained(metadata=metadata, weighs_classes=True))
    assert "rows weigh by the inverse of the count of their class" in text
    assert "too high for rare classes on purpose" in text
    text = read(trained())
    assert "rows weigh by" not in text
    assert "on purpose" not in text


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, "the number and digest of its fitted estimators, which stay there, or sums"),
        ({"publish": True}, "its fitted estimators, or sums over its rows"),
    ],
)
def test_estimators_leave_a_site_only_where_they_are_published(options, left):
    text = read(trained(metadata={"workload": "bagging", "options": dumps(options)}))
    assert left in text
    assert "an update of the model" not in text


def test_sums_over_held_out_rows_left_no_site_where_nothing_was_measured():
    session = trained()
    assert "sums over the held-out rows" in read(session)
    for one in session.rounds.rounds:
        one.ClearField("evaluation")
    text = read(session)
    assert "What left a site:" in text
    assert "sums over the held-out rows" not in text


def test_table_of_columns_of_one_site_alone_is_not_shown():
    """Means and spreads of one site are on no page that goes to others."""
    assert "Columns as the model takes them" in read(trained())
    text = read(trained(contributors=("north",)))
    assert "How was it made?" in text
    assert "Columns as the model takes them" not in text


@pytest.mark.parametrize("workload", ["", "describe"])
def test_training_without_a_workload_has_no_methods(workload):
    """The training of a script is known by its numbers alone."""
    assert "How was it made?" not in read(trained(metadata={"workload": workload}))


def test_figures_say_that_their_rows_have_chosen_the_model():
    text = read(trained())
    assert "of 11 models it has the smallest log loss. So its figures are slightly optim" in text
    assert "chosen the model" not in read(trained(best_round=None))


def test_calibration_has_figures_and_points_with_rows():
    text = read(trained())
    for name in ("observed / expected", "calibration intercept", "calibration slope"):
        assert re.search(rf"{name}\n.*?\n.*?\d to \d", text, re.DOTALL), name
    points = text.partition("Calibration of yes in numbers")[2].partition("Sites")[0]
    assert sum(int(n) for n in re.findall(r"^([1-9]\d*)$", points, re.MULTILINE)) == 80
    assert "Wilson's of shares of rows" in text


def of_study(kind: Any) -> Any:
    """The table of a finished study of two folds, or of two sites that were left out."""
    outcomes = []
    labels = ("fold 1", "fold 2") if kind == "folds" else ("without north", "without south")
    for at, label in enumerate(labels):
        sites = ("north", "south") if kind == "folds" else (("north", "south")[at],)
        step = Step("5", "measure", label, (at + 1, 2))
        by_site = {name: Evaluation(60, {}, tallied(60, at)) for name in sites}
        outcomes.append(Outcome(label, step, "", 0, by_site=by_site))
    return loads(as_json(Plan(kind, folds=2), outcomes[-1].step, outcomes))


@pytest.mark.parametrize(
    ("kind", "first", "method"),
    [
        ("folds", "All folds: accuracy 0.", "no row has trained, prepared or chosen the model"),
        ("leave_out", "Each site left out: accuracy 0.", "trained and chosen at the others"),
    ],
)
def test_page_of_a_study_begins_with_its_pooled_figures(kind, first, method):
    """The page begins with the figures of the study, not with those of its last fold, and has each
    figure of all rows and of the sites."""
    text = read(trained(study="2 of 2"), of_study(kind))
    assert first in text
    line = text.partition(first)[2].partition("rows.")[0]
    assert ("AUC" in line) == (kind == "folds")
    assert "is the best by" not in text
    assert method in text
    assert "Of the latest session alone, 2 of 2." in text
    every = text.partition("All figures")[2].partition("What was trained")[0]
    for name in ("sensitivity", "brier", "calibration intercept", "calibration slope"):
        assert len(re.findall(r"\(-?\d.*? to ", every.partition(name)[2][:200])) >= 3, name


def test_figures_of_one_site_alone_are_not_called_those_of_all_sites():
    assert "rows of north alone, on which nobody trained" in read(trained(contributors=("north",)))
    assert "rows of all sites together" in read(trained())
