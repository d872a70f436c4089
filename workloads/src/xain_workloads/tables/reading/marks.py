"""Marks in numbers of text: decimal mark and mark between thousands, currencies, "%" and units."""

import re
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.reading.errors import DoesNotFit, Problem

THOUSANDS = (",", ".", " ", "'")
DECIMALS = (".", ",")

_CURRENCIES = ("$", "€", "£", "¥", "₹", "US$", "CHF", "EUR", "USD", "GBP", "JPY", "kr", "zł")
# Longer ones are tried first.
_UNITS = (
    *("%", "‰", "kg", "g", "mg", "µg", "ng", "lb", "lbs", "km", "m", "cm", "mm", "µm", "in", "ft"),
    *("l", "dl", "ml", "µl", "mmHg", "bpm", "mmol/l", "µmol/l", "mg/dl", "g/dl", "ng/ml", "U/l"),
    *("years", "year", "yrs", "yr", "y", "months", "weeks", "days", "day", "d", "hours", "h"),
    *("min", "s", "ms", "Jahre", "Monate", "Wochen", "Tage", "Std", "°C", "°F", "kcal", "kPa"),
)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


_NUMBER = r"[-+]?\.?\d[\d.,' ]*"
_MARKED = re.compile(
    rf"(?P<sign>[-+]?)(?P<before>{_any_of(_CURRENCIES)}) ?(?P<number>{_NUMBER})"
    rf"|(?P<other>{_NUMBER}?) ?(?P<after>{_any_of((*_CURRENCIES, *_UNITS))})",
    re.IGNORECASE,
)


def mark_of(text: str) -> str:
    """The currency, "%" or unit beside a number; "" if the text is not a number with one."""
    found = _MARKED.fullmatch(text)
    mark = "" if found is None else found["before"] or found["after"]
    return "" if mark == "M" else mark  # millions, months or men rather than metres


def without_mark(texts: Any, mark: str) -> Any:
    """Remove a mark before or behind the numbers of an Arrow column of text."""
    from pyarrow import compute

    literal = re.escape(mark)
    texts = compute.replace_substring_regex(texts, rf"^([-+]?){literal}\s*([-+]?[\d.,])", r"\1\2")
    return compute.replace_substring_regex(texts, rf"^([-+]?[\d.,].*?)\s*{literal}$", r"\1")


def numbers_in(texts: Any, dialect: Dialect) -> tuple[NDArray[np.float64], Sequence[int]]:
    """Convert texts: (the numbers, NaN for null; rows of texts that are no numbers).

    texts: an Arrow column. The numbers are empty if a text is none.
    """
    import pyarrow as pa

    plain = _in_points(texts, dialect.decimal or ".", dialect.thousands)
    try:
        return plain.cast(pa.float64()).fill_null(nan).to_numpy().astype(np.float64), ()
    except pa.ArrowInvalid:
        cells = plain.to_pylist()
        others = {cell for cell in set(cells) if cell is not None and not _is_number(cell)}
        return np.empty(0), [row for row, cell in enumerate(cells) if cell in others]


def _in_points(texts: Any, decimal: str, thousands: str) -> Any:
    """Remove the mark between thousands, and write decimal points in place of commas."""
    from pyarrow import compute

    if thousands:
        pattern = _filled(r"^[-+]?\d{1,3}(THOUSANDS\d{3})+(DECIMAL\d*)?$", decimal, thousands)
        grouped = compute.match_substring_regex(texts, pattern)
        texts = compute.if_else(grouped, compute.replace_substring(texts, thousands, ""), texts)
    if decimal == ",":  # and a point is no part of a number
        texts = compute.replace_substring(texts, ".", ";")
        texts = compute.replace_substring(texts, ",", ".")
    return texts


def _is_number(text: str) -> bool:
    import pyarrow as pa

    try:
        pa.scalar(text).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


# --- which marks a file has ---

# A fraction does not look like a number with a mark between thousands: it begins with 0, has no or
# more than three digits before the mark, or another number of digits than three behind it.
_BEFORE = rf"^[-+]?((?i:{_any_of(_CURRENCIES)}) ?)?"
_BEHIND = rf"( ?(?i:{_any_of((*_CURRENCIES, *_UNITS))}))?$"
_FRACTION = (
    rf"{_BEFORE}((0|\d{{4,}})?DECIMAL\d+|\d+DECIMAL(\d{{1,2}}|\d{{4,}}))([eE][-+]?\d+)?{_BEHIND}"
)
_UNCLEAR = rf"{_BEFORE}[1-9]\d{{0,2}}DECIMAL\d{{3}}{_BEHIND}"
_GROUPS = r"^[-+]?\d{1,3}(THOUSANDS\d{3}){2,}$"
_BOTH = r"^[-+]?\d{1,3}(THOUSANDS\d{3})+DECIMAL\d+$"


_Having = Mapping[str, Mapping[str, Any]]  # by mark, the columns by name in which it occurs


def _filled(pattern: str, decimal: str, thousands: str) -> str:
    return pattern.replace("DECIMAL", f"[{decimal}]").replace("THOUSANDS", f"[{thousands}]")


def has_marks(column: Any, separator: str) -> bool:
    """Whether numbers of a text column have marks that with_marks() must look at."""
    from pyarrow import compute

    pattern = r"\d['\s\x{a0}\x{2007}\x{2009}\x{202f}]\d"
    pattern += r"|\d,\d|\.\d{3}\." if separator == "," else r"|[.,]\d"
    return bool(compute.any(compute.match_substring_regex(column, pattern)).as_py())


def with_marks(dialect: Dialect, columns: Mapping[str, Any], separator: str) -> Dialect:
    """The dialect with the marks that the numbers of a file have.

    columns: Arrow columns of text by name, those that may be numbers.
    Where commas separate cells, numbers have decimal points, and a comma in one needs a
    declaration; the decimal mark stays "" if there are commas and no fraction tells it.
    Elsewhere the numbers tell: 3,5 has a decimal comma and 3.5 a point; 1.234,5 has both marks;
    1,234 and 1.234 may be fractions or thousands. Raises DoesNotFit if both marks are decimal, or
    if there are only such as the latter.
    """
    decimal: str = dialect.decimal
    thousands: str = dialect.thousands
    having = {mark: _having(mark, columns) for mark in THOUSANDS}
    if decimal and thousands:
        return dialect
    if thousands in (",", "."):
        decimal = decimal or ("." if thousands == "," else ",")
    if not thousands:
        told = _thousands(having, decimal)
        decimal, thousands = (told[0] or decimal, told[1]) if told else (decimal, "")
    if not decimal:
        decimal = _decimal(having, separator, thousands)
    return dialect.model_copy(update={"decimal": decimal, "thousands": thousands})


def _thousands(having: _Having, decimal: str) -> tuple[str, str] | None:
    """(decimal mark or "", mark between thousands) if a number tells them; None if none does."""
    for thousands in THOUSANDS:
        for mark in DECIMALS:
            if mark == thousands or (decimal and mark != decimal):
                continue
            if _cell_like(having, _BOTH, mark, thousands):
                return mark, thousands
        if thousands == decimal or _cell_like(having, _FRACTION, thousands):
            continue
        if _cell_like(having, _GROUPS, "", thousands):
            return decimal or {",": ".", ".": ","}.get(thousands, ""), thousands
    return None


def _decimal(having: _Having, separator: str, thousands: str) -> str:
    """The decimal mark of a file; "" if no number has a fraction. Raises DoesNotFit where it cannot
    be told from the mark of thousands."""
    commas, points = (_cell_like(having, _FRACTION, mark) for mark in (",", "."))
    if separator == ",":
        return "." if points or not having[","] else ""
    if commas and points:
        raise DoesNotFit(
            [
                Problem(
                    f"numbers have decimal commas, {commas}, and points, {points}; "
                    + hint("xain-participant", 'data.decimal = ","')
                    + ' or "."'
                )
            ]
        )
    if commas or points:
        return "," if commas else "."
    for mark in (",", "."):
        unclear = "" if thousands == mark else _cell_like(having, _UNCLEAR, mark)
        if unclear:
            groups = hint("xain-participant", f'data.thousands = "{mark}"')
            fraction = hint("xain-participant", f'data.decimal = "{mark}"')
            raise DoesNotFit(
                [
                    Problem(
                        f"a number may have thousands or be a fraction, {unclear}; {groups}, or"
                        f" {fraction} if it is a fraction"
                    )
                ]
            )
    return "."


def with_decimals(columns: Mapping[str, Any]) -> set[str]:
    """Names of the columns with a number that is a fraction, or may be one."""
    return {
        name
        for mark in DECIMALS
        for name, cells in columns.items()
        if _cell_like({mark: {name: cells}}, f"{_FRACTION}|{_UNCLEAR}", mark)
    }


def _cell_like(having: _Having, pattern: str, decimal: str, thousands: str = "") -> str:
    """Describe the first cell that matches a pattern such as _FRACTION; "" if none does."""
    from pyarrow import compute

    pattern = _filled(pattern, decimal, thousands)
    for name, cells in having[thousands or decimal].items():
        if decimal and name not in having[decimal]:
            continue
        row = compute.index(compute.match_substring_regex(cells, pattern), True).as_py()
        if row >= 0:
            return f"{cells[row].as_py()!r} in column {name!r}, row {row + 1}"
    return ""


def _having(mark: str, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Map the names of columns in which the mark occurs to their cells."""
    from pyarrow import compute

    return {
        name: cells
        for name, cells in columns.items()
        if compute.any(compute.match_substring(cells, mark)).as_py()
    }
