"""A data set and a declared workload make a participant."""

import json
from dataclasses import replace

import numpy as np
import pytest

from support.learning import table_of
from xain_participant.sdk.evaluations import evaluation_message, from_json, to_json
from xain_participant.sdk.participant import (
    Assignment,
    Evaluation,
    Participant,
    call_train_round,
    take_evaluation,
    take_metrics,
)
from xain_participant.tables.workload_participant import WorkloadParticipant
from xain_workloads.comparing.gains import Budget
from xain_workloads.errors import Diverged, WorkloadError
from xain_workloads.model import Model
from xain_workloads.tables.data import Dataset, load
from xain_workloads.tables.preprocessing import PreprocessingOptions
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model


@pytest.fixture(scope="module")
def iris() -> Dataset:
    return load("iris")


@pytest.fixture(scope="module")
def model(iris: Dataset) -> Model:
    return create("sgd").initial_model([iris.profile()])


def train(participant: Participant, model: Model, epochs: int = 2) -> tuple[np.ndarray, int]:
    participant.on_model(model.layout, model.metadata)
    return call_train_round(participant, model.vector.copy(), epochs, 0)


def test_participant_trains_the_workload_of_the_metadata(iris, model):
    participant = WorkloadParticipant(iris, seed=3)
    vector, num_samples = train(participant, model)
    expected = create("sgd").train(model, iris, epochs=2, epoch_base=0, seed=3)
    assert num_samples == 150
    assert vector.tobytes() == expected.vector.tobytes()
    (point,) = take_metrics(participant)
    assert point.values["seconds"] >= 0
    assert point.values == {
        **expected.metrics,
        "samples": 150.0,
        "seconds": point.values["seconds"],
    }


def test_workload_follows_the_metadata_of_each_model(iris, model):
    """Options that change between two rounds count from the second one on, and back."""
    participant = WorkloadParticipant(iris, seed=3)
    other = create("sgd", {"alpha": 0.1}).initial_model([iris.profile()])
    for one, workload in ((model, create("sgd")), (other, create("sgd", {"alpha": 0.1}))) * 2:
        for _ in range(2):
            vector, _ = train(participant, one)
            expected = workload.train(one, iris, epochs=2, epoch_base=0, seed=3)
            assert vector.tobytes() == expected.vector.tobytes()


def test_profile_has_the_statistics_of_the_columns(iris):
    """A Dataset is taken as a table of number columns."""
    table = Table.from_dataset(iris)
    assert WorkloadParticipant(iris).profile() == table.profile()
    assert table.profile().statistics


def test_rows_set_aside_measure_the_global_model(iris, model):
    test = iris.subset(range(10))
    participant = WorkloadParticipant(iris, test=test)
    assert participant.can_evaluate
    participant.on_round(Assignment("s1", 0, evaluate=True))
    train(participant, model)
    before, after = take_metrics(participant)
    assert sorted(before.values) == ["test_accuracy", "test_loss"]
    assert sorted(after.values) == ["accuracy", "loss", "samples", "seconds"]
    evaluation = take_evaluation(participant)
    assert evaluation.num_samples == 10
    measured = create("sgd").measure(model, test)
    assert (evaluation.metrics, evaluation.tallies) == (measured.metrics, measured.tallies)
    assert from_json(json.loads(json.dumps(to_json(evaluation)))) == evaluation
    assert from_json([3, {"accuracy": 0.5}]) == Evaluation(3, {"accuracy": 0.5}), "as it was kept"


def test_fewer_rows_than_the_coordinator_asks_for_are_not_told(iris, model):
    participant = WorkloadParticipant(iris, test=iris.subset(range(10)))
    participant.on_round(Assignment("s1", 0, evaluate=True, min_rows=11))
    train(participant, model)
    assert take_evaluation(participant) == Evaluation(0, {}, withheld=True)
    (after,) = take_metrics(participant)
    assert "test_loss" not in after.values


def test_model_is_not_measured_in_rounds_that_do_not_ask_for_it(iris, model):
    participant = WorkloadParticipant(iris, test=iris.subset(range(10)))
    participant.on_round(Assignment("s1", 1, evaluate=False))
    train(participant, model)
    assert len(take_metrics(participant)) == 1
    assert take_evaluation(participant) is None


def test_evaluation_round_measures_without_training(iris, model):
    participant = WorkloadParticipant(iris, test=iris.subset(range(10)))
    participant.on_model(model.layout, model.metadata)
    participant.evaluate_round(model.vector)
    (point,) = take_metrics(participant)
    assert sorted(point.values) == ["test_accuracy", "test_loss"]
    assert take_evaluation(participant) is not None


def test_evaluation_of_the_last_model_comes_with_a_local_model(iris, model, caplog):
    """The site is told what it gains, compared with the last model and with the best before it; of
    a model with zeros alone, its own is the better one."""
    participant = WorkloadParticipant(iris, test=iris.subset(range(0, 150, 5)))
    named = {**model.metadata, "columns": json.dumps({"names": iris.feature_names})}
    participant.on_model(model.layout, named)
    assigned = Assignment("s1", 4, "evaluate", local=Budget(3, 60.0), importance_limit_s=60.0)
    participant.on_round(replace(assigned, best=model.vector, best_round=2))
    with caplog.at_level("INFO"):
        participant.evaluate_round(model.vector)
    evaluation = take_evaluation(participant)
    local = evaluation.local
    assert [one.round for one in local.differences] == [4, 2]
    assert all(one.total < 0 for one in local.differences)
    assert from_json(json.loads(json.dumps(to_json(evaluation)))) == evaluation
    sent = evaluation_message(evaluation)
    assert sent.local.tallies.confusion
    assert len(sent.local.differences) == 2
    assert [one.round for one in evaluation.importances] == [4, 2]
    assert [list(one.columns) for one in sent.importances] == [[0, 1, 2, 3]] * 2
    assert evaluation.importances[0].totals == (0.0,) * 4, "of a model with zeros alone"
    (line,) = (one for one in caplog.messages if "local_model" in one)
    assert "A model of this site's rows alone is better here than that of all sites" in line


def test_model_that_has_run_away_is_compared_with_no_local_model():
    """The coordinator refuses an evaluation with tallies of a local model alone."""
    numbers = load("diabetes", task="regression")
    workload = create("sgd", {"task": "regression", "dtype": "float64"})
    model = workload.initial_model([numbers.profile()])
    participant = WorkloadParticipant(numbers, test=numbers.subset(range(0, 400, 5)))
    participant.on_model(model.layout, model.metadata)
    participant.on_round(Assignment("s1", 4, "evaluate", local=Budget(3, 60.0)))
    participant.evaluate_round(np.full_like(model.vector, 1e80))
    evaluation = take_evaluation(participant)
    assert evaluation.tallies is None
    assert evaluation.local is None


def test_no_rows_set_aside_are_no_test(iris, model):
    participant = WorkloadParticipant(iris, test=iris.subset([]))
    assert not participant.can_evaluate
    train(participant, model)
    assert len(take_metrics(participant)) == 1


def test_no_epochs_change_nothing(iris, model):
    """XAIN's configuration allows epochs = 0."""
    vector, num_samples = train(WorkloadParticipant(iris), model, epochs=0)
    assert vector.tobytes() == model.vector.tobytes()
    assert num_samples == 150


def test_without_a_workload_the_error_says_what_to_configure(iris):
    participant = WorkloadParticipant(iris)
    participant.on_model((), {})
    with pytest.raises(WorkloadError, match=r"no workload .*--workload sgd"):
        participant.init_weights()
    with pytest.raises(WorkloadError, match="no workload"):
        participant.train_round(np.zeros(3), 1, 0)


def test_divergence_names_the_column_that_is_not_scaled():
    """Smaller steps would not help. With scaled columns the steps alone are to blame."""
    numbers = np.random.default_rng(0).normal(0, 1, 200)
    table = table_of({"age": numbers, "salary": 1e6 * numbers}, numbers)
    for scaling, eta0, names_it in (("none", 0.01, True), ("standard", 1e6, False)):
        workload = create("sgd", {"task": "regression", "eta0": eta0})
        model = initial_model(workload, [table.profile()], PreprocessingOptions(scaling))
        site = WorkloadParticipant(table)
        site.on_model(model.layout, model.metadata)
        with pytest.raises(Diverged, match="lower eta0") as told:
            site.train_round(model.vector, 5, 0)
        assert ("column 'salary'" in str(told.value)) == names_it
        assert ('workload.preprocessing.scaling = "standard"' in str(told.value)) == names_it
