"""Neural networks of PyTorch in separate processes: the commands of docs/neural.md."""

import json
from pathlib import Path

import pytest

from support.terminals import Terminals, commands_of

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
