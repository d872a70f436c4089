"""Sessions that a script drives: rounds that it configures, models that it measures."""

import pytest
from tests.unit.core.bench import IDLE_S, Bench, make_rules, replay

from xain_coordinator.core import commands as c
from xain_coordinator.core import errors
from xain_coordinator.core import events as e
from xain_coordinator.core.script import RoundConfig
from xain_coordinator.core.values import Phase, Task
from xain_coordinator.core.view import waiting_for
from xain_wire.metadata import COMPLETED

SLOWER = RoundConfig('{"lr": 0.1}', {"b": '{"epochs": 3}'})


def scripted(rounds: int = 2, **rules: object) -> Bench:
    bench = Bench(make_rules(rounds=rounds, scripted=True, **rules))  # type: ignore[arg-type]
    bench.join("a", "b", "c")
    return bench


def test_round_waits_for_its_configuration() -> None:
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


def test_session_waits_for_its_script_without_a_limit() -> None:
    bench = scripted(idle_timeout_s=IDLE_S)
    bench.pass_time(10 * IDLE_S)
    assert bench.session.phase is Phase.STANDBY


def test_initial_weights_are_made_without_a_configuration() -> None:
    bench = scripted(initial="first")
    assert bench.session.opened.task is Task.INITIALISE
    bench.end_all()
    assert bench.session.waits_for_script
    assert bench.session.round == 1


def test_same_decision_changes_nothing_and_another_one_is_refused() -> None:
    bench = scripted()
    bench.send(c.ConfigureRound(0, SLOWER))
    bench.send(c.ConfigureRound(0, SLOWER))
    assert len(bench.happened(e.RoundConfigured)) == 1
    refusal = bench.refuses(c.ConfigureRound(0, RoundConfig()), errors.DecidedOtherwise)
    assert '{"lr": 0.1}' in str(refusal)
    bench.end_all()
    bench.send(c.ConfigureRound(0, SLOWER))  # its answer may have been lost
    bench.refuses(c.ConfigureRound(2, SLOWER), errors.StaleRound)


def test_selected_participants_alone_take_part() -> None:
    bench = scripted(min_participants=2)
    bench.send(c.ConfigureRound(0, RoundConfig(selected=("c", "b"))))
    assert set(bench.session.opened.selected) == {"b", "c"}
    bench.end("b")
    bench.end("c")
    assert bench.session.round == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RoundConfig(selected=("a", "nobody")), "no participant 'nobody'; there are: a, b, c"),
        (RoundConfig(by_site={"ward": "{}"}), "no participant 'ward'"),
        (RoundConfig(selected=("a",)), "1 participants are selected, and a round needs"),
    ],
)
def test_wrong_configuration_is_refused_by_name(config: RoundConfig, words: str) -> None:
    bench = scripted(min_participants=2)
    assert words in str(bench.refuses(c.ConfigureRound(0, config), errors.InvalidRequest))


def test_evaluation_of_a_script_counts_once_and_chooses_the_best_model() -> None:
    bench = scripted(evaluate_metric="accuracy")
    for round_, accuracy in enumerate((0.9, 0.8)):
        bench.send(c.ConfigureRound(round_, RoundConfig()))
        bench.end_all()
        measured = c.RecordEvaluation(round_ + 1, 100, {"accuracy": accuracy})
        bench.send(measured)
        bench.send(measured)
        other = c.RecordEvaluation(round_ + 1, 100, {"accuracy": 0.5})
        assert str(accuracy) in str(bench.refuses(other, errors.DecidedOtherwise))
    bench.refuses(c.RecordEvaluation(1, 100, {"accuracy": 0.9}), errors.StaleModel)
    assert len(bench.happened(e.ScriptEvaluated)) == 2
    best = bench.session.evaluation.best
    assert best is not None
    assert (best.round, best.value) == (1, 0.9)
    assert replay(bench.journal) == bench.session


def test_last_model_ends_the_session_when_the_script_is_over() -> None:
    bench = scripted(rounds=1)
    bench.send(c.ConfigureRound(0, RoundConfig()))
    bench.end_all()
    assert bench.session.phase is Phase.STANDBY
    assert "to come to the end" in waiting_for(bench.session)
    bench.send(c.EndScript())
    assert (bench.session.phase, bench.session.cause) == (Phase.FINISHED, COMPLETED)
    bench.send(c.EndScript())
    assert replay(bench.journal) == bench.session


def test_failure_of_a_script_is_the_cause_of_the_end() -> None:
    bench = scripted()
    bench.send(c.EndScript("ValueError: nan"))
    assert bench.session.cause == "the script failed: ValueError: nan"


def test_session_without_a_script_takes_no_decisions() -> None:
    bench = Bench(make_rules())
    bench.join("a")
    for command in (
        c.ConfigureRound(0, RoundConfig()),
        c.RecordEvaluation(1, 1, {}),
        c.EndScript(),
    ):
        bench.refuses(command, errors.InvalidRequest)
