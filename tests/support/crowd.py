"""Participants of one process, each in a thread: honest ones, and ones that send what they like.

    python crowd.py TARGET NAME=HOW...

Honest participants go half of the way to TARGET_MODEL, each to a point of its own beside it.
HOW: "honest"; "flips": ten times as far, in the opposite direction; "huge": honest, but its fourth
update has an element of 1e30. Initial weights of honest participants are zeros, those of the others
are FAR.
"""

import logging
import sys
import threading
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_participant import Agent, Participant

TARGET_MODEL = np.array([1.0, -2.0, 3.0], np.float32)
FAR = np.full(3, 50.0, np.float32)
HUGE_EPOCH = 3


class Site(Participant):
    def __init__(self, name: str, how: str) -> None:
        self._how = how
        chance = np.random.default_rng(zlib.crc32(name.encode()))
        self._aim = TARGET_MODEL + chance.uniform(-0.01, 0.01, 3).astype(np.float32)

    def init_weights(self) -> NDArray[Any]:
        return np.zeros(3, np.float32) if self._how == "honest" else FAR

    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        step = (self._aim - weights) / 2
        if self._how == "flips":
            step *= -10
        trained = weights + step
        if self._how == "huge" and epoch_base == HUGE_EPOCH:
            trained[0] = 1e30
        return trained, 10


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    sites = dict(one.split("=") for one in sys.argv[2:])
    agents = [Agent(Site(name, how), sys.argv[1], name) for name, how in sites.items()]
    ends: list[int] = []
    threads = [threading.Thread(target=lambda a=agent: ends.append(a.run())) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(max(ends))


if __name__ == "__main__":
    main()
