"""SCAFFOLD over processes: kills leave no control variate ahead of or behind its model."""

import asyncio
import hashlib
import json
from pathlib import Path
from random import Random

import pytest

from support.process import CoordinatorProcess, Lines, SiteProcess
from support.tables import write_rows
from xain_participant.keep.versions import Versions

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SITES = {"east": 40, "north": 60, "south": 90}  # rows
ROUNDS = 16
# Lines after which something is killed: a site has handed in, or all are about to go on.
MOMENTS = ("update_accepted", "RoundClosed", "model_published", "round_opened")


class Session:
    """A coordinator and three sites, each with a state directory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        settings = {
            "workload.name": "mlp",
            "workload.remedy": "scaffold",
            "workload.options.hidden_layers": "[5]",
            "rounds.rounds": ROUNDS,
            "rounds.epochs": 2,
            "rounds.min_participants": len(SITES),
            "evaluate.local": "false",
            "logging.level": "debug",
            "server.heartbeat_time_s": 0.5,
            "server.heartbeat_timeout_s": 3,
            "server.drain_s": 1,
        }
        self.coordinator = CoordinatorProcess(folder / "session", settings)
        self.sites = {site: SiteProcess(folder, site) for site in SITES}
        for number, (site, rows) in enumerate(SITES.items()):
            write_rows(folder / f"{site}.csv", number, rows)

    async def begin(self) -> None:
        await self.coordinator.start()
        for site in SITES:
            await self.start(site)

    async def start(self, site: str) -> None:
        flags = [f"--data={self.folder / site}.csv", "--target=outcome"]
        flags.append(f"--state-dir={self.folder / 'state' / site}")
        await self.sites[site].start(self.coordinator.port, *flags)

    async def end(self) -> tuple[list[str], dict[str, str]]:
        """Wait for the end. Returns digests of all models, and of the sites' last variates."""
        try:
            assert [await self.sites[site].died() for site in SITES] == [0] * len(SITES)
            assert await self.coordinator.stop() == 0
        finally:
            for process in (self.coordinator, *self.sites.values()):
                await process.end()
        for site in self.sites.values():
            assert "control_variate_lost" not in site.log()
        (session,) = (self.folder / "session/weights").glob("????????????")
        found = [(session / f"{n}/global.weights").read_bytes() for n in range(ROUNDS + 1)]
        own = {
            site: Versions(self.folder / "state" / site, "control", site).of_round(
                session.name, ROUNDS - 1
            )
            for site in SITES
        }
        return [_digest(data) for data in found], {s: _digest(v or b"") for s, v in own.items()}


async def test_killed_session_ends_with_the_same_model_and_variates(tmp_path: Path) -> None:
    """The coordinator is killed three times, and each site once: all models, and the control
    variates at the sites, are those of the undisturbed session, bit for bit."""
    undisturbed, killed = Session(tmp_path / "a"), Session(tmp_path / "b")
    await undisturbed.begin()
    expected = await undisturbed.end()
    assert len({*expected[1].values()}) == len(SITES)

    chance = Random(7)
    await killed.begin()
    for site in SITES:
        await _until(killed.coordinator, chance.choice(MOMENTS), chance.randint(1, 3))
        await killed.sites[site].kill()
        await killed.start(site)
        await _until(killed.coordinator, chance.choice(MOMENTS), chance.randint(1, 3))
        await killed.coordinator.kill()
        await killed.coordinator.start()
    assert await killed.end() == expected


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if data else ""


async def _until(coordinator: CoordinatorProcess, event: str, times: int) -> None:
    """Wait until the log has so many more lines of this event."""
    lines = Lines(coordinator.log_path)
    while times > 0:
        for line in lines.new():
            told = json.loads(line)["event"] if line.startswith("{") else ""
            times -= told == event
            assert told != "session_finished", "it was to be killed before its end"
        await asyncio.sleep(0.005)  # a poll: the moment is to be met
