"""Checks of columns of categories, and of the names of classes."""

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from xain_foundation.settings.hints import hint
from xain_workloads.tables.checks.findings import Finding, Level
from xain_workloads.tables.checks.fixes import as_numbers, dropped, replaced
from xain_workloads.tables.checks.numbers import MIN_ROWS_OF_ID
from xain_workloads.tables.checks.summaries import Categories, Summary
from xain_workloads.tables.schema import shown

_UNITS = (
    "%|[$€£¥]|kg|g|mg|µg|lbs?|cm|mm|m|km|ft|in|ml|l|mmhg|bpm|hours|hrs?|h|min|years?|yrs?|y|days?|d"
)
_MARKED = re.compile(rf"[<>~$€£¥]?\s*[-+]?[0-9][0-9.,']*\s*({_UNITS})?", re.I)
_NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?")
_TOTALS = frozenset(("total", "totals", "sum", "summe", "gesamt", "all", "subtotal", "grand total"))
_SHARE_OF_IDS = 0.8
_PAIRS = 10  # categories in one setting


def check_categories(summary: Summary) -> Iterator[Finding]:
    """Findings of all columns of categories, and of the names of classes."""
    for column in summary.columns.values():
        if isinstance(column, Categories):
            yield from _spellings(summary, column)
            yield from _unshared(summary, column)
            yield from _identifiers(summary, column)
            yield from _constants(summary, column)
            yield from _numbers_with_marks(summary, column)
    names = summary.class_counts
    names.name = summary.target_name
    yield from _spellings(summary, names)
    yield from _odd_classes(summary)


def folded(name: str) -> str:
    """Normalise a name: no case, no accents, no blanks or punctuation at its ends."""
    text = unicodedata.normalize("NFKD", name.casefold())
    text = "".join(one for one in text if not unicodedata.combining(one))
    return " ".join(re.sub(r"[\s_\-]+", " ", text).strip(" .,;:'\"").split())


def _spellings(summary: Summary, column: Categories) -> Iterator[Finding]:
    """Find names that differ from a commoner one only in case, accents, blanks or punctuation."""
    groups: dict[str, list[str]] = {}
    for name in column.sites:
        groups.setdefault(folded(name), []).append(name)
    for names in groups.values():
        if len(names) < 2:
            continue
        weights = {name: (len(column.sites[name]), sum(column.sites[name][1::2])) for name in names}
        common = max(names, key=lambda name: (weights[name], name))
        for name in names:
            if name == common:
                continue
            yield from _spelt(summary, column, name, common)
            # With two sites, either may be the right one.
            own, others = set(column.sites[name][::2]), set(column.sites[common][::2])
            if len(own) == len(others) and not own & others:
                yield from _spelt(summary, column, common, name)


def _spelt(summary: Summary, column: Categories, name: str, common: str) -> Iterator[Finding]:
    """Warn each site that has a name: it is probably the common name, spelt in another way."""
    what = "class" if column.is_target else "category"
    text = f"{what} {name!r} is probably {common!r} of other sites, spelt in another way"
    fix = replaced(column.name, {name: common})
    for at in column.sites[name][::2]:
        yield Finding("warn", "spelling", summary.names[at], column.name, text, fix)


def _unshared(summary: Summary, column: Categories) -> Iterator[Finding]:
    """Find sites of which no category is elsewhere; one finding if no two sites share any."""
    rows = column.table()
    if len(rows) < 2:
        return
    own: dict[int, list[str]] = {}
    shared: set[int] = set()
    for name, sites in column.sites.items():
        if len(sites) > 2:
            shared |= set(sites[::2])
        else:
            own.setdefault(sites[0], []).append(name)
    alone = [at for at in own if at not in shared]
    having = shared | set(own)
    if not alone or len(having) < 2:
        return
    if not shared and len(having) > 2:
        alone = alone[:1]  # no two sites share anything: said once
    for at in alone:
        names = own[at]
        others = [name for name in column.sites if name not in names]
        text = (
            f"its categories, {shown(names)}, are at no other site; others have {shown(others)}."
            " Are they in another language or coding?"
        )
        fix = replaced(column.name, _pairs(names[:_PAIRS], others))
        yield Finding("warn", "unshared", summary.names[at], column.name, text, fix)


def _pairs(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """For each name the only one of the others with its first letter, or else a placeholder."""
    found = {}
    for name in names:
        first = folded(name)[:1]
        alike = [other for other in others if folded(other)[:1] == first]
        is_only = len(alike) == 1 and sum(folded(one)[:1] == first for one in names) == 1
        found[name] = alike[0] if is_only else "NAME"
    return found


def _identifiers(summary: Summary, column: Categories) -> Iterator[Finding]:
    """Warn of a column that has another text in nearly each row at sites of most of the rows."""
    rows = column.table()
    known = rows[:, 1] - rows[:, 2]
    each = (known >= MIN_ROWS_OF_ID) & (rows[:, 3] >= _SHARE_OF_IDS * known)
    if not each.any() or known[each].sum() < 0.5 * known.sum():
        return
    row = int(np.flatnonzero(each)[0])
    text = (
        "nearly each row has another text, such as an id, a name, a date or a number with a mark,"
        " and nothing can be learnt from it as categories"
    )
    site = "" if each.sum() > 1 else summary.names[int(rows[row, 0])]
    yield Finding("warn", "identifier", site, column.name, text, dropped(column.name))


def _constants(summary: Summary, column: Categories) -> Iterator[Finding]:
    """Find columns of one category: a warning if all sites have the same, else a note by site."""
    rows = column.table()
    constant = (rows[:, 3] == 1) & (rows[:, 4] == 0)
    if not constant.any():
        return
    is_everywhere = bool(constant.all()) and len(column.sites) == 1
    for row in np.flatnonzero(constant)[: 1 if is_everywhere else None]:
        at = int(rows[row, 0])
        name = next((n for n, sites in column.sites.items() if at in sites[::2]), "")
        text = f"all rows are {name!r}"
        site = "" if is_everywhere and len(rows) > 1 else summary.names[at]
        level: Level = "warn" if is_everywhere else "note"
        fix = dropped(column.name) if is_everywhere else ""
        yield Finding(level, "constant", site, column.name, text, fix)


def _numbers_with_marks(summary: Summary, column: Categories) -> Iterator[Finding]:
    """Warn of a column whose categories are mostly numbers, many with a mark such as "<"."""
    names = list(column.sites)
    marked = [name for name in names if _MARKED.fullmatch(name.strip())]
    plain = [name for name in marked if _NUMBER.fullmatch(name.strip())]
    if len(names) < 2 or len(marked) < 0.8 * len(names) or len(plain) > 0.5 * len(names):
        return
    example = next(name for name in marked if name not in plain)
    having = {at for name in marked for at in column.sites[name][::2]}
    site = "" if len(having) > 1 else summary.names[min(having)]
    text = f"categories such as {example!r} look like numbers with a mark"
    # A column of text in Parquet, or one declared a category, needs the type set; the reader finds
    # the mark by itself.
    fix = as_numbers(column.name)
    if example.startswith("<"):
        fix += ", and " + hint("xain-participant", 'data.below_limit = "half"')
    yield Finding("warn", "looks_numeric", site, column.name, text, fix)


def _odd_classes(summary: Summary) -> Iterator[Finding]:
    """Warn of classes that look like totals, or are the one number, or text, among the others."""
    everywhere = {name for names in summary.classes for name in names}
    numbers = {name for name in everywhere if _NUMBER.fullmatch(name)}
    texts = everywhere - numbers
    odd: dict[str, str] = {}
    for name in everywhere:
        if folded(name) in _TOTALS and len(everywhere) > 2:
            odd[name] = "looks like a line of totals"
    if len(numbers) == 1 and len(texts) >= 2:
        odd[next(iter(numbers))] = "is a number among texts"
    elif len(texts) == 1 and len(numbers) >= 2:
        odd.setdefault(next(iter(texts)), "is a text among numbers")
    for name, what in sorted(odd.items()):
        at = next(i for i, names in enumerate(summary.classes) if name in names)
        text = f"class {name!r} {what}; correct these rows in the file, or leave them out of it"
        yield Finding("warn", "odd_class", summary.names[at], summary.target_name, text)
