"""Agents that run to the end of a session, in threads of this process."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from support.process import PATIENCE_S
from xain_participant import Agent, Participant, WorkloadParticipant


class Same(Participant):
    """Hands in what it gets."""

    def init_weights(self) -> Any:
        return np.float32([1, 2, 3])

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        return weights, 1


async def ends_of(agents: Sequence[Agent]) -> list[int]:
    """Exit statuses of agents, each of which has a thread until it has ended."""
    # asyncio's own pool has too few for seven agents on two processors.
    threads, loop = ThreadPoolExecutor(len(agents)), asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*(loop.run_in_executor(threads, a.run) for a in agents))
    finally:
        for agent in agents:
            agent.stop()  # in a test that fails they would go on
        threads.shutdown(wait=False)


async def run_agents(coordinator: Any, data: Iterable[Any]) -> None:
    """Run participants p0, p1, ... of these data until the session has ended."""
    target = f"127.0.0.1:{coordinator.port}"
    agents = [Agent(WorkloadParticipant(part), target, f"p{i}") for i, part in enumerate(data)]
    assert set(await ends_of(agents)) == {0}
