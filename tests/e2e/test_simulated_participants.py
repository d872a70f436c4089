"""Simulated participants against a coordinator that others have started: xain.simulated()."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import support.simulated as scripts
import xain
from support.process import PATIENCE_S, CoordinatorProcess
from xain.result import fetch_last_model

pytestmark = pytest.mark.e2e

NUM_SITES = 4


def settings(folder: Path, **more: Any) -> dict[str, object]:
    return {
        "rounds.rounds": 4,
        "rounds.min_participants": NUM_SITES,
        "rounds.start_participants": NUM_SITES,
        "train.folder": str(folder),
        **more,
    }


async def until_over(pool: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not pool.is_over:
            await asyncio.to_thread(pool.check, 0.25)


async def trained(
    tmp_path: Path, name: str, *, is_killed: bool = False, main: Any = scripts.hold, **more: Any
) -> bytes:
    """The bits of the model of all rounds. is_killed: the coordinator, while all sites train."""
    folder = tmp_path / f"{name}-shown"
    folder.mkdir()
    coordinator = CoordinatorProcess(tmp_path / name, settings(folder, **more))
    await coordinator.start()
    target = f"127.0.0.1:{coordinator.port}"
    try:
        with xain.simulated(main, NUM_SITES, workers=2).running(target) as pool:
            if is_killed:
                async with asyncio.timeout(PATIENCE_S):
                    while len(list(folder.iterdir())) < 2:  # noqa: ASYNC110  # one of each worker
                        await asyncio.sleep(0.02)  # a poll, not a race
                await coordinator.kill()
                (folder / "go").touch()  # results are there before the coordinator is
                await coordinator.start()
            (folder / "go").touch()
            await until_over(pool)
            vector = await asyncio.to_thread(
                lambda: fetch_last_model(target, "somebody").vector.tobytes()
            )
            return bytes(vector)
    finally:
        await coordinator.end()


@pytest.mark.parametrize("port", ["on", "off"])
async def test_models_that_are_too_large_for_a_call(tmp_path: Path, port: str) -> None:
    """Weights come from the weights port, or in chunks through the coordinator where none is."""
    more = {} if port == "on" else {"server.weights_port": "off"}
    bits = await trained(tmp_path, port, main=scripts.large, **more)
    assert (
        np.frombuffer(bits, np.float32).tolist() == [3.0] * scripts.LARGE
    )  # the first round initialises
