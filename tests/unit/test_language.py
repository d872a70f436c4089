"""Docstrings and comments name a thing before they say what happens to it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.trees import nodes_of

ROOT = Path(__file__).parents[2]
FOLDERS = [
    *sorted(ROOT.glob("*/src")),
    *(ROOT / one for one in ("tests", "benchmarks", "examples")),
]
NAMES_NOTHING = re.compile(r"(Of|By|Who|Whose|Whoever|Those|It|Its|They|What)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, its classes and functions, with the lines on which they begin."""
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_docstring_begins_with_no_pronoun(folder: Path) -> None:
    """A docstring that begins so can be understood only beside the signature."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in folder.rglob("*.py")
        for line, text in docstrings(path)
        if NAMES_NOTHING.match(text)
    ]
    assert not found, "\n".join(found)


def test_comment_of_a_configuration_begins_with_no_pronoun() -> None:
    """A comment that begins so can be understood only beside its key."""
    files = sorted((ROOT / "configs").glob("*.toml"))
    assert files
    found = [
        f"{path.name}: {line}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if NAMES_NOTHING.match(line.removeprefix("# "))
    ]
    assert not found, "\n".join(found)
