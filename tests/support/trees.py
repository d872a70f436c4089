"""Syntax trees of the project's files, each parsed once for all tests that read it."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    """The tree of a file, which no caller changes."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, in the order of ast.walk()."""
    return tuple(ast.walk(tree_of(file)))
