"""`xain-coordinator launch --serve` whose workers are killed: fits begin with those that are there,
predictions go on, and the dead are started again as the same participants."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from e2e.test_launch import launched, name_of, pid_of
from support.launches import processes_of
from support.shown import Shown
from xain_workloads.tables.data import load

pytestmark = pytest.mark.frameworks

TIMEOUT_S = 240  # of one request; no test measures how long one takes
ROWS = load("breast_cancer")
QUESTION = {"columns": list(ROWS.feature_names), "rows": ROWS.features[:20].tolist()}
SETTINGS = {
    "sgd": ("--workload=sgd", "--rounds=3"),
    "bagging": (
        *("--workload=bagging", "--rounds=1", "--set=workload.options.publish=false"),
        *("--set=workload.options.vote=soft", "--set=workload.options.estimators=2"),
    ),
}


class Service:
    """A launch that serves. url: of its HTTP face. work: its folder."""

    def __init__(self, shown: Shown, work: Path) -> None:
        self.shown = shown
        self.name = work.name
        self.work = work
        self.url = re.search(r"POST (http://\S+)/v1/fit", shown.output)[1]

    async def ask(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Status and answer of a request; GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"content-type": "application/json"})

        def answer() -> tuple[int, dict[str, Any]]:
            try:
                with urlopen(request, timeout=TIMEOUT_S) as told:
                    return told.status, json.load(told)
            except HTTPError as error:
                return error.code, json.load(error)

        return await asyncio.to_thread(answer)

    async def fit(self) -> list[str]:
        """Fit to the end. Returns the names of those that were missing."""
        status, told = await self.ask("/v1/fit", {"wait": True})
        assert (status, told.get("state")) == (200, "finished"), told
        return told["missing"]

    async def predict(self) -> dict[str, Any]:
        status, told = await self.ask("/v1/predict", QUESTION)
        assert status == 200, told
        right = sum(a == b for a, b in zip(told["predictions"], ROWS.target[:20], strict=True))
        assert right > 14
        return told

    def kill(self, *names: str) -> None:
        for name in names:
            os.kill(pid_of(self.name, name), signal.SIGKILL)

    async def until_status(self, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            while not found(  # noqa: ASYNC110  # nothing tells of it
                status := (await self.ask("/v1/status"))[1]
            ):
                await asyncio.sleep(0.1)  # between two questions
        return status

    def log(self, event: str) -> list[dict[str, Any]]:
        """Lines of the coordinator's log."""
        lines = map(json.loads, (self.work / "logs/coordinator.log").read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    async def end(self) -> None:
        """Ctrl-C is the usual end, and leaves nothing."""
        self.shown.process.send_signal(signal.SIGINT)
        assert await self.shown.end() == 0, self.shown.output
        assert processes_of(self.name) == []


@pytest.fixture
def name(tmp_path: Path) -> str:
    return name_of(tmp_path)


def serving(folder: Path, name: str, workload: str, *settings: str) -> Any:
    arguments = (*SETTINGS[workload], "--data=breast_cancer", "--serve", "--quiet")
    return launched(folder, f"--name={name}", *arguments, *settings)


async def service_of(shown: Shown, folder: Path, name: str) -> Service:
    await shown.until(lambda output: "launch: train with: curl -X POST " in output)
    return Service(shown, folder / "xain-launch" / name)


@pytest.mark.parametrize("workload", ["sgd", "bagging"])
async def test_fits_and_predictions_go_on_with_the_workers_that_are_left(tmp_path, name, workload):
    """Killed before the fit, between two fits and after them, with no restart: fits wait for the
    declared time, and name the missing; without a worker the service stays, and says so."""
    own = ("--set=launch.max_restarts=0", "--set=http.participants_timeout_s=20")
    async with serving(tmp_path, name, workload, *own) as shown:
        service = await service_of(shown, tmp_path, name)
        service.kill("worker-3")
        await shown.until(lambda output: "worker-3 was killed; the others go on" in output)
        await service.until_status(lambda status: status["connected"] == 2)
        assert await service.fit() == ["worker-3"]
        (line,) = service.log("participants_missing")
        assert line["participant"] == ["worker-3"]
        told = await service.predict()

        service.kill("worker-2")
        assert await service.fit() == ["worker-2", "worker-3"]
        told = await service.predict()
        if workload == "bagging":
            assert told["answered"] == ["worker-1"]

        service.kill("worker-1")
        await shown.until(lambda output: "launch: no worker is left" in output)
        status, told = await service.ask("/v1/predict", QUESTION)
        if workload == "bagging":
            assert (status, told["error"]["code"]) == (503, "NOBODY_ANSWERED")
            assert "worker-1: it is not connected" in told["error"]["message"]
        else:
            assert (status, len(told["predictions"])) == (200, 20)
        await service.until_status(lambda status: status["connected"] == 0)
        status, told = await service.ask("/v1/fit", {})
        assert (status, told["error"]["code"]) == (503, "NO_PARTICIPANTS")
        assert "missing: worker-1, worker-2, worker-3" in told["error"]["message"]
        assert shown.process.returncode is None
        await service.end()
