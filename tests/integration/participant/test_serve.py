"""Participants that stay after the end of a session, against real coordinators."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from integration.participant.scripted import PATIENCE_S
from support.process import CoordinatorProcess, Process


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)  # a poll, not a race


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
