"""One bad participant harms only itself: the round goes on without it."""

import asyncio
from typing import Any

import numpy as np

from xain_coordinator.core.parts.selection_state import Faults
from xain_coordinator.core.vocabulary.values import Phase
from xain_foundation.exit_statuses import EXIT_NOTHING_COUNTED
from xain_participant import Participant


class Halves(Participant):
    """Goes half of the way to its number. extra: weights too many, the first `num_wrong` times."""

    def __init__(self, number: float, extra: int = 0, num_wrong: int = 1000) -> None:
        self.number = number
        self.extra = extra
        self.num_wrong = num_wrong
        self.num_trained = 0

    def init_weights(self) -> Any:
        return np.zeros(4, dtype=np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        trained = (weights + np.float32(self.number)) / 2
        self.num_trained += 1
        extra = self.extra if self.num_trained <= self.num_wrong else 0
        return np.concatenate([trained, np.zeros(extra, dtype=trained.dtype)]), 1


async def test_a_participant_whose_updates_are_wrong_does_not_hold_up_the_round(
    start: Any, take_part: Any
) -> None:
    """After three refusals the participant stands by: the other two finish the training."""
    rounds = {"rounds": 3, "min_participants": 2, "start_participants": 3}
    coordinator = await start(rounds=rounds)
    participants = {"a": Halves(1), "b": Halves(3), "wrong": Halves(9, extra=1)}
    ends = await asyncio.wait_for(take_part(coordinator, participants), 30)
    assert ends == {"a": 0, "b": 0, "wrong": EXIT_NOTHING_COUNTED}
    session = coordinator.driver.session
    assert (session.phase, session.cause) == (Phase.FINISHED, "completed")
    assert session.selection.faults["wrong"] == Faults(num_refused=3, left_out_until=5)
    assert coordinator.driver.history.accounts.contributions() == {"a": 2, "b": 2}
