"""Three sites and one that writes its target in cents, each in a process of its own."""

import asyncio
import csv
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from support.process import CoordinatorProcess, SiteProcess

pytestmark = pytest.mark.e2e


def write_sites(folder: Path) -> list[str]:
    """Files of four sites, the first of which has its target times 100. Returns their names."""
    data = load_diabetes()
    rows = np.random.default_rng(0).permutation(len(data.target))
    names = ["cents", "north", "south", "west"]
    for name, part in zip(names, np.array_split(rows, 4), strict=True):
        factor = 100 if name == "cents" else 1
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*data.feature_names, "price"])
            writer.writerows([*data.data[row], factor * data.target[row]] for row in part)
    return names


async def test_site_with_its_target_in_cents_stops_with_the_reason_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """The site hears the name of its column and what to do, the coordinator names the site, and the
    model of the others learns, though the site was in the statistics before the first round."""
    names = write_sites(tmp_path)
    coordinator = CoordinatorProcess(
        tmp_path / "data",
        {
            "workload.name": "sgd",
            "workload.options.task": "regression",
            "rounds.rounds": 10,
            "rounds.min_participants": 3,
            "rounds.start_participants": 4,
            "rounds.max_participants": 4,
        },
    )
    sites = {name: SiteProcess(tmp_path, name) for name in names}
    try:
        await coordinator.start()
        for name, site in sites.items():
            table = [f"--data={tmp_path / name}.csv", "--target=price", "--task=regression"]
            await site.start(coordinator.port, *table)
        ended = await asyncio.gather(*(site.died() for site in sites.values()))
        assert ended == [1, 0, 0, 0]
        await coordinator.until_logged('"session_finished"')
        assert await coordinator.stop() == 0
    finally:
        for process in (*sites.values(), coordinator):
            await process.end()
    told = sites["cents"].log()
    assert "all values of the target 'price' are far from those of the other sites" in told
    assert "data.factors." in told
    assert "workload.preprocessing.clip = 0" in told
    entries = [json.loads(line) for line in coordinator.log().splitlines()]
    failed = [one for one in entries if one["event"] == "training_failed"]
    assert [one["participant"] for one in failed] == ["cents"]
    assert failed[0]["reason"].endswith("workload.preprocessing.clip = 0")
    measured = [one["metrics"]["r2"] for one in entries if one["event"] == "model_evaluated"]
    assert measured[-1] > 0.3
