"""Agents in threads of their own, and what they train."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from integration.participant.scripted import PATIENCE_S, Ledger
from xain_participant import Agent, Participant
from xain_workloads.model import Layout
from xain_workloads.tables.profile import DataProfile


class Adder(Participant):
    """Adds 1 to every weight. It waits, when told to, until the test lets it go on."""

    def __init__(self) -> None:
        self.trained: list[float] = []  # the first weight of each model that was trained
        self.models: list[tuple[Layout, Mapping[str, str]]] = []
        self.initialised = 0
        self.entered = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.error: BaseException | None = None

    def profile(self) -> DataProfile | None:
        return DataProfile(5, 2)

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        self.models.append((layout, metadata))

    def init_weights(self) -> Any:
        self.initialised += 1
        return np.ones(4, dtype=np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.trained.append(float(weights[0]))
        self.entered.set()
        assert self.may_finish.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.update_metrics(loss=float(weights[0]))
        return weights + 1, 5


class Running:
    """An agent in a thread of its own."""

    def __init__(self, participant: Participant, target: str, **options: Any) -> None:
        self.seen: list[tuple[str, int, str]] = []
        options = {"observer": self._note, "insecure": True, **options}
        self.agent = Agent(participant, target, "ward-7", **options)
        self._code: int | None = None
        # A daemon, so that a test that fails does not keep the others from ending.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self.agent.run()

    def code(self) -> int:
        self._thread.join(PATIENCE_S)
        assert self._code is not None, "it has not come to an end"
        return self._code

    def _note(self, *step: Any) -> None:
        self.seen.append(step)

    @property
    def steps(self) -> list[tuple[str, int]]:
        return [(step, round_) for step, round_, _ in self.seen]


def large() -> Ledger:
    """A session whose weights do not fit into a reference: they travel in streams."""
    return Ledger(model=np.zeros(50_000, dtype=np.float32))
