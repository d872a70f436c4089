"""rounds.result: the model of a session that is over, for the script that has taken part."""

import asyncio
from typing import Any

import numpy as np
import pytest

import xain
from support.process import PATIENCE_S


def script(port: int, name: str, results: dict[str, Any]) -> None:
    """Add the number of the site to "w", count in the personal "own" and in an integer."""
    step = 1 + "ab".index(name)
    model = {"w": np.zeros(2, np.float32), "own": np.zeros(1, np.float32), "n": np.array(0)}
    rounds = xain.rounds(model, coordinator=f"127.0.0.1:{port}", id=name, evaluates=True)
    for round_ in rounds:
        if round_.number == 1:
            with pytest.raises(
                RuntimeError, match=r"until then round\.weights is the global model"
            ):
                _ = rounds.result
        if round_.wants_evaluation:
            round_.evaluate({"accuracy": float(round_.weights["w"][0]) / 10}, samples=1)
        if round_.task == "train":
            weights = round_.weights
            trained = {key: value + step for key, value in weights.items()}
            round_.submit(trained, samples=1, metrics={"loss": step})
    results[name] = rounds.result
    rounds.close()  # as `with xain.rounds(model) as rounds:` does
    assert rounds.result is results[name], "the model is fetched once"


async def test_script_has_the_model_of_the_session_after_its_loop(start):
    """The weights are those of all sites, with the site's own where they do not travel; the metrics
    are those of the training and of the evaluation."""
    coordinator = await start(
        rounds={"rounds": 2, "min_participants": 2, "initial_weights": "first"},
        evaluate={"metric": "accuracy"},
        model={"personal": ["own"]},
    )
    results = {}
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(
            *(asyncio.to_thread(script, coordinator.port, name, results) for name in "ab")
        )
    for step, name in enumerate("ab", 1):
        result = results[name]
        assert result.weights["w"].tolist() == [3, 3]
        assert result.weights["own"].tolist() == [2 * step]
        assert result.weights["n"].item() == 2 * step
        assert result.round == coordinator.driver.session.model.round
        assert result.metrics == {"loss": 1.5, "accuracy": pytest.approx(0.3)}


async def test_result_that_cannot_be_fetched_is_an_error(start):
    coordinator = await start(rounds={"rounds": 1, "min_participants": 1})
    target = f"127.0.0.1:{coordinator.port}"

    def train() -> xain.Rounds:
        rounds = xain.rounds(np.zeros(2, np.float32), coordinator=target, id="a")
        for round_ in rounds:
            round_.submit(round_.weights + 1, samples=1)
        return rounds

    async with asyncio.timeout(PATIENCE_S):
        rounds = await asyncio.to_thread(train)
        await coordinator.stop()
        why = f"^the coordinator at {target} cannot be asked: connection refused$"
        with pytest.raises(xain.SessionError, match=why):
            await asyncio.to_thread(lambda: rounds.result)
