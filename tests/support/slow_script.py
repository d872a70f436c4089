"""A server's script whose rule, controller or pacing rule takes its time.

    python -m support.slow_script FOLDER WHAT [asyncio]

WHAT, which is "rule" or "controller", makes the file "called" in the folder, and returns when the
file "go" is there.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import xain

MODEL = {"w": np.zeros(3)}


def wait_in(what: str) -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2] == what:
        (folder / "called").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)  # a poll of the file, which the test makes


class Slow(xain.Rule):
    def combine(self, tile: Any, weights: Any) -> Any:
        wait_in("rule")
        return tile.astype(np.float64).mean(axis=0)


class First:
    """The first participants by name."""

    def select(self, candidates: Any, k: int, chance: Any) -> list[str]:
        wait_in("controller")
        return [one.participant_id for one in candidates][:k]


def site(site: xain.Site) -> None:
    for round_ in xain.rounds(MODEL):
        round_.submit({"w": round_.weights["w"] + 1}, samples=1)


def opened() -> "xain.Session[Any]":
    return xain.session(
        MODEL,
        rounds=2,
        rule=Slow(),
        controller=First(),
        participants=xain.simulated(site, 1, workers=1),
        data_dir=Path(sys.argv[1], "data"),
        progress=False,
    )


async def under_asyncio() -> list[float]:
    async with opened() as session:
        async for round_ in session:
            await round_.run()
    return session.result.weights["w"].tolist()


def plain() -> list[float]:
    with opened() as session:
        for round_ in session:
            round_.run()
    return session.result.weights["w"].tolist()


if __name__ == "__main__":
    weights = asyncio.run(under_asyncio()) if sys.argv[3:] else plain()
    sys.stdout.write(f"{weights}\n")
