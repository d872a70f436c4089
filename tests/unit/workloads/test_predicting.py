"""Predictions for the rows of a file: what is written of each, and what the model does not know."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from xain_coordinator.cli.main import app as coordinator
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_UNKNOWN_INPUT
from xain_participant.cli.cli import app as participant
from xain_workloads.exported import formats
from xain_workloads.exported.formats import Exported
from xain_workloads.exported.predicting import predict_file, predict_with
from xain_workloads.tables.data import Task, load_table
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.workload import create, fit_centralised

SEXES = ("female", "male")


def trained(folder: Path, task: Task = "classification") -> Exported:
    """A model of age and sex, of which one number is missing in training."""
    lines = ["age,sex,outcome"]
    for i in range(60):
        age = "" if i == 7 else str(20 + i)
        value = f"{20.0 + i}" if task == "regression" else "yn"[i % 2]
        lines.append(f"{age},{SEXES[i % 2]},{value}")
    (folder / "train.csv").write_text("\n".join(lines))
    table = load_table(folder / "train.csv", target="outcome", task=task)
    model = fit_centralised(create("sgd", {"task": task}), table, epochs=20, seed=1)
    about = {
        "target": "outcome",
        "classes": ["n", "y"] if task == "classification" else [],
        "columns": formats.columns_of(model.metadata),
        "metadata": dict(model.metadata),
    }
    return Exported(about, model)


def predicted(
    folder: Path, exported: Exported, text: str, **options: Any
) -> tuple[int, list[list[str]], list[str]]:
    """Exit status, cells of the file that is written, and lines to the user."""
    (folder / "new.csv").write_text(text)
    notes: list[str] = []
    status = predict_file(
        exported.about,
        predict_with(exported),
        folder / "new.csv",
        folder / "out.csv",
        note=notes.append,
        **options,
    )
    with (folder / "out.csv").open(newline="") as file:
        return status, list(csv.reader(file)), notes


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    return trained(tmp_path)


def test_each_line_has_row_class_and_probabilities(tmp_path, exported):
    """Probabilities are in the order of the classes, and of sum 1; rows are counted from 1."""
    status, cells, notes = predicted(tmp_path, exported, "age,sex\n30,male\n50,female\n")
    assert (status, notes) == (EXIT_OK, [])
    assert cells[0] == ["row", "outcome", "p(n)", "p(y)"]
    assert [line[:2] for line in cells[1:]] == [["1", "n"], ["2", "y"]]
    for line in cells[1:]:
        shares = list(map(float, line[2:]))
        assert math.isclose(sum(shares), 1, abs_tol=1e-5)
        assert "ny"[int(np.argmax(shares))] == line[1]


def test_ids_stay_as_they_are_in_the_file(tmp_path, exported):
    """007 and 1.10 are no numbers."""
    text = "age,patient,sex\n30,007,male\n31,1.10,male\n"
    _, cells, _ = predicted(tmp_path, exported, text, id_column="patient")
    assert [line[0] for line in cells] == ["patient", "007", "1.10"]


def test_regression_has_numbers(tmp_path):
    exported = trained(tmp_path, "regression")
    text = "age,sex,outcome\n30,male,30\n50,female,\n60,male,60\n"
    status, cells, notes = predicted(tmp_path, exported, text)
    assert status == EXIT_OK
    assert cells[0] == ["row", "outcome"]
    assert float(cells[1][1]) == pytest.approx(30, abs=3)
    score, error = notes
    assert score.startswith("R² 0.9")
    assert " of 2 rows (" in score
    assert error.startswith("  RMSE ")


def test_categories_that_the_model_does_not_know_are_named(tmp_path, exported):
    """With the share of the rows and what the model knows; the predictions are written first, and
    the score says on how many rows it stands."""
    text = "age,sex,outcome\n" + "30,M,n\n" * 3 + "30,F,y\n"
    status, cells, notes = predicted(tmp_path, exported, text)
    assert status == EXIT_UNKNOWN_INPUT
    assert len(cells) == 5
    warning, score, auc, _, honest, end = notes
    assert warning == (
        "warning: column 'sex': 4 of 4 values are unknown to the model, which knows"
        " 'female', 'male'; the file has 'M', 'F'"
    )
    assert " of 4 rows (95 % interval " in score
    assert score.endswith("always the commonest class: 0.75)")
    assert auc.startswith("  AUC 0.")
    assert honest.startswith("each of these rows")
    assert "100%" in end
    assert "--max-unknown" in end


def test_score_of_rows_of_one_class_has_no_negative_zero(tmp_path, exported):
    """Always predicting the shares of the classes has a log loss of 0 there, and not of -0."""
    _, _, notes = predicted(tmp_path, exported, "age,sex,outcome\n" + "30,male,n\n" * 6)
    (loss,) = (note for note in notes if "log loss" in note)
    assert loss.endswith("always the shares of the classes: 0)")


def test_score_without_the_rows_of_unknown_values_is_told_too(tmp_path, exported):
    text = "age,sex,outcome\n" + "30,male,n\n" * 9 + ",male,y\n"
    status, _, notes = predicted(tmp_path, exported, text)
    assert status == EXIT_OK
    known, score, _, loss, without, *_ = notes
    assert known == "column 'age': 1 of 10 values are missing, as were 2% in training"
    assert score.startswith("accuracy 0.9000 of 10 rows (")
    assert loss.startswith("  log loss ")
    assert without.startswith("accuracy 1.0000 of the 9 rows without a missing value")


@pytest.mark.parametrize(("share", "status"), [(0.49, EXIT_UNKNOWN_INPUT), (0.5, EXIT_OK)])
def test_status_depends_on_the_share_of_one_column(tmp_path, share, status, exported):
    text = "age,sex\n30,male\n31,M\n"
    assert predicted(tmp_path, exported, text, max_unknown=share)[0] == status


def test_rows_that_are_as_incomplete_as_those_of_training_are_relied_on(tmp_path):
    """A column that half of the patients lacked in training is no reason to doubt predictions of
    patients like them; one that all of them lack is."""
    lines = ["age,lab,outcome"]
    lines += [f"{20 + i},{i if i % 2 else ''},{'yn'[i % 3 == 0]}" for i in range(60)]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    table = load_table(tmp_path / "train.csv", target="outcome")
    model = fit_centralised(create("sgd", {}), table, epochs=2, seed=1)
    about = {"classes": ["n", "y"], "columns": formats.columns_of(model.metadata)}
    exported = Exported({**about, "metadata": dict(model.metadata)}, model)
    status, _, (known,) = predicted(tmp_path, exported, "age,lab\n30,5\n31,\n32,\n")
    assert status == EXIT_OK
    assert known == "column 'lab': 2 of 3 values are missing, as were 50% in training"
    status, _, (_, end) = predicted(tmp_path, exported, "age,lab\n30,\n31,\n")
    assert status == EXIT_UNKNOWN_INPUT
    assert "does not know 100% of the values, in training 50%, and at most 20% more" in end


@pytest.mark.parametrize("outcomes", [("", ""), ("n", "")])
def test_rows_without_outcome_are_predicted(tmp_path, outcomes, exported):
    """A column of outcomes may be blank; the rows that have one are scored."""
    text = "age,sex,outcome\n" + "".join(f"30,male,{outcome}\n" for outcome in outcomes)
    status, cells, notes = predicted(tmp_path, exported, text)
    assert (status, len(cells)) == (EXIT_OK, 3)
    assert any(note.startswith("accuracy") for note in notes) == any(outcomes)


def test_classes_of_another_name_are_not_scored_as_wrong(tmp_path, exported):
    text = "age,sex,outcome\n30,male,no\n30,female,y\n"
    _, _, notes = predicted(tmp_path, exported, text)
    other, score, *_ = notes
    assert other.startswith("1 rows are not scored: their class is 'no'")
    assert score.startswith("accuracy 1.0000 of 1 rows (")


@pytest.mark.parametrize("suffix", [".skops", ".npz"])
def test_files_of_all_formats_have_the_same_probabilities(tmp_path, suffix, exported):
    assert exported.model is not None
    path = tmp_path / f"model{suffix}"
    about = {key: value for key, value in exported.about.items() if key != "metadata"}
    formats.write(path, exported.model, about)
    text = "age,sex\n30,male\n,F\n"
    _, expected, notes = predicted(tmp_path, exported, text, max_unknown=1.0)
    _, cells, same_notes = predicted(tmp_path, formats.read(path), text, max_unknown=1.0)
    assert (cells, same_notes) == (expected, notes)


@pytest.mark.parametrize("app", [coordinator, participant])
def test_both_programs_predict_alike_and_take_how_the_file_is_written(tmp_path, app, exported):
    """The dialect in the model holds for the file, and --set counts more."""
    assert exported.model is not None
    about = {key: value for key, value in exported.about.items() if key != "metadata"}
    about["dialect"] = Dialect(rename={"Alter": "age"}, missing=("-",)).to_json()
    formats.write(tmp_path / "model.npz", exported.model, about)
    (tmp_path / "new.csv").write_text("Alter;sex\n30,5;male\n-;female\nunclear;male\n")
    command = ["predict", f"--model={tmp_path}/model.npz", f"--data={tmp_path}/new.csv"]

    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == EXIT_FAILED
    assert "'unclear'" in refused.stderr
    setting = 'data.missing = ["-", "unclear"]'
    also = 'data.rename."Geschlecht" = "sex"'  # which leaves the model's other names
    found = CliRunner().invoke(app, [*command, "--set", setting, "--set", also])
    assert found.exit_code == EXIT_UNKNOWN_INPUT, found.stderr
    assert "column 'age': 2 of 3 values are missing" in found.stderr
    assert [line[:3] for line in found.stdout.splitlines()] == ["row", "1,n", "2,y", "3,n"]
    wrong = CliRunner().invoke(app, [*command, "--set=data.decimals=,"])
    assert wrong.exit_code == EXIT_BAD_CONFIG
    assert "did you mean data.decimal?" in wrong.stderr
