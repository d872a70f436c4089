"""The dialect of a site: how it writes its tables, and what their cells mean."""

import re
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from xain_foundation.settings.fields import Allowed, Section, Texts
from xain_workloads.errors import DataError

# A dialect travels in the metadata of a model.
MAX_BYTES = 256 << 10

# Keys of how a file is written, and not of what its cells mean. Another file of the site may
# differ.
_FORM = (
    *("encoding", "separator", "decimal", "thousands", "skip_lines", "totals", "sheet"),
    "missing_target",
)

_DATES = re.compile(r"(days since|age at) (\d{4}-\d{2}-\d{2})|parts|hours")
_DATES_RULE = '"days since YYYY-MM-DD", "age at YYYY-MM-DD", "parts" or "hours"'


def _check_dates(use: str) -> str:
    """Return a use of dates as it is. Raises ValueError if its form or its date is wrong."""
    found = _DATES.fullmatch(use)
    if found is None:
        raise ValueError("no use of dates")
    if found[2]:
        date.fromisoformat(found[2])
    return use


def _check_scale(scale: float) -> float:
    if scale == 0:
        raise ValueError("nothing of the features would be left")
    return scale


Scale = Annotated[float, AfterValidator(_check_scale), Allowed("a number, not 0")]
Dates = Annotated[str, AfterValidator(_check_dates), Allowed(_DATES_RULE)]


class Dialect(Section):
    """How a site writes its tables, and what their cells mean. Keys of [data] and of [evaluate].

    Keys with columns use the names of the columns in the file.

    encoding: a codec of Python; "" for UTF-8, UTF-16 or else Windows' cp1252, as the file tells.
    separator: between the cells of a text file; "" for the one that the file tells.
    decimal, thousands: marks in numbers of text; "" for those that the numbers tell.
    skip_lines: lines above the header; None for those that have one cell alone.
    totals: a last row that is called "Total": refuse it, drop it, or keep it as a row.
    sheet: of an Excel file; "" for the first.
    missing_target: rows without a target are dropped; "" refuses them.
    missing: texts beside those in MISSING that stand for a missing value, in all columns.
        missing_in: texts and numbers that do so in one column.
    below_limit: a value such as "<50", below the limit of detection, is half of the limit, or
        missing; "" refuses it.
    marks: the text beside each number of a column, such as "$", "%" or "kg", which is left out.
    dates: what becomes of a column of dates: days since a date, years until one, or columns of its
        parts; "hours" of a column of times.
    date_order: of 03/02/2021; "" for the order that the column tells.
    rename: names of columns in the session. scale: factor on all columns of numbers.
    factors, offsets: by column, or target, in the session what its numbers are multiplied by, and
        what is added then. replace: by column, or target, the new names of categories or classes.
    """

    encoding: str = ""
    separator: Literal["", ",", ";", "\t", "|"] = ""
    decimal: Literal["", ".", ","] = ""
    thousands: Literal["", ",", ".", " ", "'"] = ""
    skip_lines: int | None = Field(default=None, ge=0, le=1000)
    totals: Literal["", "drop", "keep"] = ""
    sheet: str = ""
    missing_target: Literal["", "drop"] = ""
    missing: Texts = ()
    missing_in: dict[str, Texts] = Field(default_factory=dict)
    below_limit: Literal["", "half", "missing"] = ""
    marks: dict[str, str] = Field(default_factory=dict)
    dates: dict[str, Dates] = Field(default_factory=dict)
    date_order: Literal["", "day", "month"] = ""
    rename: dict[str, str] = Field(default_factory=dict)
    scale: Scale = 1.0
    factors: dict[str, Scale] = Field(default_factory=dict)
    offsets: dict[str, float] = Field(default_factory=dict)
    replace: dict[str, dict[str, str]] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def meaning(self) -> "Dialect":
        """The part that says what cells mean, which holds for other files of the site too."""
        return self.model_copy(update={name: Dialect.model_fields[name].default for name in _FORM})

    @classmethod
    def of(cls, settings: "Dialect") -> "Dialect":
        """Copy the keys of a dialect out of a section of settings that has further keys."""
        return Dialect.model_construct(
            **{name: getattr(settings, name) for name in Dialect.model_fields}
        )

    def to_json(self) -> str:
        """JSON text of what differs from the defaults."""
        # Without warnings: pydantic makes lists of Texts, and then wonders at them.
        return self.model_dump_json(exclude_defaults=True, warnings=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the dialect of a model. Raises DataError; the text may come from the network."""
        if len(text) > MAX_BYTES:
            raise DataError(f"the model's dialect takes more than {MAX_BYTES} bytes")
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise DataError(
                f"the model's dialect cannot be read: {key or 'it is no JSON'}"
            ) from None


DETECTED = Dialect()  # all of it as the file tells
