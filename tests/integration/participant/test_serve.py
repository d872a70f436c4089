"""Participants that stay after the end of a session, against real coordinators."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from integration.conftest import config_for
from integration.participant.agents import Adder
from integration.participant.scripted import PATIENCE_S
from support.process import CoordinatorProcess, Process
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.core.vocabulary.commands import RequestFit
from xain_coordinator.core.vocabulary.values import Phase
from xain_participant import Agent

ROUNDS = {"rounds": 2, "min_participants": 2}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)  # a poll, not a race


async def fit(coordinator: SessionCoordinator) -> None:
    """Wait for both participants, request the fit, and wait for its end."""
    driver = coordinator.driver

    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: driver.session.members.num_eligible == 2)
        assert driver.session.phase is Phase.STANDBY
        await driver.submit(RequestFit())
        while driver.session.phase is not Phase.FINISHED:
            await driver.changed()
        assert driver.session.cause == "completed"


async def test_participants_that_serve_take_part_in_the_next_session(tmp_path: Path) -> None:
    """The second coordinator opens a new session on the same port and journal."""
    sections = {"rounds": ROUNDS, "server": {"heartbeat_time_s": 0.5}, "http": {"port": 0}}
    config = config_for(tmp_path, **sections)
    coordinator = SessionCoordinator(config)
    await coordinator.start()
    port = coordinator.port
    adders = {name: Adder() for name in ("a", "b")}
    agents = [Agent(adders[n], f"127.0.0.1:{port}", n, serve=True) for n in adders]
    ends = [asyncio.ensure_future(asyncio.to_thread(agent.run)) for agent in agents]
    try:
        await fit(coordinator)
        await coordinator.stop()
        server = config.server.model_copy(update={"port": port})
        coordinator = SessionCoordinator(
            config.model_copy(update={"server": server}), new_session=True
        )
        await coordinator.start()
        await fit(coordinator)
        assert [len(adder.trained) for adder in adders.values()] == [2, 2], "one trains per session"
        assert not any(end.done() for end in ends)
    finally:
        for agent in agents:
            agent.stop(143)
        assert await asyncio.wait_for(asyncio.gather(*ends), PATIENCE_S) == [143, 143]
        await coordinator.stop()


async def test_serving_process_outlives_the_session(tmp_path: Path) -> None:
    """With --serve, of a coordinator that is not in serve mode too. SIGTERM ends it."""
    coordinator = CoordinatorProcess(
        tmp_path,
        {
            "rounds.rounds": 1,
            "workload.name": "sgd",
            "server.heartbeat_time_s": 0.5,
        },
    )
    site = Process(tmp_path, "site")
    await coordinator.start()
    try:
        flags = ["-m", "xain_participant", "--data=iris", "--id=site", "--serve"]
        site._process = await site.run([*flags, f"--coordinator=127.0.0.1:{coordinator.port}"])
        await site.until_logged("session_finished")
        await coordinator.stop()
        await coordinator.start("--new-session")
        await until(lambda: site.log().count("session_finished") == 2)
        assert await site.stop() == 143
    finally:
        await site.end()
        await coordinator.end()
