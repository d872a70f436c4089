"""The procedure of docs/operations.md: back up a stopped coordinator, and restore the copy."""

import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.process import CoordinatorProcess
from support.wire import Member
from xain_wire.fl import coordinator_pb2 as pb

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def commands() -> tuple[str, str, str]:
    """Commands of the page: stop, back up, restore."""
    section = PAGE.read_text(encoding="utf-8").partition("## Back up and restore")[2]
    backup, restore = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    stop, copy = backup.splitlines()
    return stop, copy, restore


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    settings = {"rounds.min_participants": 2, "rounds.rounds": 3, "rounds.controller": "all"}
    made = CoordinatorProcess(tmp_path / "xain-data", settings)
    yield made
    await made.end()


@pytest.mark.e2e
async def test_restored_backup_goes_on_with_its_round(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """An update from before the backup counts; one from after it is asked for again."""
    stop, copy, restore = commands()

    def type_in(line: str) -> None:
        environment = os.environ | {"COORDINATOR": str(coordinator.pid)}
        subprocess.run(line, shell=True, check=True, cwd=tmp_path, env=environment)

    async def members() -> tuple[Member, Member]:
        both = Member(coordinator.port, "a"), Member(coordinator.port, "b")
        for member in both:
            await member.rendezvous()
        return both

    await coordinator.start()
    a, b = await members()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0, 1.0])
    type_in(stop)
    assert await coordinator.died() == 0
    await a.close()
    await b.close()
    type_in(copy)

    await coordinator.start()
    a, b = await members()
    await b.until(pb.ROUND, 0)
    await b.hand_in([3.0, 3.0])
    await a.until(pb.ROUND, 1)
    await coordinator.kill()
    await a.close()
    await b.close()
    type_in(restore)

    await coordinator.start()
    a, b = await members()
    assert (await a.heartbeat()).update_accepted
    await b.until(pb.ROUND, 0)
    await b.hand_in([3.0, 3.0])
    await a.until(pb.ROUND, 1)
    await a.close()
    await b.close()
