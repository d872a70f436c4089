"""Checks of columns of numbers, and of a target of numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np
from numpy.typing import NDArray

from xain_workloads.tables.checks.findings import Finding, Level
from xain_workloads.tables.checks.fixes import dropped, missing_in, moved, multiplied
from xain_workloads.tables.checks.summaries import CODES, Numbers, Summary
from xain_workloads.tables.statistics import MIN_BUCKET

Array = NDArray[np.float64]

# Ratios of units that people mix up: the unit of the larger numbers, and that of the smaller ones.
UNITS: Mapping[float, tuple[str, str]] = {
    2.2046: ("pounds", "kilograms"),
    2.54: ("centimetres", "inches"),
    4.184: ("kilojoules", "kilocalories"),
    7: ("days", "weeks"),
    7.5006: ("mmHg", "kPa"),
    10: ("millimetres", "centimetres"),
    12: ("months", "years"),
    18.02: ("mg/dl", "mmol/l of glucose"),
    30.44: ("days", "months"),
    38.67: ("mg/dl", "mmol/l of cholesterol"),
    60: ("minutes", "hours"),
    88.4: ("µmol/l", "mg/dl of creatinine"),
    100: ("cents", "euros"),
    365.25: ("days", "years"),
    1000: ("grams", "kilograms"),
    1e4: ("", ""),
    1e6: ("", ""),
}
RATIOS = tuple(UNITS)
# In spreads, and in ratios. Tuned on real tables in which nothing is wrong, divided at random and
# by a column; benchmarks/real_tables.py repeats it.
_FAR = 3.0  # of distributions that a ratio of units explains
_MATCH = 0.35  # distance of the distributions after it
_CLOSE = 0.2  # of those of many rows, after a ratio that need not be far
_USUAL = 5.0  # times the distance that is usual for the site's columns, of which it needs a few
_MIN_COLUMNS = 4
_TOP = 3.0  # ratio of the highest buckets after it, where some values are 0
_SHIFT = 2.5
_VERY_FAR = 12.0
_OUTLIER = 20.0  # spreads of the others
_OUTLIER_RATIO = 4.0  # times the furthest cell of the others
_ALONE = 60.0  # widths of nine tenths of the column, at a single site
_GAP = 3.0  # widths of nine tenths of the others
_GAP_OF_ESTIMATE = 10.0
_FEW_ROWS = 40  # below, the highest bucket reaches the quartile
MIN_ROWS_OF_ID = 20
_CLOSE_TOGETHER = 1.6  # widths of numbered rows, a fifth of which is held out: 1.25
_ROWS_OF_EVEN = 200
_EVEN = 1.8  # distance from an even spread, times the root of the rows; a bell curve has 2.3
_ID_NAMES: tuple[str, ...] = (
    "id",
    "ids",
    "index",
    "idx",
    "key",
    "mrn",
    "nr",
    "no",
    "row",
    "rowname",
    "rownames",
)
_ID_NAMES += ("rownumber", "record", "code", "pid", "number", "uuid")


def check_numbers(summary: Summary) -> Iterator[Finding]:
    """Findings of all columns of numbers, and of a target of numbers."""
    columns = [one for one in summary.columns.values() if isinstance(one, Numbers)]
    if summary.target is not None:
        columns.append(summary.target)
    usual_distances = _usual_distances(columns)
    for column in columns:
        table = column.table()
        told = table["count"] > 0
        if not told.any():
            continue
        findings = list(_units(summary, column, table, usual_distances))
        yield from findings
        known = {finding.site for finding in findings}
        yield from _lone_masses(summary, column, table, told, known)
        if not column.is_target:
            yield from _identifiers(summary, column, table)
            yield from _constants(summary, column, table, told)


def figure(value: float) -> str:
    """A number for a message, with four digits, or with those before the point."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of a site, or the medians of several, which withstand one that is wrong."""

    quantiles: Array
    spread: float
    low: float
    high: float
    distinct: float

    @classmethod
    def of_site(cls, table: dict[str, Array], row: np.intp) -> "_Values":
        """Read the values of a site from its row of the table."""
        return cls(
            table["quantiles"][row],
            *(float(table[name][row]) for name in ("spread", "low", "high", "distinct")),
        )

    @classmethod
    def of_sites(cls, table: dict[str, Array], rows: NDArray[np.intp]) -> "_Values":
        """Compute the medians of the values of several sites."""
        return cls(
            np.median(table["quantiles"][rows], axis=0),
            *(
                float(np.median(table[name][rows]))
                for name in ("spread", "low", "high", "distinct")
            ),
        )


def _pairs(table: dict[str, Array]) -> Iterator[tuple[np.intp, _Values, _Values]]:
    """Row, values and the others' values of each site that has a spread: the other site, or the
    median of three sites and more."""
    rows = np.flatnonzero(table["count"] > 0)
    if len(rows) < 2:
        return
    median = _Values.of_sites(table, rows)
    for i, row in enumerate(rows):
        others = _Values.of_site(table, rows[1 - i]) if len(rows) == 2 else median
        own = _Values.of_site(table, row)
        if table["count"][row] >= MIN_BUCKET and own.spread > 0 and others.spread > 0:
            yield row, own, others


def _usual_distances(columns: Sequence[Numbers]) -> dict[int, float]:
    """Typical distance of the columns of each site from those of the others, in spreads.

    A site of other patients differs in many columns, and one of another unit in one.
    """
    found: dict[int, list[float]] = {}
    for column in columns:
        table = column.table()
        for row, own, others in _pairs(table):
            found.setdefault(int(table["site"][row]), []).append(_distance(own, others))
    return {
        site: float(np.median(distances)) if len(distances) >= _MIN_COLUMNS else 0.0
        for site, distances in found.items()
    }


def _distance(own: _Values, others: _Values) -> float:
    """Mean distance of the quantiles, in the smaller spread."""
    raw = float(np.abs(own.quantiles - others.quantiles).mean())
    return raw / min(own.spread, others.spread)


def _units(
    summary: Summary, column: Numbers, table: dict[str, Array], usual_distances: dict[int, float]
) -> Iterator[Finding]:
    """Warn of sites whose numbers are in another unit than the other sites', or shifted."""
    told = np.flatnonzero(table["count"] > 0)
    for row, own, others in _pairs(table):
        coded = _coded(own, others)
        if _distance(own, others) < _FAR / 2 and coded is None:
            continue
        other = [one for one in told if one != row]
        if _is_cell(table, row, others) or (len(other) == 1 and _is_cell(table, other[0], own)):
            continue
        at, least = int(table["site"][row]), float(table["count"][told].min())
        site, usual = summary.names[at], _USUAL * usual_distances.get(at, 0.0)
        found = _explained(column, site, own, others, coded, least, usual)
        if found is not None:
            yield found


def _is_cell(table: dict[str, Array], row: np.intp, others: _Values) -> bool:
    """Whether one cell alone sets a site of few rows apart, whose quantiles it moves."""
    mass, rows, gap, count, mean = (
        float(table[name][row]) for name in ("mass", "mass_rows", "gap", "count", "mean")
    )
    if not 0 < rows < 1.5 or gap <= _GAP or not 1 < count < _FEW_ROWS:
        return False
    rest = mean - rows * (mass - mean) / (count - rows)  # mean of the other rows
    centre = others.quantiles[4]
    is_far = abs(mass - centre) > _OUTLIER * others.spread
    return bool(is_far and abs(rest - centre) < _FAR / 2 * others.spread)


def _explained(
    column: Numbers,
    site: str,
    own: _Values,
    others: _Values,
    coded: tuple[str, float] | None,
    least: float,
    usual: float,
) -> Finding | None:
    """The finding that explains by a unit or an offset how far a site is from the others, or None.

    coded: from _coded(). least: values of the site that has fewest. usual: distance that patients
    may account for.
    """
    distance, width = _distance(own, others), max(own.spread, others.spread)
    median = f"its median is {figure(float(own.quantiles[4]))}"
    match coded:
        case "ratio", ratio:
            return _unit(column, site, ratio, median)
        case "offset", shift:
            return _shifted(column, site, shift, shift / width, median)
    if distance < usual:
        return None
    ratio, error = _best_ratio(own, others)
    is_close = error < _CLOSE + 1 / np.sqrt(least)
    needed = _FAR if max(ratio, 1 / ratio) < 5 and not is_close else _FAR / 2
    raw = float(np.abs(own.quantiles - others.quantiles).mean())
    if (
        distance >= needed
        and error < min(_MATCH, 0.2 * raw / others.spread + 0.1)
        and _fits(ratio, own, others)
    ):
        return _unit(column, site, ratio, median)
    wider = own.spread / others.spread
    if distance >= _VERY_FAR and not 0.2 < wider < 5:
        # Quantiles of few rows are too coarse to be matched, and their spread is no ratio.
        middle = float(own.quantiles[4] / others.quantiles[4]) if others.quantiles[4] else 0.0
        for one in (ratio for known in RATIOS for ratio in (known, 1 / known)):
            if isclose(middle, one, rel_tol=0.3) and 1 / 3 < wider / one < 3:
                return _unit(column, site, one, median)
    shift = float(np.median(own.quantiles - others.quantiles))
    left = float(np.abs(own.quantiles - others.quantiles - shift).mean()) / width
    # A shift moves both ends; a site with fewer of the same values has them in the same range.
    is_moved = (own.low - others.low) * shift > 0 and (own.high - others.high) * shift > 0
    if is_moved and abs(shift) > _SHIFT * width and (left < 0.6 or distance >= _VERY_FAR):
        return _shifted(column, site, shift, shift / width, median)
    if distance >= _VERY_FAR and not 0.2 < wider < 5 and _fits(wider, own, others):
        return _unit(column, site, wider, median)
    return None


def _fits(ratio: float, own: _Values, others: _Values) -> bool:
    """Whether the largest values, too, have this ratio. Where most values are 0, a few rows decide
    all quantiles."""
    if np.count_nonzero(own.quantiles * others.quantiles) == len(own.quantiles) or not others.high:
        return True
    return 1 / _TOP < own.high / others.high / ratio < _TOP


def _best_ratio(own: _Values, others: _Values) -> tuple[float, float]:
    """The ratio of units that explains the values best, and the distance that is left, in spreads
    of the others."""
    values, spread, reference = own.quantiles, others.spread, others.quantiles
    tried = [ratio for one in RATIOS for ratio in (one, 1 / one)]
    errors = [float(np.abs(values / ratio - reference).mean()) / spread for ratio in tried]
    errors = [
        error + abs(float(np.log(own.spread / ratio / spread))) * 0.1
        for error, ratio in zip(errors, tried, strict=True)
    ]
    best = int(np.argmin(errors))
    return tried[best], errors[best]


def _coded(own: _Values, others: _Values) -> tuple[str, float] | None:
    """How a site writes few whole numbers in another way, as 1 and 2 for 0 and 1; or None.

    Returns ("ratio" or "offset", the figure).
    """
    distinct, low, high = own.distinct, own.low, own.high
    if not 2 <= distinct <= 5 or distinct != others.distinct:
        return None
    if not (low.is_integer() and high.is_integer()):
        return None
    if low == others.low == 0 and 0 < others.high != high > 0:
        ratio = high / others.high
        is_known = any(isclose(max(ratio, 1 / ratio), one) for one in RATIOS)
        return ("ratio", ratio) if is_known else None
    shift = low - others.low
    if shift and isclose(shift, high - others.high):
        return "offset", shift
    return None


def _unit(column: Numbers, site: str, ratio: float, own: str) -> Finding:
    """The warning that a site's values are a ratio times those of the other sites."""
    is_larger = ratio >= 1
    ratio = ratio if is_larger else 1 / ratio
    shown = f"{ratio:,g}" if ratio in UNITS else figure(ratio)
    times = f"{shown} times" if is_larger else f"1/{shown} of"
    here, elsewhere = UNITS.get(ratio, ("", ""))[:: 1 if is_larger else -1]
    probably = f", as {here} are to {elsewhere}" if here else ""
    text = (
        f"{_values_of(column)} are about {times} those of the other sites{probably}; {own}. Are"
        " they in another unit?"
    )
    fix = multiplied(column.name, 1 / ratio if is_larger else ratio)
    return Finding("warn", "units", site, column.name, text, fix)


def _shifted(column: Numbers, site: str, shift: float, spreads: float, own: str) -> Finding:
    """The warning that a site's values are above or below those of the others by an offset."""
    side = "above" if shift > 0 else "below"
    text = (
        f"{_values_of(column)} are about {abs(spreads):.1f} standard deviations {side} those of the"
        f" other sites; {own}. Are they in another unit, or is an instrument off?"
    )
    return Finding("warn", "offset", site, column.name, text, moved(column.name, -shift))


def _values_of(column: Numbers) -> str:
    return "values of the target" if column.is_target else "values"


def _lone_masses(
    summary: Summary,
    column: Numbers,
    table: dict[str, Array],
    told: NDArray[np.bool_],
    explained: set[str],
) -> Iterator[Finding]:
    """Warn of values such as -999 that may mean missing, and of cells far outside. explained: sites
    with a known unit or offset, whose far cells are not reported."""
    at = np.flatnonzero(told & (table["mass_rows"] > 0))
    if not len(at):
        return
    name = column.name
    centre = float(np.median(table["quantiles"][at, 4]))
    # With two sites, the spread of the site with the cell may be due to the cell.
    spreads = table["spread"][at]
    spread = float(spreads.min() if len(at) == 2 and spreads.min() > 0 else np.median(spreads))
    reach = np.zeros(len(table["site"]))
    reach[at] = np.abs(table["mass"][at] - centre)
    two = np.sort(np.concatenate([[0.0], reach]))[-2:]
    for row in at:
        site = summary.names[int(table["site"][row])]
        value, rows, gap = (float(table[key][row]) for key in ("mass", "mass_rows", "gap"))
        count, distinct = table["count"][row], table["distinct"][row]
        # The value is an estimate where there are few cells: 1209 may look like 998.
        is_exact = value in CODES and (value < 0 or value >= 98)
        is_negative = value < 0 <= table["q0"][row]
        code = min(CODES, key=lambda one: abs(one - value))
        needed = _GAP if is_exact else _GAP_OF_ESTIMATE
        is_code = (is_exact or is_negative) and isclose(value, code, rel_tol=0.05) and gap > needed
        cells = f"about {max(round(rows), 1)} of {int(count)} values"
        are = "is" if rows < 1.5 else "are"
        if is_code and rows < 0.45 * count and not column.is_target:
            text = (
                f"{cells} {are} {code:g}, far from the others. Does it stand for a missing value?"
            )
            fix = missing_in(name, f"{code:g}")
            yield Finding("warn", "sentinel", site, name, text, fix)
            continue
        furthest = float(two[1] if reach[row] != two[1] or two[0] == two[1] else two[0])
        # Where all other values are zero, at every site, a few rows do not tell how large a value
        # may be.
        is_untold = rows >= 1.5 and np.isinf(gap) and not furthest
        if site in explained or spread <= 0 or is_untold:
            continue
        if told.sum() == 1:
            is_out = gap > _ALONE
        elif distinct <= 5:
            is_out = reach[row] > 100 * max(furthest, 1.0)
        else:
            least = max(_OUTLIER_RATIO * furthest, _OUTLIER * spread)
            is_out = reach[row] > least and gap > _GAP
        if is_out:
            # The value is an estimate: a cell of three digits is met, another one is not.
            short = float(f"{value:.3g}")
            is_met = isclose(value, short, rel_tol=1e-4)
            value = short if is_met else value
            text = f"{cells} {are} about {figure(value)}, far outside all others; correct the file"
            text += ", or take it for a missing value" if is_met else ""
            fix = missing_in(name, f"{value:.15g}") if is_met else ""
            yield Finding("warn", "outlier", site, name, text, fix)


def _identifiers(summary: Summary, column: Numbers, table: dict[str, Array]) -> Iterator[Finding]:
    """Warn of whole numbers that all differ, at sites of half of the rows and more, if the column
    is called an id, if they lie close together, or if they are spread evenly over their range."""
    count = table["count"]
    enough = (count >= MIN_ROWS_OF_ID) & (table["whole"] == 1)
    each = enough & (table["distinct"] == count)
    rows = float(count[each].sum())
    if not rows or rows < 0.5 * count.sum():
        return
    # Whole numbers that lie so close together would repeat by chance: 20 within a range of 32 do,
    # unless they number something.
    is_close = (table["high"] - table["low"])[each] < _CLOSE_TOGETHER * count[each]
    # Few numbers of a bell curve look evenly spread, too.
    is_even = rows >= _ROWS_OF_EVEN and np.median(table["bend"][each]) < _EVEN / np.sqrt(rows)
    if not (_is_called_id(column.name) or is_close.all() or is_even):
        return
    site = "" if each.sum() > 1 else summary.names[int(table["site"][each][0])]
    what = "they number the rows" if is_close.all() else "the column looks like an id"
    text = f"all values are whole and differ: {what}, and nothing can be learnt from them"
    yield Finding("warn", "identifier", site, column.name, text, dropped(column.name))


def _is_called_id(name: str) -> bool:
    words = name.lower().replace("_", " ").replace("-", " ").split()
    return bool(words) and (words[-1] in _ID_NAMES or "".join(words) in _ID_NAMES)


def _constants(
    summary: Summary, column: Numbers, table: dict[str, Array], told: NDArray[np.bool_]
) -> Iterator[Finding]:
    """Find columns of one value: a warning if all sites have the same, else a note by site."""
    constant = told & (table["deviation"] == 0) & (table["count"] >= 5)
    if not constant.any():
        return
    at = np.flatnonzero(constant)
    values = {float(one) for one in table["mean"][at]}
    is_everywhere = bool((constant == told).all()) and len(values) == 1
    for row in at[:1] if is_everywhere else at:
        is_of_all = is_everywhere and len(at) > 1
        site = "" if is_of_all else summary.names[int(table["site"][row])]
        text = f"all values are {figure(float(table['mean'][row]))}"
        level: Level = "warn" if is_everywhere else "note"
        fix = dropped(column.name) if is_everywhere else ""
        yield Finding(level, "constant", site, column.name, text, fix)
