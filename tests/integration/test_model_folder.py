"""A session's folder `models`: which file is which, for people and for --from-model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from integration.conftest import config_for
from support.wire import inside
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.assembly.warm_start import load_model_file
from xain_coordinator.export.trained import open_files
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.upkeep import model_copies
from xain_coordinator.upkeep.model_copies import ModelCopies
from xain_wire.fl import coordinator_pb2 as pb

PROFILE = pb.DataProfile(num_samples=5, num_features=2, classes=["a", "b"])
SETTINGS = {"rounds": {"rounds": 2}, "workload": {"name": "sgd"}}


async def trained(start, join) -> SessionCoordinator:
    """A finished session of a linear model of three numbers, stopped at once."""
    coordinator = await start(**SETTINGS)
    member = join(coordinator, "a")
    await member.rendezvous(PROFILE)
    for round_ in range(2):
        await member.until(pb.ROUND, round_)
        await member.hand_in(np.float32([1.0 + round_, 2.0, 3.0]), round_=round_)
    await member.until(pb.FINISHED, 1)
    await coordinator.stop()
    return coordinator


def folder_of(root: Path, coordinator: SessionCoordinator) -> Path:
    return root / "weights" / coordinator.driver.session.session_id / "models"


async def test_model_folder_has_a_file_for_each_round(start, join, tmp_path):
    """Each global model has a name with its round, and the last one is a link to its own; numpy
    reads them. After the loss of the folder the next start makes it anew."""
    coordinator = await trained(start, join)
    models = folder_of(tmp_path, coordinator)
    names = ["index.json", "last.npy", "round-0000.npy", "round-0001.npy", "round-0002.npy"]
    for _ in range(2):
        assert sorted(path.name for path in models.iterdir()) == names
        assert (models / "last.npy").readlink() == Path("round-0002.npy")
        assert np.load(models / "last.npy").tolist() == [2.0, 2.0, 3.0]
        assert np.load(models / "round-0001.npy").tolist() == [1.0, 2.0, 3.0]
        index = json.loads((models / "index.json").read_text())
        assert index["last"] == {"round": 2, "file": "../2/global.weights"}
        assert (models / index["last"]["file"]).exists()
        assert index["best"] is None
        shutil.rmtree(models)
        again = await start(**SETTINGS)
        await again.stop()


async def killed_before_its_models_are_copied(start, join, monkeypatch) -> SessionCoordinator:
    """A finished session whose two small models lie in its journal alone."""
    coordinator = await start(**SETTINGS)
    member = join(coordinator, "a")
    await member.rendezvous(PROFILE)
    with monkeypatch.context() as killed:
        killed.setattr(ModelCopies, "_copy", lambda self, keys: None)
        for round_ in range(2):
            await member.until(pb.ROUND, round_)
            await member.end(inside(np.float32([1.0 + round_, 2.0, 3.0])), 1, round_)
        await member.until(pb.FINISHED, 1)
        await coordinator.stop()
    return coordinator


async def test_small_models_of_a_killed_coordinator_are_in_its_journal(
    start, join, tmp_path, monkeypatch
):
    """Commands read them there, and the start of another session brings them to the store."""
    coordinator = await killed_before_its_models_are_copied(start, join, monkeypatch)
    session_id = coordinator.driver.session.session_id
    path = tmp_path / "weights" / session_id / "2" / "global.weights"
    assert not path.exists()
    with open_files(config_for(tmp_path, **SETTINGS)) as models:
        assert models.load(models.choose("last").model).vector.tolist() == [2.0, 2.0, 3.0]
    again = await start(**SETTINGS, new_session=True)
    assert np.load(path).tolist() == [2.0, 2.0, 3.0]
    await again.stop()


async def test_new_session_is_not_opened_while_earlier_models_cannot_be_copied(
    start, join, tmp_path, monkeypatch
):
    """The new session would hide them for good."""
    coordinator = await killed_before_its_models_are_copied(start, join, monkeypatch)
    session_id = coordinator.driver.session.session_id
    config = config_for(tmp_path, **SETTINGS)

    def away(*_: object) -> None:
        raise StoreUnavailable("no route")

    refused = SessionCoordinator(config, new_session=True)
    with monkeypatch.context() as broken:
        broken.setattr(model_copies, "publish", away)
        with pytest.raises(StoreUnavailable):
            await refused.start()
    await refused.stop()
    again = SessionCoordinator(config)
    await again.start()
    assert again.driver.session.session_id == session_id
    await again.stop()
    path = tmp_path / "weights" / session_id / "2" / "global.weights"
    assert np.load(path).tolist() == [2.0, 2.0, 3.0]


async def test_best_model_is_a_link_of_its_own(enter, start, tmp_path):
    coordinator = await start(
        rounds={"rounds": 2, "initial_weights": "average"},
        evaluate={"metric": "accuracy", "direction": "max"},
    )
    [member] = await enter(coordinator, "a")
    for round_, accuracy in ((0, None), (1, 0.75)):
        await member.until(pb.ROUND, round_)
        ref = await member.upload([1.0 + round_], round_)
        measured = accuracy and pb.Evaluation(num_samples=4, metrics={"accuracy": accuracy})
        await member.stub.EndTrainingRound(
            pb.EndTrainingRoundRequest(
                participant_id="a",
                number_samples=1,
                round=round_,
                update=ref,
                evaluation=measured or None,
            ),
            metadata=member.metadata,
        )
    await member.until(pb.FINISHED, 1)
    await coordinator.stop()
    models = folder_of(tmp_path, coordinator)
    assert coordinator.driver.session.evaluation.best.round == 1
    assert (models / "best.npy").readlink() == Path("round-0001.npy")
    best = json.loads((models / "index.json").read_text())["best"]
    assert best == {"round": 1, "file": "../1/global.weights", "accuracy": 0.75}


async def test_a_session_starts_from_a_file_of_the_folder(start, join, tmp_path):
    """index.json brings layout, metadata and profile, so that a workload can go on, in another
    data folder too."""
    coordinator = await trained(start, join)
    last = folder_of(tmp_path, coordinator) / "last.npy"
    other = SessionCoordinator(config_for(tmp_path / "other", **SETTINGS), from_model=str(last))
    await other.start()
    await other.stop()
    model, old = other.driver.session.model, coordinator.driver.session.model
    assert (model.layout, model.metadata) == (old.layout, old.metadata)
    assert model.ref.digest == old.ref.digest
    _, profile = load_model_file(last)
    assert (profile.num_features, profile.classes) == (2, ("a", "b"))


async def test_without_links_the_index_tells(start, join, tmp_path, monkeypatch):
    """A file system without links costs the names, and no round."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    coordinator = await trained(start, join)
    assert coordinator.driver.session.cause == "completed"
    (index,) = folder_of(tmp_path, coordinator).iterdir()
    assert json.loads(index.read_text())["last"]["round"] == 2
