"""Identifiers use the words of docs/glossary.md, and no metaphors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.trees import nodes_of

ROOT = Path(__file__).parents[2]
FOLDERS = [*sorted(ROOT.glob("*/src")), ROOT / "tests", ROOT / "benchmarks"]
HONEST = {"in_place"}  # an operation in place is no metaphor


def metaphors() -> set[str]:
    """Words of the left column of the glossary's last table, with plurals and past forms."""
    _, table = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").split("| not | but |", 1)
    rows = re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE)
    words = {word for row in rows for word in row.split(", ")}
    return {form for word in words for form in (word, f"{word}s", f"{word.removesuffix('e')}ed")}


def parts(identifier: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def identifiers(file: Path) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module names, or calls by its name."""
    for node in nodes_of(file):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield node.value.lineno if isinstance(node, ast.keyword) else node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_identifier_is_a_metaphor(folder):
    """A reader who knows the field finds its words, and one word for one thing."""
    forbidden = metaphors()
    assert len(forbidden) > 20, "the table of the glossary is not found"
    found = []
    files = [path for path in folder.rglob("*.py") if "_pb2" not in path.name]
    assert files, folder
    for path in files:
        relative = path.relative_to(ROOT)
        if parts(str(relative)) & forbidden:
            found.append(f"{relative}: the name of the file")
        for line, name in identifiers(path):
            if name not in HONEST and parts(name) & forbidden:
                found.append(f"{relative}:{line}: {name}")
    assert not found, "\n".join(found)
