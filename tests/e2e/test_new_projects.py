"""Projects of `xain-participant new`, each with a coordinator and two sites in processes."""

import re
from pathlib import Path

import pytest

from support.terminals import Terminals, commands_of

pytestmark = pytest.mark.frameworks


async def written(template: str, folder: Path) -> Path:
    """A new project; with two rounds, so that the test is short."""
    project = folder / template
    shown = await Terminals(folder).do(f"xain-participant new --template {template} {project}")
    assert shown.endswith(f"Now: cd {project}, and follow README.md\n")
    settings = project / "coordinator.toml"
    text = settings.read_text()
    text, found = re.subn(r"^rounds = [1-9]0\b", "rounds = 2", text, flags=re.MULTILINE)
    assert found == 1
    settings.write_text(text)
    return project


@pytest.mark.parametrize(
    ("template", "file"),
    [("sklearn", "model.skops"), ("xgboost", "model.json"), ("torch", "model.safetensors")],
)
async def test_new_project_trains_as_it_is(template, file, tmp_path):
    """The three commands of its README train a model, and one more takes it home."""
    project = await written(template, tmp_path)
    page = (project / "README.md").read_text()
    lines = commands_of(page)
    assert len(lines) == 3
    terminals = Terminals(project, scripts=("train.py",))
    try:
        for line in lines:
            await terminals.do(line)
        await terminals.wait_for_participants()
        export = f"xain-coordinator export --address localhost:50051 --best --to {file}"
        assert f"`{export}`" in page
        shown = await terminals.do(export)
        assert shown.endswith(f" is in {file}\n")  # the best one, by what the sites have measured
    finally:
        await terminals.end()
