"""Evaluations of global models: in rounds, after the last model, and by the coordinator itself."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import r2_score
from tests.unit.core.bench import TIMED, Bench, make_rules, stored

from support.refusals import refused_as
from xain_coordinator.core.machine.decider import next_deadline
from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload
from xain_coordinator.core.parts.evaluation import (
    MAX_BACKLOG,
    MAX_METRICS,
    checked,
    combined,
    spreads,
    together,
)
from xain_coordinator.core.view.history import TALLIED_ROUNDS, History
from xain_coordinator.core.view.view import evaluation_warnings, trend, waiting_for
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import EvaluateModel, FitCentral
from xain_coordinator.core.vocabulary.keys import update_key
from xain_coordinator.core.vocabulary.replacing import replace as replace_session
from xain_coordinator.core.vocabulary.values import (
    CentralModel,
    Evaluation,
    Importance,
    LocalModel,
    Phase,
    Stride,
    Task,
)
from xain_workloads.comparing.gains import Budget, Difference
from xain_workloads.comparing.importance import SHOWN
from xain_workloads.measures.tallies import Tallies, add, tally_classes, tally_numbers

SCORES = {"accuracy": 0.5, "loss": 1.0}
ASP = {"min_participants": 1, "consistency": "asp", "staleness": None, "start_participants": 2}


def bench_of(*names: str, without: tuple[str, ...] = (), **rules: Any) -> Bench:
    """A bench with round 0 open. names: those that can evaluate. without: those that cannot."""
    number = len(names) + len(without)
    bench = Bench(make_rules(**{"rounds": 2, "min_participants": number, **rules}))
    for name in (*names, *without):
        bench.join(name, can_evaluate=name in names)
    assert bench.phase is Phase.COLLECTING
    return bench


def bring(bench: Bench, name: str, evaluation: Evaluation | None) -> None:
    """An update with an evaluation, or the evaluation alone in the round that asks for no more."""
    number = bench.session.trained_by(name)
    is_last = bench.session.opened.task is Task.EVALUATE
    weights = None if is_last else stored(update_key(number, name), f"{name}@{number}")
    num_samples = 0 if is_last else 10
    bench.send(c.EndTrainingRound(name, number, num_samples, weights, evaluation=evaluation))


def hand_in(
    bench: Bench, name: str, metrics: Mapping[str, float] | None = None, num_samples: int = 1
) -> None:
    """An update with an evaluation, if there are metrics."""
    bring(bench, name, None if metrics is None else Evaluation(num_samples, metrics))


def evaluate(bench: Bench, name: str, accuracy: float | None, num_samples: int = 1) -> None:
    """An answer in the round that evaluates the last model."""
    bring(
        bench, name, None if accuracy is None else Evaluation(num_samples, {"accuracy": accuracy})
    )


def train(bench: Bench, *accuracies: float) -> None:
    """Rounds of all participants, whose models have these accuracies."""
    for accuracy in accuracies:
        for name in bench.outstanding:
            hand_in(bench, name, {"accuracy": accuracy})


def owed(bench: Bench) -> list[int]:
    """The models whose evaluation the last command has asked of the coordinator."""
    return [one.model.round for one in bench.effects if isinstance(one, EvaluateModel)]


# --- what is measured ---


def test_mean_weighs_sites_by_their_samples():
    mean = together([Evaluation(1, {"a": 0.0}), Evaluation(3, {"a": 1.0, "b": 2.0})])
    assert mean == Evaluation(4, {"a": 0.75, "b": 2.0})


def test_names_of_one_site_leave_room_for_those_of_all():
    """One participant sends as many names as are taken, all of them before "accuracy"."""
    crowd = {f"a{i:02}": 1.0 for i in range(MAX_METRICS)}
    sites = [Evaluation(10, {"accuracy": 0.5}), Evaluation(10, {"accuracy": 0.7})]
    mean = together([*sites, Evaluation(10, crowd)])
    assert mean.metrics["accuracy"] == pytest.approx(0.6)
    assert len(mean.metrics) == MAX_METRICS
    assert spreads([*sites, Evaluation(10, crowd)])["accuracy"].max == 0.7


@pytest.mark.parametrize(
    ("num_samples", "metrics"),
    [
        (-1, {}),
        (2**60, {}),
        (1, {"a": float("nan")}),
        (1, {"a": float("inf")}),
        (1, {"a": 1e200}),
        (1, {"": 1.0}),
        (1, {"a\n": 1.0}),
        (1, {"a" * 65: 1.0}),
        (1, {f"a{i}": 1.0 for i in range(MAX_METRICS + 1)}),
    ],
)
def test_evaluation_that_cannot_be_kept_is_refused(num_samples, metrics):
    with pytest.raises(ValueError, match=r"samples|metric"):
        checked(num_samples, metrics)


def test_tallies_of_other_classes_than_the_model_has_are_refused():
    """Added up with those of the other sites they would take figures from all of them."""
    tallies = told("a", 0.9).tallies
    for known in (2, None):
        assert checked(40, {}, tallies, num_classes=known).tallies == tallies
    with pytest.raises(ValueError, match="tallies are of 2 classes, and the model has 3"):
        checked(40, {}, tallies, num_classes=3)
    with pytest.raises(ValueError, match="tallies are of 2 classes, and the model has 0"):
        checked(40, {}, tallies, num_classes=0)


def test_tallies_without_the_losses_of_a_model_with_probabilities_are_refused():
    """Added up with those of the other sites they would take log loss and AUC from all of them."""
    tallies = told("a", 0.9).tallies
    assert checked(40, {}, tallies, num_classes=2, has_probabilities=True).tallies == tallies
    for lacking in (replace(tallies, sums={}), replace(tallies, scores=())):
        assert checked(40, {}, lacking, num_classes=2).tallies == lacking
        with pytest.raises(ValueError, match="tallies lack losses or scores"):
            checked(40, {}, lacking, num_classes=2, has_probabilities=True)


# --- in rounds ---


def test_assignment_asks_for_every_kth_model():
    bench = bench_of("a", rounds=5, evaluate_every=2)
    asked = []
    for _ in range(4):
        asked.append(bench.start("a").evaluate)
        train(bench, 0.5)
    assert asked == [True, False, True, False]


def test_empty_model_is_not_evaluated():
    bench = Bench(make_rules(initial="empty"))
    bench.send(c.Rendezvous("a", None, {}, True))
    assert not bench.start("a").evaluate
    hand_in(bench, "a", {"accuracy": 1.0})
    assert bench.phase is Phase.COLLECTING
    assert bench.session.round == 1
    assert bench.evaluation.best is None, "an empty model is not the best one"


def test_evaluation_off_asks_for_nothing():
    bench = bench_of("a", evaluate_every=0)
    assert not bench.start("a").evaluate
    hand_in(bench, "a", SCORES)
    assert bench.happened(e.UpdateAccepted)[0].evaluation is None
    hand_in(bench, "a")
    assert bench.phase is Phase.FINISHED


def test_best_model_is_the_one_with_the_best_mean():
    bench = bench_of("a", "b", rounds=3, evaluate_metric="accuracy")
    for values in ((0.1, 0.1), (0.9, 0.7), (0.5, 0.5)):
        for name, value in zip(("a", "b"), values, strict=True):
            hand_in(bench, name, {"accuracy": value, "loss": 1 - value})
    best = bench.evaluation.best
    assert (best.metric, best.is_minimised, best.round) == ("accuracy", False, 1)
    assert best.value == pytest.approx(0.8)


def test_less_of_a_minimised_metric_is_better():
    bench = bench_of("a", rounds=3, evaluate_metric="loss", evaluate_minimised=True)
    for loss in (3.0, 1.0, 2.0):
        hand_in(bench, "a", {"loss": loss})
    assert (bench.evaluation.best.round, bench.evaluation.best.value) == (1, 1.0)


def test_evaluation_of_an_earlier_model_does_not_count_for_the_round():
    """In ASP an update may be counted by a later round than the one that it was trained for."""
    bench = bench_of("a", "b", rounds=9, evaluate_metric="accuracy", **ASP)
    for accuracy in (0.1, 0.2):
        hand_in(bench, "a", {"accuracy": accuracy})
    assert bench.session.round == 2
    hand_in(bench, "b", {"accuracy": 0.9})  # trained for round 0
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 2
    best = bench.evaluation.best
    assert (best.round, best.value) == (1, 0.2)


# --- the last model ---


def test_last_model_is_evaluated_by_all_that_can():
    bench = bench_of("a", "b", without=("c",), evaluate_metric="accuracy")
    train(bench, 0.1, 0.2)
    assert bench.phase is Phase.COLLECTING
    round_ = bench.session.opened
    assert (round_.number, round_.task, round_.selected) == (2, Task.EVALUATE, ("a", "b"))
    assert bench.happened(e.RoundOpened)[-1].task is Task.EVALUATE
    work = bench.start("a")
    assert (work.task, work.evaluate, work.epochs) == (Task.EVALUATE, True, 0)
    assert work.model.round == 2
    assert bench.heartbeat("c").phase is Phase.STANDBY
    bench.refuses(AssignmentFor("c"), "NOT_SELECTED")
    evaluate(bench, "a", 0.9)
    assert bench.heartbeat("a").update_accepted
    assert bench.phase is Phase.COLLECTING
    evaluate(bench, "b", 0.7)
    assert bench.is_completed
    assert not bench.evaluation.ended_because
    best = bench.evaluation.best
    assert (best.round, best.value) == (2, 0.8)
    assert len(bench.aggregates) == 2
    (point,) = [
        point
        for point in bench.points
        if point.fields.get("round") == 2 and point.measurement == "evaluation"
    ]
    assert point.fields["accuracy"] == 0.8
    assert point.fields["accuracy_min"] == 0.7


def test_evaluation_that_is_sent_again_is_answered_again_and_another_one_is_refused():
    """The refusal is that of a second other update, and holds after the end too."""
    bench = bench_of("a", "b")
    train(bench, 0.1, 0.2)
    none = c.EndTrainingRound("b", 2, 0, None)
    again = replace(none, participant_id="a", evaluation=Evaluation(1, {"accuracy": 0.5}))
    other = replace(again, evaluation=Evaluation(1, {"accuracy": 0.9}))
    for phase in (Phase.COLLECTING, Phase.FINISHED):
        bench.send(again)
        bench.send(again)
        for second in (other, replace(again, evaluation=None)):
            bench.refuses(second, "DUPLICATE_UPDATE")
        assert bench.phase is phase
        bench.send(none)
    assert [one.participant_id for one in bench.happened(e.EvaluationAccepted)] == ["a", "b"]


def test_updates_of_the_last_round_are_still_recognised_while_it_is_evaluated():
    bench = bench_of("a")
    train(bench, 0.1, 0.2)
    weights = stored(update_key(1, "a"), "a@1")
    bench.send(c.EndTrainingRound("a", 1, 10, weights))
    assert len(bench.happened(e.UpdateAccepted)) == 2


def test_weights_are_not_taken_while_the_last_model_is_evaluated():
    bench = bench_of("a")
    train(bench, 0.1, 0.2)
    bench.refuses(MayUpload("a", 2, "good"), "ROUND_CLOSED")


def test_evaluation_of_the_last_model_ends_at_its_deadline():
    bench = bench_of("a", "b", evaluate_metric="accuracy", evaluate_deadline_s=30.0, **TIMED)
    train(bench, 0.1, 0.2)
    evaluate(bench, "a", 0.9)
    bench.pass_time(29.0)
    assert bench.phase is Phase.COLLECTING
    bench.pass_time(1.0)
    assert bench.is_completed
    assert bench.evaluation.best.round == 2


def test_time_is_written_down_often_enough_for_the_deadline_of_an_evaluation():
    bench = bench_of("a", evaluate_deadline_s=30.0, deadline_s=86400.0)
    train(bench, 0.1, 0.2)
    began = bench.now
    bench.pass_time(29.0)
    noted = max(event.at for event in bench.happened(e.TimePassed))
    assert noted - began >= 29.0 - 3.0


def test_participants_behind_are_asked_to_evaluate_and_not_to_train():
    bench = bench_of("a", "b", **ASP)
    hand_in(bench, "a")
    hand_in(bench, "a")
    assert bench.session.opened.task is Task.EVALUATE
    assert bench.start("b").task is Task.EVALUATE
    weights = stored(update_key(0, "b"), "b@0")
    bench.refuses(c.EndTrainingRound("b", 0, 10, weights), "STALE_ROUND")


# --- early stopping ---


def test_session_stops_when_its_patience_is_over():
    bench = bench_of("a", rounds=50, evaluate_metric="accuracy", evaluate_patience=2)
    train(bench, 0.1, 0.5, 0.4)
    assert not bench.session.is_trained
    train(bench, 0.5)
    assert bench.session.is_trained
    assert bench.session.opened.task is Task.EVALUATE
    assert bench.session.opened.number == 4
    evaluate(bench, "a", 0.45)
    assert bench.is_completed
    why = "stopped early: accuracy has not improved since round 1"
    assert bench.evaluation.ended_because == why
    assert bench.happened(e.SessionFinished)[0].ended_because == why
    assert bench.evaluation.best.round == 1


def test_improvement_by_less_than_min_delta_is_none():
    bench = bench_of(
        "a", rounds=50, evaluate_metric="accuracy", evaluate_patience=2, evaluate_min_delta=0.1
    )
    train(bench, 0.1, 0.5, 0.55, 0.59)
    assert bench.session.is_trained
    best = bench.evaluation.best
    assert (best.improved_round, best.round) == (1, 3), "the best model is the best all the same"


# --- the coordinator's own data ---


def own(bench: Bench, number: int, accuracy: float | None) -> None:
    evaluation = None if accuracy is None else Evaluation(7, {"accuracy": accuracy})
    bench.send(c.EvaluationDone(number, evaluation, "" if evaluation else "no such file"))


def test_coordinator_evaluates_one_model_after_the_other():
    bench = bench_of(without=("a",), rounds=4, evaluate_data=True, evaluate_metric="accuracy")
    assert [m.round for m in bench.evaluation.owed] == [0]
    train(bench, 0.1, 0.1)
    assert [m.round for m in bench.evaluation.owed] == [0, 1, 2]
    own(bench, 0, 0.2)
    assert owed(bench) == [1]
    bench.refuses(c.EvaluationDone(2, None), errors.StaleModel)
    own(bench, 1, None)
    assert owed(bench) == [2]
    own(bench, 2, 0.3)
    best = bench.evaluation.best
    assert (best.round, best.value) == (2, 0.3), "what the participants measure does not count"


def test_coordinators_evaluation_is_owed_again_after_a_restart():
    bench = bench_of(without=("a",), evaluate_data=True)
    bench.effects = bench.restart()
    assert owed(bench) == [0]


def test_session_waits_for_the_coordinators_evaluation_of_the_last_model():
    bench = bench_of(
        without=("a",), evaluate_data=True, evaluate_metric="accuracy", evaluate_deadline_s=30.0
    )
    train(bench, 0.1, 0.1)
    assert bench.session.opened.task is Task.EVALUATE
    assert bench.session.opened.selected == ()
    own(bench, 0, 0.1)
    own(bench, 2, 0.3)  # model 1 is passed over: the last one does not wait
    assert bench.phase is Phase.FINISHED
    assert bench.evaluation.best.round == 2


def test_wait_for_the_coordinators_evaluation_has_an_end():
    bench = bench_of(without=("a",), evaluate_data=True, evaluate_deadline_s=30.0)
    train(bench, 0.1, 0.1)
    assert next_deadline(bench.session) is not None
    bench.pass_time(30.0)
    assert bench.is_completed


def test_evaluations_that_wait_are_bounded():
    bench = bench_of(without=("a",), rounds=50, evaluate_data=True)
    train(bench, *(0.1,) * 20)
    numbers = [model.round for model in bench.evaluation.owed]
    assert numbers == [0, *range(21 - MAX_BACKLOG, 21)]


@pytest.mark.parametrize("sites_evaluate", [True, False])
def test_coordinators_evaluation_stops_the_session_early(sites_evaluate):
    """The session ends even if its last model is the best."""
    names, without = (("a",), ()) if sites_evaluate else ((), ("a",))
    stops = {"evaluate_data": True, "evaluate_metric": "accuracy", "evaluate_patience": 1}
    bench = bench_of(*names, without=without, rounds=50, **stops)
    own(bench, 0, 0.1)
    train(bench, 0.1)
    own(bench, 1, 0.5)
    train(bench, 0.1)
    own(bench, 2, 0.4)
    assert bench.session.opened.task is Task.TRAIN, "the round that is open is brought to its end"
    train(bench, 0.2)
    assert bench.session.opened.task is Task.EVALUATE
    own(bench, 3, 0.3 if sites_evaluate else 0.9)
    if sites_evaluate:
        evaluate(bench, "a", 0.1)
    assert bench.is_completed
    assert bench.evaluation.ended_because


# --- sums of sites ---


def told(name: str, probability: float, *, rows: int = 40) -> Evaluation:
    """Evaluation of a site with three rows of class 1 in ten, which get this probability, while the
    others get one that is as far from it. name: "a" has another order of rows than "b"."""
    target = np.arange(rows) % 10 < 3
    if name == "a":
        target = target[::-1]
    p = np.where(target, probability, 1 - probability)
    codes = target.astype(int)
    both = np.stack([1 - p, p], axis=1)
    tallies = tally_classes(2, codes, (p > 0.5).astype(int), both)
    return Evaluation(rows, {"accuracy": 0.123, "loss": 1.0}, tallies)


def pooled(probability: float) -> Tallies | None:
    """Tallies of the rows of sites "a" and "b" together."""
    return add(one for name in "ab" if (one := told(name, probability).tallies) is not None)


def hand_in_tallies(bench: Bench, *probabilities: float, rows: int = 40) -> None:
    """Rounds of all participants, whose models give the rows these probabilities."""
    for probability in probabilities:
        for name in bench.outstanding:
            bring(bench, name, told(name, probability, rows=rows))


def test_threshold_follows_from_the_tallies_of_the_best_and_of_the_latest_model():
    """Nothing is journalled for it: the best model is kept with its sums, as the latest is."""
    bench = bench_of("a", "b", rounds=4, evaluate_threshold="sensitivity >= 0.9")
    assert bench.evaluation.thresholds(bench.session.rules) == {}
    hand_in_tallies(bench, 0.5, 0.8, 0.6)
    found = bench.evaluation.thresholds(bench.session.rules)
    assert list(found) == [1, 2], "the best, and the latest"
    for number, probability in ((1, 0.8), (2, 0.6)):
        assert found[number].value == pytest.approx(probability, abs=0.002)
        assert found[number].figures["sensitivity"].value == 1
        assert found[number].figures["specificity"].value == 1
    assert not [one for one in evaluation_warnings(bench.session, History()) if "threshold" in one]


def test_threshold_that_no_sums_give_is_warned_of():
    bench = bench_of("a", rounds=4, evaluate_threshold="youden", evaluate_metric="accuracy")
    train(bench, 0.5, 0.6)
    assert bench.evaluation.thresholds(bench.session.rules) == {}
    told = [one for one in evaluation_warnings(bench.session, History()) if "threshold" in one]
    assert told == [
        'No threshold is chosen by evaluate.threshold = "youden": it needs a model of two classes '
        "with probabilities, and held-out rows of both."
    ]


# --- the central model ---


def central_of(number: int) -> CentralModel:
    return CentralModel(number, with_local("own", 0.8, 0.7, number), "central.npz")


def central_owed(bench: Bench) -> list[FitCentral]:
    return [one for one in bench.effects if isinstance(one, FitCentral)]


def test_central_model_is_compared_with_the_best_one_when_all_evaluations_are_done():
    """The best model is not known until then. The session waits for it, also after a restart."""
    bench = bench_of(
        without=("a",),
        rounds=2,
        epochs=3,
        evaluate_data=True,
        evaluate_local=True,
        evaluate_metric="accuracy",
        evaluate_deadline_s=60.0,
    )
    own(bench, 0, 0.1)
    train(bench, 0.1)
    own(bench, 1, 0.5)
    train(bench, 0.1)
    assert not central_owed(bench)
    own(bench, 2, 0.3)
    expected = [FitCentral(1, Budget(6, 30.0))]
    assert central_owed(bench) == expected
    assert bench.session.opened.task is Task.EVALUATE
    assert waiting_for(bench.session, "").startswith("The central model")
    assert [one for one in bench.restart() if isinstance(one, FitCentral)] == expected
    bench.send(c.CentralDone(central_of(1)))
    assert bench.is_completed
    assert bench.evaluation.central == central_of(1)
    bench.refuses(c.CentralDone(central_of(1)), errors.StaleModel)


def test_central_model_is_waited_for_no_longer_than_the_evaluation_of_the_last_model():
    settings = {"evaluate_data": True, "evaluate_local": True, "evaluate_deadline_s": 30.0}
    bench = bench_of(without=("a",), rounds=1, **settings)
    train(bench, 0.1)
    for number in (0, 1):
        own(bench, number, None)
    assert [one.round for one in central_owed(bench)] == [1], "no model is the best"
    bench.pass_time(30.0)
    assert bench.is_completed
    assert bench.evaluation.central is None


# --- local models ---


def with_local(name: str, probability: float, local: float, number: int) -> Evaluation:
    """Evaluation of the last model, and of a model of the site's own rows, on the same rows."""
    evaluation, own = told(name, probability), told(name, local)
    difference = Difference(number, 40 * 0.1, 40 * 0.02)
    return replace(evaluation, local=LocalModel(own.tallies, 3, differences=(difference,)))


def test_local_model_is_wanted_with_the_evaluation_of_the_last_model_alone():
    bench = bench_of("a", evaluate_local=True, rounds=2, epochs=3, evaluate_deadline_s=60.0)
    assert bench.ask(AssignmentFor("a")).local is None
    hand_in_tallies(bench, 0.6, 0.8)
    assignment = bench.ask(AssignmentFor("a"))
    assert assignment.task is Task.EVALUATE
    assert assignment.local == Budget(6, 30.0), "three epochs in each of two rounds"
    assert assignment.best_round == 1
    assert assignment.importance_limit_s == 0
    without = bench_of("a", rounds=1)
    hand_in_tallies(without, 0.6)
    assert without.ask(AssignmentFor("a")).local is None


def test_local_models_are_in_the_history_by_site_and_pooled():
    """Their figures are kept, as those of the evaluation, and their differences add up."""
    bench = bench_of("a", "b", evaluate_local=True, rounds=1)
    hand_in_tallies(bench, 0.6)
    for name, own in (("a", 0.7), ("b", 0.9)):
        bring(bench, name, with_local(name, 0.8, own, 1))
    assert bench.phase is Phase.FINISHED
    record = bench.history.rounds[-1]
    for name, own in (("a", 0.7), ("b", 0.9)):
        local = record.sites[name].evaluation.local
        assert local.figures["log_loss"].value == pytest.approx(-np.log(own))
        assert local.tallies is None, "its figures follow from them"
        assert local.num_samples == 40
    whole = record.evaluation.local
    assert whole.figures["log_loss"].value == pytest.approx(-np.log([0.7, 0.9]).mean())
    assert (whole.num_samples, whole.passes) == (80, 3)
    assert whole.differences == (Difference(1, 8.0, pytest.approx(1.6), 80),)


def test_evaluation_with_a_local_model_that_had_less_time_is_the_same_one():
    """A site that was killed trains it again, and the first one that came counts."""
    bench = bench_of("a", "b", evaluate_local=True, rounds=1)
    hand_in_tallies(bench, 0.6)
    first = with_local("a", 0.8, 0.7, 1)
    bench.send(c.EndTrainingRound("a", 1, 0, None, evaluation=first))
    again = replace(first, local=LocalModel(why_not="its training diverged"))
    assert bench.send(c.EndTrainingRound("a", 1, 0, None, evaluation=again)).reply == r.Done()
    assert bench.session.evaluated("a", 1) == first
    with refused_as("DUPLICATE_UPDATE"):
        bench.send(c.EndTrainingRound("a", 1, 0, None, evaluation=told("a", 0.9)))


def test_local_model_of_other_rows_or_classes_is_refused():
    evaluation = with_local("a", 0.8, 0.7, 1)
    kept = checked(40, {}, evaluation.tallies, num_classes=2, local=evaluation.local)
    assert kept.local == evaluation.local
    other = replace(evaluation.local, tallies=told("a", 0.7, rows=39).tallies)
    with pytest.raises(ValueError, match="other rows"):
        checked(40, {}, evaluation.tallies, local=other)
    with pytest.raises(ValueError, match="other rows"):
        checked(40, {}, None, local=evaluation.local)
    regression = replace(evaluation.local, tallies=numbers([1.0] * 40, [2.0] * 40))
    with pytest.raises(ValueError, match="are of 0 classes"):
        checked(40, {}, evaluation.tallies, num_classes=2, local=regression)


# --- importance of columns ---


def with_importance(name: str, number: int, *totals: float) -> Evaluation:
    """Evaluation of the last model, with importances of the first columns of this model."""
    columns, squares = tuple(range(len(totals))), tuple(t * t for t in totals)
    found = Importance(number, 20.0, 5, columns, totals, squares)
    return replace(told(name, 0.8), importances=(found,))


def test_importance_is_wanted_of_the_last_model_and_of_the_best_alone():
    bench = bench_of("a", evaluate_importance=True, rounds=2, evaluate_deadline_s=60.0)
    assert bench.ask(AssignmentFor("a")).importance_limit_s == 0
    hand_in_tallies(bench, 0.6, 0.8)
    assignment = bench.ask(AssignmentFor("a"))
    assert (assignment.importance_limit_s, assignment.best_round) == (6.0, 1)
    assert assignment.local is None


def test_importances_add_up_over_sites_and_are_kept_by_site():
    """The best model has its own; single sites keep those of the most important columns."""
    bench = bench_of("a", "b", evaluate_importance=True, rounds=1)
    hand_in_tallies(bench, 0.6)
    many = [0.1 * at for at in range(2 * SHOWN)]
    for name, totals in (("a", [3.0, *many]), ("b", [5.0])):
        assert bench.history.importance(1) is None, "the round is open"
        bring(bench, name, with_importance(name, 1, *totals))
    assert bench.phase is Phase.FINISHED
    history = bench.history
    found, record = history.importance(1)
    assert found.totals == (8.0, *many)
    assert (found.loss, found.num_samples, found.rows[:2]) == (40.0, 80, (80, 40))
    assert found.figures[0].value == 0.1
    (at_a,) = record.sites["a"].evaluation.importances
    assert sorted(at_a.figures) == [0, *range(SHOWN + 2, 2 * SHOWN + 1)]
    (at_b,) = record.sites["b"].evaluation.importances
    assert at_b.figures[0].value == 5.0 / 40
    assert history.importance(None) == (found, record), "without a best model that of the last"
    assert bench.history == history


def test_evaluation_with_other_importances_is_the_same_one():
    """A site that was killed measures anew, and the first ones that came count."""
    bench = bench_of("a", "b", evaluate_importance=True, rounds=1)
    hand_in_tallies(bench, 0.6)
    first, again = with_importance("a", 1, 3.0, 1.0), with_importance("a", 1, 3.0)
    for one in (first, again):
        assert bench.send(c.EndTrainingRound("a", 1, 0, None, evaluation=one)).reply == r.Done()
    assert bench.session.evaluated("a", 1) == first


def test_importances_without_tallies_or_with_wrong_sums_are_refused():
    evaluation = with_importance("a", 1, 3.0)
    given = evaluation.importances
    assert checked(40, {}, evaluation.tallies, importances=given).importances == given
    with pytest.raises(ValueError, match="no tallies"):
        checked(40, {}, None, importances=given)
    with pytest.raises(ValueError, match="importance"):
        checked(40, {}, evaluation.tallies, importances=[replace(given[0], totals=())])


@pytest.mark.parametrize(
    ("probabilities", "told"),
    [
        ((0.55, 0.6, 0.7, 0.8, 0.9), "fell by 53 % a pass from model 3 to model 4: more passes"),
        ((0.55, 0.6, 0.8, 0.8, 0.8), "hardly changed from model 3 to model 4: more passes would"),
        ((0.55, 0.6, 0.9, 0.8, 0.7), "rose by 60 % a pass from model 3 to model 4: more passes"),
    ],
)
def test_trend_tells_what_further_passes_would_bring(probabilities, told):
    """The curve is that of the loss of all held-out rows, without the untrained model."""
    bench = bench_of("a", "b", rounds=4, epochs=1)
    assert trend(bench.session, bench.history) == ""
    hand_in_tallies(bench, *probabilities[:4])
    hand_in_tallies(bench, probabilities[4])
    assert told in trend(bench.session, bench.history)


def test_trend_of_models_with_class_weights_is_that_of_their_auc():
    """The log loss of such models, which is too high on purpose, rises here."""
    bench = bench_of("a", epochs=1, workload_options='{"class_weight": "balanced"}')
    hand_in_tallies(bench, 0.5)
    target = np.arange(40) % 2
    for sure, num_wrong in ((0.6, 10), (0.99, 5)):
        of_second = np.where(np.arange(40) < num_wrong, 1 - target, target) * (2 * sure - 1)
        shares = np.stack([sure - of_second, 1 - sure + of_second], axis=1)
        evaluation = Evaluation(40, {}, tally_classes(2, target, shares.argmax(axis=1), shares))
        bring(bench, "a", evaluation)
    (told,) = [trend(bench.session, bench.history)]
    assert "difference of the AUC to 1 on the held-out rows still fell by 50 % a pass" in told


def test_figures_are_of_all_rows_and_only_other_metrics_are_averaged():
    site = Evaluation(3, {"r2": -33.0, "mse": 1.0, "mine": 1.0}, numbers([1, 2, 3], [1, 2, 4]))
    other = Evaluation(2, {"r2": -9.0, "mse": 1.0, "mine": 6.0}, numbers([90, 92], [90, 91]))
    found = together([site, other])
    assert found == together([other, site])
    truth = r2_score([1, 2, 3, 90, 92], [1, 2, 4, 90, 91])
    assert found.metrics["r2"] == pytest.approx(truth)
    assert found.metrics["mine"] == 3.0
    assert "mine" not in found.figures
    open_round = combined([site, other], None)
    assert open_round.metrics == {"mine": 3.0}, "no average is called r2"


def numbers(target: list[float], predicted: list[float]) -> Tallies:
    tallies = tally_numbers(np.array(target, float), np.array(predicted, float))
    assert tallies is not None
    return tallies


def test_models_are_compared_by_the_log_loss_of_all_rows_and_the_untrained_one_never_wins():
    bench = bench_of("a", "b", rounds=3)
    hand_in_tallies(bench, 0.9, 0.7, 0.6)  # model 0 is the best of them
    hand_in_tallies(bench, 0.65)
    bench.restart()
    winner = bench.evaluation.winner
    assert (winner.metric, winner.round) == ("log_loss", 1)
    assert winner.value == pytest.approx(-np.log(0.7))
    (record, *_) = bench.history.rounds
    assert record.evaluation.figures["log_loss"].value == pytest.approx(-np.log(0.9))
    assert record.evaluation.metrics["accuracy"] == 1.0, "and not the sites' 0.123"
    assert record.sites["a"].evaluation.tallies is None, "what follows from them is kept"
    assert bench.evaluation.no_better == ""
    assert bench.evaluation.shown == (1, pooled(0.7))


def test_model_that_is_no_better_than_the_commonest_class_is_told_and_never_the_best():
    """The shares of the classes, 0.3 and 0.7, have log loss 0.611."""
    bench = bench_of("a", "b", rounds=2)
    hand_in_tallies(bench, 0.5, 0.54)
    assert bench.evaluation.no_better.startswith(
        "Model 1 is no better than always predicting the commonest class: its log_loss over the "
        "held-out rows is 0.6162, and that of the commonest class 0.6109; no model was better"
    )
    assert bench.evaluation.winner is None
    number, tallies = bench.evaluation.shown or (None, None)
    assert (number, tallies) == (1, pooled(0.54)), "the latest, where none is the best"
    hand_in_tallies(bench, 0.56)
    assert bench.evaluation.no_better == ""
    assert bench.evaluation.winner is not None
    assert bench.session.cause == "completed"


def test_patience_counts_by_the_loss_of_all_rows_without_a_named_metric():
    bench = bench_of("a", "b", rounds=50, evaluate_patience=2)
    hand_in_tallies(bench, 0.5, 0.9, 0.8, 0.85)
    assert bench.session.is_trained
    hand_in_tallies(bench, 0.9)
    assert bench.evaluation.ended_because == (
        "stopped early: log_loss has not improved since round 1"
    )


@pytest.mark.parametrize(("rows", "stops"), [(40, False), (60, True)])
def test_default_patience_needs_enough_held_out_rows(rows, stops):
    """The loss of few rows is smallest where chance has it, which ends no training."""
    bench = bench_of("a", "b", passes=50, epochs=1, evaluate_patience=2, evaluate_patience_rows=100)
    hand_in_tallies(bench, 0.5, 0.9, 0.8, 0.85, rows=rows)
    assert bench.session.is_trained is stops
    if stops:
        hand_in_tallies(bench, 0.9)
        assert bench.evaluation.ended_because == (
            "stopped early: log_loss has not improved since round 1, for 3 passes"
        )


def test_patience_of_trees_counts_iterations_and_no_levels():
    """Only models whose trees are whole are measured, and levels do not count."""
    bench = bench_of(
        "a", "b", passes=9, rounds=9, epochs=1, stride=Stride(levels=3), evaluate_patience=2
    )
    hand_in_tallies(bench, *[0.5, 0.5, 0.5], *[0.9] * 3, *[0.8] * 3)
    assert not bench.session.is_trained
    hand_in_tallies(bench, 0.7)
    assert (bench.session.model.round, bench.session.is_trained) == (10, True)


def test_session_of_an_earlier_version_is_evaluated_where_a_tree_is_whole():
    """The rules of such a session do not tell the levels of a tree; the models do."""
    bench = bench_of("a", "b", rounds=9, epochs=1, evaluate_patience=2, workload="xgboost")
    first = replace(bench.session.model, metadata={"steps_per_pass": "3"})
    bench.session = replace_session(bench.session, plan=None, model=first)
    asked = []
    for number in range(9):
        asked.append(bench.start("a").evaluate)
        hand_in_tallies(bench, 0.5 + number / 20)
    assert asked == [True, False, False] * 3
    assert bench.session.plan.rounds_per_pass == 3


def test_averages_choose_no_model_unless_their_metric_is_named():
    bench = bench_of("a", rounds=3)
    train(bench, 0.1, 0.9, 0.5)
    assert bench.evaluation.best is None


def test_site_with_too_few_rows_is_told_and_counts_nowhere():
    bench = bench_of("a", "b", rounds=2)
    for name in bench.outstanding:
        few = Evaluation(0, {}, withheld=True)
        bring(bench, name, few if name == "b" else told(name, 0.5))
    assert bench.history.withheld == ["b"]
    (record, *_) = bench.history.rounds
    assert record.evaluation.num_samples == 40


def test_late_evaluation_leaves_figures_alone_whose_sums_are_gone():
    """A round that is long over has the figures of its sites, and no sums to add a late one to."""
    bench = bench_of("a", "b", rounds=20, **ASP)
    for _ in range(TALLIED_ROUNDS + 1):
        bring(bench, "a", told("a", 0.9))
    (before, *_) = bench.history.rounds
    bring(bench, "b", told("b", 0.6))
    assert bench.happened(e.UpdateAccepted)[-1].staleness == TALLIED_ROUNDS + 1
    (record, *_) = bench.history.rounds
    assert record.evaluation == before.evaluation


def test_models_of_steps_are_evaluated_once_a_pass_over_the_data():
    bench = bench_of("a", passes=3, epochs=1, stride=Stride(levels=3), evaluate_every=1)
    asked = []
    for _ in range(7):
        asked.append(bench.start("a").evaluate)
        train(bench, 0.5)
    assert asked == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("metric", ["sensitivity", "specificity"])
def test_figure_that_one_class_alone_makes_perfect_has_no_baseline_to_beat(metric):
    """Always predicting one class has a sensitivity or a specificity of 1."""
    bench = bench_of("a", "b", rounds=2, evaluate_metric=metric)
    hand_in_tallies(bench, 0.9, 0.9)
    assert bench.evaluation.no_better == ""
    assert bench.evaluation.winner is not None


@pytest.mark.parametrize("metric", ["auc", "sensitivity", "accuracy"])
def test_model_whose_loss_is_above_the_baseline_is_told_and_never_the_best(metric):
    """Probabilities far off have a log loss above 0.611, that of the shares of the classes."""
    bench = bench_of("a", "b", rounds=4, evaluate_metric=metric)
    hand_in_tallies(bench, 0.5, 0.51)
    assert bench.evaluation.no_better == (
        "Model 1 is no better than always predicting the commonest class: its log_loss over the "
        "held-out rows is 0.6733, and that of the commonest class 0.6109; no model was better."
    )
    assert bench.evaluation.winner is None
    hand_in_tallies(bench, 0.9)
    assert bench.evaluation.no_better == ""
    hand_in_tallies(bench, 0.51)
    assert bench.evaluation.no_better.endswith(f"the best model is 2, with {metric} 1.")
    assert bench.evaluation.winner.round == 2


def test_patience_without_a_metric_for_averages_is_warned_of():
    bench = bench_of("a", rounds=9, evaluate_patience=3)
    train(bench, 0.5)
    (warning,) = evaluation_warnings(bench.session, bench.history)
    assert "evaluate.patience stops nothing" in warning
    with_tallies = bench_of("a", "b", rounds=9, evaluate_patience=3)
    hand_in_tallies(with_tallies, 0.9)
    assert evaluation_warnings(with_tallies.session, with_tallies.history) == []


def test_sites_that_are_not_in_the_figures_are_named():
    """A diverged model sends no sums, and the figures of the others look well."""
    bench = bench_of("a", "b", rounds=2)
    hand_in(bench, "a", {"mse": 1e130}, 5)
    bring(bench, "b", told("b", 0.9))
    history = bench.history
    assert history.not_in_figures == ["a"]
    (warning,) = evaluation_warnings(bench.session, history)
    assert "without those of a, whose predictions" in warning


def test_metric_that_models_are_compared_by_and_later_lacks_is_warned_of():
    bench = bench_of("a", "b", rounds=3)
    hand_in_tallies(bench, 0.9, 0.9)
    assert not bench.evaluation.lacks_metric
    without = replace(told("a", 0.9), tallies=tally_classes(2, *(np.arange(40) % 10 < 3,) * 2))
    bring(bench, "a", without)
    bring(bench, "b", told("b", 0.9))
    (warning,) = evaluation_warnings(bench.session, bench.history)
    assert warning.startswith("The latest evaluation lacks log_loss")


def test_ensemble_that_stays_at_the_sites_is_warned_of():
    """Bagging shows no figure by default, and has no model that anybody could take home."""
    bench = bench_of("a", workload="bagging", workload_options='{"vote": "hard"}')
    (warning,) = evaluation_warnings(bench.session, bench.history)
    assert "workload.options.publish = true" in warning
    bench = bench_of("a", workload="bagging", workload_options='{"publish": true}')
    assert not evaluation_warnings(bench.session, bench.history)


def test_model_whose_rows_weigh_by_class_is_not_judged_by_its_log_loss():
    """Probabilities are those of classes of equal size, too high for rare ones."""
    weighed = '{"class_weight": "balanced"}'
    bench = bench_of("a", "b", rounds=2, evaluate_metric="auc", workload_options=weighed)
    hand_in_tallies(bench, 0.5, 0.51)
    hand_in_tallies(bench, 0.51)
    assert bench.evaluation.no_better == ""
    assert bench.evaluation.winner is not None
