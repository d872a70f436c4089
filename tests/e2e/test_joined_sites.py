"""Sites that have joined train with a coordinator that lets nobody else in."""

import asyncio
from pathlib import Path

import pytest

from support.process import CoordinatorProcess, Process
from xain_coordinator.access.control import initialise
from xain_participant.enrolment.joining import Token, join
from xain_participant.enrolment.kept import KeptCertificates

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

# The script's weights grow by 1 a round. Each round is a line of the book before it is trained.
SCRIPT = """
import sys
import numpy as np
import xain

folder, size = sys.argv[1:]
rounds = xain.rounds(np.zeros(int(size), np.float32), state_dir=folder)
for round_ in rounds:
    with open(folder + ".book", "a") as book:
        print(round_.number, file=book)
    round_.submit(round_.weights + 1, samples=5)
with open(folder + ".book", "a") as book:
    print("result", float(rounds.result.weights[0]), file=book)
"""


class ScriptProcess(Process):
    def __init__(self, folder: Path, name: str, size: int = 4) -> None:
        super().__init__(folder, name)
        self.state_dir = folder / name
        self._size = size

    async def start(self) -> None:
        self._process = await self.run(["-c", SCRIPT, str(self.state_dir), str(self._size)])

    @property
    def book(self) -> list[str]:
        path = self.state_dir.with_suffix(".book")
        return path.read_text().splitlines() if path.exists() else []


async def joined(coordinator: CoordinatorProcess, site: ScriptProcess) -> None:
    """Give a token to a site, and let it join."""
    address = f"127.0.0.1:{coordinator.port}"
    name = site.state_dir.name
    text = await coordinator.told("tokens", "create", "--name", name, f"--address={address}")
    kept = KeptCertificates(site.state_dir)
    await asyncio.to_thread(join, kept, Token(text, "token"))


@pytest.mark.parametrize("size", [4, 300_000])
async def test_scripts_need_their_state_directory_only(keep, tmp_path, size):
    """Calls, weights inside them, and those of the weights port go under the certificate, and the
    last model is fetched after the end of the session."""
    initialise(tmp_path / "access", ["localhost"])
    coordinator = keep(
        CoordinatorProcess(tmp_path, {"rounds.rounds": 3, "rounds.min_participants": 2})
    )
    sites = [keep(ScriptProcess(tmp_path, name, size)) for name in ("north", "south")]
    await coordinator.start()
    for site in sites:
        await joined(coordinator, site)
        await site.start()
    for site in sites:
        assert await site.died() == 0, site.log()
        assert site.book == ["1", "2", "result 2.0"]
        assert "offer_failed" not in site.log()
    assert await coordinator.stop() == 0
