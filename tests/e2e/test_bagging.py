"""Three sites bag estimators in processes of their own, on tables in CSV files."""

import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.ensemble import BaggingClassifier

from e2e.test_take_home import command
from e2e.test_trees import SITES, train, write_tables
from support.process import CoordinatorProcess, Process
from support.terminals import Terminals, commands_of, files_of
from support.wire import Member
from xain_workloads.bagging_options import BaggingOptions
from xain_workloads.data import load as load_data
from xain_workloads.dataset import Dataset
from xain_workloads.ensembles import load, unpack
from xain_workloads.held import unpack_holdings
from xain_workloads.partition import dirichlet, split_train_test

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "bagging.md"
RULES: dict[str, Any] = {
    "rounds.rounds": 4,
    "rounds.min_participants": len(SITES),
    "workload.name": "bagging",
    "workload.options.publish": "true",
    "workload.options.estimators": 3,
    "workload.options.parameters": "{ max_depth = 4 }",
    "workload.preprocessing.scaling": "none",
    "aggregation.rule": "ensemble",
    "server.heartbeat_time_s": 1.0,
    "server.heartbeat_timeout_s": 200.0,
}


async def test_killed_coordinator_makes_the_same_ensemble(tmp_path):
    """93 % on rows that no site has, with a vote in numpy."""
    held_out = write_tables(tmp_path)
    undisturbed = await train(tmp_path / "undisturbed", tmp_path, None, RULES)
    model = np.load(io.BytesIO(undisturbed[-1]), allow_pickle=False).tobytes()
    options = BaggingOptions(publish=True)
    members = [load(frame.file, options, held_out.num_features) for frame in unpack(model)]
    assert len(members) == 4 * 3 * len(SITES)
    votes = np.mean([member.predict_proba(held_out.features) for member in members], axis=0)
    predicted = np.array(sorted(set(held_out.target.tolist())))[votes.argmax(axis=1)]
    assert np.mean(predicted == held_out.target) >= 0.93
    # Some commits are of the gathering; this one is in the middle of the rounds.
    assert await train(tmp_path / "killed", tmp_path, 12, RULES) == undisturbed


# --- estimators that stay at the participants ---

SEED = 3  # of a division in which a site lacks a class

KEPT: dict[str, Any] = {
    **RULES,
    "rounds.rounds": 3,
    "workload.options.publish": "false",
    "workload.options.vote": "soft",
}


class Site(Process):
    """A participant with a CSV file and a state directory, which stays after the end."""

    async def start(self, port: int) -> None:
        name = self.log_path.stem
        words = ["-m", "xain_participant", f"--coordinator=127.0.0.1:{port}", "--serve"]
        words += [f"--data={self.folder / name}.csv", f"--state-dir={self.folder / name}"]
        self._process = await self.run([*words, f"--id={name}"])


@asynccontextmanager
async def fitted(folder: Path) -> AsyncIterator[tuple[CoordinatorProcess, list[Site], Dataset]]:
    """A coordinator and three sites after the fit, and rows that none of them has.

    In the middle of the fit the coordinator and a site were killed, and started again.
    """
    held_out = write_tables(folder)
    coordinator = CoordinatorProcess(folder / "data", KEPT)
    coordinator.dies_at, coordinator.dies_of = 10, "after-commit"
    sites = [Site(folder, name) for name in SITES]
    try:
        await coordinator.start()
        for site in sites:
            await site.start(coordinator.port)
        assert await coordinator.died() < 0
        await sites[0].kill()
        assert '"round_opened"' in coordinator.log()
        assert '"session_finished"' not in coordinator.log()
        coordinator.dies_at = None
        await coordinator.start()
        await sites[0].start(coordinator.port)
        await coordinator.until_logged('"session_finished"')
        yield coordinator, sites, held_out
    finally:
        for process in (coordinator, *sites):
            await process.end()


def rows_file(folder: Path, data: Dataset, name: str = "rows") -> Path:
    """The rows with their diagnosis."""
    path = folder / f"{name}.csv"
    header = ",".join([*(f"x{i}" for i in range(data.num_features)), "diagnosis"])
    lines = [
        ",".join([*map(repr, features), label])
        for features, label in zip(data.features.tolist(), data.target.tolist(), strict=True)
    ]
    path.write_text("\n".join([header, *lines, ""]))
    return path


async def ask(coordinator: CoordinatorProcess, rows: Path, *words: str) -> tuple[int, str, str]:
    address = f"--address=127.0.0.1:{coordinator.port}"
    return await command("predict", address, f"--data={rows}", *words)


async def test_kills_in_the_fit_and_after_it_lose_no_estimator_and_no_prediction(tmp_path):
    """Every round has the estimators of all sites, and whoever is left predicts."""
    async with fitted(tmp_path) as (coordinator, sites, held_out):
        reader = Member(coordinator.port, "reader")
        model = np.load(io.BytesIO(await reader.download("3/global")), allow_pickle=False)
        await reader.close()
        holdings = unpack_holdings(model.tobytes())
        assert [one.participant for one in holdings] == [*SITES, *SITES, *SITES]
        rows = rows_file(tmp_path, held_out)
        status, whole, told = await ask(coordinator, rows, "--max-retries=3")
        assert status == 0, told
        assert told.startswith("answered: north, south, west\naccuracy 0.9"), told
        assert whole.startswith("diagnosis\n")

        await sites[2].kill()
        status, left, told = await ask(coordinator, rows)
        assert status == 0, told
        assert "answered: north, south\nmissing: west: it is not connected\naccuracy 0.9" in told
        assert len(left.splitlines()) == len(whole.splitlines())

        await coordinator.kill()
        await coordinator.start()
        status, again, told = await ask(coordinator, rows, "--max-retries=3")
        assert (status, again) == (0, left), told
        assert "answered: north, south\nmissing: west: it is not connected, asked 4 times" in told

        await sites[2].start(coordinator.port)
        status, again, told = await ask(coordinator, rows, "--max-retries=5")
        assert (status, again) == (0, whole), told

        for site in sites:
            await site.kill()
        status, nothing, told = await ask(coordinator, rows, "--timeout-s=1")
        assert (status, nothing) == (1, "")
        assert "no participant answered: north: it is not connected; south: it is" in told


async def test_open_votes_of_sites_divided_by_label_are_as_good_as_trees_in_one_place(tmp_path):
    """Within a point of the accuracy of as many trees that scikit-learn fits on all rows."""
    data, num_trees = load_data("wine"), 20
    rest, held_out = split_train_test(data, 0.3, SEED)
    parts = [rest.subset(rows) for rows in dirichlet(rest.target, 3, alpha=0.5, seed=SEED)]
    assert min(np.bincount(codes(part), minlength=3).min() for part in parts) == 0
    rules = {
        **KEPT,
        "rounds.rounds": 1,
        "workload.options.vote": "open",
        "workload.options.estimators": num_trees,
        "workload.options.parameters": "{}",
        "workload.preprocessing.scaling": "standard",
        "schema.classes": json.dumps(sorted(set(data.target.tolist()))),
    }
    coordinator = CoordinatorProcess(tmp_path / "data", rules)
    sites = [Site(tmp_path, name) for name in SITES]
    try:
        await coordinator.start()
        for name, site, part in zip(SITES, sites, parts, strict=True):
            rows_file(tmp_path, part, name)
            await site.start(coordinator.port)
        await coordinator.until_logged('"session_finished"')
        rows = rows_file(tmp_path, held_out)
        status, _, told = await ask(coordinator, rows, "--max-retries=3")
        assert status == 0, told
    finally:
        for process in (coordinator, *sites):
            await process.end()
    found = re.search(r"^accuracy ([\d.]+) of 53 rows", told, re.MULTILINE)
    assert found, told
    trees = BaggingClassifier(n_estimators=num_trees * len(SITES), random_state=0)
    alone = trees.fit(rest.features, rest.target).score(held_out.features, held_out.target)
    assert float(found[1]) >= alone - 0.01


def codes(data: Dataset) -> NDArray[np.intp]:
    """Numbers of the classes class_0, class_1 and class_2."""
    return np.array([int(label[-1]) for label in data.target.tolist()])


async def test_commands_of_the_page_ask_the_participants(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    for file, text in files_of(page).items():
        (tmp_path / file).write_text(text)
    commands = [line for line in commands_of(page) if "model.skops" not in line]
    assert len(commands) == 5
    terminals = Terminals(tmp_path)
    try:
        outputs = [await terminals.do(line) for line in commands]
    finally:
        await terminals.end()
    assert outputs[-1].splitlines() == ["target", "setosa", "virginica", "answered: north, south"]


async def test_last_published_model_predicts_without_a_file(tmp_path):
    """`predict --address` asks no participant then."""
    held_out = write_tables(tmp_path)
    rules = {**RULES, "rounds.rounds": 1, "rounds.min_participants": 1}
    coordinator, site = CoordinatorProcess(tmp_path / "data", rules), Site(tmp_path, SITES[0])
    try:
        await coordinator.start()
        await site.start(coordinator.port)
        await coordinator.until_logged('"session_finished"')
        rows = rows_file(tmp_path, held_out)
        status, predicted, told = await ask(coordinator, rows)
        assert (status, told[:12]) == (0, "accuracy 0.9"), told
        assert predicted.startswith("diagnosis\n")
    finally:
        for process in (coordinator, site):
            await process.end()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "give --model FILE or --address HOST:PORT"),
        (("--model=a.skops", "--address=localhost"), "give --model FILE or --address HOST:PORT"),
        (("--model=a.skops", "--max-retries=2"), "--timeout-s and --max-retries go with --address"),
    ],
)
async def test_flags_of_predict_that_do_not_go_together_are_refused(words, why):
    status, _, told = await command("predict", "--data=rows.csv", *words)
    assert status == 2
    assert why in told
