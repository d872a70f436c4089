"""docs/operations.md names every log event and every exit status of our programs."""

import ast
import re
import signal
from collections.abc import Iterator
from configparser import ConfigParser, SectionProxy
from pathlib import Path

import pytest

from support.trees import nodes_of
from xain_coordinator.cli import repair
from xain_coordinator.cli.launch import interrupts
from xain_foundation.exit_statuses import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_FENCED,
    EXIT_NOTHING_COUNTED,
    EXIT_OK,
    EXIT_ROWS_MISSED,
    EXIT_SIGNAL,
    FINAL,
    MEANINGS,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}
HELPERS = {"_info": "info", "_log_measured": "info"}  # methods of the agent
# The distributions whose events are in a table.
TABLES = {
    "Coordinator": ("coordinator", "foundation"),
    "Participant": ("participant", "workloads"),
    "Parameter server": ("parameters",),
    "Messaging": ("membership", "messaging"),
}
SIGNALS = {EXIT_SIGNAL + signal.SIGINT, EXIT_SIGNAL + signal.SIGTERM}
LAUNCH_SIGNALS = {EXIT_SIGNAL + number for number in interrupts._SIGNALS}
USUAL = {EXIT_OK, EXIT_FAILED, EXIT_BAD_CONFIG}
STATUSES = {
    "xain-coordinator": USUAL | {EXIT_FENCED},
    "xain-participant": USUAL | SIGNALS | {EXIT_NOTHING_COUNTED},
    "xain-coordinator repair": {repair.EXIT_SOUND, repair.EXIT_DAMAGED, repair.EXIT_NOT_CHECKED},
    "xain-coordinator launch": USUAL | LAUNCH_SIGNALS | {EXIT_NOTHING_COUNTED, EXIT_ROWS_MISSED},
    "xain-coordinator demo": USUAL | LAUNCH_SIGNALS,
    "xain-participant sparse": USUAL | SIGNALS | {EXIT_NOTHING_COUNTED, EXIT_ROWS_MISSED},
}


def may_be(node: ast.expr, within: ast.AST) -> Iterator[ast.expr]:
    """The expressions that one stands for: both of a choice, and what a name is set to."""
    if isinstance(node, ast.IfExp):
        yield from may_be(node.body, within)
        yield from may_be(node.orelse, within)
    elif isinstance(node, ast.Name):
        for one in ast.walk(within):
            if isinstance(one, ast.Assign) and node.id in map(ast.unparse, one.targets):
                yield from may_be(one.value, within)
    else:
        yield node


def logged(distribution: str) -> Iterator[tuple[str, str]]:
    """(event, level) of every line that an operator sees; debug lines are for developers."""
    for file in (ROOT / distribution / "src").rglob("*.py"):
        for function in nodes_of(file):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                method, name = node.func, node.args[0]
                if isinstance(method, ast.Name) and method.id == "RateLimitedLog":
                    method, name = node.args[:2]
                for level in filter(None, map(level_of, may_be(method, function))):
                    for event in may_be(name, function):
                        if isinstance(event, ast.Constant):
                            yield str(event.value), level


def level_of(method: ast.expr) -> str | None:
    """The level at which a method of a logger, or of the agent, logs; None for any other."""
    if not isinstance(method, ast.Attribute):
        return None
    is_logger = re.fullmatch(r"(self\._)?log(ger)?", ast.unparse(method.value))
    return LEVELS.get(method.attr) if is_logger else HELPERS.get(method.attr)


def table(heading: str) -> list[list[str]]:
    """Cells of the rows under a heading, up to the next one."""
    (text,) = re.findall(rf"^##+ {heading}\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize("heading", TABLES)
def test_every_log_event_is_in_the_table_with_its_level(heading):
    """No event is missing, and none is there that no code logs."""
    found = {}
    for distribution in TABLES[heading]:
        for event, level in logged(distribution):
            found.setdefault(event, set()).add(level)
    told = {}
    for names, level, *_ in table(heading):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), level)
    assert told.keys() == found.keys()
    assert not {event for event, level in told.items() if level not in found[event]}


def test_the_exit_statuses_of_all_programs_are_one_table():
    assert {int(status): means for status, means in table("Exit statuses")} == MEANINGS


@pytest.mark.parametrize("program", STATUSES)
def test_every_exit_status_is_in_the_table(program):
    rows = table("Exit statuses of each program")
    told = {int(status) for status, of, *_ in rows if f"`{program}`" in of}
    assert told == STATUSES[program]


def service(block: str) -> SectionProxy:
    """The section of a systemd unit that says how the program is run."""
    unit = ConfigParser(interpolation=None)
    unit.read_string(block)
    return unit["Service"]


def test_units_of_systemd_start_no_program_again_that_must_be_corrected():
    """The exit statuses are those of the table, and all that are final."""
    coordinator, participant = map(service, re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL))
    for unit, program in ((coordinator, "xain-coordinator"), (participant, "xain-participant")):
        final = {
            int(status)
            for status, of, _, again in table("Exit statuses of each program")
            if of == f"`{program}`" and status != "0" and again != "yes"
        }
        assert {*map(int, unit["RestartPreventExitStatus"].split())} == final.union(FINAL)
