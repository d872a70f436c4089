"""Rows of CSV files, a range of bytes at a time, as Arrow tables.

The text is UTF-8. The first line that is not blank has the names of the columns. A line break ends
a row, also within quotation marks: a range of bytes that begins there would not know of them.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from csv import Error as CsvError
from csv import reader as csv_reader
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import csv

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.sources.lines import BLOCK_BYTES, blocks, line_at
from xain_workloads.sources.parts import Part

MISSING: Final = ("", "NA", "NaN", "nan", "null", "NULL", "?")  # as in other tables
_SEPARATORS: Final = (",", ";", "\t", "|")
_HEAD_BYTES: Final = 1 << 20  # that types are inferred from
_COUNTS: Final = re.compile(r"Expected (\d+) columns, got (\d+)")
_CONVERSION: Final = re.compile(r"CSV column #(\d+): .*?invalid value '(.{0,40})", re.DOTALL)
_BYTE_ORDER_MARK: Final = "\ufeff"


@dataclass(frozen=True, slots=True)
class Header:
    """names: of the columns; none if the file has blank lines alone. begin: byte of the first line
    behind the header."""

    names: tuple[str, ...]
    separator: str
    begin: int


def header(part: Part) -> Header:
    """Read the header of a file, and find its separator. Raises DataError."""
    begin = 0
    while begin < part.size:
        line = line_at(part, begin)
        begin += len(line)
        try:
            text = line.decode("utf-8").strip("\r\n").removeprefix(_BYTE_ORDER_MARK)
        except UnicodeDecodeError:
            raise _not_utf8(part.path) from None
        if text.strip():
            break
    else:
        return Header((), ",", begin)
    if "\0" in text:
        raise _not_utf8(part.path)
    if "\r" in text:
        raise DataError(f"{part.path}: lines end with a line feed, and here with a carriage return")
    if text.count('"') % 2:
        raise _open_quotes(part.path, 0)
    # As many cells as possible, and of equal numbers the first.
    separator = max(_SEPARATORS, key=lambda mark: len(_cells(text, mark)))
    names = tuple(name.strip() for name in _cells(text, separator))
    if not names:
        raise DataError(f"{part.path}: the header has a cell of more than 128 KiB")
    if all(map(_is_number, names)):
        raise DataError(f"{part.path}: the first line has numbers, and no names of columns")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{part.path}: more than one column is called {twice!r}")
    return Header(names, separator, begin)


def inferred(part: Part) -> pa.Schema | None:
    """Infer names and types of the columns from the first rows; None if the file has no rows.

    A column of numbers is float64; every other one is string.
    """
    about = header(part)
    for offset, block in blocks(part, about.begin, part.size, _HEAD_BYTES):
        table = _parse(block, about, None, f"{part.path} behind byte {offset}")
        if table.num_rows:
            return pa.schema([(field.name, _number_or_text(field.type)) for field in table.schema])
    return None


def read(
    part: Part,
    start: int,
    stop: int,
    schema: pa.Schema | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[pa.Table]:
    """Rows of the lines that begin in bytes [start, stop), some megabytes at a time.

    schema: types of the columns; without it all are text. Cells in MISSING are null.
    Raises DataError.
    """
    about = header(part)
    if not about.names:
        return
    types = dict.fromkeys(about.names, pa.string())
    if schema is not None:
        types = dict(zip(schema.names, schema.types, strict=True))
    for offset, block in blocks(part, max(start, about.begin), stop, block_bytes):
        table = _parse(block, about, types, f"{part.path} behind byte {offset}")
        if table.num_rows:
            yield table


def _parse(block: bytes, about: Header, types: Mapping[str, Any] | None, where: str) -> pa.Table:
    """Parse whole lines to a table. types: by column; None infers them. Raises DataError."""
    if b'"' in block:
        _require_closed_quotes(block, where)
    if not block.strip():
        return pa.table({name: pa.array([], pa.null()) for name in about.names})
    try:
        return csv.read_csv(
            pa.py_buffer(block),
            read_options=csv.ReadOptions(
                column_names=about.names, use_threads=False, block_size=len(block) + 1024
            ),
            parse_options=csv.ParseOptions(delimiter=about.separator),
            convert_options=csv.ConvertOptions(
                column_types=types, null_values=MISSING, strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: {_in_words(str(error), about)}") from error


def _in_words(error: str, about: Header) -> str:
    """Explain an error of pyarrow's reader by rows, columns and what to type."""
    if counts := _COUNTS.search(error):
        return f"a row has {counts[2]} cells, and the header {counts[1]}"
    if found := _CONVERSION.search(error):
        name, value = about.names[int(found[1])], found[2].partition("'")[0]
        as_text = hint("xain-participant", f"--categories {shlex.quote(name)}")
        return f"column {name!r} has {value!r}, and its first rows have numbers; {as_text}"
    if "UTF8" in error:
        return "the text is not UTF-8"
    return f"not a CSV file: {error}"


def _require_closed_quotes(block: bytes, where: str) -> None:
    """Raise DataError if a line has an odd number of quotation marks."""
    text = np.frombuffer(block, np.uint8)
    line_ends = np.flatnonzero(text == ord("\n"))
    lines = np.searchsorted(line_ends, np.flatnonzero(text == ord('"')))
    odd = np.flatnonzero(np.bincount(lines) % 2)
    if len(odd):
        raise _open_quotes(where, int(odd[0]))


def _open_quotes(where: str, line: int) -> DataError:
    """The error of a line in which a quotation mark stays open."""
    return DataError(
        f"{where}, line {line + 1} from there: a quotation mark stays open; cells with line breaks "
        "cannot be divided by bytes: write Parquet, or take the line breaks out"
    )


def _not_utf8(path: str) -> DataError:
    return DataError(f"{path}: the text is not UTF-8; save it so, or write Parquet")


def _cells(text: str, separator: str) -> list[str]:
    """Divide a line into cells; [] if one of them is too long."""
    try:
        return next(csv_reader([text], delimiter=separator))
    except CsvError:  # such as a name of more than 128 KiB
        return []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number_or_text(kind: pa.DataType) -> pa.DataType:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
    return pa.float64() if is_number else pa.string()
