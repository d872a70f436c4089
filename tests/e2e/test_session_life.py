"""The end of a session and what comes after it, over real processes."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands import command, status_json
from support.process import PATIENCE_S, CoordinatorProcess, ParticipantProcess, ended
from support.wire import Member

Launch = Callable[..., CoordinatorProcess]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Coordinators of one data folder; all are gone at the end."""
    launched = []

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
    async with ended(*members):
        for member in members:
            await member.start()
        for member in members:
            assert await member.died() == 0, member.log()


async def test_after_the_end_participants_that_left_are_not_connected(launch, tmp_path):
    """At once after the end, and after a restart: no participant is connected or training, no lease
    is negative, and its participants are still listed."""
    coordinator = launch(server__heartbeat_time_s=0.5, server__heartbeat_timeout_s=0.5)
    await coordinator.start()
    await trained(tmp_path, coordinator, "north")
    for _ in range(2):
        shown = await status_json(coordinator.port)
        assert shown["status"]["phase"] == "finished"
        assert shown["status"]["num_connected"] == 0
        (north,) = shown["participants"]
        assert north["participant_id"] == "north"
        assert north["lease_seconds"] == 0
        assert north["reported_state"] == "FINISHED"
        assert north["rounds_contributed"] == 1  # initial weights are not counted
        _, told, _ = await command("status", "--address", f"127.0.0.1:{coordinator.port}")
        assert "0 still connected" in told
        assert "gone" in told
        await coordinator.stop()
        await coordinator.start()


def told(coordinator: CoordinatorProcess, event: str) -> dict[str, Any]:
    """The last line of this event in the coordinator's log."""
    return coordinator.events(event)[-1]


async def logged(coordinator: CoordinatorProcess, event: str) -> dict[str, Any]:
    """The same, once there is one: the coordinator serves before it has said all."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if f'"{event}"' in coordinator.log():
                return told(coordinator, event)
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when the line is there


async def test_check_config_in_a_pipe_has_one_line_for_each_setting(tmp_path):
    """However long a value is, its line is whole: `grep` finds key, value and origin together."""
    long = tmp_path / ("deep/" * 30) / "journal.sqlite"
    code, output, _ = await command("check-config", f"--set=journal.path={long}", "--rounds=7")
    assert code == 0
    lines = [line.split() for line in output.splitlines()]
    assert ["journal.path", f'"{long}"', "flag"] in lines
    assert ["rounds.rounds", "7", "flag"] in lines
    assert ["rounds.quorum", '""', "default"] in lines


async def test_other_settings_refuse_the_start_and_name_themselves(launch):
    """Key, value in the session and configured value in one line, and exit status 2; --resume goes
    on with the session's own rules, and times for heartbeats are taken at once."""
    coordinator = launch()
    await coordinator.start()
    session = told(coordinator, "coordinator_serving")["session"]
    await coordinator.stop()
    code, _, errors = await command("extend", f"--data-dir={coordinator.folder}", "--rounds=+2")
    assert code == 1
    assert f"the session {session} is not finished" in errors
    other = ("--set=rounds.epochs=3", "--set=aggregation.rule=median")
    assert await coordinator.fails(*other) == 2
    error = told(coordinator, "cannot_start")["error"]
    assert "rounds.epochs = 1 (configured: 3)" in error
    assert 'aggregation.rule = "weighted_average" (configured: "median")' in error
    assert "--resume goes on with these" in error
    assert "add --new-session" in error
    assert (await command("--resume", "--new-session"))[0] == 2

    await coordinator.start(*other, "--resume", "--set=server.heartbeat_time_s=3")
    assert told(coordinator, "coordinator_serving")["session"] == session
    kept = (await logged(coordinator, "rules_differ"))["kept"]
    assert "rounds.epochs = 1 (configured: 3)" in kept
    member = Member(coordinator.port, "a")
    assert (await member.rendezvous()).heartbeat_interval_ms == 3000
    await member.close()
    await coordinator.kill()

    await coordinator.start()  # again with the times from before
    member = Member(coordinator.port, "a")
    assert (await member.rendezvous()).heartbeat_interval_ms == 10000
    assert told(coordinator, "coordinator_serving")["session"] == session
    await member.close()


async def test_a_finished_session_is_served_with_resume_whatever_is_configured(launch, tmp_path):
    """A container whose settings were changed after the end: without --resume it would be restarted
    for ever; with it the result is served, and one line tells how to train on."""
    coordinator = launch()
    await coordinator.start()
    await trained(tmp_path, coordinator, "a")
    await coordinator.stop()
    assert await coordinator.fails("--set=rounds.rounds=40") == 2
    error = told(coordinator, "cannot_start")["error"]
    assert "is finished and was opened with other settings" in error
    assert "rounds.rounds = 2 (configured: 40)" in error
    assert "to train it further, run `xain-coordinator extend --rounds +1`" in error

    await coordinator.start("--set=rounds.rounds=40", "--resume")
    assert (await status_json(coordinator.port))["status"]["phase"] == "finished"
    kept = (await logged(coordinator, "rules_differ"))["kept"]
    assert kept == ["rounds.rounds = 2 (configured: 40)"]
    assert "extend --rounds +1" in (await logged(coordinator, "session_is_finished"))["hint"]
    assert await coordinator.stop() == 0


async def test_a_session_begins_with_the_model_of_a_file(launch, tmp_path):
    """The same command goes on after a kill -9, without the file; another file is refused, and so
    is one that is no model."""
    file, other = tmp_path / "model.npy", tmp_path / "other.npy"
    np.save(file, np.arange(10, dtype=np.float32))
    np.save(other, np.zeros((2, 5)))
    coordinator = launch()
    assert await coordinator.fails("--from-model", str(tmp_path / "none.npy")) == 2
    assert "No such file" in told(coordinator, "cannot_start")["error"]
    assert await coordinator.fails("--from-model", str(other)) == 2
    error = told(coordinator, "cannot_start")["error"]
    assert re.search(r"float64 .*\(2, 5\)", error)
    assert await coordinator.fails("--from-model", "5e55104aaaaa/3") == 2
    assert "this journal has no session 5e55104aaaaa" in told(coordinator, "cannot_start")["error"]

    await coordinator.start("--from-model", str(file))
    await coordinator.kill()
    file.unlink()
    await coordinator.start("--from-model", str(file))
    shown = await status_json(coordinator.port)
    assert shown["status"]["began_with"] == str(file)
    assert shown["models"][0]["shape"] == [10]
    await trained(tmp_path, coordinator, "a")
    await coordinator.stop()
    assert await coordinator.fails("--from-model", str(other)) == 2
    refused = f"--from-model = {file} (configured: {other})"
    assert refused in told(coordinator, "cannot_start")["error"]

    session = shown["status"]["session_id"]
    await coordinator.start(
        "--new-session", "--from-model", f"{session}/last", "--set=rounds.rounds=3"
    )
    assert (await status_json(coordinator.port))["status"]["began_with"] == f"{session}/2"
