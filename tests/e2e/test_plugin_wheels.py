"""The example plug-ins, installed from wheels, pass the contract suites and hold a session."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.agents import ends_of
from support.process import CoordinatorProcess, ended
from support.trainee import Trainee
from support.training import Scenario, models, undisturbed
from xain_participant import Agent

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "plugins"
SUITES = ("tests/contract/test_weights_store.py", "tests/contract/test_metrics_store.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has both plug-ins."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    for name in ("sqlite_store", "csv_metrics"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", wheels]
        subprocess.run(build, cwd=EXAMPLES / name, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site]
    subprocess.run([*pip, *wheels.glob("*.whl")], check=True)
    return {**os.environ, "PYTHONPATH": f"{site}:{ROOT / 'tests'}"}


def test_example_plug_ins_pass_the_contract_suites(installed):
    contract = {
        "stores": {"sqlite": {"path": "{folder}/weights.sqlite"}},
        "metrics": {"csv": {"path": "{folder}/metrics.csv"}},
        "read": {"csv": "xain_csv_metrics:read"},
    }
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-k", "plugin-", *SUITES],
        cwd=ROOT,
        env={**installed, "XAIN_CONTRACT": json.dumps(contract)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None, ran.stdout
    assert int(passed[1]) > 50, ran.stdout


async def test_session_runs_with_the_example_plug_ins(installed, tmp_path, monkeypatch):
    """Models are those of a session on files, bit for bit, and metrics are in the file."""
    monkeypatch.setenv("PYTHONPATH", installed["PYTHONPATH"])
    scenario = Scenario(("north", "south"), rounds=4, size=500_000)
    expected = await undisturbed(scenario, tmp_path / "files")
    metrics = tmp_path / "metrics.csv"
    chosen = {"storage.kind": "sqlite", "storage.options.path": str(tmp_path / "w.sqlite")}
    chosen |= {"metrics.kind": "csv", "metrics.options.path": str(metrics)}
    process = CoordinatorProcess(tmp_path / "plug-ins", {**scenario.rules(), **chosen})
    async with ended(process):
        await process.start()
        target = f"127.0.0.1:{process.port}"
        agents = [Agent(Trainee(p, scenario.size), target, p) for p in scenario.participants]
        assert set(await ends_of(agents)) == {0}
        assert await models(process.port, scenario) == expected
        assert await process.stop() == 0
    with metrics.open(encoding="utf-8", newline="") as lines:
        assert {measurement for measurement, *_ in csv.reader(lines)} >= {"coordinator"}


def test_example_plug_ins_are_small():
    for file in EXAMPLES.glob("*/*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 120, file
