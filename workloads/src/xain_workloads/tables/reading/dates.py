"""Dates and times as numbers: the texts that are dates, and what a site wants of them."""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Order = Literal["", "day", "month"]
Moments = NDArray[np.datetime64]

PARTS = ("year", "month", "weekday")
_DAYS_IN_YEAR = 365.25

_TIME = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(:(?P<second>\d{2})([.,]\d+)?)?"
_ZONE = r"(?P<zone>Z|[-+]\d{2}:?\d{2})?"
_YEAR = r"(?P<year>\d{4}|\d{2})"
# A month of a year, without a day.
_MONTH, _ITS_YEAR = r"(?P<month>0[1-9]|1[0-2])", r"(?P<year>(19|20)\d{2})"
_DATES = [
    re.compile(rf"{date}([T ,]+{_TIME} ?{_ZONE})?", re.IGNORECASE)
    for date in (
        r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>\d{1,2})(?P=mark)(?P<day>\d{1,2})",
        rf"(?P<first>\d{{1,2}})(?P<mark>[-/.])(?P<second_number>\d{{1,2}})(?P=mark){_YEAR}",
        rf"(?P<day>\d{{1,2}})[-. ]+(?P<name>[^\W\d_]{{3,9}})[-., ]+{_YEAR}",
        rf"(?P<name>[^\W\d_]{{3,9}})\.? (?P<day>\d{{1,2}}),? {_YEAR}",
        rf"{_ITS_YEAR}[-/]{_MONTH}",
        rf"{_MONTH}[-/]{_ITS_YEAR}",
        rf"(?P<name>[^\W\d_]{{3,9}})[-. ]+{_ITS_YEAR}",
    )
]
_TIME_ALONE = re.compile(_TIME)
_COMPACT = re.compile(r"(?P<year>(19|20)\d{2})(?P<month>\d{2})(?P<day>\d{2})")
# Months by their first three letters, in English and German.
_MONTHS = {
    name: number
    for names in (
        "jan feb mar apr may jun jul aug sep oct nov dec",
        "jän feb mär apr mai jun jul aug sep okt nov dez",
    )
    for number, name in enumerate(names.split(), start=1)
}


def _match(text: str) -> re.Match[str] | None:
    return next((found for one in _DATES if (found := one.fullmatch(text))), None)


def is_date(text: str) -> bool:
    """Whether a text looks like a date, with or without a time, or a time alone."""
    found = _match(text)
    if found is None:
        return _TIME_ALONE.fullmatch(text) is not None
    return "name" not in found.groupdict() or found["name"][:3].casefold() in _MONTHS


def is_time(text: str) -> bool:
    """Whether a text looks like a time of the day."""
    return _TIME_ALONE.fullmatch(text) is not None


def order_of(texts: Iterable[str]) -> Order:
    """Whether the day or the month is first in 03/02/2021; "" if the texts do not tell."""
    order: Order = ""
    for found in filter(None, map(_match, texts)):
        if "first" not in found.groupdict() or len(found["year"]) == 2:
            continue
        if found["mark"] == "." or int(found["first"]) > 12:
            return "day"
        if int(found["second_number"]) > 12:
            order = "month"
    return order


def has_open_order(texts: Iterable[str]) -> bool:
    """Whether a text is a date such as 03/02/2021, in which the day or the month may be first."""
    return any(
        found is not None and "first" in found.groupdict() and len(found["year"]) == 4
        for found in map(_match, texts)
    )


def parse(text: str, order: Order) -> datetime | None:
    """The moment that a text tells; None if it is none, or if its year has two digits.

    order: of 03/02/2021. A month is its first day, a time alone is on the first day of 1970.
    """
    found = _match(text) or _COMPACT.fullmatch(text)
    if found is None:
        found = _TIME_ALONE.fullmatch(text)
        if found is None:
            return None
    part = found.groupdict()
    if found.re is _TIME_ALONE:
        year, month, day = 1970, 1, 1
    else:
        if len(part["year"]) == 2:
            return None
        year = int(part["year"])
        if "first" in part:
            one, two = int(part["first"]), int(part["second_number"])
            month, day = (one, two) if order == "month" else (two, one)
        else:
            day = int(part.get("day") or 1)
            name = part.get("name")
            month = _MONTHS.get(name[:3].casefold(), 0) if name else int(part["month"])
    hour, minute, second = (int(part.get(key) or 0) for key in ("hour", "minute", "second"))
    try:
        moment = datetime(year, month, day, hour, minute, second)
        zone = part.get("zone")
        if zone and zone not in "Zz":
            shift = datetime.strptime(zone, "%z").utcoffset()
            assert shift is not None
            moment -= shift
    except (ValueError, OverflowError):  # the 31st of February; before the year 1 in UTC
        return None
    return moment


def are_unread(texts: Iterable[str]) -> bool:
    """Whether most of the texts that look like dates are none that parse() reads."""
    dated = list(filter(is_date, texts))
    unread = [text for text in dated if not parse(text, "day") and not parse(text, "month")]
    return 2 * len(unread) > len(dated)


def are_compact(numbers: NDArray[np.float64]) -> bool:
    """Whether all numbers are dates such as 20210203, and more than one is there."""
    known = np.unique(numbers[~np.isnan(numbers)])
    if len(known) < 2 or known[0] < 19000101 or known[-1] > 20991231:
        return False
    return all(number.is_integer() and parse(str(int(number)), "") for number in known.tolist())


def moments_of(texts: Iterable[str | None], order: Order) -> tuple[Moments, dict[str, int]]:
    """Parse dates: (moments, NaT for none; first row of each text that is no date)."""
    known: dict[str, datetime | None] = {}
    moments: list[datetime | None] = []
    strays: dict[str, int] = {}
    for row, text in enumerate(texts):
        if text is None:
            moments.append(None)
            continue
        if text not in known:
            known[text] = parse(text, order)
            if known[text] is None:
                strays[text] = row
        moments.append(known[text])
    return np.array(moments, dtype="datetime64[us]"), strays


def names_of(name: str, use: str | None) -> tuple[str, ...]:
    """The names of the columns that a column of dates becomes."""
    return tuple(f"{name} {part}" for part in PARTS) if use == "parts" else (name,)


def numbers_of(moments: Moments, use: str) -> list[NDArray[np.float64]]:
    """Convert moments to a column of numbers for each of names_of(). use: as in Dialect.dates."""
    day = moments.astype("datetime64[D]")
    parts: list[NDArray[Any]]
    if use == "parts":
        month = moments.astype("datetime64[M]").astype(np.int64)
        weekday = (day.astype(np.int64) + 3) % 7 + 1  # 1 is Monday; 1970 began on a Thursday
        parts = [month // 12 + 1970, month % 12 + 1, weekday]
    elif use == "hours":
        parts = [(moments - day) / np.timedelta64(1, "h")]
    else:
        since = (moments - np.datetime64(use[-10:])) / np.timedelta64(1, "D")
        parts = [since if use.startswith("days") else -since / _DAYS_IN_YEAR]
    return [np.where(np.isnat(moments), np.nan, part).astype(np.float64) for part in parts]
