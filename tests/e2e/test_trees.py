"""Two sites train trees, or send gradients, in processes of their own, on tables in CSV files."""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from support.process import CoordinatorProcess, Process
from support.wire import Member
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset

pytestmark = pytest.mark.e2e

ROUNDS = 12
SITES = ("north", "south", "west")
TWO = SITES[:2]
RULES: dict[str, Any] = {
    "rounds.rounds": ROUNDS,
    "rounds.min_participants": len(TWO),
    "workload.name": "xgboost",
    "workload.options.max_depth": 3,
    "workload.options.eta": 0.3,  # four iterations are few
    "aggregation.rule": "trees",
    "aggregation.options.mode": "histogram",
    "server.heartbeat_time_s": 1.0,
    "server.heartbeat_timeout_s": 200.0,
}
GRADIENT: dict[str, Any] = {
    **RULES,
    "workload.name": "sgd",
    "workload.options.mode": "gradient",
    "aggregation.rule": "gradient",
    "aggregation.options.learning_rate": "adaptive",
    "aggregation.options.eta0": 2.0,
    "aggregation.options.n_iter_no_change": 1,
}
for _key in ("workload.options.max_depth", "workload.options.eta", "aggregation.options.mode"):
    del GRADIENT[_key]
PATIENCE_S = 120.0


def write_tables(folder: Path, sites: tuple[str, ...] = SITES) -> Dataset:
    """Write a table for each site. Returns the rows that no site has."""
    data = load("breast_cancer")
    rows = np.random.default_rng(1).permutation(data.num_samples)
    held_out, *parts = np.array_split(rows, len(sites) + 1)
    header = ",".join([*(f"x{i}" for i in range(data.num_features)), "diagnosis"])
    for site, part in zip(sites, parts, strict=True):
        lines = [
            ",".join([*map(repr, features), label])
            for features, label in zip(
                data.features[part].tolist(), data.target[part].tolist(), strict=True
            )
        ]
        (folder / f"{site}.csv").write_text("\n".join([header, *lines, ""]))
    return data.subset(held_out)


async def train(
    folder: Path, tables: Path, dies_at: int | None, rules: dict[str, Any]
) -> list[bytes]:
    """Run a session; returns all of its models.

    dies_at: the commit after which the coordinator kills itself; it is started again.
    """
    coordinator = CoordinatorProcess(folder, rules)
    coordinator.dies_at, coordinator.dies_of = dies_at, "after-commit"
    sites = [Process(folder, site) for site in TWO]
    try:
        await coordinator.start()
        for site in sites:
            name = site.log_path.stem
            flags = ["-m", "xain_participant", f"--data={tables / name}.csv", f"--id={name}"]
            flags.append("--test-fraction=0")  # figures are of rows that write_tables() held out
            site._process = await site.run([*flags, f"--coordinator=127.0.0.1:{coordinator.port}"])
        if dies_at is not None:
            assert await coordinator.died() < 0
            coordinator.dies_at = None
            await coordinator.start()
        async with asyncio.timeout(PATIENCE_S):
            assert [await site.died() for site in sites] == [0, 0]
        reader = Member(coordinator.port, "reader")
        models = [
            await reader.download(f"{number}/global")
            for number in range(rules["rounds.rounds"] + 1)
        ]
        await reader.close()
        return models
    finally:
        for process in (coordinator, *sites):
            await process.end()


async def test_sites_learn_trees_and_a_killed_coordinator_makes_the_same_bytes(tmp_path):
    """93 % on rows that no site has, with plain XGBoost."""
    held_out = write_tables(tmp_path, TWO)
    undisturbed = await train(tmp_path / "undisturbed", tmp_path, None, RULES)
    model = np.load(io.BytesIO(undisturbed[-1]), allow_pickle=False)
    booster = xgboost.Booster(model_file=bytearray(model.tobytes()))
    predicted = booster.predict(xgboost.DMatrix(held_out.features)) > 0.5
    assert np.mean(predicted == (held_out.target == "malignant")) >= 0.93
    # Some commits are of the gathering; this one is in the middle of the rounds.
    assert await train(tmp_path / "killed", tmp_path, 12, RULES) == undisturbed


async def test_a_killed_coordinator_takes_the_same_gradient_steps(tmp_path):
    """The rate of a step follows from the losses of all steps before."""
    write_tables(tmp_path, TWO)
    undisturbed = await train(tmp_path / "undisturbed", tmp_path, None, GRADIENT)
    assert len(set(undisturbed)) == ROUNDS + 1
    assert await train(tmp_path / "killed", tmp_path, 12, GRADIENT) == undisturbed
