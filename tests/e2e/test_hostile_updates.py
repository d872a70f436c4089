"""Updates and initial weights of participants that send what they like, over processes: they do
not decide what the others learn."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.crowd import HUGE_EPOCH, TARGET_MODEL
from support.process import PATIENCE_S, CoordinatorProcess, Process
from xain_coordinator.server.inspection_client import fetch
from xain_proto.fl.inspection_pb2 import GetStatusResponse

CROWD = Path(__file__).parents[1] / "support" / "crowd.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(4 * PATIENCE_S)]


class Crowd(Process):
    """The participants of support/crowd.py. sites: how each one behaves, by name."""

    async def start(self, port: int, sites: Mapping[str, str]) -> None:
        named = [f"{name}={how}" for name, how in sites.items()]
        self._process = await self.run([str(CROWD), f"127.0.0.1:{port}", *named])


async def trained(
    folder: Path, sites: Mapping[str, str], settings: Mapping[str, object]
) -> tuple[NDArray[np.float32], CoordinatorProcess, GetStatusResponse]:
    """The last model of a session of all these sites, its coordinator, which has stopped, and the
    session's status."""
    number = len(sites)
    coordinator = CoordinatorProcess(
        folder,
        {
            "rounds.min_participants": number,
            "rounds.initial_weights": "first",
            "rounds.controller": "ordered",
            **settings,
        },
    )
    crowd = Crowd(folder, "crowd")
    try:
        await coordinator.start()
        await crowd.start(coordinator.port, sites)
        assert await crowd.died() == 0, crowd.log()
        status = fetch(f"127.0.0.1:{coordinator.port}").status
        await coordinator.stop()
    finally:
        await crowd.end()
        await coordinator.end()
    model = np.load(folder / "weights" / status.session_id / "models" / "last.npy")
    return model, coordinator, status


def told(coordinator: CoordinatorProcess, event: str) -> list[dict[str, Any]]:
    """The lines of this event in the coordinator's log."""
    lines = [json.loads(line) for line in coordinator.log().splitlines()]
    return [line for line in lines if line["event"] == event]


def distance(model: NDArray[np.float32]) -> float:
    """From the model that the honest participants would agree on."""
    return float(np.linalg.norm(model - TARGET_MODEL))


def honest(number: int) -> dict[str, str]:
    return {f"honest-{i}": "honest" for i in range(number)}


@pytest.mark.parametrize("optimizer", ["fedadam", "fedyogi"])
async def test_one_huge_update_does_not_saturate_an_optimiser(tmp_path, optimizer):
    """The log names the step that was not taken. Without that the model would walk to 1e9."""
    model, coordinator, _ = await trained(
        tmp_path,
        {**honest(2), "wild": "huge"},
        {"rounds.rounds": 12, "aggregation.optimizer": optimizer},
    )
    (skipped,) = told(coordinator, "optimizer_step_skipped")
    assert (skipped["level"], skipped["optimizer"]) == ("warning", optimizer)
    assert (skipped["round"], skipped["num_elements"]) == (HUGE_EPOCH + 1, 1)
    assert np.abs(model).max() < 10


async def test_centred_clipping_holds_against_three_of_ten_and_a_bad_initial_model(tmp_path):
    """One of them, whom the controller asks first, makes the initial weights. A fixed radius of 10
    would leave the model some 8 away."""
    flippers = {f"a-flipper-{i}": "flips" for i in range(3)}
    model, coordinator, _ = await trained(
        tmp_path,
        {**flippers, **honest(7)},
        {"rounds.rounds": 30, "aggregation.rule": "centred_clipping"},
    )
    (made, *_) = told(coordinator, "update_accepted")
    assert (made["round"], made["participant"]) == (0, "a-flipper-0")
    assert distance(model) < 1


async def test_multi_krum_averages_all_but_the_hostile_updates(tmp_path):
    """Up to n - f of them; a larger number is refused at the start, with the bound."""
    rules = {
        "rounds.min_participants": 5,
        "aggregation.rule": "multi_krum",
        "rounds.rounds": 8,
    }
    refused = CoordinatorProcess(
        tmp_path / "refused", {**rules, "aggregation.options.num_selected": 5}
    )
    assert await refused.fails() == 2
    assert "num_selected = 5 can select at most n - f = 4 of 5 updates" in refused.log()
    model, _, _ = await trained(
        tmp_path / "trained",
        {**honest(4), "wild": "flips"},
        {**rules, "aggregation.options.num_selected": 4},
    )
    assert distance(model) < 0.1


async def test_fast_participants_do_not_stall_while_models_are_made(tmp_path):
    """With a model of each update there is nearly always one being made. An update that comes
    meanwhile waits for the next one: its sender is not told to come again later."""
    _, _, status = await trained(
        tmp_path,
        honest(4),
        {
            "rounds.rounds": 100,
            "rounds.min_participants": 1,
            "rounds.start_participants": 4,
            "rounds.max_participants": 4,
            "rounds.consistency": "asp",
            "rounds.buffer_size": 1,
        },
    )
    assert status.cause == "completed"
    assert "NOT_IN_ROUND" not in status.counters
    # Only at the end there is nothing more to do.
    log = (tmp_path / "crowd.log").read_text()
    refusals = {line.partition("message=")[2] for line in log.splitlines() if ":refused " in line}
    assert refusals <= {
        "'round 100 is closed and being aggregated'",
        "'the session is finished: completed'",
    }
