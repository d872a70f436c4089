"""Description of the data profile that a coordinator would receive, as text for the data's
owner."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.tables.checks.checking import check
from xain_workloads.tables.checks.describe import OF_TWO
from xain_workloads.tables.checks.findings import Finding
from xain_workloads.tables.profile import DataProfile, check_profile
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.schema import MAX_COLUMNS, shown
from xain_workloads.tables.statistics import CategoryStatistics, ColumnStatistics
from xain_workloads.tables.table import Table

_HELD_OUT = "rows that are held out"
_SHOWN_CATEGORIES = 8
_SHOWN_CLASSES = 20
_SHOWN_STEPS = 7


def profile_of(train: Table, min_category_count: int, min_known: int) -> DataProfile:
    """The profile that a participant with these rows sends. Raises DataError if no coordinator
    takes it, whatever data the others have."""
    profile = train.profile(min_category_count, min_known)
    check_profile(profile)
    if profile.num_samples == 0:
        raise DataError(f"{train.origin}: there are no rows to train on")
    return profile


def inspect(train: Table, test: Table, profile: DataProfile, min_category_count: int) -> str:
    """Describe the profile of a participant, with the values that it tells, and what the checks
    find in it alone."""
    return "\n".join(_lines(train, test, profile, min_category_count))


def cells_held_out(trained: DataProfile, held_out: DataProfile) -> list[Finding]:
    """Find cells of the rows that are held out which lie far outside those that are trained on.

    They spoil what is measured, and a coordinator cannot find them: nothing of these rows is sent
    before the training.
    """
    return [
        finding
        for finding in check([("rows that are trained on", trained), (_HELD_OUT, held_out)])
        if finding.site == _HELD_OUT and finding.check in ("outlier", "sentinel")
    ]


def _findings(train: Table, profile: DataProfile) -> Iterator[str]:
    """Findings at this site alone, with up to five values that they are about."""
    for finding in check([("here", profile)]):
        text = str(replace(finding, site=""))
        if finding.check in ("outlier", "sentinel"):
            values = train.values.get(finding.column, train.target)
            far = np.argsort(-np.nan_to_num(np.abs(values - np.nanmedian(values))))[:5]
            text += f"; the furthest values are {', '.join(f'{values[row]:g}' for row in far)}"
        yield f"{finding.level}: {text}"


def _lines(train: Table, test: Table, profile: DataProfile, least: int) -> Iterator[str]:
    """Lines of the description: how the file was read, its columns, target, notes and findings."""
    statistics = from_json(profile.statistics).columns if profile.statistics else {}
    yield f"{train.origin}: {train.num_samples} rows to train on, {test.num_samples} to test with"
    if train.group:
        yield (
            f"rows with the same {train.group!r} are kept together: {train.num_groups} of them to"
            f" train on, {test.num_groups} to test with"
        )
    if read_as := _read_as(train.dialect):
        yield f"read as: {read_as}"
    if train.without_target:
        plural = "" if train.without_target == 1 else "s"
        yield f"left out: {train.without_target} row{plural} without a target"
    yield ""
    rows = [("column", "type", "unit", "missing", "what a coordinator is told of the values")]
    for column in train.columns:
        known = statistics.get(column.name)
        missing = "" if known is None else str(known.missing)
        rows.append((column.name, column.type, column.unit, missing, _told(known, least)))
    yield from _aligned(rows)
    yield ""
    yield f"target   {profile.target}, for {profile.task}"
    if profile.classes:
        yield f"classes  {shown(profile.classes, _SHOWN_CLASSES)}"
    yield ""
    if not test.num_samples:
        yield "note: no row is held out, so that models are not measured here"
    yield from _findings(train, profile)
    yield from (f"note: {note}" for note in _notes(profile, statistics))
    yield from (f"note: {finding}" for finding in cells_held_out(profile, test.profile(least)))
    yield (
        "A coordinator is told the above, and takes it if the data of the session have the same"
        f" columns, types, units, target and classes. No row is sent; {OF_TWO}. --json shows all"
        " that is sent."
    )


_FOUND = {
    "encoding": "encoding {}",
    "sheet": "sheet {!r}",
    "separator": "cells separated by {!r}",
    "decimal": "decimal mark {!r}",
    "thousands": "thousands mark {!r}",
    "skip_lines": "{} lines above the header",
}


def _read_as(dialect: Dialect) -> str:
    """Describe how a file was read: as it is declared, or as the file has told."""
    parts = [
        words.format(value) for key, words in _FOUND.items() if (value := getattr(dialect, key))
    ]
    parts += [f"{mark!r} left out of {name!r}" for name, mark in dialect.marks.items()]
    return ", ".join(parts)


def _told(known: ColumnStatistics | None, least: int) -> str:
    """Describe the statistics of a column that are sent. least: rows of a named category."""
    if known is None:
        return "nothing"
    if not isinstance(known, CategoryStatistics):
        if not known.moments.count:
            return "nothing, fewer than data.min_known of them are known"
        values = [f"{value:.4g}" for value, _ in known.buckets]
        some = values if len(values) <= _SHOWN_STEPS else [*values[:3], "...", *values[-3:]]
        spread = known.moments.variance**0.5
        return (
            f"{known.moments.count} values, {known.distinct} distinct, mean"
            f" {known.moments.mean:.4g}, spread {spread:.4g}, means of {len(values)} groups:"
            f" {', '.join(some)}"
        )
    largest = sorted(known.counts, key=lambda name: -known.counts[name])
    told = [f"{name!r} {known.counts[name]}" for name in largest[:_SHOWN_CATEGORIES]]
    if len(largest) > _SHOWN_CATEGORIES:
        told.append(f"{len(largest) - _SHOWN_CATEGORIES} more categories")
    if known.infrequent:
        told.append(f"{known.infrequent} in categories with fewer than {least} rows, without names")
    return ", ".join(told) or "nothing, all of them are missing"


def _notes(profile: DataProfile, statistics: Mapping[str, ColumnStatistics]) -> Iterator[str]:
    """Remarks on a profile that a site should know of."""
    if profile.num_features > MAX_COLUMNS:
        yield (
            f"there are more than {MAX_COLUMNS} columns: their names are not sent, and only their"
            " number is compared with that of others"
        )
    if profile.task == "classification" and len(profile.classes) < 2:
        yield (
            "the target has one class only; if others may have more, "
            + hint("xain-participant", 'data.classes = ["NAME"]')
            + " with all of them"
        )
    nameless = [
        name
        for name, known in statistics.items()
        if isinstance(known, CategoryStatistics) and not known.counts
    ]
    if nameless:
        yield (
            f"no category of {shown(nameless)} is frequent enough to be told, so nothing can be"
            " learnt from it here; if it tells rows apart, such as a name, leave it out: "
            + hint("xain-participant", 'data.drop = ["NAME"]')
        )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines with aligned cells."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
