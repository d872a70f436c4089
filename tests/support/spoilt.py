"""Mistakes that people make in tables, as pure functions, and all that is told of them.

A site's rows are dictionaries of text, as in its file.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xain_coordinator.core.parts.profiles import ProfileMismatch, check_profile
from xain_coordinator.core.vocabulary.values import Schema
from xain_foundation.settings.settings import load
from xain_participant.config import ParticipantConfig
from xain_participant.tables.workload_participant import WorkloadParticipant
from xain_workloads.errors import DataError
from xain_workloads.tables.checks.checking import check
from xain_workloads.tables.checks.findings import Finding
from xain_workloads.tables.partition import split_train_test
from xain_workloads.tables.profile import DataProfile

Row = Mapping[str, str]
Rows = Sequence[Row]
Change = Callable[[str, int], str]  # of a cell, by its text and its place

MISSING = frozenset(("", "NA", "nan"))


@dataclass(frozen=True, slots=True)
class Study:
    """Tables of sites, the column to predict, and its task."""

    name: str
    target: str
    sites: Mapping[str, Rows]
    task: str = "classification"

    def values(self, column: str) -> list[str]:
        """The known values of a column at all sites."""
        return [
            row[column]
            for rows in self.sites.values()
            for row in rows
            if row[column] not in MISSING
        ]

    @property
    def columns(self) -> list[str]:
        """Names of the columns, without the target."""
        first = next(iter(self.sites.values()))
        return [name for name in first[0] if name != self.target]

    def is_number(self, column: str) -> bool:
        try:
            return bool([float(value) for value in self.values(column)])
        except ValueError:
            return False

    def with_rows(self, site: str, rows: Rows) -> "Study":
        return replace(self, sites={**self.sites, site: rows})


def cells(rows: Rows, column: str, change: Change) -> Rows:
    """Change the known cells of a column. change: gets the text and the number of the cell."""
    changed, at = [], 0
    for row in rows:
        if row.get(column, "") in MISSING:
            changed.append(row)
            continue
        changed.append({**row, column: change(row[column], at)})
        at += 1
    return changed


def scaled(rows: Rows, column: str, factor: float, offset: float = 0.0) -> Rows:
    return cells(rows, column, lambda text, _: f"{float(text) * factor + offset:.10g}")


def set_cells(rows: Rows, column: str, text: str, every: int = 0) -> Rows:
    """Set the fourth known cell, or each so many of them."""
    return cells(
        rows, column, lambda old, at: text if (at % every == 0 if every else at == 3) else old
    )


def added(rows: Rows, column: str, make: Callable[[Row, int], str]) -> Rows:
    """Add a first column."""
    return [{column: make(row, at), **row} for at, row in enumerate(rows)]


def text_of(rows: Rows, separator: str = ",") -> str:
    """The rows as a CSV file with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*rows[0]], delimiter=separator, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Read:
    """A site's file as its participant reads it, and what a coordinator would be told."""

    profile: DataProfile | None
    refused: str = ""


def read(file: Path, target: str, task: str, settings: Mapping[str, object] | None = None) -> Read:
    """Read a file as `xain-participant --data FILE --target COLUMN --task TASK` does."""
    given = {"data.source": str(file), "data.target": target, "data.task": task, **(settings or {})}
    data = load(ParticipantConfig, overrides=given).data
    try:
        table = data.load()
        train, test = split_train_test(table, data.test_fraction, 0, least=data.min_known)
        participant = WorkloadParticipant(train, 0, test, min_known=data.min_known)
        return Read(participant.profile())
    except DataError as error:
        return Read(None, str(error))


def findings(sites: Iterable[tuple[str, Read]]) -> list[Finding]:
    """All that is told of the sites' tables before the training: by each one's participant, by the
    coordinator, which compares names, types and classes in the order of joining, and by the check
    list over the sites that joined."""
    found, joined = [], list[tuple[str, DataProfile]]()
    for name, one in sites:
        if one.profile is None:
            found.append(Finding("refuse", "reader", name, "", one.refused))
            continue
        try:
            check_profile(
                one.profile,
                [profile for _, profile in joined],
                Schema(),
                needs_rows=True,
                is_model_requested=False,
                first=lambda: "",
            )
        except ProfileMismatch as error:
            found.append(Finding("refuse", "schema", name, "", str(error)))
            continue
        joined.append((name, one.profile))
    return [*found, *check(joined, {})]
