"""docs/operations.md names every log event and every exit status of the coordinator."""

import ast
import re
from collections.abc import Iterator
from configparser import ConfigParser, SectionProxy
from pathlib import Path

from xain_coordinator.process import run
from xain_foundation.commands import EXIT_BAD_CONFIG
from xain_participant.cli import EXIT_BAD_DATA

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SOURCES = ROOT / "coordinator/src/xain_coordinator"
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}


def logged() -> Iterator[tuple[str, str]]:
    """(event, level) of every line that an operator sees; debug lines are for developers."""
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            method: ast.expr = node.func
            if isinstance(method, ast.Name) and method.id == "RateLimitedLog":
                method, name = node.args[:2]
            else:
                name = node.args[0] if node.args else node.func
            if (
                isinstance(method, ast.Attribute)
                and isinstance(method.value, ast.Name)
                and method.value.id == "log"
                and method.attr in LEVELS
                and isinstance(name, ast.Constant)
            ):
                yield str(name.value), LEVELS[method.attr]


def documented() -> dict[str, str]:
    """The level of each event in the page's table."""
    events = {}
    for line in PAGE.partition("## Log events")[2].splitlines():
        cells = line.split(" | ")
        if line.startswith("| `"):
            events |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[1])
    return events


def test_every_log_event_is_in_the_table_with_its_level() -> None:
    found: dict[str, set[str]] = {}
    for event, level in logged():
        found.setdefault(event, set()).add(level)
    assert documented().keys() == found.keys()
    assert not {event for event, level in documented().items() if level not in found[event]}


def test_every_exit_status_is_in_the_table() -> None:
    table = PAGE.partition("## Exit statuses")[2].partition("## ")[0]
    told = {int(number) for number in re.findall(r"^\| (\d)", table, re.MULTILINE)}
    assert told == {run.EXIT_OK, run.EXIT_ERROR, EXIT_BAD_CONFIG, run.EXIT_FENCED}


def service(block: str) -> SectionProxy:
    """The section of a systemd unit that says how the program is run."""
    unit = ConfigParser(interpolation=None)
    unit.read_string(block)
    return unit["Service"]


def test_units_of_systemd_start_no_program_again_that_must_be_corrected() -> None:
    """The exit statuses are those of the table, and of a participant."""
    coordinator, participant = map(service, re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL))
    table = PAGE.partition("## Exit statuses")[2].partition("## ")[0]
    final = re.findall(r"^\| (\d) \|.*\| (?!yes)[^|]+ \|$", table, re.MULTILINE)
    assert coordinator["RestartPreventExitStatus"].split() == final
    corrected = [str(EXIT_BAD_DATA), str(EXIT_BAD_CONFIG)]
    assert participant["RestartPreventExitStatus"].split() == corrected
