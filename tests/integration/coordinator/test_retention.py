"""Objects that a session leaves in its store."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from integration.conftest import config_for
from support.waiting import until
from support.wire import Code, Member, assert_refused
from xain_coordinator.core.vocabulary.keys import is_model
from xain_coordinator.export.trained import ask, open_files
from xain_coordinator.stores.opening import open_store
from xain_foundation.exit_statuses import CannotStart
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.errors import NoModel

PATIENCE_S = 20.0
ROUNDS = 4


def updates(coordinator) -> dict[int, int]:
    found = {}
    for key in sorted(coordinator.store.keys()):
        round_, _, name = key.partition("/")
        if round_.isdecimal() and name != "global":
            found[int(round_)] = found.get(int(round_), 0) + 1
    return found


def storage(folder: Path, **settings: object) -> dict[str, object]:
    return {"path": str(folder / "weights"), **settings}


@pytest.mark.parametrize(("settings", "left"), [({}, {3: 2}), ({"keep_updates": 0}, {})])
async def test_session_keeps_the_updates_of_so_many_rounds(enter, start, tmp_path, settings, left):
    """The default is the updates of the last round; models are always kept."""
    rounds = {"rounds": ROUNDS, "start_participants": 2, "min_participants": 2}
    coordinator = await start(rounds=rounds, storage=storage(tmp_path, **settings))
    members = await enter(coordinator, "a", "b")
    for round_ in range(ROUNDS):
        await members[0].until(pb.ROUND, round_)
        for member in members:
            await member.hand_in(np.full(3, round_, np.float32), round_=round_)
    await members[0].until(pb.FINISHED, ROUNDS - 1)
    await until(lambda: updates(coordinator) == left)
    models = [key for key in sorted(coordinator.store.keys()) if key.endswith("/global")]
    assert len(models) == ROUNDS + 1


async def test_updates_that_may_still_count_stay(in_round, tmp_path):
    """A participant that is behind hands in for the round that it trains, however many are over."""
    coordinator, fast, slow = await in_round(
        "fast",
        "slow",
        rounds={
            "rounds": 6,
            "start_participants": 2,
            "consistency": "asp",
            "deadline_s": 3600.0,
            "idle_timeout_s": 7200.0,
        },
        storage=storage(tmp_path, keep_updates=0),
    )
    for member in (fast, slow):
        await member.hand_in([0.0])
    await fast.until(pb.ROUND, 1)
    put = await slow.upload([7.0], round_=1)
    for round_ in (1, 2, 3):
        await fast.until(pb.ROUND, round_)
        await fast.hand_in([float(round_)], round_=round_)
    await fast.until(pb.ROUND, 4)
    # Objects of rounds that are not trained have gone; the uploads of the slow participant stay.
    await until(lambda: updates(coordinator) == {1: 2})
    await slow.end(put, round_=1)
    await slow.until(pb.ROUND, 5)
    # None of these rounds is trained any more.
    await until(lambda: updates(coordinator) == {})


async def rounds_of(member: Member, rounds: range, best: int) -> None:
    """Hand in for each round; the model of the round `best` is the best one."""
    for round_ in rounds:
        await member.until(pb.ROUND, round_)
        measured = pb.Evaluation(
            num_samples=4, metrics={"accuracy": 0.9 if round_ == best else 0.5}
        )
        request = pb.EndTrainingRoundRequest(
            participant_id="a",
            number_samples=1,
            round=round_,
            update=await member.upload([float(round_)], round_),
            evaluation=measured,
        )
        await member.stub.EndTrainingRound(request, metadata=member.metadata)


async def test_latest_models_and_the_best_one_are_kept(enter, start, tmp_path, storage_settings):
    """Also over a restart, which removes what the journal says is gone and is still there. What is
    gone is said to be removed by keep_models, by every reader."""
    settings = {
        "rounds": {"rounds": 8, "initial_weights": "average"},
        "evaluate": {"metric": "accuracy", "direction": "max"},
        "storage": {**storage_settings, "keep_models": 3},
    }
    coordinator = await start(**settings)
    [member] = await enter(coordinator, "a")
    await rounds_of(member, range(5), best=1)
    await until(lambda: "0/global" not in models_of(coordinator))
    await coordinator.stop()
    coordinator.weights = open_store(config_for(tmp_path, **settings).storage)
    left_behind = f"{coordinator.driver.session.session_id}/0/global"
    coordinator.weights.put({left_behind: b"as if it had died before it removed the object"})
    coordinator.weights.close()

    coordinator = await start(**settings)
    [member] = await enter(coordinator, "a")
    await rounds_of(member, range(5, 8), best=1)
    await member.until(pb.FINISHED, 7)
    kept = [f"{round_}/global" for round_ in (1, 6, 7, 8)]
    await until(lambda: models_of(coordinator) == kept)
    why = "the model '3/global' was removed by [storage] keep_models"
    await assert_refused(member.download("3/global"), Code.NOT_FOUND, "", why)

    address = f"127.0.0.1:{coordinator.port}"

    def look() -> None:
        with ask(address) as trained:
            assert list(trained.entries) == [1, 6, 7, 8]
            assert sorted(trained.removed) == [0, 2, 3, 4, 5]
            assert trained.load(trained.choose("best").model).vector.tolist() == [0.0]
            with pytest.raises(NoModel, match=r"model 3 was removed by \[storage\] keep_models"):
                trained.choose("3")

    await asyncio.to_thread(look)
    session_id = coordinator.driver.session.session_id
    await coordinator.stop()
    with open_files(config_for(tmp_path, **settings)) as trained:
        assert sorted(trained.removed) == [0, 2, 3, 4, 5]
    if storage_settings.get("kind") != "s3":
        shown = {path.name for path in (tmp_path / "weights" / session_id / "models").iterdir()}
        names = {f"round-000{round_}.npy" for round_ in (1, 6, 7, 8)}
        assert shown == names | {"best.npy", "last.npy", "index.json"}
    removed = f"{session_id}/4"
    text = r"/4 was removed by \[storage\] keep_models; its models are 1, 6, 7, 8$"
    with pytest.raises(CannotStart, match=text):
        await start(new_session=True, from_model=removed, **settings)


def models_of(coordinator) -> list[str]:
    return sorted({key for key in coordinator.store.keys("") if is_model(key)})
