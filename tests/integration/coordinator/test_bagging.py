"""Sessions of the workload "bagging" over real channels: agents, hostile updates, the export."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import skops.io
from sklearn.ensemble import BaggingClassifier, BaggingRegressor
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from integration.conftest import config_for
from integration.coordinator.test_trees import INVALID, gather, refused, trained
from support.agents import run_agents
from unit.workloads.test_bagging import edit_schema, rewritten
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.limits import MAX_INLINE_BYTES
from xain_workloads.ensembles.ensembles import Frame, pack, unpack
from xain_workloads.ensembles.estimators import files, skops_files
from xain_workloads.ensembles.held import unpack_holdings
from xain_workloads.ensembles.stacking import Stack
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats
from xain_workloads.model import Model
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.partition import dirichlet
from xain_workloads.tables.table import Table
from xain_workloads.workload import evaluate, predict, probabilities


def settings(num_sites: int, **options: Any) -> dict[str, dict[str, Any]]:
    return {
        "rounds": {"rounds": 2, "min_participants": num_sites, "refused_limit": 50},
        "workload": {"name": "bagging", "options": {"publish": True, "vote": "soft", **options}},
        "aggregation": {"rule": "ensemble"},
    }


def halves(data: Dataset) -> tuple[Dataset, Dataset]:
    """Two sets of rows, drawn at random."""
    rows = np.random.default_rng(0).permutation(data.num_samples)
    return data.subset(rows[::2]), data.subset(rows[1::2])


async def last_model(coordinator: Any, join: Any) -> Model:
    last = coordinator.driver.session.model
    return Model(await join(coordinator, "reader").model(last.round), (), dict(last.metadata))


def rules_of(rounds: int) -> dict[str, dict[str, Any]]:
    found = settings(2, estimators=2)
    found["rounds"]["rounds"] = rounds
    return found


async def first_round(start: Any, join: Any, rounds: int) -> Any:
    """Coordinator, two members, their rows, the work of the first round, and its model."""
    parts = halves(load("wine"))
    coordinator = await start(**rules_of(rounds))
    members = await gather(coordinator, join, parts)
    work = await members[0].start()
    return coordinator, members, parts, work, await members[0].model(0)


@pytest.mark.parametrize(("num_sites", "alpha"), [(1, None), (3, None), (7, None), (3, 1.0)])
async def test_agents_learn_as_much_as_bagging_on_all_rows(start, join, num_sites, alpha):
    """Wine at random, within 5 points; and by label, within 10."""
    train, test = halves(load("wine"))
    if alpha is None:
        parts = np.array_split(np.arange(train.num_samples), num_sites)
    else:
        parts = dirichlet(train.target, num_sites, alpha=alpha, seed=0)
    coordinator = await start(**settings(num_sites, estimators=5))
    await run_agents(coordinator, [train.subset(part) for part in parts])
    model = await last_model(coordinator, join)
    frames = unpack(model.vector.tobytes())
    assert len(frames) == 2 * 5 * num_sites
    assert len({frame.file for frame in frames}) == len(frames)
    assert {frame.weight for frame in frames} == {len(part) for part in parts}
    central = BaggingClassifier(DecisionTreeClassifier(), n_estimators=30, random_state=0)
    expected = central.fit(train.features, train.target).score(test.features, test.target)
    bound = 0.05 if alpha is None else 0.1
    assert evaluate(model, test)["accuracy"] >= expected - bound


async def test_participants_train_without_downloading_the_ensemble(start, join, tmp_path):
    train, _ = halves(load("digits"))
    parts = [train.subset(rows) for rows in np.array_split(np.arange(train.num_samples), 2)]
    path = tmp_path / "latency.jsonl"
    with closing(LatencyFile(path)) as latencies:
        coordinator = await start(latencies=latencies, **settings(2))
        await run_agents(coordinator, parts)
        assert len(await join(coordinator, "reader").download("1/global")) > MAX_INLINE_BYTES
        await coordinator.stop()
    calls = [line for line in path.read_text().splitlines() if '"reader"' not in line]
    assert any("/EndTrainingRound" in call for call in calls)
    assert not [call for call in calls if "/GetWeights" in call]


async def test_session_lists_the_estimators_that_stay_and_has_nothing_to_export(
    start, join, tmp_path
):
    parts = [*halves(load("wine"))]
    coordinator = await start(**settings(2, publish=False, estimators=3))
    await run_agents(coordinator, parts)
    model = await last_model(coordinator, join)
    found = unpack_holdings(model.vector.tobytes())
    assert [(one.participant, one.estimators, one.rows) for one in found] == [
        (f"p{i}", 3, part.num_samples) for _ in range(2) for i, part in enumerate(parts)
    ]
    assert len({one.digest for one in found}) == 4
    for suffix in (".skops", ".npz"):
        with pytest.raises(NoModel, match="no model to export"):
            formats.write(tmp_path / f"model{suffix}", model, {})


async def test_stacked_votes_are_trained_and_gone_on_with(start, join, tmp_path):
    """Sites by label; the file that is taken home predicts as what was measured."""
    train, test = halves(load("wine"))
    order = np.argsort(train.target, kind="stable")
    names = tuple(sorted(set(train.target.tolist())))
    tables = [Table.from_dataset(train.subset(part)) for part in np.array_split(order, 3)]
    parts = [replace(table, classes=names) for table in tables]
    rules = settings(3, estimators=3, vote="stacked")
    rules["rounds"]["rounds"] = 6

    async def session(name: str, source: str = "") -> Model:
        coordinator = SessionCoordinator(config_for(tmp_path / name, **rules), from_model=source)
        await coordinator.start()
        try:
            await run_agents(coordinator, parts)
            return await last_model(coordinator, join)
        finally:
            await coordinator.stop()

    model = await session("one")
    stack = Stack.parse(model.vector.tobytes())
    assert len(stack.frames) == 3 * 3
    assert len(stack.numbers)
    assert evaluate(model, test)["accuracy"] > 0.9
    path = tmp_path / "model.skops"
    formats.write(path, model, {"round": 6})
    pipeline = formats.read(path).pipeline
    assert type(pipeline.steps[-1][1]).__name__ == "StackingClassifier"
    assert pipeline.predict(test.features).tolist() == predict(model, test).tolist()
    found = probabilities(model, test)
    assert np.array_equal(pipeline.predict_proba(test.features), found)
    files = [*(tmp_path / "one" / "weights").glob("*/models/last.npy")]
    again = Stack.parse((await session("two", str(files[0]))).vector.tobytes())
    assert again.frames == stack.frames
    (shape, found), (_, expected) = again.linear(model.metadata), stack.linear(model.metadata)
    assert shape == stack.due(model.metadata)
    np.testing.assert_allclose(found, expected, atol=0.01)


async def test_exported_ensemble_predicts_the_same_in_plain_scikit_learn(start, join, tmp_path):
    train, test = halves(load("wine"))
    parts = np.array_split(np.arange(train.num_samples), 3)
    coordinator = await start(**settings(3, estimators=2, vote="hard"))
    await run_agents(coordinator, [train.subset(part) for part in parts])
    model = await last_model(coordinator, join)
    path = tmp_path / "model.skops"
    formats.write(path, model, {"round": 2})
    pipeline = skops.io.load(path, trusted=["numpy.dtype", "sklearn.tree._tree.Tree"])
    assert [name for name, _ in pipeline.steps] == ["preprocessing", "model"]
    assert pipeline.predict(test.features).tolist() == predict(model, test).tolist()
    assert formats.read(path).pipeline.predict(test.features[:3]).shape == (3,)
    for suffix in (".json", ".onnx"):
        with pytest.raises(NoModel, match=r"have no form in \.\w+; take model\.skops"):
            formats.write(tmp_path / f"model{suffix}", model, {})


async def test_hostile_estimators_are_refused_and_the_round_goes_on(start, join):
    _, (a, b), parts, work, model = await first_round(start, join, rounds=1)
    good = trained(work, model, parts[0])
    frames = unpack(good.tobytes())
    other = skops.io.dumps(DecisionTreeRegressor().fit(parts[0].features, np.arange(89.0)))
    system = rewritten(
        skops_files.dump(files.load(frames[0].file)), edit_schema('"sklearn.tree._tree"', '"os"')
    )
    for update, why in (
        (b"{}", "no ensemble"),
        (pack(frames[:1]), "a round adds 2"),
        (pack([frames[0], Frame(1, other)]), "not a DecisionTreeClassifier"),
        (
            pack([frames[0], Frame(1, system)]),
            "estimator 1: the file has types that are not trusted",
        ),
    ):
        code, name, details = await refused(a.hand_in(np.frombuffer(update, np.uint8)))
        assert ((code, name), why in details) == (INVALID, True), details
    other_order = trained(work, model, parts[1])
    await b.hand_in(other_order, num_samples=7)
    await a.hand_in(good, num_samples=5)
    await a.until(pb.FINISHED, 0)
    made = unpack((await a.model(1)).tobytes())
    assert [frame.weight for frame in made] == [5, 5, 7, 7]
    assert [frame.file for frame in made[:2]] == [frame.file for frame in frames]


async def test_agents_bag_regressors(start, join):
    train, test = halves(load("diabetes", task="regression"))
    parts = np.array_split(np.arange(train.num_samples), 3)
    options = {"estimator": "DecisionTreeRegressor", "parameters": {"max_depth": 4}}
    coordinator = await start(**settings(3, **options))
    await run_agents(coordinator, [train.subset(part) for part in parts])
    model = await last_model(coordinator, join)
    central = BaggingRegressor(DecisionTreeRegressor(max_depth=4), 30, random_state=0)
    expected = central.fit(train.features, train.target).score(test.features, test.target)
    assert evaluate(model, test)["r2"] >= expected - 0.06
