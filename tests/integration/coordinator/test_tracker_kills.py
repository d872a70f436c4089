"""A tracker of another distribution, told by a coordinator that is killed."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import xain
from integration.conftest import plug_in
from support.process import PATIENCE_S, CoordinatorProcess, Keep
from support.waiting import until

ROUNDS = 6
SITES = ("east", "west")

# Writes a line for each call, and fails while the file `away` is there.
LINES = """
import os
from pathlib import Path


class Lines:
    def __init__(self):
        self.folder = Path(os.environ["LINES_FOLDER"])

    def on_round(self, record):
        self.write(f"{record.round} {record.metrics.get('loss')} {record.samples}")

    def on_end(self, result):
        self.write(f"end {result.model} {result.cause}")

    def write(self, text):
        if (self.folder / "away").exists():
            raise OSError("no route to host")
        with (self.folder / "lines").open("a") as file:
            file.write(text + "\\n")
"""


class Gate:
    """Sites in threads, which train rounds up to a number."""

    def __init__(self, port: int) -> None:
        self._changed = threading.Condition()
        self._last = -1
        self._waiting: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._train, args=(name, port), daemon=True) for name in SITES
        ]
        for thread in self._threads:
            thread.start()

    def open(self, last: int) -> None:
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def until_ended(self) -> None:
        """Wait until all sites have heard of the end of the session."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _train(self, name: str, port: int) -> None:
        for round_ in xain.rounds({"w": np.zeros(3)}, id=name, coordinator=f"127.0.0.1:{port}"):
            self._pass_through(name, round_.number)
            loss = 1.0 / (1 + round_.number)
            round_.submit(round_.weights, samples=10, metrics={"loss": loss})

    def _pass_through(self, name: str, number: int) -> None:
        with self._changed:
            self._waiting[name] = number
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number <= self._last, PATIENCE_S)

    def until_waiting(self, number: int) -> None:
        with self._changed:
            expected = dict.fromkeys(SITES, number)
            assert self._changed.wait_for(lambda: self._waiting == expected, PATIENCE_S)


@pytest.fixture
async def process(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CoordinatorProcess:
    """A coordinator whose path has a distribution with the tracker `lines`."""
    site = plug_in(tmp_path / "site", "trackers", "lines = acme_lines:Lines", LINES)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("LINES_FOLDER", str(tmp_path))
    settings = {
        "metrics.trackers": '["lines"]',
        "rounds.rounds": ROUNDS,
        "rounds.min_participants": len(SITES),
    }
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.start()
    return coordinator


@pytest.fixture
def gate(process: CoordinatorProcess) -> Iterator[Gate]:
    gate = Gate(process.port)
    yield gate
    gate.open(ROUNDS)
    gate.until_ended()


def lines(folder: Path) -> list[str]:
    path = folder / "lines"
    return path.read_text().splitlines() if path.exists() else []


async def until_taken(folder: Path, round_: int, *, ended: bool = False) -> None:
    """Wait until the coordinator has noted that the tracker has taken a round."""
    path = folder / "journal.tracked-lines.json"

    def is_noted() -> bool:
        noted = json.loads(path.read_text()) if path.exists() else {}
        return (noted.get("round"), noted.get("ended")) == (round_, ended)

    await until(is_noted)


async def test_tracker_hears_once_of_each_round_of_a_coordinator_that_is_killed(
    process, gate, tmp_path
):
    """Also of the rounds that it did not take before the kill, and of the end."""
    gate.open(2)
    await until_taken(tmp_path, 2)
    (tmp_path / "away").touch()
    gate.open(4)
    await asyncio.to_thread(gate.until_waiting, 5)
    await process.until_logged("tracker_failed")
    await process.kill()
    # In the first round sites make the initial weights.
    told = ["0 None 0", *[f"{number} {1.0 / (1 + number)} 20" for number in range(1, ROUNDS)]]
    assert lines(tmp_path) == told[:3]
    (tmp_path / "away").unlink()
    await process.start()
    await until_taken(tmp_path, 4)
    assert lines(tmp_path) == told[:5]
    await process.kill()
    await process.start()
    gate.open(ROUNDS)
    await until_taken(tmp_path, ROUNDS - 1, ended=True)
    await asyncio.to_thread(gate.until_ended)
    assert await process.stop() == 0
    await process.start()
    assert await process.stop() == 0
    assert lines(tmp_path) == [*told, f"end {ROUNDS} completed"]
