"""Data that do not fit the session are refused at the rendezvous, told at both ends."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.process import PATIENCE_S, CoordinatorProcess
from xain_coordinator.inspection.client import fetch

pytestmark = pytest.mark.e2e

HEADER = "age,sex,weight,status"
ROWS = ("63,f,71.5,alive", "41,m,88,dead", "58,m,?,alive", "70,f,66,dead")
SITE = "\n".join((HEADER, *ROWS)) + "\n"
FLAGS = ("--set=data.units.weight=kg",)


def table(header: str, *rows: str) -> str:
    return "\n".join((header, *rows)) + "\n"


def labelled(*labels: str) -> str:
    return table(HEADER, *(f"6{i},f,7{i},{label}" for i, label in enumerate(labels)))


# For each site its file, its flags, and what both ends are told. The unit tests have every mistake.
MISTAKES: Mapping[str, tuple[str, Sequence[str], str]] = {
    "renamed": (
        SITE.replace("weight", "Weight_kg"),
        (),
        "column 'weight' of the session's schema is not in the data, and column 'Weight_kg' of the"
        " data is not in the schema; if two of them are the same, rename it, set data.rename",
    ),
    "pounds": (
        SITE,
        ("--set=data.units.weight=lb",),
        "column 'weight' is in the unit 'lb', in the session's schema in 'kg'",
    ),
    "other-target": (
        SITE.replace("status", "outcome"),
        FLAGS,
        "the target is called 'outcome', in the session 'status'",
    ),
    "stray": (
        labelled("alive", "dead", "unknown"),
        (),
        "label 'unknown' of the target 'status' is unknown to the session",
    ),
}


class Site:
    """A participant with a CSV file, in a process of its own."""

    def __init__(self, folder: Path, name: str, text: str, flags: Sequence[str], port: int) -> None:
        self.name = name
        self._path = folder / f"{name}.csv"
        self._path.write_text(text)
        self._flags = (f"--coordinator=localhost:{port}", f"--id={name}", *flags)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "xain_participant", f"--data={self._path}", *self._flags),
            stderr=asyncio.subprocess.PIPE,
        )

    async def ended(self) -> tuple[int | None, str]:
        """(exit status, standard error)."""
        assert self._process is not None
        _, stderr = await asyncio.wait_for(self._process.communicate(), PATIENCE_S)
        return self._process.returncode, stderr.decode()

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@asynccontextmanager
async def waiting_coordinator(
    folder: Path, settings: Mapping[str, object]
) -> AsyncIterator[CoordinatorProcess]:
    """A coordinator for a linear model that waits for more participants than will come."""
    coordinator = CoordinatorProcess(
        folder, {"workload.name": "sgd", "rounds.min_participants": 50, **settings}
    )
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.end()


def refusals(coordinator: CoordinatorProcess) -> dict[str, dict[str, str]]:
    """The warnings about refused rendezvous, by participant."""
    lines = [json.loads(line) for line in coordinator.log().splitlines()]
    told = [line for line in lines if line["event"] == "rendezvous_refused"]
    assert all(line["level"] == "warning" for line in told)
    return {line["participant"]: line for line in told}


async def require_refused(
    coordinator: CoordinatorProcess,
    folder: Path,
    mistakes: Mapping[str, tuple[str, Sequence[str], str]],
) -> None:
    """Each site hears why it is refused and ends with status 1; the coordinator's log has the
    same with the site's name."""
    sites = [
        Site(folder, name, text, flags, coordinator.port)
        for name, (text, flags, _) in mistakes.items()
    ]
    for two in zip(sites[::2], [*sites[1::2], None], strict=False):  # two at a time, for two cores
        started = [site for site in two if site is not None]
        for site in started:
            await site.start()
        for site in started:
            status, told = await site.ended()
            complaint = mistakes[site.name][2]
            assert status == 1, told
            assert complaint in json.loads(told.splitlines()[-1])["reason"]
            line = refusals(coordinator)[site.name]
            assert complaint in line["reason"]
            assert site.name in line["reason"]
            assert line["code"] == "PROFILE_MISMATCH"
    assert refusals(coordinator).keys() == mistakes.keys()
    status = fetch(f"localhost:{coordinator.port}").status
    told_of = sorted(warning.partition(" was not let in: ")[0] for warning in status.warnings)
    assert told_of == sorted(map(repr, mistakes))


async def test_mistakes_in_data_are_told_at_both_ends(tmp_path: Path) -> None:
    """The first participant's data are the schema; columns in another order are no mistake."""
    async with waiting_coordinator(tmp_path / "coordinator", {}) as coordinator:
        shuffled = table("status,weight,sex,age", "alive,71.5,f,63", "dead,88,m,41")
        first = Site(tmp_path, "first", SITE, FLAGS, coordinator.port)
        second = Site(tmp_path, "second", shuffled, ("--target=status", *FLAGS), coordinator.port)
        try:
            for site in (first, second):
                await site.start()
                await coordinator.until_logged(f'"participant": "{site.name}"')
            await require_refused(coordinator, tmp_path, MISTAKES)
        finally:
            await first.kill()
            await second.kill()


def csv(rows: Sequence[Mapping[str, str]], *columns: str) -> str:
    return table(",".join(columns), *(",".join(row[name] for name in columns) for row in rows))
