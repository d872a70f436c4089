"""A script that drives a coordinator elsewhere, which is killed, stopped and started again."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xain
from support.process import PATIENCE_S, CoordinatorProcess, Keep
from support.waiting import until

MODEL = {"w": np.zeros(3)}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def coordinator(keep: Keep, tmp_path: Path, address: str) -> CoordinatorProcess:
    rules = {"rounds.scripted": "true", "rounds.rounds": 3, "rounds.min_participants": 2}
    port = int(address.rpartition(":")[2])
    coordinator = keep(CoordinatorProcess(tmp_path / "coordinator", rules, port))
    await coordinator.start()
    return coordinator


def connected(coordinator: CoordinatorProcess) -> xain.Session[Any]:
    return xain.connect(str(coordinator.folder / "journal.sock"), MODEL)


async def told(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Wait until the script has told something."""
    seen = []
    await until(lambda: seen.append(capsys.readouterr().err) or text in "".join(seen))


async def test_script_waits_for_a_coordinator_that_is_away(coordinator, sites, capsys):
    """In a wait, in the body, and in a download: it says so, and each goes on."""
    loop = asyncio.get_running_loop()
    at = asyncio.Queue()
    go_on = {"body": asyncio.Event(), "weights": asyncio.Event()}

    def pause(where: str) -> None:
        loop.call_soon_threadsafe(at.put_nowait, where)
        asyncio.run_coroutine_threadsafe(go_on[where].wait(), loop).result(PATIENCE_S)

    def drive() -> list[int]:
        models = []
        with connected(coordinator) as session:
            for round_ in session:
                round_.configure(lr=0.5)
                record = round_.run()
                if not models:
                    pause("body")
                record.evaluate(r2=0.5)
                if len(models) == 1:
                    pause("weights")
                assert record.weights["w"].shape == (3,)
                models.append(record.model)
        return models

    async def away(where: str) -> None:
        assert await asyncio.wait_for(at.get(), PATIENCE_S) == where
        await coordinator.kill()
        go_on[where].set()
        await told(capsys, "does not answer")
        await coordinator.start()

    driving = asyncio.create_task(asyncio.to_thread(drive))
    await told(capsys, "waiting: 2 more participants")
    await coordinator.kill()
    await told(capsys, "does not answer")
    await coordinator.start()
    sites()
    await away("body")
    await away("weights")
    assert await asyncio.wait_for(driving, PATIENCE_S) == [2, 3]  # the sites made model 1


async def test_error_of_a_body_is_raised_though_the_coordinator_is_away(coordinator, capsys):
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()

    def drive() -> None:
        with connected(coordinator) as session:
            assert session.id
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(killed.wait(), loop).result(PATIENCE_S)
            raise ZeroDivisionError

    killed = asyncio.Event()
    driving = asyncio.create_task(asyncio.to_thread(drive))
    await asyncio.wait_for(entered.wait(), PATIENCE_S)
    coordinator.send(signal.SIGKILL)
    assert await coordinator.died() == -signal.SIGKILL
    killed.set()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(driving, PATIENCE_S)
    assert "the session has not heard of the error, and goes on" in capsys.readouterr().err
