"""Personal tensors: each participant keeps its own, and no other sees them."""

import asyncio
import io
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xain
from support.agents import ends_of
from support.waiting import until
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_participant import Agent, StateDirectory, WorkloadParticipant
from xain_participant.sdk.participant import Assignment, call_train_round
from xain_participant.tables.personal import PersonalTensors
from xain_workloads.model import Model, unflatten
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import create

SGD = create("sgd")
PERSONAL = {"personal": '["intercept"]'}


def halves() -> list[Dataset]:
    """Iris, of which each half has classes that the other one has few rows of."""
    whole = load("iris")
    return [
        whole.subset([*range(90), *range(140, 150)]),
        whole.subset([*range(9), *range(60, 150)]),
    ]


def model_of(data: list[Dataset]) -> Model:
    model = SGD.initial_model([part.profile() for part in data])
    return replace(model, metadata={**model.metadata, **PERSONAL})


def train(
    participant: WorkloadParticipant, model: Model, round_: int
) -> dict[str, np.ndarray[Any, Any]]:
    """One round; returns the update's tensors."""
    participant.on_model(model.layout, model.metadata)
    participant.on_round(Assignment("session", round_))
    vector, _ = call_train_round(participant, model.vector.copy(), 1, round_)
    return unflatten(vector, model.layout)


async def models(
    coordinator: SessionCoordinator, join: Any, rounds: int
) -> list[np.ndarray[Any, Any]]:
    reader = join(coordinator, "reader")
    downloads = [await reader.download(f"{number}/global") for number in range(rounds + 1)]
    return [np.load(io.BytesIO(data), allow_pickle=False) for data in downloads]


async def test_heads_differ_and_shared_parts_are_the_same(start, join):
    """Through a real coordinator: no global model has ever had a head of a participant."""
    data = halves()
    coordinator = await start(
        rounds={"rounds": 3, "min_participants": 2},
        workload={"name": "sgd"},
        model={"personal": ["inter*"]},
    )
    tensors = [PersonalTensors(), PersonalTensors()]
    target = f"127.0.0.1:{coordinator.port}"
    agents = [
        Agent(WorkloadParticipant(part, personal=own), target, name)
        for part, own, name in zip(data, tensors, "ab", strict=True)
    ]
    assert await ends_of(agents) == [0, 0]
    layout = model_of(data).layout
    whole = [unflatten(vector, layout) for vector in await models(coordinator, join, 3)]
    assert all((model["intercept"] == 0).all() for model in whole)
    assert all((model["coef"] != 0).any() for model in whole[1:])
    final = np.concatenate([whole[-1][name].ravel() for name in ("coef", "intercept")])
    session_id = coordinator.driver.session.session_id
    mine = []
    for own in tensors:
        own.on_round(Assignment(session_id, 3))
        mine.append(unflatten(own.with_own(final), layout))
    assert (mine[0]["coef"] == mine[1]["coef"]).all()
    assert (mine[0]["intercept"] != mine[1]["intercept"]).all()
    assert (mine[0]["intercept"] != 0).all()


def test_participant_trains_on_from_its_own_values(tmp_path):
    """The values survive a restart with a state directory. Without one the participant begins with
    the global values."""
    data = halves()
    model = model_of(data)
    folder = tmp_path / "state"
    with StateDirectory(folder, "a"):
        kept = WorkloadParticipant(data[0], personal=PersonalTensors(folder, "a"))
        train(kept, model, 0)
        again = WorkloadParticipant(data[0], personal=PersonalTensors(folder, "a"))
        assert (train(again, model, 1)["coef"] == train(kept, model, 1)["coef"]).all()
    forgetful = WorkloadParticipant(data[0])
    assert (train(forgetful, model, 1)["coef"] != train(kept, model, 1)["coef"]).any()


def test_models_are_evaluated_with_the_participants_own_values():
    """On a fresh participant the intercepts are zero, which scores otherwise."""
    data = halves()
    model = model_of(data)
    participant = WorkloadParticipant(data[0], test=data[0])
    scores = []
    for round_ in (0, 1):
        participant.on_model(model.layout, model.metadata)
        participant.on_round(Assignment("session", round_, "evaluate"))
        participant.evaluate_round(model.vector.copy())
        evaluation = participant.__dict__["_evaluation"]
        scores.append(evaluation.metrics["loss"])
        train(participant, model, round_)
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["head.*"], "model.personal has 'head.*', which is no tensor of the model; there are: "),
        (["*"], "model.personal matches all tensors of the model (coef, intercept)"),
    ],
)
async def test_patterns_that_do_not_fit_the_model_are_named(start, join, patterns, told):
    """A mistyped pattern must not share what was to stay at home."""
    coordinator = await start(
        rounds={"rounds": 1, "min_participants": 1},
        workload={"name": "sgd"},
        model={"personal": patterns},
    )
    agent = Agent(WorkloadParticipant(halves()[0]), f"127.0.0.1:{coordinator.port}", "a")
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        await until(lambda: told in coordinator.driver.session.trouble)
    finally:
        agent.stop()
        await asyncio.to_thread(thread.join, 30)


# --- scripts ---


def script(target: str, name: str, step: float, state_dir: Path | None = None) -> dict[str, Any]:
    """Add `step` to all tensors in each round; returns the tensors of the last round."""
    weights = {}
    initial = {"body": np.zeros(2, np.float32), "head.w": np.full(3, 10.0, np.float32)}
    for round_ in xain.rounds(initial, coordinator=target, id=name, state_dir=state_dir):
        weights = {key: value + np.float32(step) for key, value in round_.weights.items()}
        round_.submit(weights, samples=1)
        initial.update(weights)  # as load_state_dict() and training change a model in place
    return weights


@pytest.mark.parametrize("has_state", [False, True])
async def test_scripts_leave_personal_tensors_out(start, join, tmp_path, has_state):
    """The session's layout has no head at all."""
    coordinator = await start(
        rounds={"rounds": 4, "min_participants": 2}, model={"personal": ["head.*"]}
    )
    target = f"127.0.0.1:{coordinator.port}"
    folders = [tmp_path / name if has_state else None for name in "ab"]
    async with asyncio.timeout(60):
        a, b = await asyncio.gather(
            asyncio.to_thread(script, target, "a", 1.0, folders[0]),
            asyncio.to_thread(script, target, "b", 3.0, folders[1]),
        )
    final = (await models(coordinator, join, 4))[-1]
    num_trained = round((a["head.w"][0] - 10.0) / 1.0)
    assert final.shape == (2,)
    assert final.tolist() == [2.0 * num_trained] * 2
    assert a["head.w"].tolist() == [10.0 + num_trained] * 3
    assert b["head.w"].tolist() == [10.0 + 3.0 * num_trained] * 3


async def test_script_without_the_personal_tensors_is_told(start):
    coordinator = await start(
        rounds={"rounds": 1, "min_participants": 1}, model={"personal": ["head.*"]}
    )

    def run() -> None:
        next(xain.rounds({"w": np.zeros(2)}, coordinator=f"127.0.0.1:{coordinator.port}"))

    with pytest.raises(ValueError, match=r"model.personal has 'head\.\*', which is no tensor"):
        await asyncio.to_thread(run)
