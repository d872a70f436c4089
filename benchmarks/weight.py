"""Weight of the code: its size, and the way of a call, at a revision and now.

    python benchmarks/weight.py REVISION

lines, tokens: of Python files, without generated ones; tokens as `python -m tokenize` counts them.
strings: lines of string literals that are no docstrings.
modules: of the fullest folder of the product.
calls, moves, core: see tests/support/walk.py, which each revision has of its own; none before it.
An update leaves its round open, the last one closes it.

Prints a table; writes bench-results/weight.json.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import results

HERE = Path(__file__).resolve().parent.parent
PARTS = {"product": "*/src/**/*.py", "tests": "tests/**/*.py", "benchmarks": "benchmarks/**/*.py"}
Figures = dict[str, float]


def files_of(tree: Path, pattern: str) -> list[Path]:
    return [file for file in tree.glob(pattern) if not file.stem.endswith(("_pb2", "_pb2_grpc"))]


def tokens_of(text: str) -> int:
    return sum(1 for _ in tokenize.generate_tokens(io.StringIO(text).readline))


def string_lines(text: str) -> int:
    """Lines of the string literals that are no docstrings."""
    tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = {id(node.body[0].value) for node in ast.walk(tree) if _is_told(node, documented)}
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    )
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in strings)


def _is_told(node: ast.AST, kinds: object) -> bool:
    return isinstance(node, kinds) and ast.get_docstring(node) is not None  # type: ignore[arg-type]


def sizes(tree: Path) -> Figures:
    figures: Figures = {}
    for part, pattern in PARTS.items():
        texts = [file.read_text(encoding="utf-8") for file in files_of(tree, pattern)]
        figures[f"{part}, lines"] = sum(text.count("\n") for text in texts)
        figures[f"{part}, tokens"] = sum(map(tokens_of, texts))
        if part == "product":
            figures["product, lines of strings"] = sum(map(string_lines, texts))
    figures["modules of the fullest folder"] = fullest(files_of(tree, PARTS["product"]))
    return figures


def fullest(files: Iterable[Path]) -> int:
    return max(Counter(file.parent for file in files if file.stem != "__init__").values())


def ways(tree: Path) -> Figures:
    """Figures of the way of a call through the coordinator of a tree."""
    walk = tree / "tests" / "support" / "walk.py"
    if not walk.exists():
        return {}
    sources = os.pathsep.join(str(source) for source in tree.glob("*/src"))
    done = subprocess.run(
        [sys.executable, str(walk)],
        env={**os.environ, "PYTHONPATH": sources},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {f"{call}, {name}": figure for call, of in found.items() for name, figure in of.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", metavar="REVISION")
    revision = parser.parse_args().revision
    with results.scratch() as before:
        packed = subprocess.run(
            ["git", "-C", str(HERE), "archive", revision], stdout=subprocess.PIPE, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(before, filter="data")
        then, now = ({**sizes(tree), **ways(tree)} for tree in (before, HERE))
    table = [
        {
            "figure": name,
            "before": then.get(name),
            "now": figure,
            "ratio": round(figure / then[name], 3) if then.get(name) else None,
        }
        for name, figure in now.items()
    ]
    results.report("weight", {"revision_before": revision, "figures": table})


if __name__ == "__main__":
    main()
