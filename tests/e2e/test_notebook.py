"""The notebook among the tutorials, executed from its first cell to its last."""

import ast
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def text_of(cell: Any) -> str:
    """All that a cell has printed, and its value."""
    assert "stderr" not in {output.get("name") for output in cell.outputs}, "".join(
        output.get("text", "") for output in cell.outputs
    )
    return "".join(
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
        for output in cell.outputs
    )


async def test_notebook_trains_and_exports_a_model_that_scores_the_same(tmp_path):
    """A coordinator in the notebook's process, three sites, and plain scikit-learn."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    await client.async_execute(env={**os.environ, "TMPDIR": str(tmp_path)})
    tables, _, statuses, curve, report, exported = (
        cell for cell in notebook.cells if cell.cell_type == "code"
    )
    assert [line.split()[0] for line in text_of(tables).splitlines()] == [
        "north",
        "south",
        "west",
        "test",
    ]
    assert ast.literal_eval(text_of(statuses)) == [0, 0, 0]
    header, *rows = [line.split() for line in text_of(curve).splitlines()]
    assert header == ["model", "test", "north", "south", "west", "spread"]
    assert [int(row[0]) for row in rows] == list(range(11))
    for _, _, *at_sites, spread in rows:
        values = [float(one) for one in at_sites]
        assert float(spread) == pytest.approx(max(values) - min(values), abs=0.0011)
    assert "<iframe" in report.outputs[-1]["data"]["text/html"]
    scores = ast.literal_eval(text_of(exported).partition("model.skops\n")[2])
    assert scores["model"] == 10
    assert scores["scikit-learn"] == scores["coordinator"] > 0.85
    assert f"{scores['scikit-learn']:.3f}" == rows[-1][1]


def test_notebook_is_kept_without_outputs():
    """Outputs would go stale, and may hold rows of data."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert NOTEBOOK.stat().st_size < 20_000
