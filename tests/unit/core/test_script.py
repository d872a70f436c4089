"""Sessions that a script drives: rounds that it configures, models that it measures."""

import dataclasses

import pytest
from tests.unit.core.bench import DEADLINE_S, IDLE_S, Bench, make_rules, replay

from xain_coordinator.core.view.view import waiting_for
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.effects import Notify
from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.core.vocabulary.values import Phase, Task
from xain_wire.limits import MAX_INT32
from xain_wire.metadata import COMPLETED

SLOWER = RoundConfig('{"lr": 0.1}', {"b": '{"epochs": 3}'})


def scripted(rounds: int = 2, **rules: object) -> Bench:
    bench = Bench(make_rules(rounds=rounds, scripted=True, **rules))  # type: ignore[arg-type]
    bench.join("a", "b", "c")
    return bench


def test_round_waits_for_its_configuration():
    bench = scripted()
    assert bench.session.open_round is None
    assert bench.session.waits_for_script
    assert "to configure round 0" in waiting_for(bench.session)
    bench.send(c.ConfigureRound(0, SLOWER))
    assert bench.session.opened.number == 0
    assert bench.start("a").script_config == ('{"lr": 0.1}',)
    assert bench.start("b").script_config == ('{"lr": 0.1}', '{"epochs": 3}')
    bench.end_all()
    assert bench.session.open_round is None
    assert "to configure round 1" in waiting_for(bench.session)
    assert replay(bench.journal) == bench.session


def test_initial_weights_are_made_without_a_configuration():
    bench = scripted(initial="first")
    assert bench.session.opened.task is Task.INITIALISE
    bench.end_all()
    assert bench.session.waits_for_script
    assert bench.session.round == 1


def test_same_decision_changes_nothing_and_another_one_is_refused():
    bench = scripted()
    bench.send(c.ConfigureRound(0, SLOWER))
    bench.send(c.ConfigureRound(0, SLOWER))
    assert len(bench.happened(e.RoundConfigured)) == 1
    refusal = bench.refuses(c.ConfigureRound(0, RoundConfig()), "DECIDED_OTHERWISE")
    assert '{"lr": 0.1}' in str(refusal)
    bench.end_all()
    bench.send(c.ConfigureRound(0, SLOWER))  # its answer may have been lost
    bench.refuses(c.ConfigureRound(2, SLOWER), "NOT_FITTING")


@pytest.mark.parametrize("comes", [False, True])
def test_chosen_participant_is_missing_unless_it_comes(comes):
    bench = scripted(min_participants=1)
    bench.send(c.ConfigureRound(0, RoundConfig()))
    bench.end_all()
    bench.leave("c")
    bench.send(c.ConfigureRound(1, RoundConfig(selected=("b", "c"))))
    assert bench.session.opened.selected == ("b",)
    if comes:
        bench.join("c")
        bench.end("c")
    bench.end("b")
    record = bench.history.rounds[-1]
    assert set(record.contributors) == ({"b", "c"} if comes else {"b"})
    assert record.missing == ({} if comes else {"c": "not connected"})
    assert replay(bench.journal) == bench.session


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RoundConfig(selected=("a", "nobody")), "no participant 'nobody'; there are: a, b, c"),
        (RoundConfig(by_site={"ward": "{}"}), "no participant 'ward'"),
        (RoundConfig(selected=("a",)), "1 participants are selected, and a round needs"),
    ],
)
def test_wrong_configuration_is_refused_by_name(config, words):
    bench = scripted(min_participants=2)
    assert words in str(bench.refuses(c.ConfigureRound(0, config), "INVALID_REQUEST"))


def test_evaluation_of_a_script_counts_once_and_chooses_the_best_model():
    bench = scripted(evaluate_metric="accuracy")
    for round_, accuracy in enumerate((0.9, 0.8)):
        bench.send(c.ConfigureRound(round_, RoundConfig()))
        bench.end_all()
        measured = c.RecordEvaluation(round_ + 1, 100, {"accuracy": accuracy})
        bench.send(measured)
        bench.send(measured)
        other = c.RecordEvaluation(round_ + 1, 100, {"accuracy": 0.5})
        assert str(accuracy) in str(bench.refuses(other, "DECIDED_OTHERWISE"))
    bench.refuses(c.RecordEvaluation(1, 100, {"accuracy": 0.9}), errors.StaleModel)
    assert len(bench.happened(e.ScriptEvaluated)) == 2
    best = bench.session.evaluation.best
    assert (best.round, best.value) == (1, 0.9)
    assert replay(bench.journal) == bench.session


def test_last_model_ends_the_session_when_the_script_is_over():
    bench = scripted(rounds=1)
    bench.send(c.ConfigureRound(0, RoundConfig()))
    bench.end_all()
    assert bench.session.phase is Phase.STANDBY
    assert "to come to the end" in waiting_for(bench.session)
    bench.send(c.EndScript())
    assert (bench.session.phase, bench.session.cause) == (Phase.FINISHED, COMPLETED)
    bench.send(c.EndScript())
    assert replay(bench.journal) == bench.session


def test_failure_of_a_script_is_the_cause_of_the_end():
    bench = scripted()
    bench.send(c.EndScript("ValueError: nan"))
    assert bench.session.cause == "the script failed: ValueError: nan"


def test_session_without_a_script_takes_no_decisions():
    bench = Bench(make_rules())
    bench.join("a")
    for command in (
        c.ConfigureRound(0, RoundConfig()),
        c.RecordEvaluation(1, 1, {}),
        c.EndScript(),
    ):
        bench.refuses(command, "INVALID_REQUEST")


def test_wait_for_the_script_is_not_counted_once_a_round_is_configured():
    """A script may be slow; participants that are away then have the whole idle time to come."""
    bench = scripted(min_participants=3, idle_timeout_s=IDLE_S)
    bench.pass_time(10 * IDLE_S)
    assert not bench.happened(e.TimePassed), "the journal does not grow meanwhile"
    bench.leave("c")
    bench.send(c.ConfigureRound(0, RoundConfig()))
    assert bench.session.phase is Phase.STANDBY
    bench.pass_time(IDLE_S / 2)
    bench.join("c")
    assert bench.session.opened.number == 0


def test_last_model_is_evaluated_by_the_sites_when_the_script_ends_early():
    bench = Bench(make_rules(rounds=3, scripted=True))
    bench.join("a", can_evaluate=True)
    bench.send(c.ConfigureRound(0, RoundConfig()))
    bench.end("a")
    bench.send(c.EndScript())
    assert bench.session.opened.task is Task.EVALUATE
    assert bench.start("a").script_config == ()
    bench.refuses(c.RecordEvaluation(1, 1, {"accuracy": 1.0}), "NOT_FITTING")


@pytest.mark.parametrize("num_over", [0, 1])
def test_round_that_is_open_when_the_script_ends_is_not_waited_for(num_over):
    bench = scripted(rounds=3)
    for number in range(num_over):
        bench.send(c.ConfigureRound(number, RoundConfig()))
        bench.end_all()
    bench.send(c.ConfigureRound(num_over, RoundConfig()))
    bench.send(c.EndScript())
    assert bench.session.phase is Phase.FINISHED
    assert (bench.session.cause == COMPLETED) == bool(num_over)
    assert replay(bench.journal) == bench.session


def test_evaluation_of_a_script_reaches_metrics_history_and_those_who_follow():
    bench = scripted(rounds=1, evaluate_metric="accuracy")
    bench.send(c.ConfigureRound(0, RoundConfig()))
    bench.end_all()
    bench.send(c.RecordEvaluation(1, 10, {"accuracy": 0.5}))
    assert Notify() in bench.effects
    (point,) = [point for point in bench.points if point.measurement == "evaluation"]
    assert (point.fields["accuracy"], point.fields["round"]) == (0.5, 1)
    assert point.tags == {"source": "coordinator"}
    bench.send(c.EndScript())
    record = bench.history.rounds[-1]
    assert (record.round, record.coordinator_evaluation.metrics) == (1, {"accuracy": 0.5})


def test_patience_with_evaluations_of_a_script_ends_the_training():
    bench = scripted(rounds=9, evaluate_metric="accuracy", evaluate_patience=2)
    for number, accuracy in enumerate((0.9, 0.8, 0.7)):
        bench.send(c.ConfigureRound(number, RoundConfig()))
        bench.end_all()
        bench.send(c.RecordEvaluation(number + 1, 10, {"accuracy": accuracy}))
    assert bench.session.is_trained
    assert bench.session.waits_for_script
    bench.refuses(c.ConfigureRound(3, RoundConfig()), "NOT_FITTING")
    bench.send(c.EndScript())
    assert "has not improved since round 1" in bench.session.evaluation.ended_because


def test_models_of_a_coordinator_with_data_are_not_evaluated_by_a_script():
    bench = scripted(evaluate_data=True)
    refusal = bench.refuses(c.RecordEvaluation(0, 1, {"loss": 1.0}), "INVALID_REQUEST")
    assert "evaluate.data" in str(refusal)


# --- participants chosen by name ------------------------------------------------------------------


def test_chosen_participant_that_comes_later_is_selected():
    bench = scripted()
    bench.send(c.ConfigureRound(0, RoundConfig(selected=("a", "b"))))
    bench.end_all()
    bench.leave("b")
    bench.send(c.ConfigureRound(1, RoundConfig(selected=("a", "b"))))
    assert set(bench.session.opened.selected) == {"a"}
    assert "chosen by the script, and not connected or failed: b." in waiting_for(bench.session)
    bench.join("b")
    assert set(bench.session.opened.selected) == {"a", "b"}


def test_round_waits_until_enough_of_the_chosen_are_connected():
    bench = scripted(min_participants=2, idle_timeout_s=IDLE_S)
    bench.send(c.ConfigureRound(0, RoundConfig(selected=("a", "b"))))
    bench.end_all()
    bench.leave("b")
    bench.send(c.ConfigureRound(1, RoundConfig(selected=("a", "b"))))
    assert bench.session.open_round is None
    assert "chosen for round 1: b" in waiting_for(bench.session)
    bench.pass_time(IDLE_S + 1)
    assert "round 1 has waited for participants that the script has chosen" in bench.session.cause
    assert bench.session.cause.endswith(": b")


def test_others_are_asked_at_the_deadline_when_a_chosen_participant_has_left():
    bench = scripted(min_participants=2, deadline_s=DEADLINE_S)
    bench.send(c.ConfigureRound(0, RoundConfig(selected=("a", "b"))))
    bench.end("a")
    bench.leave("b")
    assert bench.session.opened.selected == ("a",)
    assert waiting_for(bench.session) == (
        "Participants chosen by the script, and not connected or failed: b. At the deadline others "
        "are asked."
    )
    bench.pass_time(DEADLINE_S + 1)
    assert set(bench.session.opened.selected) == {"a", "c"}
    bench.end("c")
    assert bench.session.round == 1


# --- epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["gradient", "newton", "ensemble"])
def test_rule_of_one_epoch_takes_no_other(rule):
    bench = Bench(dataclasses.replace(make_rules(scripted=True, epochs=1), aggregation=rule))
    bench.join("a")
    refused = c.ConfigureRound(0, RoundConfig(site_epochs={"a": 2}))
    assert rule in str(bench.refuses(refused, "INVALID_REQUEST"))
    bench.send(c.ConfigureRound(0, RoundConfig(epochs=1)))


@pytest.mark.parametrize(
    "config",
    [
        RoundConfig(epochs=-1),
        RoundConfig(epochs=MAX_INT32 + 1),
        RoundConfig(site_epochs={"a": 0}),
        RoundConfig(site_epochs={"nobody": 1}),
    ],
)
def test_epochs_are_checked(config):
    scripted().refuses(c.ConfigureRound(0, config), "INVALID_REQUEST")


# --- sessions -------------------------------------------------------------------------------------


def test_decision_for_another_session_is_refused():
    bench = scripted()
    for command in (
        c.ConfigureRound(0, RoundConfig(), "s0"),
        c.RecordEvaluation(0, 1, {"loss": 1.0}, "s0"),
        c.EndScript(session_id="s0"),
    ):
        assert "s0" in str(bench.refuses(command, "NOT_FITTING"))
    bench.send(c.ConfigureRound(0, RoundConfig(), "s1"))
