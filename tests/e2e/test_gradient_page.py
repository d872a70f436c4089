"""The commands of docs/gradients.md take steps of gradient descent over two sites."""

import json
from pathlib import Path

import pytest

from support.terminals import Terminals, commands_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


async def test_commands_of_the_page_take_gradient_steps(tmp_path):
    """Accuracy on the rows that both sites have held out."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    terminals = Terminals(tmp_path)
    try:
        for line in commands_of((ROOT / "docs" / "gradients.md").read_text(encoding="utf-8")):
            await terminals.do(line)
        shown = json.loads(await terminals.do(f"{line} --json"))
    finally:
        await terminals.end()
    assert shown[-1]["round"] == 60
    assert shown[-1]["evaluation"]["metrics"]["accuracy"] >= 0.9
