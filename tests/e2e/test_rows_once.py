"""Workers of a job come and go, by kill -9 and SIGTERM, and each row is read once in each epoch.

Rows are counted at the servers, under their numbers, by the pushes of the clocks in which they are
read; and by the notes that workers go on from.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import xain_parameters as parameters
from support import rows_worker
from support.parameter_processes import Fleet
from xain_parameters.scheduler.reports import DataStatus, Status

NUM_EPOCHS = 10
NUM_ROWS = 211
PATIENCE_S = 240

pytestmark = pytest.mark.e2e


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of rows; lines have different lengths."""
    (tmp_path / "rows").mkdir()
    lines = [f"{row}{'' if row % 7 else 40 * ' '}\n" for row in range(NUM_ROWS)]
    (tmp_path / "rows" / "a").write_text("".join(lines[:80]))
    (tmp_path / "rows" / "b").write_text("".join(lines[80:]))
    for epoch in range(NUM_EPOCHS):
        (tmp_path / f"gate-{epoch}").touch()
    return tmp_path


class Rows(Fleet):
    """A fleet with workers that count rows."""

    def start_counting(self, *names: str) -> None:
        for name in names:
            arguments = (self.target, name, "3", str(NUM_EPOCHS))
            self._start(name, rows_worker.__file__, *arguments, str(self.folder))

    def until_gate(self, epoch: int) -> None:
        """A worker has begun an epoch, which no worker goes on in."""
        self.until_data(lambda data: data.num_begun > epoch)

    def until_data(self, condition: Callable[[DataStatus], bool]) -> None:
        def is_so(status: Status) -> bool:
            job = status.jobs.get(rows_worker.JOB)
            return job is not None and any(map(condition, job.data.values()))

        deadline = time.monotonic() + PATIENCE_S
        while not is_so(self.status()):
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.05)  # a poll, not a race

    def open_gates(self, *epochs: int) -> None:
        for epoch in epochs:
            (self.folder / f"gate-{epoch}").unlink()

    def assert_each_row_once(self, *workers: str) -> None:
        self.ended(*workers)
        num_bytes = sum(file.stat().st_size for file in (self.folder / "rows").iterdir())
        for name in workers:
            told = json.loads((self.folder / f"{name}.json").read_text())
            assert told["rows"] == [NUM_ROWS] * NUM_EPOCHS
            assert told["sizes"] == [num_bytes] * NUM_EPOCHS
        keys = np.array([rows_worker.keys(e, np.arange(NUM_ROWS)) for e in range(NUM_EPOCHS)])
        with parameters.connect_sync(self.target, worker="reader", job=rows_worker.JOB) as reader:
            counts = reader.table(rows_worker.TABLE, 1).pull(keys)[..., 0]
        assert (counts == 1).all(), np.argwhere(counts != 1)[:10]


def test_each_row_is_read_once_in_an_epoch_whoever_comes_and_goes(folder: Path) -> None:
    with Rows(folder, "--replicas", "1", "--set=scheduler.worker_lease_s=2.5") as fleet:
        fleet.start_servers("s0", "s1", "s2")
        fleet.start_counting("w0", "w1", "w2")
        fleet.until_gate(0)
        fleet.kill("w0")  # in the first epoch, and back
        fleet.start_counting("w0")
        fleet.open_gates(0)
        fleet.until_gate(1)
        fleet.kill("w1")  # for good; another one comes
        fleet.open_gates(1)
        fleet.start_counting("w3")
        fleet.until_gate(2)
        fleet.until(lambda status: "w1" not in status.jobs[rows_worker.JOB].view.ranks)
        fleet.open_gates(2, 3)
        fleet.until_gate(4)
        fleet.kill("scheduler")
        fleet.kill("w2")
        fleet.open_gates(4)
        fleet.start_scheduler()
        fleet.until_gate(5)
        fleet.kill("w0", signal.SIGTERM)
        fleet.kill("s0")
        fleet.start_counting("w4", "w5")
        fleet.open_gates(5, 6)
        fleet.until_gate(7)
        fleet.start_counting("w2")  # long gone, and back
        fleet.open_gates(7, 8)
        fleet.until_gate(9)
        fleet.kill("w3")
        fleet.open_gates(9)
        fleet.assert_each_row_once("w2", "w4", "w5")
