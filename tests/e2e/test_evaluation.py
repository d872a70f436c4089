"""Evaluations of global models, over real processes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from e2e.test_take_home import command
from support.process import PATIENCE_S, CoordinatorProcess, ParticipantProcess, Process
from support.trainee import predicted
from support.training import close_gates
from xain_foundation.exit_statuses import EXIT_NO_BETTER

pytestmark = pytest.mark.e2e

Launch = Callable[..., CoordinatorProcess]

SITES = 3
SCALE = 0.0625


class Site(Process):
    """The command xain-participant with a part of digits; a fifth of the rows is held out."""

    def __init__(self, folder: Path, index: int, port: int) -> None:
        super().__init__(folder, f"site-{index}")
        self._flags = [
            f"--coordinator=127.0.0.1:{port}",
            f"--id=site-{index}",
            "--data=digits",
            "--partition=iid",
            f"--num-parts={SITES}",
            f"--index={index}",
            f"--set=data.scale={SCALE}",
        ]

    async def start(self) -> None:
        self._process = await self.run(["-m", "xain_participant", *self._flags])


class RandomSite(Process):
    """The command xain-participant with a file whose labels are drawn by lot."""

    def __init__(self, folder: Path, index: int, port: int) -> None:
        super().__init__(folder, f"random-{index}")
        chance = np.random.default_rng(index)
        rows = [",".join(f"{x:.3f}" for x in chance.normal(size=4)) for _ in range(200)]
        labels = chance.integers(0, 2, len(rows))
        lines = [f"{row},{'yes' if y else 'no'}" for row, y in zip(rows, labels, strict=True)]
        file = folder / f"random-{index}.csv"
        file.write_text("\n".join(["a,b,c,d,outcome", *lines]), encoding="utf-8")
        self._flags = [
            f"--coordinator=127.0.0.1:{port}",
            f"--id=random-{index}",
            f"--data={file}",
            "--target=outcome",
        ]

    async def start(self) -> None:
        self._process = await self.run(["-m", "xain_participant", *self._flags])


@pytest.fixture
async def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launch]:
    """Coordinators of one data folder; all are gone at the end."""
    monkeypatch.setenv("COLUMNS", "200")
    launched: list[CoordinatorProcess] = []

    def make(**settings: object) -> CoordinatorProcess:
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        launched.append(CoordinatorProcess(tmp_path / "data", dotted))
        return launched[-1]

    yield make
    for coordinator in launched:
        await coordinator.end()


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if found():
                return
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when it is found


async def status(coordinator: CoordinatorProcess, *flags: str) -> str:
    """The output of `xain-coordinator status`."""
    code, output, told = await command("status", f"--address=127.0.0.1:{coordinator.port}", *flags)
    assert code == 0, told
    return output


async def status_json(coordinator: CoordinatorProcess) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(await status(coordinator, "--json"))
    return shown


async def test_digits_are_evaluated_each_round_and_at_the_end(launch, tmp_path):
    """Three sites measure each global model on their held-out rows, and so does the coordinator on
    data of its own; all of it is in status, in the journal and in the metrics."""
    coordinator = launch(
        rounds__rounds=3,
        rounds__min_participants=SITES,
        workload__name="sgd",
        evaluate__data="digits",
        evaluate__scale=SCALE,
    )
    await coordinator.start()
    sites = [Site(tmp_path, index, coordinator.port) for index in range(SITES)]
    try:
        for site in sites:
            await site.start()
        for site in sites:
            assert await site.died() == 0, site.log()
    finally:
        for site in sites:
            await site.end()
    shown = await status_json(coordinator)
    rounds = shown["rounds"]
    assert [one["round"] for one in rounds] == [0, 1, 2, 3]
    assert [one["task"] for one in rounds] == ["TRAIN"] * 3 + ["EVALUATE"]
    names = {f"site-{index}" for index in range(SITES)}
    for one in rounds:
        assert {site["participant_id"] for site in one["sites"]} == names
        by_site = [site["evaluation"] for site in one["sites"]]
        total = sum(site["num_samples"] for site in by_site)
        assert one["evaluation"]["num_samples"] == total
        assert one["evaluation"]["averages"] == ["loss"]
        for name in ("accuracy", "loss"):
            weighted = sum(s["num_samples"] * s["metrics"][name] for s in by_site) / total
            assert one["evaluation"]["metrics"][name] == pytest.approx(weighted)
            values = [s["metrics"][name] for s in by_site]
            assert one["spread"][name]["min"] == min(values)
            assert one["spread"][name]["max"] == max(values)
        assert one["coordinator_evaluation"]["num_samples"] == 1797
    for one in rounds[:3]:
        assert one["metrics"]["loss"] > 0, "training tells its loss as well"
        assert "test_accuracy" not in one["metrics"], "it is in the evaluation"
    accuracy = [one["coordinator_evaluation"]["metrics"]["accuracy"] for one in rounds]
    assert accuracy[0] < 0.2 < 0.8 < accuracy[3]
    losses = [one["coordinator_evaluation"]["metrics"]["log_loss"] for one in rounds]
    best = min(range(1, 4), key=losses.__getitem__)
    assert shown["status"]["metric"] == "log_loss"
    assert shown["status"]["best_round"] == best
    assert shown["status"]["best_value"] == losses[best]
    told = await status(coordinator)
    assert "log_loss here" in told
    assert "evaluated" in told
    assert re.search(rf"best model +{best}, log_loss", told)
    assert re.search(r"model 3 +accuracy 0\.\d+ \(0\.\d+ to 0\.\d+, baseline 0\.1", told)
    assert await coordinator.stop() == 0
    lines = (tmp_path / "data" / "metrics.jsonl").read_text().splitlines()
    points = [one for one in map(json.loads, lines) if one["measurement"] == "evaluation"]
    found = sorted((p["tags"]["source"], p["fields"]["round"]) for p in points)
    assert found == [(by, r) for by in ("coordinator", "participants") for r in range(4)]


async def test_coordinator_killed_while_the_last_model_is_evaluated_goes_on(launch, tmp_path):
    """Acknowledged evaluations are not asked for again; the others are waited for. What is told in
    the end is what scikit-learn measures on the rows of both sites."""
    gates = tmp_path / "gates"
    close_gates(gates, "b-2")
    coordinator = launch(rounds__rounds=2, rounds__min_participants=2)
    await coordinator.start()
    target = f"127.0.0.1:{coordinator.port}"
    a = ParticipantProcess(tmp_path, "a", target, "--size=10", "--scores=0.5", "--predicts")
    b = ParticipantProcess(
        tmp_path, "b", target, "--size=10", "--scores=0.7", "--predicts", f"--gates={gates}"
    )
    try:
        await a.start()
        await b.start()
        await until(lambda: ("handed_in", 2) in a.book() and ("at_gate", 2) in b.book())
        await coordinator.kill()
        await coordinator.start()
        shown = await status_json(coordinator)
        assert shown["status"]["phase"] == "evaluating"
        assert (shown["status"]["num_updates"], shown["status"]["num_selected"]) == (1, 2)
        (gates / "b-2").unlink()
        assert await a.died() == 0, a.log()
        assert await b.died() == 0, b.log()
    finally:
        await a.end()
        await b.end()
    assert a.book().count(("evaluated", 2)) == 1
    assert b.book().count(("evaluated", 2)) == 1
    shown = await status_json(coordinator)
    assert shown["status"]["cause"] == "completed"
    last = shown["rounds"][-1]
    assert last["phase"] == "evaluated"
    sites = [predicted(name, 2) for name in ("a", "b")]
    target = np.concatenate([classes for classes, _ in sites])
    p = np.concatenate([probabilities for _, probabilities in sites])
    assert last["evaluation"]["num_samples"] == len(target)
    figures = {name: one["value"] for name, one in last["evaluation"]["figures"].items()}
    assert figures["accuracy"] == sk.accuracy_score(target, p.argmax(axis=1))
    assert figures["log_loss"] == pytest.approx(sk.log_loss(target, p), abs=1e-9)
    auc = sk.roc_auc_score(target, p, multi_class="ovr")
    assert abs(figures["auc"] - auc) <= last["evaluation"]["figures"]["auc"]["bound"] + 1e-9
    assert shown["status"]["best_round"] == 2


async def test_participant_killed_while_it_evaluates_does_so_again(launch, tmp_path):
    gates = tmp_path / "gates"
    close_gates(gates, "a-2")
    coordinator = launch(rounds__rounds=2, rounds__min_participants=1)
    await coordinator.start()
    target = f"127.0.0.1:{coordinator.port}"
    a = ParticipantProcess(tmp_path, "a", target, "--size=10", "--scores=0.5", f"--gates={gates}")
    try:
        await a.start()
        await until(lambda: ("at_gate", 2) in a.book())
        await a.kill()
        (gates / "a-2").unlink()
        await a.start()
        assert await a.died() == 0, a.log()
    finally:
        await a.end()
    shown = await status_json(coordinator)
    assert shown["rounds"][-1]["evaluation"]["metrics"] == {"accuracy": 0.5}


async def test_training_that_is_no_better_than_the_commonest_class_ends_with_status_4(
    launch, tmp_path
):
    """Labels that have nothing to do with the columns, and a step that is too long."""
    coordinator = launch(
        rounds__rounds=2,
        rounds__min_participants=2,
        workload__name="sgd",
        workload__options__eta0=5.0,
    )
    await coordinator.start()
    sites = [RandomSite(tmp_path, index, coordinator.port) for index in range(2)]
    try:
        for site in sites:
            await site.start()
        for site in sites:
            assert await site.died() == EXIT_NO_BETTER, site.log()
            assert "Model 2 is no better than always predicting the commonest class" in site.log()
    finally:
        for site in sites:
            await site.end()
    shown = await status_json(coordinator)
    assert shown["status"]["cause"] == "completed"
    assert shown["status"]["best_round"] is None
    assert "no model was better" in shown["status"]["no_better"]
    assert shown["status"]["no_better"] in shown["status"]["warnings"]
    address = f"--address=127.0.0.1:{coordinator.port}"
    code, _, told = await command("export", address, "--best", f"--to={tmp_path / 'm.skops'}")
    assert code == 1
    assert "there is no best model" in told
    assert await coordinator.stop() == 0
    log = coordinator.log()
    assert '"event": "no_better_than_baseline"' in log


async def test_missing_data_of_the_coordinator_stop_its_start(launch):
    coordinator = launch(evaluate__data="missing.csv", evaluate__target="y")
    assert await coordinator.fails() == 1
    last = json.loads(coordinator.log().splitlines()[-1])
    assert last["event"] == "cannot_start"
    assert "missing.csv" in last["error"]
