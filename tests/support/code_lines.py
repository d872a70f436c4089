"""Count the lines of code of scripts, all of them and those beside model and data.

    python tests/support/code_lines.py examples/cookbook/*.py

A line of code has a token other than a comment, and is no part of a docstring. A section begins
with a comment such as "# --- data, model and training ---"; its lines of code, up to the next such
comment, are those that the script has without federation as well. Imports count beside them.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

_HEADING = re.compile(r"^# --- (.+?) ---$")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> set[int]:
    """Numbers of the lines of code, from 1 on."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def beside_model_and_data(source: str) -> int:
    """Number of lines of code outside of the sections whose headings begin with "data"."""
    counts, is_beside = 0, True
    numbers = code_lines(source)
    for number, line in enumerate(source.splitlines(), 1):
        if heading := _HEADING.match(line):
            is_beside = not heading[1].startswith("data")
        counts += is_beside and number in numbers
    return counts


def main() -> None:
    for name in sys.argv[1:]:
        source = Path(name).read_text(encoding="utf-8")
        beside, total = beside_model_and_data(source), len(code_lines(source))
        sys.stdout.write(f"{name}: {beside} beside model and data, {total} in all\n")


if __name__ == "__main__":
    main()
