"""Findings, their levels, and the list of checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["refuse", "warn", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the data that a person should look at.

    level: "refuse" makes no model, "warn" and "note" go on.
    check: a name in CHECKS. site: "" for all sites together. column: "" for none in particular.
    text: a sentence without a full stop, or sentences of which the last one is a question; of other
        sites it tells a direction, a ratio and names of categories, and no figure.
    fix: words of hint() for the participant at the site; "" if there is no setting.
    """

    level: Level
    check: str
    site: str
    column: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.site}: " if self.site else ""
        where += f"column {self.column!r}: " if self.column else ""
        return where + told(self.text, self.fix)


def told(text: str, fix: str) -> str:
    """Join a finding's text and its fix, what to type, to one sentence or two."""
    if not fix:
        return text
    return f"{text} If so, {fix}" if text.endswith("?") else f"{text}; {fix}"


# Level by default, and what is found.
CHECKS: Mapping[str, tuple[Level, str]] = {
    "untold": (
        "refuse",
        "no site has enough rows to tell anything of its columns, so nothing could be scaled",
    ),
    "many_classes": ("refuse", "a target of numbers is taken for classes, a few rows each"),
    "units": ("warn", "numbers of a column, or the target, are a multiple of those of other sites"),
    "offset": ("warn", "numbers of a column, or the target, are shifted against other sites"),
    "outlier": ("warn", "one or a few cells lie far outside all others"),
    "sentinel": ("warn", "a lone value such as -999 far outside may stand for a missing one"),
    "spelling": ("warn", "categories or classes differ in case, blanks or accents only"),
    "unshared": ("warn", "a site has none of the categories of the others"),
    "identifier": ("warn", "a column has another value in each row: an id, a row number, a name"),
    "groups": (
        "warn",
        "rows of one patient are not kept together: the values of a column repeat as an id's, or"
        " other sites declare one",
    ),
    "constant": ("warn", "a column has one value only; a note if other sites have more"),
    "empty": ("warn", "a column has no value at a site"),
    "lone_class": ("warn", "a class is at one site only"),
    "odd_class": ("warn", "a class is a number among texts, a text among numbers, or a total"),
    "few_events": ("warn", "a class has fewer than ten rows at all sites together"),
    "leak": ("warn", "a column alone predicts the target"),
    "follow_up": ("warn", "a column may be a time of follow-up, known only after the outcome"),
    "looks_numeric": ("warn", "the categories of a column are numbers with marks, as in $1,200"),
    "reversed_labels": ("warn", "labels of a site go with its columns against those of all others"),
    "no_statistics": ("warn", "a site sends no statistics, so nothing is scaled"),
    "withheld": (
        "warn",
        "fewer sites than [schema] min_sites tell of a column, which the model then does not scale,"
        " or of a category (a note), whose rows it takes for rows of none",
    ),
    "untold_column": ("warn", "no site tells anything of a column, so it is not scaled"),
    "unlike_classes": (
        "note",
        "the shares of the classes differ much between sites, whose models are averaged without a"
        " remedy",
    ),
    "small_site": ("note", "a site has fewer than twenty rows"),
}
