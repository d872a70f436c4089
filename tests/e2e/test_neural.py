"""Neural networks in separate processes: the commands of docs/neural.md, a killed coordinator, and
a module that a builder makes."""

import json
import os
from pathlib import Path

import pytest

from support.process import CoordinatorProcess, Process
from support.terminals import Terminals, commands_of
from xain_foundation.exit_statuses import EXIT_NO_BETTER, EXIT_OK

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


async def test_commands_of_the_page_train_three_sites_in_both_modes(tmp_path: Path) -> None:
    """Accuracy on the rows that the sites have held out."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    terminals = Terminals(tmp_path)
    reached = []
    try:
        for line in commands_of((ROOT / "docs" / "neural.md").read_text(encoding="utf-8")):
            # A part of the rounds suffices.
            await terminals.do(line.replace("digits-neural &", "digits-neural --rounds 4 &"))
            if " models " in line:
                shown = json.loads(await terminals.do(f"{line} --json"))
                reached.append(shown[-1]["evaluation"]["metrics"]["accuracy"])
    finally:
        await terminals.end()
    federated, gradient = reached
    assert federated >= 0.9
    assert gradient >= 0.9


async def test_builder_is_imported_by_participants_that_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round goes on without the others, whose log says what to set."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "clinic_nets.py").write_text(
        "import os\n"
        "from torch import nn\n"
        "def make(num_features, num_outputs):\n"
        "    return nn.Sequential(nn.Linear(num_features, num_outputs), nn.Identity())\n"
    )
    path = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    rules = {
        "rounds.rounds": 2,
        "rounds.min_participants": 1,
        "rounds.start_participants": 2,
        "workload.name": "neural",
        "workload.options.mode": "gradient",  # without torch.optim, which imports for seconds
        "workload.options.builder": "clinic_nets:make",
        "aggregation.rule": "gradient",
    }
    coordinator = CoordinatorProcess(tmp_path / "session", rules)
    allowed = {"north": ['--set=training.builders=["clinic_nets:*"]'], "south": []}
    sites = [Process(tmp_path, name) for name in allowed]
    try:
        await coordinator.start()
        for site, more in zip(sites, allowed.values(), strict=True):
            flags = ["-m", "xain_participant", "--data=wine", f"--id={site.log_path.stem}", *more]
            site._process = await site.run([*flags, f"--coordinator=127.0.0.1:{coordinator.port}"])
        # Two steps need not beat the commonest class.
        assert await sites[0].died() in (EXIT_OK, EXIT_NO_BETTER)
        await sites[1].until_logged("is not allowed here, so it is not imported")
    finally:
        for process in (coordinator, *sites):
            await process.end()
    assert "clinic_nets:make" in sites[1].log()
    assert '"session_finished"' in coordinator.log()
    assert "completed" in coordinator.log()
