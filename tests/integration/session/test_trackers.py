"""Trackers of a script's session."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xain
from integration.session.conftest import settings_of
from xain_coordinator.process.embedding import Coordinator
from xain_coordinator.server.operators_socket import socket_of
from xain_foundation.settings.settings import ConfigError


class Remembering:
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.ended: list[int] = []

    def on_round(self, record: xain.Record) -> None:
        self.rounds.append(record.round)

    def on_end(self, result: Any) -> None:
        self.ended.append(result.model)


def run(
    folder: Path,
    address: str,
    *trackers: Any,
    start: Callable[..., None],
    pause_at: int = -1,
    break_at: int = -1,
) -> None:
    with xain.session(
        {"w": np.zeros(3)},
        rounds=3,
        min_participants=2,
        data_dir=folder,
        address=address,
        trackers=trackers,
        linger_s=0.0,
        progress=False,
    ) as session:
        start()
        for round_ in session:
            round_.run()
            if round_.number == pause_at:
                session.pause()
            if round_.number == break_at:
                break


def test_round_that_a_tracker_has_taken_is_not_told_again(tmp_path, address, sites):
    first, later = Remembering(), Remembering()
    run(tmp_path, address, first, start=sites, pause_at=1)
    run(tmp_path, address, later, start=lambda: None)
    assert (first.rounds, first.ended) == ([0, 1], [])
    assert (later.rounds, later.ended) == ([2], [3])


def test_mlflow_has_one_run_of_a_session_that_was_left_and_gone_on_with(
    tmp_path, address, sites, monkeypatch
):
    import mlflow

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


def test_round_that_the_loop_breaks_after_is_told_too(tmp_path, address, sites):
    tracker = Remembering()
    run(tmp_path, address, tracker, start=sites, break_at=1)
    assert (tracker.rounds, tracker.ended) == ([0, 1], [2])


def test_script_of_a_coordinator_elsewhere_keeps_what_its_trackers_have_taken(
    tmp_path, address, sites
):
    settings = settings_of(tmp_path, address) | {
        "rounds.scripted": True,
        "rounds.rounds": 3,
        "rounds.min_participants": 2,
        "rounds.initial_weights": "average",
    }

    def drive(tracker: Remembering, pause_at: int = -1) -> None:
        socket = str(socket_of(tmp_path / "journal.sqlite"))
        folder = tmp_path / "script"
        with xain.connect(socket, trackers=[tracker], data_dir=folder, progress=False) as session:
            for round_ in session:
                round_.run()
                if round_.number == pause_at:
                    session.pause()

    first, later, last = Remembering(), Remembering(), Remembering()
    with Coordinator(settings):
        sites()
        drive(first, pause_at=1)
        drive(later)
        drive(last)
    # In the round before these the sites make the model.
    assert (first.rounds, first.ended) == ([1], [])
    assert (later.rounds, later.ended) == ([2], [3])
    assert (last.rounds, last.ended) == ([], [])


def test_tracker_that_fails_ends_no_session(tmp_path, address, sites, capsys):
    class Away(Remembering):
        def on_round(self, record: xain.Record) -> None:
            super().on_round(record)
            raise OSError("no route to host")

    away = Away()
    run(tmp_path, address, away, start=sites)
    assert (away.rounds, away.ended) == ([0, 1, 2], [3])
    text = "Away.on_round() has failed: OSError: no route to host\n"
    assert capsys.readouterr().err.count(text) == 3


def test_tensorboard_has_the_scalars_of_each_round(tmp_path, address, sites):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, address, xain.TensorBoard(tmp_path / "runs"), start=sites)
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    told = events.Tensors("loss")
    assert [one.step for one in told] == [0, 1, 2]
    assert [one.tensor_proto.float_val[0] for one in told] == [1.0, 1.0, 1.0]


def test_weights_and_biases_keeps_a_run_of_the_session_without_a_network(tmp_path, address, sites):
    import wandb

    tracker = xain.WeightsAndBiases(
        project="wards",
        mode="offline",
        dir=str(tmp_path),
        settings=wandb.Settings(silent=True, console="off"),
    )
    run(tmp_path, address, tracker, start=sites)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert [*folder.glob("*.wandb")]


def test_tracker_whose_program_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(xain.SessionError, match="needs wandb: pip install wandb"):
        xain.WeightsAndBiases(mode="offline")


def test_deployment_tells_a_tracker_the_figures_of_each_round(tmp_path, address, sites):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = settings_of(tmp_path, address) | {
        "metrics.trackers": ["tensorboard"],
        "rounds.rounds": 3,
        "rounds.min_participants": 2,
        "rounds.initial_weights": "average",
    }
    with Coordinator(settings) as coordinator:
        sites()
        session_id = coordinator.wait(60).session_id
    assert (tmp_path / "metrics.jsonl").exists()
    events = EventAccumulator(str(tmp_path / "runs" / session_id))
    events.Reload()
    assert [one.step for one in events.Tensors("updates")] == [0, 1, 2]
    assert [one.step for one in events.Tensors("loss")] == [1, 2]  # before, sites make the model


def test_deployment_with_a_tracker_that_is_unknown_is_refused():
    with pytest.raises(ConfigError, match=r"metrics\.trackers.*no tracker 'neptune'; there are"):
        Coordinator({"metrics.trackers": ["neptune"]})
