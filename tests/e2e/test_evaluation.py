"""Evaluations of global models, over real processes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.commands import command, status, status_json
from support.process import CoordinatorProcess, Keep, SiteProcess
from xain_coordinator.assembly.warm_start import load_model_file
from xain_foundation.exit_statuses import EXIT_NO_BETTER

pytestmark = pytest.mark.frameworks

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
def launch(keep: Keep, tmp_path: Path) -> Launch:
    """Coordinators of one data folder; all are gone at the end."""

    def make(**settings: object) -> CoordinatorProcess:
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        return keep(CoordinatorProcess(tmp_path / "data", dotted))

    return make


async def test_digits_are_evaluated_each_round_and_at_the_end(keep, launch, tmp_path):
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
    sites = [keep(SiteProcess(tmp_path, f"site-{index}")) for index in range(SITES)]
    part = ["--data=digits", "--partition=iid", f"--num-parts={SITES}", f"--set=data.scale={SCALE}"]
    for index, site in enumerate(sites):
        await site.start(coordinator.port, *part, f"--index={index}")
    for site in sites:
        assert await site.died() == 0, site.log()
    shown = await status_json(coordinator.port)
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
    told = await status(coordinator.port)
    assert "log_loss here" in told
    assert "evaluated" in told
    assert re.search(rf"best model +{best}, log_loss", told)
    assert re.search(r"model 3 +accuracy 0\.\d+ \(0\.\d+ to 0\.\d+, baseline 0\.1", told)
    assert await coordinator.stop() == 0
    lines = (tmp_path / "data" / "metrics.jsonl").read_text().splitlines()
    points = [one for one in map(json.loads, lines) if one["measurement"] == "evaluation"]
    found = sorted((p["tags"]["source"], p["fields"]["round"]) for p in points)
    assert found == [(by, r) for by in ("coordinator", "participants") for r in range(4)]


async def test_central_model_is_compared_with_the_global_one_and_kept_as_a_file(
    keep, launch, tmp_path
):
    """The coordinator trains it on its own rows, and both are measured on those held out."""
    coordinator = launch(
        rounds__rounds=1,  # so that no evaluation is passed over for the last one
        rounds__epochs=1000,
        workload__name="sgd",
        evaluate__data="breast_cancer",
    )
    await coordinator.start()
    site = keep(SiteProcess(tmp_path, "site"))
    part = ["--data=breast_cancer", "--partition=iid", "--num-parts=4", "--index=0"]
    await site.start(coordinator.port, *part)
    assert await site.died() == 0, site.log()
    central = (await status_json(coordinator.port))["status"]["central"]
    evaluation = central["evaluation"]
    assert (central["round"], evaluation["local"]["passes"]) == (1, 1000)
    assert evaluation["num_samples"] == evaluation["local"]["num_samples"] == 114
    assert evaluation["local"]["figures"]["log_loss"]["value"] < 0.5
    assert [one["round"] for one in evaluation["local"]["differences"]] == [1]
    loaded, _ = load_model_file(Path(central["file"]))
    assert loaded.metadata["workload"] == "sgd"


async def test_training_that_is_no_better_than_the_commonest_class_ends_with_status_4(
    keep, launch, tmp_path
):
    """Labels that have nothing to do with the columns, and a step that is too long."""
    coordinator = launch(
        rounds__rounds=2,
        rounds__min_participants=2,
        workload__name="sgd",
        workload__options__eta0=5.0,
    )
    await coordinator.start()
    sites = [keep(SiteProcess(tmp_path, f"site-{index}")) for index in range(2)]
    for index, site in enumerate(sites):
        await site.start(coordinator.port, write_random(tmp_path, index), "--target=outcome")
    for site in sites:
        assert await site.died() == EXIT_NO_BETTER, site.log()
        assert "Model 2 is no better than always predicting the commonest class" in site.log()
    shown = await status_json(coordinator.port)
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
