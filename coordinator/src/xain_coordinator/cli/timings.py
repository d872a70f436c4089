"""`xain-coordinator timings`: percentiles of a latency stream."""

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xain_coordinator.server.inspection_client import clean
from xain_foundation.commands import CommandFailed

TRAINING = "training"  # the endpoint of updates

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_NUMBERS = ("count", "failed", "median", "p90", "p99", "max")


@dataclass(slots=True)
class Times:
    """Seconds of the calls of one endpoint. num_failed: calls that did not end with OK."""

    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    num_failed: int = 0

    def add(self, other: "Times") -> None:
        self.seconds.extend(other.seconds)
        self.num_failed += other.num_failed

    def numbers(self) -> dict[str, float]:
        """Numbers by the names of _NUMBERS; percentiles are interpolated linearly, as by numpy."""
        quantiles = np.quantile(np.frombuffer(self.seconds), (0.5, 0.9, 0.99, 1.0))
        values = (len(self.seconds), self.num_failed, *quantiles.tolist())
        return dict(zip(_NUMBERS, values, strict=True))


@dataclass(slots=True)
class Timings:
    """by_caller: by endpoint and participant, which is "" for callers without a name.
    num_unreadable: lines that are not of a latency stream."""

    by_caller: dict[tuple[str, str], Times] = field(default_factory=dict)
    num_unreadable: int = 0

    def by_endpoint(self) -> dict[str, Times]:
        endpoints: dict[str, Times] = {}
        for (endpoint, _), times in sorted(self.by_caller.items()):
            endpoints.setdefault(endpoint, Times()).add(times)
        return endpoints

    def as_json(self) -> dict[str, Any]:
        return {
            "endpoints": [
                {"endpoint": endpoint, **times.numbers()}
                for endpoint, times in self.by_endpoint().items()
            ],
            "participants": [
                {"participant": participant, "endpoint": endpoint, **times.numbers()}
                for participant, endpoint, times in self._participants()
            ],
            "unreadable_lines": self.num_unreadable,
        }

    def tables(self) -> tuple[list[list[str]], list[list[str]]]:
        """Rows of the two tables, the headings first."""
        endpoints = [["endpoint", *_NUMBERS]]
        for endpoint, times in self.by_endpoint().items():
            endpoints.append([clean(endpoint), *_cells(times)])
        participants = [["participant", "endpoint", *_NUMBERS]]
        for participant, endpoint, times in self._participants():
            participants.append([clean(participant), clean(endpoint), *_cells(times)])
        return endpoints, participants

    def _participants(self) -> list[tuple[str, str, Times]]:
        found = [
            (participant, endpoint, times)
            for (endpoint, participant), times in self.by_caller.items()
            if participant
        ]
        return sorted(found, key=lambda one: one[:2])


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
        times = timings.by_caller.setdefault((endpoint, participant), Times())
        times.seconds.append(seconds)
        times.num_failed += not is_ok
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
    if as_json:
        typer.echo(json.dumps(timings.as_json()))
        return
    console = Console()
    for number, rows in enumerate(timings.tables()):
        if number:
            console.print()
        if console.is_terminal:
            console.print(_table(rows))
        else:  # lines as long as they are, for grep and sort
            typer.echo("\n".join(_aligned(rows)))
    if timings.num_unreadable:
        told = f"xain-coordinator timings: {timings.num_unreadable} lines could not be read"
        typer.echo(told, err=True)


def _parsed(line: bytes) -> tuple[str, str, float, bool]:
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


def _cells(times: Times) -> list[str]:
    numbers = times.numbers()
    return [
        f"{number:d}" if name in ("count", "failed") else f"{number:.5f}"
        for name, number in numbers.items()
    ]


def _num_texts(rows: Sequence[Sequence[str]]) -> int:
    """Number of text columns before the columns of numbers."""
    return len(rows[0]) - len(_NUMBERS)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, heading in enumerate(rows[0]):
        is_text = number < _num_texts(rows)
        table.add_column(
            heading,
            header_style="dim",
            overflow="fold" if is_text else "ellipsis",
            justify="left" if is_text else "right",
            no_wrap=not is_text,
        )
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_texts = _num_texts(rows)
    return [
        "  ".join(
            f"{cell:<{width}}" if number < num_texts else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
