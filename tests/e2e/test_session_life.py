"""The end of a session and what comes after it, over real processes."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.process import PATIENCE_S, CoordinatorProcess, ParticipantProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

Launch = Callable[..., CoordinatorProcess]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Coordinators of one data folder; all are gone at the end."""
    launched: list[CoordinatorProcess] = []

    def make(**settings: object) -> CoordinatorProcess:
        rules = {"rounds.rounds": 2, "rounds.min_participants": 1}
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        launched.append(CoordinatorProcess(tmp_path / "data", rules | dotted))
        return launched[-1]

    (tmp_path / "data").mkdir()
    yield make
    for coordinator in launched:
        await coordinator.end()


async def trained(folder: Path, coordinator: CoordinatorProcess, *names: str) -> None:
    """Participants take part to the end of the session, and end."""
    members = [
        ParticipantProcess(folder, name, f"127.0.0.1:{coordinator.port}", "--size", "10")
        for name in names
    ]
    try:
        for member in members:
            await member.start()
        for member in members:
            assert await member.died() == 0, member.log()
    finally:
        for member in members:
            await member.end()


async def command(*words: object) -> tuple[int, str, str]:
    """Run `xain-coordinator`: (exit status, standard output, standard error)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "xain_coordinator", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def status_of(coordinator: CoordinatorProcess) -> dict[str, Any]:
    """What `xain-coordinator status --json` prints."""
    address = f"127.0.0.1:{coordinator.port}"
    code, output, errors = await command("status", "--json", "--address", address)
    assert code == 0, errors
    shown: dict[str, Any] = json.loads(output)
    return shown


async def test_after_the_end_participants_that_left_are_not_connected(launch, tmp_path):
    """At once after the end, and after a restart: no participant is connected or training, no lease
    is negative, and those who took part are still listed."""
    coordinator = launch(server__heartbeat_time_s=0.5, server__heartbeat_timeout_s=0.5)
    await coordinator.start()
    await trained(tmp_path, coordinator, "north")
    for _ in range(2):
        shown = await status_of(coordinator)
        assert shown["status"]["phase"] == "finished"
        assert shown["status"]["num_connected"] == 0
        (north,) = shown["participants"]
        assert north["participant_id"] == "north"
        assert north["lease_seconds"] == 0
        assert north["reported_state"] == "FINISHED"
        assert north["rounds_contributed"] == 2
        _, told, _ = await command("status", "--address", f"127.0.0.1:{coordinator.port}")
        assert "0 still connected" in told
        assert "gone" in told
        await coordinator.stop()
        await coordinator.start()


async def test_check_config_in_a_pipe_has_one_line_for_each_setting(tmp_path):
    """However long a value is, its line is whole: `grep` finds key, value and origin together."""
    long = tmp_path / ("deep/" * 30) / "journal.sqlite"
    code, output, _ = await command("check-config", f"--set=journal.path={long}", "--rounds=7")
    assert code == 0
    lines = [line.split() for line in output.splitlines()]
    assert ["journal.path", f'"{long}"', "flag"] in lines
    assert ["rounds.rounds", "7", "flag"] in lines
    assert ["rounds.quorum", '""', "default"] in lines
