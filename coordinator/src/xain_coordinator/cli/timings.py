"""`xain-coordinator timings`: percentiles of a latency stream."""

import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xain_coordinator.inspection.client import clean
from xain_foundation.exit_statuses import CommandFailed

TRAINING = "training"  # the endpoint of updates

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
Row = dict[str, Any]  # cells by heading
_NUMBERS = ("count", "failed", "median", "p90", "p99", "max")


@dataclass(slots=True)
class Timings:
    """by_caller: seconds by endpoint and participant, which is "" for callers without a name.
    num_failed: calls that did not end with OK. num_unreadable: lines that are not of a latency
    stream."""

    by_caller: "dict[tuple[str, str], array[float]]" = field(default_factory=dict)
    num_failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_unreadable: int = 0

    def tables(self) -> tuple[list[Row], list[Row]]:
        """Rows of the two tables: by endpoint, and by participant and endpoint."""
        endpoints = sorted({endpoint for endpoint, _ in self.by_caller})
        named = sorted((name, endpoint) for endpoint, name in self.by_caller if name)
        return [
            {"endpoint": one, **self._numbers([key for key in self.by_caller if key[0] == one])}
            for one in endpoints
        ], [
            {"participant": name, "endpoint": endpoint, **self._numbers([(endpoint, name)])}
            for name, endpoint in named
        ]

    def _numbers(self, callers: Sequence[tuple[str, str]]) -> Row:
        """Numbers by the names of _NUMBERS; percentiles are interpolated linearly, as by numpy."""
        seconds = np.concatenate([np.frombuffer(self.by_caller[key]) for key in callers])
        quantiles = np.quantile(seconds, (0.5, 0.9, 0.99, 1.0)).tolist()
        num_failed = sum(self.num_failed[key] for key in callers)
        return dict(zip(_NUMBERS, (len(seconds), num_failed, *quantiles), strict=True))


def read(lines: Iterable[bytes]) -> Timings:
    """The latencies of a latency stream, 8 bytes of memory for each."""
    timings = Timings()
    for line in lines:
        if not line.strip():
            continue
        try:
            endpoint, participant, seconds, is_ok = _parsed(line)
        except _UNREADABLE:
            timings.num_unreadable += 1
            continue
        timings.by_caller.setdefault((endpoint, participant), array("d")).append(seconds)
        timings.num_failed[endpoint, participant] += not is_ok
    return timings


def show(path: Path, *, as_json: bool = False) -> None:
    """Print the timings of a file. Raises OSError and CommandFailed."""
    with path.open("rb") as lines:
        timings = read(lines)
    if not timings.by_caller:
        unreadable = f" ({timings.num_unreadable} other lines)" if timings.num_unreadable else ""
        raise CommandFailed(
            f"{path} has no latency{unreadable}; name a file that [logging] latency_file named"
        )
    endpoints, participants = timings.tables()
    if as_json:
        rows = {"endpoints": endpoints, "participants": participants}
        typer.echo(json.dumps({**rows, "unreadable_lines": timings.num_unreadable}))
        return
    # Wide enough for any table in a pipe, for grep and sort.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    console.print(_table(endpoints))
    if participants:
        console.print(Text(), _table(participants))
    if timings.num_unreadable:
        told = f"xain-coordinator timings: {timings.num_unreadable} lines could not be read"
        typer.echo(told, err=True)


def _parsed(line: bytes) -> tuple[str, str, float, bool]:
    """Endpoint, participant, seconds, and whether the call ended with OK, of a line. Raises an
    error of _UNREADABLE."""
    document = json.loads(line)
    seconds = float(document["seconds"])
    if not 0 <= seconds < math.inf:
        raise ValueError("no time")
    participant = document.get("participant", "")
    if "method" in document:
        endpoint = document["method"].rpartition(".")[2].removeprefix("Coordinator/")
        return endpoint, str(participant), seconds, document["status"] == "OK"
    int(document["round"])
    return TRAINING, str(participant), seconds, True


def _table(rows: Sequence[Row]) -> Table:
    """Table of rows, with numbers to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        is_number = heading in _NUMBERS
        table.add_column(
            heading,
            header_style="dim",
            overflow="ellipsis" if is_number else "fold",
            justify="right" if is_number else "left",
            no_wrap=is_number,
        )
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    return table


def _cell(value: str | float) -> str:
    """A value as text; seconds with 10 µs."""
    if isinstance(value, str):
        return clean(value)
    return f"{value:.5f}" if isinstance(value, float) else str(value)
