"""A controller of another distribution, in a coordinator of its own: installed, broken, mended."""

import re
from pathlib import Path

import numpy as np
import pytest

from integration.conftest import plug_in
from support.process import CoordinatorProcess, Keep
from xain_wire.fl import coordinator_pb2 as pb

LAST = """
class Last:
    def __init__(self, breaks_at: int = -1) -> None:
        pass

    def select(self, candidates, k, chance):
        names = [candidate.participant_id for candidate in candidates]
        return names[-k:]
"""
BROKEN = LAST.replace("return names[-k:]", "return names[-k:] if len(names) < 3 else []")


@pytest.fixture
async def process(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CoordinatorProcess:
    """A coordinator whose path has a distribution with the controller `last`."""
    site = plug_in(tmp_path / "site", "controllers", "last = acme_last:Last", LAST)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # its source changes within a second
    settings = {
        "rounds.controller": "last",
        "rounds.rounds": 2,
        "rounds.fraction_participants": "1/3",
        "rounds.start_participants": 2,
        "rounds.max_participants": 3,
    }
    coordinator = keep(CoordinatorProcess(tmp_path, settings))
    await coordinator.start()
    return coordinator


def error_of(process: CoordinatorProcess) -> str:
    return str([line for line in process.events() if line["level"] == "error"][-1]["error"])


async def test_a_session_goes_on_when_its_controller_is_mended(enter, join, process, tmp_path):
    """A controller that answers nonsense ends the process with status 1 and a line that names it;
    without it there is no start; mended, the session goes on where it was."""
    code = tmp_path / "site" / "acme_last.py"
    _, last = await enter(process, "a", "b")
    await last.until(pb.ROUND, 0)
    await process.kill()
    code.write_text(BROKEN)
    await process.start()
    await enter(process, "c")
    b = join(process, "b")
    await b.until(pb.ROUND, 0)
    await b.hand_in(np.float32([1, 2]))  # durable; what follows from it is not
    assert await process.died() == 1
    assert re.search("Last .* 0 participants .*round 1", error_of(process))
    entry_points = tmp_path / "site" / "acme_last-0.1.dist-info" / "entry_points.txt"
    installed = entry_points.read_text()
    entry_points.write_text("")
    assert await process.fails() == 2, "the configuration names it"
    process._settings["rounds.controller"] = "random"
    assert await process.fails() == 1, "the session needs it"
    assert "the session's controller is 'last'" in error_of(process)
    entry_points.write_text(installed)
    code.write_text(LAST)
    process._settings["rounds.controller"] = "last"  # with another one it would refuse to start
    await process.start()
    c = join(process, "c")
    await c.until(pb.ROUND, 1)
