"""Sessions that train trees: models and updates of bytes, over real channels."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from integration.conftest import config_for
from integration.test_bit_rot import flip, stored
from integration.test_direct_uploads import Reachable, put, store  # noqa: F401  # a fixture
from support.agents import run_agents
from support.wire import Code, Member, assert_refused, refused
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_foundation.exit_statuses import CannotStart
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.model import Model
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.table import Table
from xain_workloads.trees import trees
from xain_workloads.workload import from_metadata

INVALID = (Code.INVALID_ARGUMENT, "INVALID_UPDATE")


def settings(data: str = "breast_cancer", **rounds: Any) -> dict[str, dict[str, Any]]:
    options = {"max_depth": 3 if data == "breast_cancer" else 6}
    return {
        "rounds": {"rounds": 3, "min_participants": 2, "epochs": 2, **rounds},
        "workload": {"name": "xgboost", "options": options},
        "aggregation": {"rule": "trees", "options": {"mode": "bagging"}},
    }


def histograms_of(**rounds: Any) -> dict[str, dict[str, Any]]:
    """Settings of the mode that sessions have by default."""
    found = settings(**{"epochs": 1, **rounds})
    return found | {"aggregation": {"rule": "trees"}}


def parts(num: int, data: str = "breast_cancer") -> list[Dataset]:
    whole = load(data)
    rows = np.random.default_rng(0).permutation(whole.num_samples)
    return [whole.subset(part) for part in np.array_split(rows, num)]


def profile(data: Dataset) -> pb.DataProfile:
    known = Table.from_dataset(data).profile()
    return pb.DataProfile(
        num_samples=known.num_samples,
        num_features=known.num_features,
        classes=known.classes,
        statistics=known.statistics,
    )


def trained(work: pb.StartTrainingRoundResponse, vector: np.ndarray, data: Dataset) -> np.ndarray:
    workload = from_metadata(dict(work.metadata))
    model = Model(vector, (), dict(work.metadata))
    result = workload.train(
        model, data, epochs=work.epochs, epoch_base=work.epoch_base, seed=work.round
    )
    return result.vector


async def gather(coordinator: SessionCoordinator, join: Any, data: list[Dataset]) -> list[Member]:
    members = [join(coordinator, f"p{i}") for i in range(len(data))]
    for member, part in zip(members, data, strict=True):
        await member.rendezvous(profile(part))
    await members[0].until(pb.ROUND, 0)
    return members


async def train_first_round(members: list[Member], data: list[Dataset]) -> None:
    work = await members[0].start()
    model = await members[0].model(0)
    for member, part in zip(members, data, strict=True):
        await member.hand_in(trained(work, model, part))
    await members[0].until(pb.ROUND, 1)


async def test_agents_train_a_booster_that_plain_xgboost_loads(start, join, tmp_path):
    """Ten classes: updates of 20 trees are too large to travel inside a call."""
    data = parts(2, "digits")
    coordinator = await start(**settings("digits"))
    await run_agents(coordinator, data)
    final = await join(coordinator, "reader").model(3)
    assert final.dtype == np.uint8
    path = tmp_path / "model.json"
    path.write_bytes(final.tobytes())
    booster = xgboost.Booster(model_file=path)
    assert booster.num_boosted_rounds() == 3 * 2 * 2  # of rounds, participants and epochs
    features = np.concatenate([part.features for part in data])
    target = np.concatenate([part.target for part in data]).astype(int)
    predicted = booster.predict(xgboost.DMatrix(features)).argmax(axis=1)
    assert np.mean(predicted == target) > 0.95


async def test_model_joins_the_trees_in_the_order_of_names(start, join):
    data = parts(2)
    coordinator = await start(**settings(rounds=1))
    a, b = await gather(coordinator, join, data)
    work = await a.start()
    model = await a.model(0)
    sent = [trained(work, model, part) for part in data]
    await b.hand_in(sent[1], num_samples=30)
    await a.hand_in(sent[0], num_samples=10)
    await a.until(pb.FINISHED, 0)
    kind = trees.BoosterKind.from_metadata(dict(work.metadata))
    expected = trees.joined(
        model.tobytes(),
        [
            (trees.parse_update(update.tobytes(), kind, 2), num_samples)
            for update, num_samples in zip(sent, (10, 30), strict=True)
        ],
        kind,
    )
    assert (await a.model(1)).tobytes() == expected


async def test_bytes_are_no_update_of_a_model_of_numbers(in_round):
    _, a = await in_round("a", rounds={"rounds": 1})
    code, name, details = await refused(a.hand_in(np.zeros(9, np.uint8)))
    assert ((code, name), "got uint8" in details) == (INVALID, True)


async def test_cyclic_training_takes_one_participant_after_the_other(start, join):
    data = parts(2)
    cyclic = settings(
        rounds=4,
        min_participants=1,
        fraction_participants="1/2",
        max_participants=2,
        start_participants=2,
        controller="round_robin",
    )
    cyclic["aggregation"]["options"] = {"mode": "cyclic"}
    coordinator = await start(**cyclic)
    await run_agents(coordinator, data)
    model = (await join(coordinator, "reader").model(4)).tobytes()
    assert xgboost.Booster(model_file=bytearray(model)).num_boosted_rounds() == 4 * 2


async def test_hostile_histograms_are_refused_and_the_round_goes_on(start, join):
    """In the first round and while a tree is growing; a booster is no update in this mode."""
    data = parts(2)
    coordinator = await start(**histograms_of(rounds=2, refused_limit=50))
    a, b = await gather(coordinator, join, data)
    for round_ in (0, 1):
        await a.until(pb.ROUND, round_)
        work = await a.start()
        model = await a.model(round_)
        good = trained(work, model, data[0])
        negative = good.view("<f8").copy()
        negative[-1] = -1.0
        for vector, why in (
            (good[:-8], f"the update has {len(good) - 8} bytes; histograms of {round_ + 1} nodes"),
            (model, "histograms of"),
            (negative.view(np.uint8), "a negative sum of hessians"),
            (np.full(len(good) // 8, np.nan).view(np.uint8), "a value that is not finite"),
        ):
            code, name, details = await refused(a.hand_in(vector, round_=round_))
            assert ((code, name), why in details) == (INVALID, True), details
        await a.hand_in(good, round_=round_, num_samples=5)
        await b.hand_in(trained(work, model, data[1]), round_=round_, num_samples=7)
    await a.until(pb.FINISHED, 1)


async def test_damaged_model_that_grows_is_rebuilt_at_the_start(start, join, tmp_path):
    """The initial one from its metadata, as the sites' statistics are dropped by then, and a later
    one from the histograms of its round; to the same bytes."""
    data = parts(2)
    coordinator = await start(**histograms_of(rounds=5))
    a, b = await gather(coordinator, join, data)
    for round_ in (0, 1):
        before = await a.download(f"{round_}/global")
        await coordinator.stop()
        flip(stored(tmp_path, f"*{round_}/global*"))
        coordinator = await start(**histograms_of(rounds=5))
        a, b = (join(coordinator, name) for name in ("p0", "p1"))
        assert await a.download(f"{round_}/global") == before
        if round_ == 0:
            await train_first_round([a, b], data)


async def test_participants_are_not_blamed_for_a_model_that_is_damaged_under_them(
    start, join, tmp_path
):
    """The coordinator reads the model to check histograms."""
    data = parts(2)
    coordinator = await start(**histograms_of(rounds=5))
    a, b = await gather(coordinator, join, data)
    await train_first_round([a, b], data)
    work = await a.start()
    model = await a.model(1)
    path = stored(tmp_path, "*1/global*")
    whole = path.read_bytes()
    # As if no tree were growing, for which histograms have another size.
    path.write_bytes(whole.replace(b'"xain_level":"1"', b'"xain_level":"0"'))
    update = trained(work, model, data[0])
    await assert_refused(a.hand_in(update, round_=1), Code.UNAVAILABLE)
    path.write_bytes(whole)
    await a.hand_in(update, round_=1)
    assert coordinator.driver.session.selection.faults == {}


async def test_growing_goes_on_in_another_session_from_the_model_alone(start, join, tmp_path):
    """An iteration that was cut off at its second level gets its third one; the model is that of
    an undisturbed session. Bagging can go on from it, too, and histograms not from bagging."""
    data = parts(2)
    one = await start(**histograms_of(rounds=4))
    await run_agents(one, data)
    undisturbed = await join(one, "reader").download("4/global")
    await one.stop()
    cut_off = tmp_path / "weights" / one.driver.session.session_id / "models" / "round-0002.npy"

    async def last_of(name: str, rules: dict[str, Any], source: Path) -> bytes:
        coordinator = SessionCoordinator(
            config_for(tmp_path / name, **rules), from_model=str(source)
        )
        await coordinator.start()
        try:
            await run_agents(coordinator, data)
            return await join(coordinator, "reader").download("2/global")
        finally:
            await coordinator.stop()

    assert await last_of("grown", histograms_of(rounds=2), cut_off) == undisturbed
    bagged = np.load(io.BytesIO(await last_of("bagged", settings(rounds=2, epochs=1), cut_off)))
    booster = xgboost.Booster(model_file=bytearray(bagged.tobytes()))
    assert booster.num_boosted_rounds() == 1 + 2 * 2
    np.save(tmp_path / "bagged.npy", bagged)
    (index,) = (tmp_path / "bagged" / "weights").glob("*/models/index.json")
    (tmp_path / "bagged.json").write_text(index.read_text())
    with pytest.raises(CannotStart, match="mode 'bagging'"):
        await last_of("back", histograms_of(rounds=2), tmp_path / "bagged.npy")
