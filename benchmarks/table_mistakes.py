"""Mistakes that sites make with their tables, and how each is planted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import RandomState

# benchmarks/studies.py, imported before, puts tests/ on the path.
from support.spoilt import Row, Rows, Study, added, cells, scaled, set_cells

Planted = tuple[Study, str]  # and the column
Plant = Callable[[Study, str, RandomState], Planted | None]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake, and by which checks it may be named, beside the readers of files and the
    comparison of columns.

    plant: gets the study, the site, and chance; returns None where it does not apply. everywhere:
    it is the same at all sites, so that none need be named.
    """

    checks: str
    plant: Plant
    everywhere: bool = False


# --- columns --------------------------------------------------------------------------------------


def number(study: Study, site: str, chance: RandomState) -> str | None:
    """A column of measurements, none of them negative."""
    return _chosen(
        chance,
        [
            name
            for name in study.columns
            if study.is_number(name)
            and len(set(study.values(name))) > 20
            and min(map(float, study.values(name))) >= 0
            and _known(study, site, name) >= 20
        ],
    )


def category(study: Study, site: str, chance: RandomState) -> str | None:
    """A column with two categories or more of ten rows at the site."""

    def is_frequent(name: str) -> bool:
        found = [row[name] for row in study.sites[site]]
        frequent = [one for one in {*study.values(name)} if found.count(one) >= 10]
        return len(frequent) >= 2 and any(one != one.swapcase() for one in frequent)

    names = [name for name in study.columns if not study.is_number(name)]
    return _chosen(chance, [name for name in names if is_frequent(name)])


def _known(study: Study, site: str, name: str) -> int:
    return len(replace(study, sites={site: study.sites[site]}).values(name))


def _chosen(chance: RandomState, names: Sequence[str]) -> str | None:
    return names[chance.randint(len(names))] if names else None


# --- mistakes -------------------------------------------------------------------------------------


def of_column(
    choose: Callable[[Study, str, RandomState], str | None], spoil: Callable[[Rows, str], Rows]
) -> Plant:
    """A mistake in one column of one site."""

    def plant(study: Study, site: str, chance: RandomState) -> Planted | None:
        if (name := choose(study, site, chance)) is None:
            return None
        return study.with_rows(site, spoil(study.sites[site], name)), name

    return plant


def everywhere(
    choose: Callable[[Study, str, RandomState], str | None], spoil: Callable[[Rows, str], Rows]
) -> Plant:
    def plant(study: Study, site: str, chance: RandomState) -> Planted | None:
        if (name := choose(study, site, chance)) is None:
            return None
        return replace(
            study, sites={at: spoil(rows, name) for at, rows in study.sites.items()}
        ), name

    return plant


def shifted(study: Study, site: str, chance: RandomState) -> Planted | None:
    """An instrument that is off by three standard deviations."""
    if (name := number(study, site, chance)) is None:
        return None
    spread = float(np.std(list(map(float, study.values(name)))))
    return study.with_rows(site, scaled(study.sites[site], name, 1.0, 3 * spread)), name


def of_target(task: str, spoil: Callable[[Rows, str, Study], Rows | None]) -> Plant:
    def plant(study: Study, site: str, chance: RandomState) -> Planted | None:
        if study.task != task:
            return None
        rows = spoil(study.sites[site], study.target, study)
        return None if rows is None else (study.with_rows(site, rows), study.target)

    return plant


def swapped(rows: Rows, target: str, study: Study) -> Rows | None:
    """Labels that mean the opposite."""
    labels = sorted(set(study.values(target)))
    counts = [sum(row[target] == label for row in rows) for label in labels]
    if len(labels) != 2 or min(counts) < 15:
        return None
    return cells(rows, target, lambda text, _: labels[1 - labels.index(text)])


def other_class(rows: Rows, target: str, study: Study) -> Rows:
    """A number among texts, or the reverse."""
    label = "unknown" if study.is_number(target) else "9"
    return cells(rows, target, lambda text, at: label if at < 10 else text)


def new_class(rows: Rows, target: str, study: Study) -> Rows:
    label = "7" if study.is_number(target) else "lost"
    return cells(rows, target, lambda text, at: label if at < 10 else text)


def total(rows: Rows, target: str, study: Study) -> Rows:
    """A last line that sums up the numbers."""

    def of(name: str, at: int) -> str:
        if at == 0 or not study.is_number(name):
            return "Total" if at == 0 else ""
        return f"{sum(float(row[name]) for row in rows if row[name] not in ('', 'NA')):g}"

    return [*rows, {name: of(name, at) for at, name in enumerate(rows[0])}]


def few_events(study: Study, site: str, chance: RandomState) -> Planted | None:
    labels = sorted(set(study.values(study.target)))
    if study.task != "classification" or len(labels) != 2:
        return None
    rare = min(labels, key=study.values(study.target).count)
    left = 6
    sites = {}
    for at, rows in study.sites.items():
        kept = []
        for row in rows:
            if row[study.target] == rare:
                left -= 1
            if row[study.target] != rare or left >= 0:
                kept.append(row)
        sites[at] = kept
    return replace(study, sites=sites), study.target


def leaking(study: Study, site: str, chance: RandomState) -> Planted | None:
    """A column that is another form of the target."""
    labels = sorted(set(study.values(study.target)))

    def value(row: Row, at: int) -> str:
        text = row[study.target]
        if study.task == "regression":
            return f"{float(text) * 1.19 + chance.normal(0, 1e-3):g}"
        return f"{labels.index(text) * 3 + chance.randint(3)}"

    sites = {at: added(rows, "code", value) for at, rows in study.sites.items()}
    return replace(study, sites=sites), "code"


def follow_up(study: Study, site: str, chance: RandomState) -> Planted | None:
    """The time until the event, or the end of the study."""
    labels = sorted(set(study.values(study.target)))
    if study.task != "classification" or len(labels) != 2:
        return None
    rare = min(labels, key=study.values(study.target).count)

    def days(row: Row, at: int) -> str:
        return str(
            chance.randint(5, 700) if row[study.target] == rare else chance.randint(700, 731)
        )

    sites = {at: added(rows, "days", days) for at, rows in study.sites.items()}
    return replace(study, sites=sites), "days"


def new_column(make: Callable[[Row, int], str], name: str) -> Plant:
    def plant(study: Study, site: str, chance: RandomState) -> Planted:
        sites = {at: added(rows, name, make) for at, rows in study.sites.items()}
        return replace(study, sites=sites), name

    return plant


def as_classes(study: Study, site: str, chance: RandomState) -> Planted | None:
    """A target of numbers without --task regression."""
    if study.task != "regression":
        return None
    return replace(study, task="classification"), study.target


def small(study: Study, site: str, chance: RandomState) -> Planted:
    return study.with_rows(site, study.sites[site][:12]), ""


def times(factor: float) -> Plant:
    return of_column(number, lambda rows, name: scaled(rows, name, factor))


def written(form: str) -> Callable[[Rows, str], Rows]:
    return lambda rows, name: cells(rows, name, lambda text, _: form.format(float(text)))


MISTAKES: dict[str, Mistake] = {
    **{
        f"unit x {ratio:g}": Mistake("units offset outlier", times(ratio))
        for ratio in (2.54, 7, 10, 100, 365, 1e3)
    },
    "unit / 100": Mistake("units offset outlier", times(0.01)),
    "target x 100": Mistake(
        "units", of_target("regression", lambda rows, name, _: scaled(rows, name, 100.0))
    ),
    "shifted by 3 spreads": Mistake("offset units", shifted),
    "one cell of 1e9": Mistake(
        "outlier", of_column(number, lambda rows, name: set_cells(rows, name, "1000000000"))
    ),
    "target cell of 1e9": Mistake(
        "outlier",
        of_target("regression", lambda rows, name, _: set_cells(rows, name, "1000000000")),
    ),
    "-999": Mistake(
        "sentinel outlier", of_column(number, lambda rows, name: set_cells(rows, name, "-999", 12))
    ),
    "$1,200 at one site": Mistake("looks_numeric", of_column(number, written("${:,}"))),
    "$1,200": Mistake(
        "looks_numeric identifier", everywhere(number, written("${:,}")), everywhere=True
    ),
    "45.0%": Mistake(
        "looks_numeric identifier", everywhere(number, written("{}%")), everywhere=True
    ),
    "other case": Mistake(
        "spelling",
        of_column(category, lambda rows, name: cells(rows, name, lambda text, _: text.upper())),
    ),
    "blank behind": Mistake(
        "spelling",
        of_column(category, lambda rows, name: cells(rows, name, lambda text, _: text + " ")),
    ),
    "other language": Mistake(
        "unshared",
        of_column(category, lambda rows, name: cells(rows, name, lambda text, _: text[::-1] + "o")),
    ),
    "empty column": Mistake(
        "empty", of_column(number, lambda rows, name: cells(rows, name, lambda text, _: ""))
    ),
    "id": Mistake("identifier", new_column(lambda _, at: f"P{at:05}", "patient"), everywhere=True),
    "row number": Mistake(
        "identifier", new_column(lambda _, at: f"{at + 1}", "nr"), everywhere=True
    ),
    "constant": Mistake("constant", new_column(lambda *_: "DE", "country"), everywhere=True),
    "class of one site": Mistake("lone_class odd_class", of_target("classification", new_class)),
    "odd class": Mistake("odd_class lone_class", of_target("classification", other_class)),
    "swapped labels": Mistake("reversed_labels", of_target("classification", swapped)),
    "few events": Mistake("few_events", few_events, everywhere=True),
    "target in another form": Mistake("leak", leaking, everywhere=True),
    "time of follow-up": Mistake("follow_up leak", follow_up, everywhere=True),
    "number as class": Mistake("many_classes", as_classes, everywhere=True),
    "line of totals, classes": Mistake("odd_class", of_target("classification", total)),
    "line of totals, numbers": Mistake("outlier", of_target("regression", total)),
    "small site": Mistake("small_site", small),
}
