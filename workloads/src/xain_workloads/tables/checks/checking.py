"""The check list."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.tables.checks.categories import check_categories
from xain_workloads.tables.checks.findings import LEVELS, Finding, Level
from xain_workloads.tables.checks.fixes import dropped
from xain_workloads.tables.checks.groups import check_groups
from xain_workloads.tables.checks.labels import check_labels
from xain_workloads.tables.checks.numbers import check_numbers
from xain_workloads.tables.checks.summaries import Categories, Numbers, Summary, summarise
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.schema import MAX_COLUMNS, shown
from xain_workloads.tables.statistics import MIN_KNOWN

MAX_FINDINGS = 200  # of all sites; those of the highest level, and of the first sites
_SMALL = 20
_NAMED = 5


def check(
    sites: Iterable[tuple[str, DataProfile]],
    levels: Mapping[str, Level | str] | None = None,
    min_sites: int = 1,
) -> tuple[Finding, ...]:
    """Look for mistakes in the data of all sites, by their profiles.

    sites: names and profiles, read one after the other. Those without rows are passed over.
    levels: by name of a check "refuse", "warn", "note", or "off", which leaves it out.
    min_sites: that a figure in the metadata of a model must be of.
    Returns at most MAX_FINDINGS, those of the highest level first. Raises DataError if statistics
    cannot be read.
    """
    levels = levels or {}
    summary = summarise(sites)
    found = []
    for finding in (*_run_checks(summary), *_withheld(summary, min_sites)):
        level = levels.get(finding.check, finding.level)
        if level in LEVELS:
            found.append(replace(finding, level=level))
    return tuple(sorted(found, key=lambda one: LEVELS.index(one.level))[:MAX_FINDINGS])


def _run_checks(summary: Summary) -> Iterator[Finding]:
    yield from _untold(summary)
    yield from check_labels(summary)
    yield from check_numbers(summary)
    yield from check_categories(summary)
    yield from check_groups(summary)
    yield from _empty(summary)


def _untold(summary: Summary) -> Iterator[Finding]:
    """Find sites without statistics or with few rows; refuse if no site tells of its columns."""
    has = [name for name, known in zip(summary.names, summary.has_statistics, strict=True) if known]
    if has and not any(summary.tells):
        pairs = zip(summary.names, summary.num_rows, strict=True)
        told = [f"{name} {rows}" for name, rows in pairs]
        more = f" and {len(told) - _NAMED} more sites" if len(told) > _NAMED else ""
        text = (
            f"no site tells anything of its columns, for want of {MIN_KNOWN} rows: they have"
            f" {', '.join(told[:_NAMED])}{more}. Nothing could be scaled: join sites to larger"
            " ones, or let every site tell of fewer rows"
        )
        fix = hint("xain-participant", "data.min_known = 1")
        yield Finding("refuse", "untold", "", "", text, fix)
        return
    for at, name in enumerate(summary.names):
        if not summary.has_statistics[at]:
            text = (
                "it sends no statistics of its columns, so nothing is prepared for any site: it has"
                f" more than {MAX_COLUMNS:,} columns, or its participant is of an earlier version"
            )
            yield Finding("warn", "no_statistics", name, "", text)
        elif summary.num_rows[at] < _SMALL:
            text = f"it has {summary.num_rows[at]} rows"
            text += "" if summary.tells[at] else " and tells nothing of its columns"
            yield Finding("note", "small_site", name, "", text)


def _empty(summary: Summary) -> Iterator[Finding]:
    """Find columns without a value at one site or at all, or of which no site tells anything."""
    if not any(summary.tells):
        return
    for column in summary.columns.values():
        at, rows, missing, tells = _presence(column)
        empty = missing >= rows
        if empty.all():
            text = "it has no value at any site"
            site = "" if len(at) > 1 else summary.names[int(at[0])]
            yield Finding("warn", "empty", site, column.name, text, dropped(column.name))
            continue
        for row in np.flatnonzero(empty & (rows > 0)):
            text = "it has no value at this site, and others have some; look for it in the export"
            yield Finding("warn", "empty", summary.names[int(at[row])], column.name, text)
        if not tells.any() and len(summary.names) > 0:
            text = f"no site tells anything of it: fewer than {MIN_KNOWN} values are known at each"
            yield Finding("warn", "untold_column", "", column.name, text, dropped(column.name))


def _withheld(summary: Summary, min_sites: int) -> Iterator[Finding]:
    """Find columns and categories of which fewer than min_sites tell, so the model has no figure.

    Names of categories are told to the sites alone that have them.
    """
    for column in summary.columns.values():
        if isinstance(column, Categories):
            few: dict[int, list[str]] = {}
            for name, told in column.sites.items():
                if len(told) // 2 < min_sites:
                    for at in told[::2]:
                        few.setdefault(at, []).append(name)
            for site, names in few.items():
                what = "category" if len(names) == 1 else "categories"
                text = (
                    f"fewer than schema.min_sites = {min_sites} sites tell of the {what}"
                    f" {shown(names)}, so the model takes these rows for rows of no category; if"
                    " others call the same by another name, rename it"
                )
                yield Finding("note", "withheld", summary.names[site], column.name, text)
            continue
        _, _, _, tells = _presence(column)
        if 0 < (num := int(tells.sum())) < min_sites:
            text = (
                f"{num} of {len(summary.names)} sites tell{'s' * (num == 1)} of its values, and"
                f" schema.min_sites is {min_sites}: the model has no mean of it, and does not scale"
                " it"
            )
            yield Finding("warn", "withheld", "", column.name, text, dropped(column.name))


def _presence(
    column: Numbers | Categories,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """Position, rows and missing values of each site that has the column, and whether it tells
    anything of the others."""
    if isinstance(column, Numbers):
        table = column.table()
        return table["site"], table["rows"], table["missing"], table["count"] > 0
    cells = column.table()
    return cells[:, 0], cells[:, 1], cells[:, 2], cells[:, 3] >= 0
