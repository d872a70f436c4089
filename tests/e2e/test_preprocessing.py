"""Three sites with files as people have them train one model, over real processes."""

import asyncio
import json
from pathlib import Path

import pytest

from support.process import CoordinatorProcess, Process
from support.tables import write_rows
from xain_coordinator.cli.demo.training import Observer
from xain_workloads.data import load_table
from xain_workloads.preprocessing import Preprocessing

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SITES = ("north", "south", "west")
LEAST_ACCURACY = 0.9


class Site(Process):
    """A participant with a CSV file."""

    async def start(self, port: int, file: Path, *flags: str) -> None:
        words = ["-m", "xain_participant", f"--coordinator=127.0.0.1:{port}", f"--data={file}"]
        self._process = await self.run([*words, f"--id={self.log_path.stem}", *flags])


@pytest.mark.parametrize("workload", ["sgd", "mlp"])
async def test_tables_with_gaps_categories_and_scales_train_a_good_model(tmp_path, workload):
    """Nothing but the workload's name is set. The model is good on rows that no site has, and
    preprocessing.json, beside the models, tells what was done to the columns."""
    write_rows(tmp_path / "test.csv", 3, 500)
    three = {"rounds.min_participants": 3}
    coordinator = CoordinatorProcess(
        tmp_path / "data",
        {"workload.name": workload, "rounds.rounds": 20, "rounds.epochs": 2, **three},
    )
    sites = [Site(tmp_path, name) for name in SITES]
    observer = None
    try:
        await coordinator.start()
        for i, site in enumerate(sites):
            write_rows(tmp_path / f"{SITES[i]}.csv", i, 150 + 50 * i)
            await site.start(coordinator.port, tmp_path / f"{SITES[i]}.csv", "--target=outcome")
        assert await asyncio.gather(*(site.died() for site in sites)) == [0, 0, 0]
        observer = Observer(coordinator.port, load_table(tmp_path / "test.csv", target="outcome"))
        observer.look()
        assert observer.final_accuracy() >= LEAST_ACCURACY
    finally:
        if observer is not None:
            observer.close()
        for process in (*sites, coordinator):
            await process.end()
    (recorded,) = (tmp_path / "data").rglob("preprocessing.json")
    preprocessing = Preprocessing.from_json(recorded.read_text())
    columns = {column["name"]: column for column in json.loads(recorded.read_text())["columns"]}
    assert columns["income"]["center"] == pytest.approx(5e4, rel=0.02)
    assert columns["ward"]["categories"] == ["A", "B", "C"]
    assert preprocessing.num_features == 5
    kept = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not any(b"secret ward" in path.read_bytes() for path in kept)
