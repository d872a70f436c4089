"""Studies over processes: what is killed in the middle of one changes nothing in its table."""

import asyncio
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.commands import printed
from support.process import CoordinatorProcess, Lines, SiteProcess, ended
from support.tables import write_rows

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

SITES = ("east", "north", "south", "west")
ALPHAS = [round(0.00001 * 2**n, 6) for n in range(12)]
STUDIES: dict[str, dict[str, object]] = {
    "folds": {"study.folds": 5, "study.final": "true"},
    "search": {"search.options": json.dumps({"workload.options.alpha": ALPHAS}), "search.first": 1},
}
# Lines of the log after which the coordinator is killed: within a round, and at the end of a
# session, before the next one is in the journal.
MOMENTS = ("update_accepted", "evaluation_accepted", "session_finished", "session_opened")
KILLS = 3


class Study:
    """A coordinator and four sites with 60 rows each."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self.folder = folder / "study"
        settings = {
            "workload.name": "sgd",
            "rounds.rounds": 2,
            "rounds.min_participants": len(SITES),
            "server.heartbeat_time_s": 0.5,
            "server.heartbeat_timeout_s": 3,
            "server.drain_s": 1,
            **STUDIES[name],
        }
        self.coordinator = CoordinatorProcess(self.folder, settings)
        self.sites = {site: SiteProcess(folder, site) for site in SITES}
        for number, site in enumerate(SITES):
            write_rows(folder / f"{site}.csv", number, 60)

    async def begin(self) -> None:
        await self.coordinator.start()
        for site in SITES:
            await self.start(site)

    async def start(self, site: str) -> None:
        data = f"--data={self.folder.parent / site}.csv"
        await self.sites[site].start(self.coordinator.port, data, "--target=outcome")

    async def end(self) -> dict[str, Any]:
        """Wait until all sites are let go, stop, and return the table without names of sessions."""
        async with ended(self.coordinator, *self.sites.values()):
            assert [await self.sites[site].died() for site in SITES] == [0] * len(SITES)
            assert await self.coordinator.stop() == 0
            table = json.loads(await output_of("study", self.folder, "--json"))
        del table["study"]
        for line in table["lines"]:
            del line["session"]
        return table


async def test_killed_study_gives_the_same_table(tmp_path):
    """The coordinator is killed three times, in a round or between two sessions, and one site once;
    every figure is that of the undisturbed study, bit for bit."""
    name = "search"
    undisturbed, killed = Study(tmp_path / "a", name), Study(tmp_path / "b", name)
    await undisturbed.begin()
    expected = await undisturbed.end()
    assert expected["state"] == "completed"
    assert len(expected["lines"]) >= 5

    chance = Random(name)
    await killed.begin()
    for number in range(KILLS):
        await _until(killed.coordinator, chance.choice(MOMENTS), chance.randint(1, 3))
        await killed.coordinator.kill()
        if number == 1:
            await killed.sites["north"].kill()
            await killed.start("north")
        await killed.coordinator.start()
    table = await killed.end()
    assert len(table["lines"]) == len(expected["lines"])
    for line, other in zip(table["lines"], expected["lines"], strict=True):
        assert line == other
    assert table == expected


async def test_model_of_a_session_is_measured_at_the_sites(tmp_path):
    """`evaluate` trains nothing, and ends with the table; all rows are measured if asked for. A
    coordinator that is killed meanwhile goes on with it."""
    study = Study(tmp_path / "a", "folds")
    coordinator = study.coordinator
    await study.begin()
    trained = await study.end()
    sessions = json.loads(await output_of("study", study.folder, "--json"))["lines"]
    file = tmp_path / "model.safetensors"
    told = await output_of(
        "export", study.folder, f"--session={sessions[0]['session']}", f"--to={file}"
    )
    assert sessions[0]["session"] in told
    flags = [f"--model={file}", "--rows=all", f"--port={coordinator.port}", "--json"]
    flags += ["--min-participants=4", "--set=server.heartbeat_time_s=0.5"]
    flags += ["--set=server.heartbeat_timeout_s=3"]
    first = await begin("evaluate", tmp_path / "measured", *flags)
    while not (tmp_path / "measured" / "journal.sqlite-wal").exists():
        assert first.returncode is None
        await asyncio.sleep(0.02)  # a poll, not a race: it ends when the session is begun
    first.kill()
    await first.wait()
    second = await begin("evaluate", tmp_path / "measured", *flags)
    for site in SITES:
        await study.start(site)
    output, _ = await second.communicate()
    for process in study.sites.values():
        assert await process.died() == 0
    assert second.returncode == 0
    table = json.loads(output)
    assert {line["site"]: line["rows"] for line in table["lines"]} == {
        "": 240,
        **dict.fromkeys(SITES, 60),
    }
    # The model of the first fold, on rows that it was trained on, too.
    of_fold = trained["lines"][0]["figures"]["accuracy"]
    assert table["lines"][0]["figures"]["accuracy"]["value"] > of_fold["low"]


async def begin(command: str, folder: Path, *flags: str) -> asyncio.subprocess.Process:
    words = ["-m", "xain_coordinator", command, f"--data-dir={folder}", *flags]
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE
    )


async def output_of(command: str, folder: Path, *flags: str) -> str:
    return await printed(command, f"--data-dir={folder}", *flags)


async def _until(coordinator: CoordinatorProcess, text: str, times: int) -> None:
    """Wait until the log has so many more lines with this text, or the study is finished."""
    lines = Lines(coordinator.log_path)
    while times > 0:
        for line in lines.new():
            times -= f'"{text}"' in line
            assert '"study_finished"' not in line, "it was to be killed before its end"
        await asyncio.sleep(0.005)  # a poll: the moment is to be met
