"""Checks for rows of one unit, such as a patient, that are not kept together."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.tables.checks.findings import Finding
from xain_workloads.tables.checks.fixes import grouped
from xain_workloads.tables.checks.numbers import MIN_ROWS_OF_ID
from xain_workloads.tables.checks.summaries import Categories, Numbers, Summary
from xain_workloads.tables.repeated import MIN_DISTINCT, MOST_DISTINCT

_IDS = frozenset(("id", "ids", "mrn", "pid", "uuid"))
_UNITS = frozenset(
    (
        *("patient", "subject", "person", "participant", "individual", "respondent"),
        *("child", "pupil", "student", "animal"),
    )
)
_NUMBERS = _IDS | frozenset(("code", "key", "nbr", "no", "nr", "number"))
_MOST_ROWS_OF_ID = 100  # of an id: a column such as admission_source_id has thousands


def check_groups(summary: Summary) -> Iterator[Finding]:
    """Findings of columns that look like ids with several rows each at sites without groups, and
    of other sites without groups if some have them."""
    found: set[int] = set()
    for column in summary.columns.values():
        sites = [at for at in _sites_with_ids(column) if not summary.groups[at]]
        if not sites:
            continue
        found.update(sites)
        text = (
            "its values repeat, as those of an id of patients with several rows do. If some rows of"
            " a patient are held out, others train the model that they measure, and its figures"
            " are too good. Is it such an id?"
        )
        site = summary.names[sites[0]] if len(sites) == 1 else ""
        yield Finding("warn", "groups", site, column.name, text, grouped(column.name))
    having = [at for at, group in enumerate(summary.groups) if group]
    if not having:
        return
    for at, name in enumerate(summary.names):
        if at in having or at in found:
            continue
        text = (
            "its rows are divided one by one, and those of other sites are kept together by"
            f" {summary.groups[having[0]]!r}. Has a patient several rows here, too?"
        )
        yield Finding("warn", "groups", name, "", text, grouped("NAME"))


def _sites_with_ids(column: Numbers | Categories) -> list[int]:
    """Positions of the sites at which the column looks like an id with several rows each."""
    sites: NDArray[Any]
    known: NDArray[Any]
    distinct: NDArray[Any]
    if isinstance(column, Numbers):
        table = column.table()
        sites, known, distinct = (table[name] for name in ("site", "count", "distinct"))
        is_told, is_repeated = table["whole"] == 1, table["repeated"] == 1
    else:
        rows = column.table()
        sites, known, distinct = rows[:, 0], rows[:, 1] - rows[:, 2], rows[:, 3]
        is_told, is_repeated = distinct >= 0, rows[:, 5] == 1
    least = np.maximum(MIN_DISTINCT, known / _MOST_ROWS_OF_ID)
    comes_again = (least <= distinct) & (distinct <= MOST_DISTINCT * known)
    is_id = is_told & comes_again & (known >= MIN_ROWS_OF_ID) & _is_called_unit(column.name)
    return [int(at) for at in sites[is_id | is_repeated]]


def _is_called_unit(name: str) -> bool:
    """Whether a column's name is like "patient_id": an id, a patient or person, or its number."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    known = re.sub(r"[\s_.-]+", " ", words).split()
    if not known:
        return False
    joined = "".join(known)
    is_number = any(joined == unit + number for unit in _UNITS for number in _NUMBERS)
    return known[-1] in _IDS or joined in _UNITS or is_number
