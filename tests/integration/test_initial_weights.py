"""One participant of a session without a workload makes the initial weights, with their layout."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from integration.conftest import config_for
from support.agents import ends_of
from xain_coordinator.export.trained import Trained, ask, open_files
from xain_participant.agent.agent import Agent
from xain_participant.sdk.participant import Participant
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.model import Layout, TensorSpec

LAYOUT = (
    TensorSpec("w", (2, 2), "float32"),
    TensorSpec("running_mean", (2,), "float32", "statistic"),
)


class Named(Participant):
    """Adds 1 to the weights each round, and writes down what it was asked to do."""

    def __init__(self, first: float) -> None:
        self.first = first
        self.num_initialised = 0
        self.trained: list[tuple[float, int]] = []
        self.layouts: list[Layout] = []

    def init_weights(self) -> NDArray[Any]:
        self.num_initialised += 1
        return np.full(6, self.first, np.float32)

    def init_layout(self) -> Layout:
        return LAYOUT

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        self.layouts.append(layout)

    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        self.trained.append((float(weights[0]), epoch_base))
        return weights + 1, 1


async def run(port: int, participants: Mapping[str, Participant]) -> list[int]:
    """Exit statuses of the participants' agents, which run to the end of the session."""
    agents = [Agent(one, f"127.0.0.1:{port}", name) for name, one in participants.items()]
    return await ends_of(agents)


async def test_status_names_the_maker_of_the_initial_weights(in_round):
    rounds = {"rounds": 2, "initial_weights": "first", "controller": "ordered"}
    _, a, b = await in_round("a", "b", rounds=rounds)
    assert (await a.start()).task == pb.INITIALISE
    assert (await b.heartbeat()).state == pb.STANDBY
    status = await a.status()
    assert status.waiting_for == "The initial weights, from a."
    assert (status.num_trained, status.num_rounds) == (0, 2)
    await a.hand_in([1.0, 2.0])
    await b.until(pb.ROUND, 1)
    assert (await b.start()).task == pb.TRAIN
    listed = await a.inspection.ListRounds(inspection.ListRoundsRequest())
    assert [round_.task for round_ in listed.rounds] == [pb.INITIALISE, pb.TRAIN]
    progress = []
    for number in (1, 2):
        await a.until(pb.ROUND, number)
        status = await a.status()
        progress.append((status.round, status.num_trained, status.num_rounds))
        for member in (a, b):
            await member.until(pb.ROUND, number)
            await member.hand_in([1.0, 2.0], round_=number)
    await a.until(pb.FINISHED, 2)
    status = await a.status()
    progress.append((status.round, status.num_trained, status.num_rounds))
    assert progress == [(1, 0, 2), (2, 1, 2), (2, 2, 2)]


async def test_initial_weights_are_listed_as_a_model_without_updates(start, tmp_path):
    """A running coordinator and the files of a stopped one give the same list."""
    coordinator = await start(
        rounds={"rounds": 2, "min_participants": 2, "initial_weights": "first"}
    )
    assert await run(coordinator.port, {"a": Named(1.0), "b": Named(2.0)}) == [0, 0]
    expected = {1: 0, 2: 2, 3: 2}
    target = f"127.0.0.1:{coordinator.port}"
    assert await asyncio.to_thread(num_updates, ask(target)) == expected
    await coordinator.stop()
    assert num_updates(open_files(config_for(tmp_path))) == expected


def num_updates(opened: AbstractContextManager[Trained]) -> dict[int, int]:
    """Updates that each model was made of."""
    with opened as trained:
        return {number: entry.num_updates for number, entry in trained.entries.items()}
