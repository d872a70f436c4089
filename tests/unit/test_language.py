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
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
MANY_LINES = 20  # of a function whose name does not say all
CHECKS = re.compile(r"__|_?(check|require|refuse)|[A-Z]")  # or calls of a service
NAMES_NOTHING = re.compile(r"(Of|By|Who|Whose|Whoever|Those|It|Its|They|What)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, its classes and functions, with the lines on which they begin."""
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTION):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_docstring_begins_with_no_pronoun(folder):
    """A docstring that begins so can be understood only beside the signature."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in folder.rglob("*.py")
        for line, text in docstrings(path)
        if NAMES_NOTHING.match(text)
    ]
    assert not found, "\n".join(found)


def untold(path: Path) -> Iterator[tuple[int, str]]:
    """First lines and names of functions that do not say what they do.

    What a call of a service does is said in its .proto file, what a command does in its help, and
    what a function within another does in that one's.
    """
    functions = [node for node in nodes_of(path) if isinstance(node, FUNCTION)]
    inner = {id(one) for each in functions for one in ast.walk(each) if one is not each}
    for node in functions:
        if id(node) in inner or CHECKS.match(node.name):
            continue
        text = ast.get_docstring(node) or ""
        is_long = (node.end_lineno or 0) - node.lineno > MANY_LINES
        has_help = any("help=" in ast.unparse(each) for each in node.decorator_list)
        if text.startswith("Raises") or (is_long and not text and not has_help):
            yield node.lineno, node.name


@pytest.mark.parametrize("folder", sorted(ROOT.glob("*/src")), ids=lambda f: f.parent.name)
def test_function_says_what_it_does(folder):
    """A stranger explains few functions that are long and have no docstring, or one that tells of
    errors alone."""
    files = [file for file in folder.rglob("*.py") if "_pb2" not in file.name]
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line} {name}" for file in files for line, name in untold(file)
    ]
    assert not found, "\n".join(found)


def test_comment_of_a_configuration_begins_with_no_pronoun():
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
