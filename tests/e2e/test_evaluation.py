"""Evaluations of global models, over real processes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from sklearn import metrics as sk

from e2e.test_take_home import command
from support.process import PATIENCE_S, CoordinatorProcess, ParticipantProcess, SiteProcess
from support.trainee import predicted, predicted_numbers
from support.training import close_gates
from xain_coordinator.assembly.warm_start import load_model_file
from xain_coordinator.inspection.client import fetch
from xain_foundation.exit_statuses import EXIT_NO_BETTER
from xain_workloads.measures.tallies import records

pytestmark = pytest.mark.e2e

Launch = Callable[..., CoordinatorProcess]

SITES = 3
SCALE = 0.0625


def write_random(folder: Path, index: int) -> str:
    """A file whose labels are drawn by lot. Returns the flag that names it."""
    chance = np.random.default_rng(index)
    rows = [",".join(f"{x:.3f}" for x in chance.normal(size=4)) for _ in range(200)]
    labels = chance.integers(0, 2, len(rows))
    lines = [f"{row},{'yes' if y else 'no'}" for row, y in zip(rows, labels, strict=True)]
    file = folder / f"random-{index}.csv"
    file.write_text("\n".join(["a,b,c,d,outcome", *lines]), encoding="utf-8")
    return f"--data={file}"


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
    sites = [SiteProcess(tmp_path, f"site-{index}") for index in range(SITES)]
    part = ["--data=digits", "--partition=iid", f"--num-parts={SITES}", f"--set=data.scale={SCALE}"]
    try:
        for index, site in enumerate(sites):
            await site.start(coordinator.port, *part, f"--index={index}")
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


def figures_of_classes(names: Sequence[str], round_: int) -> dict[str, float]:
    """Figures of scikit-learn on the rows of all these participants."""
    sites = [predicted(name, round_) for name in names]
    target = np.concatenate([classes for classes, _ in sites])
    p = np.concatenate([probabilities for _, probabilities in sites])
    classes = p.argmax(axis=1)
    return {
        "accuracy": sk.accuracy_score(target, classes),
        "balanced_accuracy": sk.balanced_accuracy_score(target, classes),
        "f1": sk.f1_score(target, classes, average="macro"),
        "log_loss": sk.log_loss(target, p),
        "brier": sk.brier_score_loss(target, p),
        "auc": sk.roc_auc_score(target, p, multi_class="ovr"),
    }


def confusion_of_classes(names: Sequence[str], round_: int) -> list[list[int]]:
    sites = [predicted(name, round_) for name in names]
    matrices = [sk.confusion_matrix(t, p.argmax(axis=1), labels=range(3)) for t, p in sites]
    return cast(list[list[int]], np.sum(matrices, axis=0).tolist())


def figures_of_numbers(names: Sequence[str], round_: int) -> dict[str, float]:
    sites = [predicted_numbers(name, round_) for name in names]
    target = np.concatenate([targets for targets, _ in sites])
    found = np.concatenate([predictions for _, predictions in sites])
    return {
        "r2": sk.r2_score(target, found),
        "rmse": sk.root_mean_squared_error(target, found),
        "mse": sk.mean_squared_error(target, found),
        "mae": sk.mean_absolute_error(target, found),
    }


@pytest.mark.parametrize("predicts", ["classes", "numbers"])
async def test_figures_are_those_of_scikit_learn_though_the_coordinator_was_killed_among_them(
    launch, tmp_path, predicts
):
    """Acknowledged evaluations of the last model are not asked for again; the others are waited
    for. What is told in the end is what scikit-learn measures on the rows of all sites, whichever
    came first."""
    names = ("a", "b", "c")
    gates = tmp_path / "gates"
    close_gates(gates, "b-2", "a-2")
    coordinator = launch(rounds__rounds=2, rounds__min_participants=3)
    await coordinator.start()
    address = f"127.0.0.1:{coordinator.port}"
    flags = ("--size=10", "--scores=0.5", f"--predicts={predicts}", f"--gates={gates}")
    sites = {name: ParticipantProcess(tmp_path, name, address, *flags) for name in names}
    a, b, c = sites.values()
    try:
        for site in sites.values():
            await site.start()
        await until(
            lambda: (
                ("handed_in", 2) in c.book()
                and all(("at_gate", 2) in site.book() for site in (a, b))
            )
        )
        for name, num_answers in (("b", 1), ("a", 2)):
            await coordinator.kill()
            await coordinator.start()
            shown = (await status_json(coordinator))["status"]
            assert shown["phase"] == "evaluating"
            assert (shown["num_updates"], shown["num_selected"]) == (num_answers, 3)
            (gates / f"{name}-2").unlink()
            await until(lambda site=sites[name]: ("handed_in", 2) in site.book())
        for site in sites.values():
            assert await site.died() == 0, site.log()
            assert site.book().count(("evaluated", 2)) == 1
    finally:
        for site in sites.values():
            await site.end()
    shown = await status_json(coordinator)
    assert (shown["status"]["cause"], shown["status"]["best_round"]) == ("completed", 2)
    whole = (await asyncio.to_thread(fetch, address, everything=True)).status
    last = shown["rounds"][-1]
    assert last["phase"] == "evaluated"
    figures = last["evaluation"]["figures"]
    expected = (figures_of_classes if predicts == "classes" else figures_of_numbers)(names, 2)
    assert expected.keys() <= figures.keys()
    for name, value in expected.items():
        bound = figures[name]["bound"] if name == "auc" else 0.0
        assert figures[name]["value"] == pytest.approx(value, abs=bound + 1e-9), name
    assert whole.measured_round == 2
    assert whole.measured.num_samples == last["evaluation"]["num_samples"]
    if predicts == "classes":
        matrix = [[0] * 3 for _ in range(3)]
        for of, as_, rows in records(whole.measured.tallies.confusion, 3):
            matrix[of][as_] = rows
        assert matrix == confusion_of_classes(names, 2)


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


async def local_models(folder: Path, name: str, *, kills: bool) -> tuple[list[Any], Any, Any]:
    """Local models of two sites, of each and together, and the importance of the columns, as the
    status tells them. kills: a site and the coordinator, while these are measured."""
    settings = {
        "rounds.rounds": 4,
        "rounds.min_participants": 2,
        "workload.name": "mlp",
        "rounds.epochs": 20,
        "workload.options.hidden_layers": [200, 100],
        "server.heartbeat_time_s": 1.0,
        "server.heartbeat_timeout_s": 10 * PATIENCE_S,
    }
    coordinator = CoordinatorProcess(folder / name, settings)
    at_sites = folder / f"{name}-sites"
    at_sites.mkdir()
    sites = [SiteProcess(at_sites, f"site-{index}") for index in range(2)]
    part = ["--data=breast_cancer", "--partition=iid", "--num-parts=2"]

    async def start(index: int) -> None:
        state = f"--state-dir={at_sites / f'state-{index}'}"
        await sites[index].start(coordinator.port, *part, f"--index={index}", state)

    try:
        await coordinator.start()
        for index in range(2):
            await start(index)
        phase = ""

        def is_evaluating() -> bool:
            nonlocal phase
            phase = fetch(f"127.0.0.1:{coordinator.port}").status.phase
            return phase in ("evaluating", "finished")

        if kills:
            await until(is_evaluating)
        if phase == "evaluating":  # with the evaluation the local models are trained
            await sites[0].kill()
            await coordinator.kill()
            await coordinator.start()
            await start(0)
        for site in sites:
            assert await site.died() == 0, site.log()
        shown = await status_json(coordinator)
    finally:
        for process in (*sites, coordinator):
            await process.end()
    last = shown["rounds"][-1]
    of_sites = [site["evaluation"]["local"] for site in last["sites"]]
    return of_sites, last["evaluation"]["local"], shown["status"]["importance"]


async def test_local_models_are_the_same_though_site_and_coordinator_were_killed_among_them(
    tmp_path,
):
    """Each site trains its own once more, and it counts once. So do the importances of columns, of
    which the site permutes the same values again."""
    expected, together, importance = await local_models(tmp_path, "undisturbed", kills=False)
    assert [one["passes"] for one in expected] == [80, 80]
    assert all(one["figures"]["log_loss"]["value"] < 0.5 for one in expected)
    assert together["num_samples"] == sum(one["num_samples"] for one in expected)
    assert importance["num_samples"] == together["num_samples"]
    assert (importance["num_columns"], importance["repeats"]) == (30, 5)
    columns = importance["columns"]
    assert len({one["column"] for one in columns}) == 30
    values = [one["difference"]["value"] for one in columns]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0
    assert [sorted(one["sites"]) for one in columns[:20]] == [["site-0", "site-1"]] * 20
    killed = await local_models(tmp_path, "killed", kills=True)
    assert killed == (expected, together, importance)


async def central_model(folder: Path, name: str, *, kills: bool) -> tuple[Any, dict[str, Any]]:
    """The central model of a coordinator with own rows, as its status has it and as
    `evaluate --model` is given it. kills: the coordinator while it trains it, twice."""
    settings = {
        "rounds.rounds": 1,  # so that no evaluation is passed over for the last one
        "workload.name": "sgd",
        "rounds.epochs": 1000,
        "evaluate.data": "breast_cancer",
        "server.heartbeat_time_s": 1.0,
        "server.heartbeat_timeout_s": 10 * PATIENCE_S,
    }
    coordinator = CoordinatorProcess(folder / name, settings)
    at_site = folder / f"{name}-site"
    at_site.mkdir()
    site = SiteProcess(at_site, "site")
    phase = ""

    def is_evaluating() -> bool:
        nonlocal phase
        phase = fetch(f"127.0.0.1:{coordinator.port}").status.phase
        return phase in ("evaluating", "finished")

    try:
        await coordinator.start()
        part = ["--partition=iid", "--num-parts=4", "--index=0"]
        await site.start(coordinator.port, "--data=breast_cancer", *part)
        for _ in range(2 if kills else 0):
            await until(is_evaluating)
            if phase == "evaluating":
                await coordinator.kill()
                await coordinator.start()
        assert await site.died() == 0, site.log()
        shown = await status_json(coordinator)
        assert await coordinator.stop() == 0
    finally:
        for process in (site, coordinator):
            await process.end()
    central = shown["status"]["central"]
    loaded, _ = load_model_file(Path(central.pop("file")))
    assert loaded.metadata["workload"] == "sgd"
    return central, {"vector": loaded.vector.tobytes(), "metadata": loaded.metadata}


async def test_central_model_is_the_same_though_the_coordinator_was_killed_meanwhile(tmp_path):
    """A restarted coordinator trains the central model once more, on the same rows, and compares it
    with the global model on those that are held out."""
    expected, model = await central_model(tmp_path, "undisturbed", kills=False)
    evaluation = expected["evaluation"]
    assert (expected["round"], evaluation["local"]["passes"]) == (1, 1000)
    assert evaluation["num_samples"] == evaluation["local"]["num_samples"] == 114
    assert evaluation["local"]["figures"]["log_loss"]["value"] < 0.5
    assert [one["round"] for one in evaluation["local"]["differences"]] == [1]
    assert await central_model(tmp_path, "killed", kills=True) == (expected, model)


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
    sites = [SiteProcess(tmp_path, f"site-{index}") for index in range(2)]
    try:
        for index, site in enumerate(sites):
            await site.start(coordinator.port, write_random(tmp_path, index), "--target=outcome")
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
