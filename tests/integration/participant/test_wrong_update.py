"""One bad participant harms only itself: the round goes on without it."""

import asyncio
from typing import Any

import numpy as np

from xain_coordinator.core.values import Phase
from xain_participant import Participant


class Halves(Participant):
    """Goes half of the way to its number. extra: weights too many, from the second round on."""

    def __init__(self, number: float, extra: int = 0) -> None:
        self.number = number
        self.extra = extra

    def init_weights(self) -> Any:
        return np.zeros(4, dtype=np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        trained = (weights + np.float32(self.number)) / 2
        return np.concatenate([trained, np.zeros(self.extra, dtype=trained.dtype)]), 1


async def test_a_participant_whose_updates_are_wrong_does_not_hold_up_the_round(
    start: Any, take_part: Any
) -> None:
    """It is selected, is refused twice, and leaves; the other two finish the training."""
    coordinator = await start(rounds={"rounds": 3, "min_participants": 2, "start_participants": 3})
    participants = {"a": Halves(1), "b": Halves(3), "wrong": Halves(9, extra=1)}
    ends = await asyncio.wait_for(take_part(coordinator, participants), 30)
    assert ends == {"a": 0, "b": 0, "wrong": 1}
    session = coordinator.driver.session
    assert (session.phase, session.cause) == (Phase.FINISHED, "completed")
