"""Trackers of a script's session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xain


class Remembering:
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.ended: list[int] = []

    def on_round(self, record: xain.Record) -> None:
        self.rounds.append(record.round)

    def on_end(self, result: Any) -> None:
        self.ended.append(result.model)


def run(
    folder: Path, address: str, tracker: Any, *, start: Callable[..., None], pause_at: int = -1
) -> None:
    with xain.session(
        {"w": np.zeros(3)},
        rounds=3,
        min_participants=2,
        data_dir=folder,
        address=address,
        trackers=[tracker],
        linger_s=0.0,
        progress=False,
    ) as session:
        start()
        for round_ in session:
            round_.run()
            if round_.number == pause_at:
                session.pause()


def test_round_that_a_tracker_has_taken_is_not_told_again(
    tmp_path: Path, address: str, sites: Callable[..., None]
) -> None:
    first, later = Remembering(), Remembering()
    run(tmp_path, address, first, start=sites, pause_at=1)
    run(tmp_path, address, later, start=lambda: None)
    assert (first.rounds, first.ended) == ([0, 1], [])
    assert (later.rounds, later.ended) == ([2], [3])


def test_mlflow_has_one_run_of_a_session_that_was_left_and_gone_on_with(
    tmp_path: Path,
    address: str,
    sites: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    run(tmp_path, address, xain.MLflow("wards"), start=sites, pause_at=1)
    run(tmp_path, address, xain.MLflow("wards"), start=lambda: None)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("wards")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    steps = [one.step for one in client.get_metric_history(found.info.run_id, "loss")]
    assert steps == [0, 1, 2]


def test_tracker_that_fails_ends_no_session(
    tmp_path: Path,
    address: str,
    sites: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Away(Remembering):
        def on_round(self, record: xain.Record) -> None:
            super().on_round(record)
            raise OSError("no route to host")

    away = Away()
    run(tmp_path, address, away, start=sites)
    assert (away.rounds, away.ended) == ([0, 1, 2], [3])
    text = "Away.on_round() has failed: OSError: no route to host\n"
    assert capsys.readouterr().err.count(text) == 3


@pytest.mark.parametrize(
    ("tracker", "wheel"),
    [
        (lambda folder: xain.TensorBoard(folder / "runs"), "tensorboard"),
        (lambda folder: xain.WeightsAndBiases(mode="offline"), "wandb"),
    ],
)
def test_tracker_whose_program_is_missing_says_what_to_install(
    tmp_path: Path, tracker: Any, wheel: str
) -> None:
    try:
        __import__(wheel)
    except ImportError:
        pass
    else:
        pytest.skip(f"{wheel} is installed")
    with pytest.raises(xain.SessionFailed, match=f"pip install {wheel}"):
        tracker(tmp_path)
