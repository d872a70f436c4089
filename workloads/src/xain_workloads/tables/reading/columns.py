"""Columns of cells as columns of numbers and categories: what each cell means."""

import re
from collections.abc import Collection, Sequence
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint, quoted
from xain_workloads.names import class_name
from xain_workloads.tables.dataset import Target, Task
from xain_workloads.tables.reading import dates, marks
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.reading.errors import DoesNotFit, Problem, cells
from xain_workloads.tables.schema import Column, ColumnType

Values = NDArray[Any]
Made = list[tuple[Column, Values]]

# Texts that stand for a missing value. Not "Na", "none" and the like, which may be categories.
MISSING = ("", "NA", "NaN", "nan", "null", "NULL", "?")
# Texts that rather stand for a missing value than are a mistake, where all others are numbers.
_LIKELY_MISSING = (
    *("-", "--", ".", "..", "*", "n/a", "N/A", "#N/A", "#NV", "NV", "none", "None", "unknown"),
    *("missing", "not known", "k.A.", "keine Angabe"),
)
# Numbers that rather stand for a missing value, where all others are 0 or more.
_CODES = (-7.0, -8.0, -9.0, -77.0, -88.0, -99.0, -777.0, -888.0, -999.0, -9999.0, -99999.0)
_MAX_LISTED = 20  # texts in one setting
_DIGITS = re.compile(r"[-+]?[\d.,' ]*\d")
_CODE = re.compile(r"^[-+]?0\d+$")
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
_TRUTHS = {"yes": "1", "no": "0"}
_LIMIT = re.compile(r"[<≤] ?=? ?(?P<limit>\S.*)")

# A target has too many classes if it has more than _MANY, and more than a share of its rows.
_MANY = 20
_SHARE_OF_NUMBERS, _SHARE_OF_TEXTS = 0.1, 0.5


def known_texts(name: str, column: Any, dialect: Dialect) -> Any:
    """Trim the cells of a text column (Arrow); cells that stand for a missing value become null."""
    import pyarrow as pa
    from pyarrow import compute

    # Blanks of other widths, as between thousands, are blanks.
    if not compute.all(compute.string_is_ascii(column)).as_py():
        column = compute.replace_substring_regex(column, "[\u00a0\u2007\u2009\u202f]", " ")
    texts = compute.utf8_trim_whitespace(column)
    missing = (*MISSING, *dialect.missing, *dialect.missing_in.get(name, ()))
    is_missing = compute.is_in(texts, value_set=pa.array(missing, texts.type))
    return compute.if_else(is_missing, pa.scalar(None, texts.type), texts)


def is_text(column: Any) -> bool:
    """Whether an Arrow column is one of text."""
    import pyarrow as pa

    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def read_column(
    name: str, column: Any, kind: ColumnType | None, dialect: Dialect, *, infer: bool
) -> tuple[Made, Dialect]:
    """Convert a column of a file to numbers or categories; a column of dates may become several.

    Returns these, and the dialect with what the column tells. column: of Arrow, without encodings
    that save memory. kind: declared, or None. infer: tell the type of texts by their values; else
    they are categories. Raises DoesNotFit if a value does not fit the type.
    """
    texts = known_texts(name, column, dialect) if is_text(column) else None
    if name in dialect.dates:
        return _read_dates(name, column if texts is None else texts, texts is not None, dialect)
    if texts is None:
        return _read_typed(name, column, kind, dialect), dialect
    if texts.null_count == len(texts):
        return _empty(name, kind, len(texts)), dialect
    if kind == "category":
        _refuse_equal_codes(name, texts)
        return _made(name, "category", categories(texts.to_pylist())), dialect
    if infer or kind == "number":
        found = _read_numbers(name, texts, kind, dialect)
        if found is not None:
            return found
    _refuse_dates(name, texts, dialect)
    _refuse_equal_codes(name, texts)
    return _made(name, "category", categories(texts.to_pylist())), dialect


def _made(name: str, kind: ColumnType, values: Values) -> Made:
    return [(Column(name, kind), values)]


def _empty(name: str, kind: ColumnType | None, num_rows: int) -> Made:
    if kind == "category":
        return _made(name, "category", np.full(num_rows, None))
    return [(Column(name, kind or "empty"), np.full(num_rows, nan))]


def categories(values: Sequence[object]) -> Values:
    """Convert values to category names: 3, "3" and "3.0" get one name, None stays None."""
    names = {cell: None if cell is None else class_name(cell) for cell in set(values)}
    made = np.empty(len(values), dtype=object)
    made[:] = [names[cell] for cell in values]
    return made


# --- columns with types of their own, as Parquet has them ---


def _read_typed(name: str, column: Any, kind: ColumnType | None, dialect: Dialect) -> Made:
    """Convert a column of a typed file, such as Parquet. Raises DoesNotFit for dates and others."""
    import pyarrow as pa

    if pa.types.is_temporal(column.type):
        raise DoesNotFit([_undeclared(name, _first(column.to_pylist()), column.type)])
    if not (
        pa.types.is_integer(column.type)
        or pa.types.is_floating(column.type)
        or pa.types.is_decimal(column.type)
        or pa.types.is_boolean(column.type)
        or pa.types.is_null(column.type)
    ):
        leave_out = hint("xain-participant", f"data.drop = [{quoted(name)}]")
        text = (
            f"column {name!r} is of type {column.type}, which is neither a number nor text; convert"
            f" it, or leave it out: {leave_out}"
        )
        raise DoesNotFit([Problem(text, (leave_out,))])
    if column.null_count == len(column):
        return _empty(name, kind, len(column))
    if kind == "category":
        return _made(name, "category", categories(column.to_pylist()))
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    # Unsafe casts lose only digits beyond float64, in integers above 2**53 and in decimals.
    cast = column.cast(pa.float64(), safe=False)
    numbers = cast.fill_null(nan).to_numpy().astype(np.float64)
    return _numbers(name, numbers, kind, dialect)


def _numbers(
    name: str, numbers: NDArray[np.float64], kind: ColumnType | None, dialect: Dialect
) -> Made:
    """Make a column of numbers, NaN for codes of missing ones. Raises DoesNotFit for e.g. -999."""
    codes = [
        code
        for text in (*dialect.missing, *dialect.missing_in.get(name, ()))
        if not isnan(code := _number_of(text))
    ]
    if codes:
        numbers = np.where(np.isin(numbers, codes), nan, numbers)
    if kind is None:
        number = hint("xain-participant", f'data.types.{quoted(name)} = "number"')
        _require_no_code(name, numbers, number)
    return _made(name, "number", numbers)


def _require_no_code(name: str, numbers: NDArray[np.float64], is_value: str) -> None:
    """Raise DoesNotFit if numbers such as -9 or -999 stand among others that are all 0 or more.
    is_value: words of the setting that declares them to be values."""
    suspect = np.isin(numbers, _CODES)
    if suspect.any() and not (numbers[~suspect] < 0).any():
        found, rows = np.unique(numbers[suspect], return_index=True)
        first = {
            f"{code:g}": int(np.flatnonzero(suspect)[row])
            for code, row in zip(found, rows, strict=True)
        }
        missing = hint("xain-participant", f"data.missing_in.{quoted(name)} = [{', '.join(first)}]")
        they = (
            "they stand for missing values" if len(first) > 1 else "it stands for a missing value"
        )
        what = (
            f"{cells(name, first)}, in {int(suspect.sum())} rows, and no other value is below 0;"
            f" {missing} if {they}, or {is_value} if not"
        )
        is_bulk = _is_bulk(int(suspect.sum()), int((~np.isnan(numbers)).sum()))
        raise DoesNotFit([Problem(what, () if is_bulk else (missing,))])


def _is_bulk(num: int, num_known: int) -> bool:
    """Whether so many values are most of a column's, so that no fix may take them for missing."""
    return 2 * num > num_known


def _number_of(text: str) -> float:
    """Convert a text to a number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return nan


# --- columns of text ---


def _read_numbers(
    name: str, texts: Any, kind: ColumnType | None, dialect: Dialect
) -> tuple[Made, Dialect] | None:
    """Convert texts to numbers; None if the column is rather one of categories. A mark that all
    cells have is added to the dialect. Raises DoesNotFit for numbers with some texts, dates or
    codes."""
    mark = dialect.marks.get(name, "")
    plain = marks.without_mark(texts, mark) if mark else texts
    numbers, strays = marks.numbers_in(plain, dialect)
    if not strays:
        if kind is None and dates.are_compact(numbers):
            raise DoesNotFit([_undeclared(name, _first(texts.to_pylist()))])
        if kind is None and (codes := _codes(texts)):
            raise DoesNotFit([_leading_zeros(name, codes)])
        return _numbers(name, numbers, kind, dialect), dialect
    values = plain.to_pylist()
    first: dict[str, int] = {}
    for row in strays:
        first.setdefault(values[row], row)
    limits = {text: number for text in first if not isnan(number := _limit(text, dialect))}
    if limits and dialect.below_limit:
        half = dialect.below_limit == "half"
        halves = {
            text: repr(limit / 2).replace(".", dialect.decimal or ".") if half else None
            for text, limit in limits.items()
        }
        return _read_numbers(
            name, _array([halves.get(value, value) for value in values]), kind, dialect
        )
    marked = {text: found for text in first if (found := marks.mark_of(text))}
    of_all = set(marked.values()) if marked.keys() == {*values} - {None} else set()
    if len(of_all) == 1:  # every cell has the same one
        declared = dialect.model_copy(update={"marks": {**dialect.marks, name: of_all.pop()}})
        return _read_numbers(name, texts, kind, declared)
    if kind == "number" and all(_name(text) in _TRUTHS for text in first):
        truths = [_TRUTHS.get(_name(value), value) for value in values]
        return _read_numbers(name, _array(truths), kind, dialect)
    num_known = len(values) - plain.null_count
    if kind is None and 2 * sum(dates.is_date(values[row]) for row in strays) > num_known:
        dated = {text: row for text, row in first.items() if dates.is_date(text)}
        raise DoesNotFit([_undeclared(name, dated)])

    grouped = {text for text in first if _DIGITS.fullmatch(text)}
    kept = [None if text in first and text not in grouped else text for text in values]
    rows = {text: first[text] for text in grouped}
    other_marks = _other_marks(name, _array(kept), rows, kind, dialect) if grouped else None
    if other_marks is None:  # codes with points, such as 1.2.3
        grouped = set()
    like_numbers = limits.keys() | marked.keys() | grouped
    num_others = sum(values[row] not in like_numbers for row in strays)
    has_numbers = marked or grouped or len(strays) < num_known
    if kind is None and (2 * num_others > num_known or not has_numbers):
        return None
    problems = []
    if limits:
        problems.append(_below_limit(name, {text: first[text] for text in limits}))
    if marked:
        rows = {text: first[text] for text in marked}
        problems.append(_marked(name, rows, set(marked.values())))
    if other_marks is not None:
        problems.append(other_marks)
    others = {text: row for text, row in first.items() if text not in like_numbers}
    if others:
        problems.append(_strays(name, others, num_known, len(strays), kind))
    raise DoesNotFit(problems)


def _codes(texts: Any) -> dict[str, int]:
    """Map each text of digits with a leading zero, such as 007, to its first row."""
    from pyarrow import compute

    if not compute.any(compute.match_substring_regex(texts, _CODE.pattern)).as_py():
        return {}
    return {text: row for text, row in _first(texts.to_pylist()).items() if _CODE.fullmatch(text)}


def _leading_zeros(name: str, first: dict[str, int]) -> Problem:
    """The problem of digits with leading zeros; its fix declares the column a category."""
    category = hint("xain-participant", f'data.types.{quoted(name)} = "category"')
    number = hint("xain-participant", f'data.types.{quoted(name)} = "number"')
    text = (
        f"{cells(name, first)}: digits with a leading zero are rather codes than numbers;"
        f" {category}, or {number}"
    )
    return Problem(text, (category,))


def _refuse_equal_codes(name: str, texts: Any) -> None:
    """Raise DoesNotFit if two texts such as 250 and 250.0 would be one category."""
    from pyarrow import compute

    spellings: dict[str, list[str]] = {}
    for text in compute.unique(texts).to_pylist():
        if text is not None and _NUMBER.fullmatch(text):
            spellings.setdefault(class_name(text), []).append(text)
    alike = next((found for found in spellings.values() if len(found) > 1), None)
    if alike is not None:
        first = _first(texts.to_pylist())
        text = (
            f"{cells(name, {text: first[text] for text in alike})} would be one category; write"
            " them alike in the file or, if they are two codes, write a letter in front of all"
            " codes of the column, at all sites"
        )
        raise DoesNotFit([Problem(text)])


def _array(values: Sequence[str | None]) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.string())


def _first(values: Sequence[object]) -> dict[str, int]:
    """Map each value, as text, to its first row; None is left out."""
    first: dict[str, int] = {}
    for row, value in enumerate(values):
        if value is not None:
            first.setdefault(str(value), row)
    return first


def _name(value: str | None) -> str:
    return "" if value is None else class_name(value)


def _limit(text: str, dialect: Dialect) -> float:
    """The limit of detection that a text such as "<50" tells; NaN if it tells none."""
    found = _LIMIT.fullmatch(text)
    if found is None:
        return nan
    numbers, strays = marks.numbers_in(_array([found["limit"]]), dialect)
    return nan if strays else float(numbers[0])


def _below_limit(name: str, first: dict[str, int]) -> Problem:
    """The problem of values below a limit of detection; its fix takes half of the limit."""
    half = hint("xain-participant", 'data.below_limit = "half"')
    missing = hint("xain-participant", 'data.below_limit = "missing"')
    plural = "are values" if len(first) > 1 else "is a value"
    text = (
        f"{cells(name, first)} {plural} below a limit of detection; {half}, which takes half of"
        f" the limit, or {missing}"
    )
    return Problem(text, (half,))


def _marked(name: str, first: dict[str, int], found: set[str]) -> Problem:
    """The problem of numbers with a mark, such as "kg", beside others without it or with others."""
    category = hint("xain-participant", f'data.types.{quoted(name)} = "category"')
    if len(found) > 1:
        texts = ", ".join(map(repr, sorted(found)))
        return Problem(
            f"{cells(name, first)}: numbers with {texts} are in one column; convert them to one"
            f" unit, or {category}",
            (category,),
        )
    (mark,) = found
    plain = hint("xain-participant", f'data.marks.{quoted(name)} = "{mark}"')
    text = (
        f"{cells(name, first)}: numbers with {mark!r} and others without it; {plain} if they are in"
        f" one unit, or {category}"
    )
    return Problem(text, (plain,))


def _undeclared(name: str, first: dict[str, int], kind: Any = None) -> Problem:
    """The problem of a column of dates that the site has not declared. kind: Arrow's type."""
    since = hint("xain-participant", f'data.dates.{quoted(name)} = "days since 2000-01-01"')
    hours = hint("xain-participant", f'data.dates.{quoted(name)} = "hours"')
    leave_out = hint("xain-participant", f"data.drop = [{quoted(name)}]")
    if all(map(dates.is_time, first)):
        text = f"{cells(name, first)}: times of the day are no numbers; {hours}, or {leave_out}"
        return Problem(text, (hours,))
    if kind is None and dates.are_unread(first):
        text = (
            f"{cells(name, first)}: dates are neither numbers nor categories, and these have no"
            f" year of four digits; write them as 2021-03-31 in the file, or {leave_out}"
        )
        return Problem(text)
    fixes: tuple[str, ...] = (since,)
    order = ""
    if kind is None and dates.has_open_order(first) and not dates.order_of(first):
        day = hint("xain-participant", 'data.date_order = "day"')
        order = f'; {day} or "month", which is first'
        fixes = (since, day)
    text = (
        f"{cells(name, first)}: dates are neither numbers nor categories; {since},"
        ' "age at 2020-01-01" for years until then, or "parts" for year, month and weekday;'
        f" or {leave_out}{order}"
    )
    return Problem(text, fixes)


def _refuse_dates(name: str, texts: Any, dialect: Dialect) -> None:
    """Raise DoesNotFit if more than half of the texts are dates."""
    from pyarrow import compute

    counted = compute.value_counts(texts).to_pylist()
    known = [one for one in counted if one["values"] is not None]
    dated = [one for one in known if dates.is_date(one["values"])]
    if _is_bulk(sum(one["counts"] for one in dated), sum(one["counts"] for one in known)):
        raise DoesNotFit([_undeclared(name, _first(texts.to_pylist()))])


def _other_marks(
    name: str, texts: Any, first: dict[str, int], kind: ColumnType | None, dialect: Dialect
) -> Problem | None:
    """The problem of numbers with other marks than the file's; None if no other marks fit all."""
    decimal = dialect.decimal or "."
    category = hint("xain-participant", f'data.types.{quoted(name)} = "category"')
    start = f"{cells(name, first)} {_no_number(first)} where the decimal mark is {decimal!r}"
    ways = "" if kind == "number" else f", or {category}"
    other = _other_decimal(decimal)
    plain = dialect.model_copy(update={"decimal": other, "thousands": ""})
    may_be_decimal = not marks.numbers_in(texts, plain)[1]
    other_decimal = hint("xain-participant", f'data.decimal = "{other}"')
    if not dialect.thousands:
        for mark in marks.THOUSANDS:
            if not any(mark in text for text in first):
                continue
            beside = decimal if mark != decimal else other
            tried = dialect.model_copy(update={"decimal": beside, "thousands": mark})
            if not marks.numbers_in(texts, tried)[1]:
                fix = hint("xain-participant", f'data.thousands = "{mark}"')
                text = f"{start}; {fix} if thousands have that mark"
                if may_be_decimal and not dialect.decimal:  # a factor of 1000: a person decides
                    return Problem(f"{text}, {other_decimal} if it is the file's{ways}")
                return Problem(f"{text}{ways}", (fix,))
    if may_be_decimal:
        return Problem(f"{start}; {other_decimal} if that is the file's{ways}", (other_decimal,))
    return None


def _no_number(first: Collection[str]) -> str:
    return "are not numbers" if len(first) > 1 else "is not a number"


def _other_decimal(decimal: str) -> str:
    return next(mark for mark in marks.DECIMALS if mark != decimal)


def _strays(
    name: str, first: dict[str, int], num_known: int, num_strays: int, kind: ColumnType | None
) -> Problem:
    """The problem of a column of numbers that has some texts, with the ways to correct it."""
    texts = sorted(first, key=lambda text: first[text])[:_MAX_LISTED]
    listed = ", ".join(map(quoted, texts))
    if all(text in _LIKELY_MISSING for text in first):
        missing = hint("xain-participant", f"data.missing = [{listed}]")
    else:
        missing = hint("xain-participant", f"data.missing_in.{quoted(name)} = [{listed}]")
    category = hint("xain-participant", f'data.types.{quoted(name)} = "category"')
    if kind is None and all(_name(text) in _TRUTHS for text in first):
        number = hint("xain-participant", f'data.types.{quoted(name)} = "number"')
        text = (
            f"{cells(name, first)} {_no_number(first)}, {num_known - num_strays} of the column's"
            f" {num_known} values are; {number}, which takes yes for 1 and no for 0, or {category}"
        )
        return Problem(text, (number,))
    # A column without any number has no missing ones.
    is_short = len(first) <= _MAX_LISTED and num_strays < num_known
    is_bulk = _is_bulk(num_strays, num_known)
    ways = [f"correct {'them' if len(first) > 1 else 'it'}"]
    if is_short:
        stand = "they stand" if len(first) > 1 else "it stands"
        ways.append(f"{missing} if {stand} for a missing value")
    is_category = kind is None or num_strays == num_known
    if is_category:
        ways.append(category)
    text = (
        f"{cells(name, first)} {_no_number(first)},"
        f" {num_known - num_strays} of the column's {num_known} values are; {', or '.join(ways)}"
    )
    # Texts with digits may be codes, or numbers written in another way: a person decides.
    if is_short and (is_bulk or any(letter.isdigit() for text in first for letter in text)):
        return Problem(text)
    return Problem(text, (missing,) if is_short else (category,) if is_category else ())


def _read_dates(name: str, column: Any, is_text: bool, dialect: Dialect) -> tuple[Made, Dialect]:
    """Convert declared dates to columns of numbers, and return the dialect. Raises DoesNotFit."""
    use = dialect.dates[name]
    if is_text:
        texts = column.to_pylist()
    else:
        texts = [None if cell is None else str(cell) for cell in column.to_pylist()]
    distinct = {text for text in texts if text is not None}
    order = dialect.date_order or dates.order_of(distinct)
    if not order and dates.has_open_order(distinct):
        day = hint("xain-participant", 'data.date_order = "day"')
        text = f'{cells(name, _first(texts))} have day or month first; {day} or "month"'
        raise DoesNotFit([Problem(text, (day,))])
    moments, strays = dates.moments_of(texts, order)
    if strays:
        listed = ", ".join(map(quoted, sorted(strays, key=lambda text: strays[text])[:_MAX_LISTED]))
        missing = hint("xain-participant", f"data.missing_in.{quoted(name)} = [{listed}]")
        num_strays = sum(text in strays for text in texts)
        num_known = sum(text is not None for text in texts)
        is_short = len(strays) <= _MAX_LISTED and not _is_bulk(num_strays, num_known)
        text = (
            f"{cells(name, strays)}: no date with a year of four digits; correct"
            f" {'them' if len(strays) > 1 else 'it'}"
            + (f", or {missing} for a missing value" if is_short else "")
        )
        raise DoesNotFit([Problem(text, (missing,) if is_short else ())])
    made = zip(dates.names_of(name, use), dates.numbers_of(moments, use), strict=True)
    return [(Column(made_name), numbers) for made_name, numbers in made], dialect


# --- the target ---


def read_target(
    name: str, column: Any, task: Task, dialect: Dialect, *, infer: bool
) -> tuple[Values, NDArray[np.bool_]]:
    """Convert the target: (class labels or numbers, (n,); True where one is missing). Raises
    DoesNotFit if a label is neither a text nor a number, or numbers look like codes of missing
    values."""
    nothing = hint("xain-participant", f"data.missing_in.{quoted(name)} = []")
    if task == "regression":
        made, _ = read_column(name, column, "number", dialect, infer=infer)
        if len(made) > 1:
            raise DoesNotFit([Problem(f"column {name!r}: parts of a date are no target")])
        values = made[0][1]
        if name not in dialect.missing_in:
            _require_no_code(name, values, nothing)
        return values, np.isnan(values)
    if is_text(column):
        column = known_texts(name, column, dialect)
    values = np.empty(len(column), dtype=object)
    values[:] = column.to_pylist()
    gaps = np.array([label is None or label != label for label in values], dtype=np.bool_)
    for row, value in enumerate(values.tolist()):
        if value is not None and not isinstance(value, str | int | float):  # bool is an int
            text = (
                f"column {name!r}, row {row + 1}: {value!r} is no class name, the column is of type"
                f" {column.type}"
            )
            raise DoesNotFit([Problem(text)])
    numbers = np.array([_number_of(str(value)) for value in values[~gaps]], np.float64)
    if name not in dialect.missing_in and not np.isnan(numbers).any():
        coded = np.full(len(values), nan)
        coded[~gaps] = numbers
        _require_no_code(name, coded, nothing)
    return values, gaps


def without_outcome(name: str, gaps: NDArray[np.bool_]) -> Problem:
    """The problem of rows whose target is missing."""
    rows = np.flatnonzero(gaps)
    drop = hint("xain-participant", 'data.missing_target = "drop"')
    shown = ", ".join(str(row + 1) for row in rows[:3])
    text = (
        f"column {name!r}, row{'s' if len(rows) > 1 else ''} {shown}: the value is missing, and the"
        f" target needs one in every row, {len(rows)} of {len(gaps)} have none; {drop} to leave"
        " these rows out"
    )
    return Problem(text, (drop,))


def too_many_classes(name: str, target: Target) -> Problem | None:
    """The problem of a target with too many classes, probably numbers or names; or None."""
    labels = np.unique(target).tolist()
    are_numbers = not any(isnan(_number_of(label)) for label in labels)
    share = _SHARE_OF_NUMBERS if are_numbers else _SHARE_OF_TEXTS
    if len(labels) <= max(_MANY, share * len(target)):
        return None
    regression = hint("xain-participant", 'data.task = "regression"')
    other = hint("xain-participant", 'data.target = "NAME"')
    classes = hint("xain-participant", 'data.classes = ["NAME"]')
    what = "numbers" if are_numbers else "texts"
    ways = [f"{regression} if it is a quantity"] if are_numbers else []
    ways.append(f"{other} if another column is the target")
    ways.append(f"{classes} with all of them if they are classes")
    text = (
        f"column {name!r}: the target has {len(labels)} different {what} in {len(target)} rows,"
        f" which would be as many classes; {', or '.join(ways)}"
    )
    return Problem(text, (regression,) if are_numbers else ())
