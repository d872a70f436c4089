"""Pages of the repository: their links lead somewhere, and what they tell to type can be typed.

No command is run and no value is checked; the tests of the pages in tests/e2e do that.
"""

import ast
import importlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from support.command_lines import parsed
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.settings.schema import Key, Schema, dotted
from xain_participant.config import ParticipantConfig

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "participant/src").rglob("templates/*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)
COMMAND = re.compile(
    r"(?:^|\s|bin/)(xain-(?:coordinator|participant|parameter-server))((?: .*)?)$", re.MULTILINE
)
SETTINGS = [Schema(CoordinatorConfig), Schema(ParticipantConfig)]
# A script of examples/.
OPTIONAL = {"torch_local"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every code block. The first line of an indented one tells its
    language."""
    text = page.read_text(encoding="utf-8")
    for _, language, block in FENCED.findall(text):
        yield language, textwrap.dedent(block)
    for found in INDENTED.findall(FENCED.sub("", text)):
        block = textwrap.dedent(found)
        is_python = re.match(r"\s*(from|import) \w|\s*@", block)
        yield "toml" if re.match(r"\s*\[", block) else "python" if is_python else "sh", block


def all_blocks(language: str) -> list[Any]:
    """Blocks of this language on all pages, as parameters of a test."""
    found = [
        pytest.param(block, id=f"{name_of(page)}-{number}")
        for page in PAGES
        for number, (its_language, block) in enumerate(blocks(page))
        if its_language == language
    ]
    assert len(found) > 20, "the blocks are not where this test looks"
    return found


def all_commands() -> list[Any]:
    """Command lines of our programs in all shell blocks, as parameters of a test."""
    found = [
        pytest.param(program, words(rest), id=f"{name_of(page)}: {program}{rest}")
        for page in PAGES
        for language, block in blocks(page)
        if language in ("sh", "ini")
        for program, rest in COMMAND.findall(block.replace("\\\n", " "))
    ]
    assert len(found) > 100, "the commands are not where this test looks"
    return found


def words(line: str) -> list[str]:
    """The arguments of a command, without a comment and what follows the command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(takewhile(lambda word: not word.startswith(tuple("&|;<>")), lexer))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {slug.replace(" ", "-") for slug in slugs}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(FENCED.sub("", text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize(("program", "arguments"), all_commands())
def test_command_lines_have_only_flags_that_exist(program, arguments):
    """Each command of a page is read by the command line of its program."""
    with suppress(typer.Exit):  # of --help
        parsed(program, arguments)
    for word in arguments:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()


def keys(table: Mapping[str, Any], schema: Schema, section: Key = ()) -> Iterator[Key]:
    for name, value in table.items():
        key = (*section, name)
        if key in schema.sections and isinstance(value, dict):
            yield from keys(value, schema, key)
        else:
            yield key


@pytest.mark.parametrize("block", all_blocks("toml"))
def test_settings_have_only_keys_that_exist(block):
    """Each TOML block is one of a coordinator, of a participant, or of a pyproject.toml."""
    table = tomllib.loads(block)
    if "project" not in table:
        unknown = [[dotted(k) for k in keys(table, s) if not s.leaf_of(k)] for s in SETTINGS]
        assert [] in unknown


@pytest.mark.parametrize("block", all_blocks("python"))
def test_imports_of_python_exist(block):
    """Each block of Python is whole, and can import what it imports."""
    for node in ast.walk(ast.parse(block)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in [node.module or ""] if names else modules:
            top = module.partition(".")[0]
            if find_spec(top) is None and top in OPTIONAL:
                continue
            found = importlib.import_module(module)
            missing = [name for name in names if not hasattr(found, name)]
            assert not missing, module
