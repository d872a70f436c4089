"""Three sites bag estimators in processes of their own, on tables in CSV files."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands import command
from support.process import CoordinatorProcess, SiteProcess, ended
from support.terminals import followed
from support.wire import Member
from xain_workloads.ensembles.stacking import Stack
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset

pytestmark = pytest.mark.frameworks

PAGE = Path(__file__).parents[2] / "docs" / "bagging.md"
SITES = ("north", "south", "west")
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


# --- estimators that stay at the participants ---


KEPT: dict[str, Any] = {
    **RULES,
    "rounds.rounds": 6,
    "workload.options.publish": "false",
    "workload.options.fit_rounds": 3,
}


def flags(site: SiteProcess) -> list[str]:
    """A CSV file and a state directory; the site stays after the end."""
    own = site.folder / site.log_path.stem
    return [f"--data={own}.csv", f"--state-dir={own}", "--serve", "--test-fraction=0"]


DIES_AT = 4  # a round of the linear model


def write_tables(folder: Path) -> Dataset:
    """Write a table for each site. Returns the rows that no site has."""
    data = load("breast_cancer")
    rows = np.random.default_rng(1).permutation(data.num_samples)
    held_out, *parts = np.array_split(rows, len(SITES) + 1)
    header = ",".join([*(f"x{i}" for i in range(data.num_features)), "diagnosis"])
    for site, part in zip(SITES, parts, strict=True):
        lines = [
            ",".join([*map(repr, features), label])
            for features, label in zip(
                data.features[part].tolist(), data.target[part].tolist(), strict=True
            )
        ]
        (folder / f"{site}.csv").write_text("\n".join([header, *lines, ""]))
    return data.subset(held_out)


@asynccontextmanager
async def fitted(
    folder: Path,
) -> AsyncIterator[tuple[CoordinatorProcess, list[SiteProcess], Dataset]]:
    """A coordinator and three sites after the fit, and rows that none of them has.

    While the linear model was trained, the coordinator and a site were killed, and started again.
    """
    held_out = write_tables(folder)
    coordinator = CoordinatorProcess(folder / "data", KEPT)
    coordinator.dies_at, coordinator.dies_of = DIES_AT, "after-opening"
    sites = [SiteProcess(folder, name) for name in SITES]
    async with ended(coordinator, *sites):
        await coordinator.start()
        for site in sites:
            await site.start(coordinator.port, *flags(site))
        assert await coordinator.died() < 0
        await sites[0].kill()
        assert '"round_opened"' in coordinator.log()
        assert '"session_finished"' not in coordinator.log()
        coordinator.dies_at = None
        await coordinator.start()
        await sites[0].start(coordinator.port, *flags(sites[0]))
        await coordinator.until_logged('"session_finished"')
        yield coordinator, sites, held_out


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
    """Every round has the estimators of all sites, and the sites that are left predict."""
    async with fitted(tmp_path) as (coordinator, sites, held_out):
        reader = Member(coordinator.port, "reader")
        model = await reader.model(6)
        await reader.close()
        stack = Stack.parse(model.tobytes())
        assert [one.participant for one in stack.holdings] == [*SITES, *SITES, *SITES]
        assert len(stack.numbers)
        rows = rows_file(tmp_path, held_out)
        status, whole, told = await ask(coordinator, rows, "--max-retries=1")
        assert status == 0, told
        assert told.startswith("answered: north, south, west\naccuracy 0.9"), told
        assert whole.startswith("row,diagnosis,p(")

        await sites[2].kill()
        status, left, told = await ask(coordinator, rows)
        assert status == 0, told
        assert re.search(r"answered: north, south\nmissing: west: .*\naccuracy 0\.9", told)
        assert len(left.splitlines()) == len(whole.splitlines())

        await coordinator.kill()
        await coordinator.start()
        status, again, told = await ask(coordinator, rows, "--max-retries=1")
        assert (status, again) == (0, left), told
        assert re.search(r"answered: north, south\nmissing: west: .* 2 times", told)

        await sites[2].start(coordinator.port, *flags(sites[2]))
        status, again, told = await ask(coordinator, rows, "--max-retries=5")
        assert (status, again) == (0, whole), told

        for site in sites:
            await site.kill()
        status, nothing, told = await ask(coordinator, rows, "--timeout-s=1")
        assert (status, nothing) == (1, "")
        assert re.search("no participant answered: north: .*; south: ", told)


async def test_commands_of_the_page_ask_the_participants(tmp_path):
    page = PAGE.read_text(encoding="utf-8").partition("    python benchmarks/")[0]
    async with followed(page, tmp_path) as (outputs, _):
        (shown,) = [text for line, text in outputs.items() if " predict " in line]
    lines = shown.splitlines()
    assert lines[0] == "row,target,p(setosa),p(versicolor),p(virginica)"
    assert [line[: len("1,setosa")] for line in lines[1:3]] == ["1,setosa", "2,virgin"]
    assert lines[3:] == ["answered: north, south"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "add --model FILE, or add --address HOST:PORT"),
        (
            ("--model=a.skops", "--address=localhost"),
            "add --model FILE, or add --address HOST:PORT",
        ),
        (("--model=a.skops", "--max-retries=2"), "--timeout-s and --max-retries go with --address"),
    ],
)
async def test_flags_of_predict_that_do_not_go_together_are_refused(words, why):
    status, _, told = await command("predict", "--data=rows.csv", *words)
    assert status == 2
    assert why in told
