"""Simulated participants against a coordinator that others have started: xain.simulated()."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import support.simulated as scripts
import xain
from support.process import PATIENCE_S, CoordinatorProcess
from xain.result import fetch_last_model

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


@pytest.mark.parametrize("port", ["on", "off"])
async def test_models_that_are_too_large_for_a_call(keep, tmp_path, port):
    """Weights come from the weights port, or in chunks through the coordinator where none is."""
    more = {} if port == "on" else {"server.weights_port": "off"}
    coordinator = keep(CoordinatorProcess(tmp_path / "data", settings(tmp_path, **more)))
    await coordinator.start()
    target = f"127.0.0.1:{coordinator.port}"
    with xain.simulated(scripts.large, NUM_SITES, workers=2).running(target) as pool:
        await until_over(pool)
        model = await asyncio.to_thread(fetch_last_model, target, "somebody")
    assert model.vector.tolist() == [3.0] * scripts.LARGE  # the first round initialises
