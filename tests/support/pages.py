"""Addresses of other hosts in pages, and code that tests run."""

import re
from pathlib import Path

# "//" begins an address of another host in an attribute, a style and a script. The namespaces of
# SVG are names, and nothing asks for them.
OTHER_HOST = re.compile(r"(https?:)?//(?!www\.w3\.org/)[\w.-]+")


def executed(page: str) -> str:
    """The code of a page in docs/ that stands below the mark of code that a test runs."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- executed by a test -->\n```python\n(.*?)```", text, re.DOTALL)
    return str(code)
