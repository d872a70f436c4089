"""Lines "target key:value key:value ..." of libsvm files as Arrow tables."""

import re
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from xain_workloads.errors import DataError

MAX_KEY: Final = 1 << 53  # keys are read as float64

SCHEMA: Final = pa.schema(
    [
        ("target", pa.float64()),
        ("keys", pa.large_list(pa.uint64())),
        ("values", pa.large_list(pa.float64())),
    ]
)

_COMMENT = re.compile(rb"#[^\n]*")
_QUERY = re.compile(rb"\bqid:\d+")
_BLANK = re.compile(rb"\n[ \t\r\n]*")
_SEPARATORS = bytes.maketrans(b" :\t\r", b"\n\n\n\n")


def parse(block: bytes, where: str) -> pa.Table:
    """Parse whole lines to rows with the columns of SCHEMA. Raises DataError."""
    if b"#" in block:
        block = _COMMENT.sub(b"", block)
    if b"qid:" in block:
        block = _QUERY.sub(b"", block)
    block = _BLANK.sub(b"\n", block.strip(b" \t\r\n") + b"\n")
    if block == b"\n":
        return SCHEMA.empty_table()
    text = np.frombuffer(block, np.uint8)
    line_ends = np.flatnonzero(text == ord("\n"))
    # Rows have one number each, and two for each colon.
    stops = np.searchsorted(np.flatnonzero(text == ord(":")), line_ends)
    starts = np.concatenate(([0], stops[:-1]))
    numbers = _numbers(block, where)
    at = np.arange(len(stops)) + 2 * starts
    if len(numbers) != len(stops) + 2 * stops[-1]:
        raise DataError(f"{where}: a line is not 'target key:value key:value ...'")
    targets, pairs = numbers[at], np.delete(numbers, at).reshape(-1, 2)
    keys, values = pairs[:, 0], pairs[:, 1]
    if not (np.isfinite(values).all() and np.isfinite(targets).all()):
        raise DataError(f"{where}: a value is not finite")
    if not ((keys >= 0) & (keys <= MAX_KEY) & (keys == np.floor(keys))).all():
        raise DataError(f"{where}: keys are whole numbers from 0 to {MAX_KEY}")
    ascends = np.diff(keys) > 0
    first_of_row = starts[(starts > 0) & (starts < len(keys))]
    ascends[first_of_row - 1] = True
    if not ascends.all():
        raise DataError(f"{where}: the keys of a row ascend, each once")
    offsets = pa.array(np.append(0, stops), pa.int64())
    columns = [
        pa.array(targets),
        pa.LargeListArray.from_arrays(offsets, pa.array(keys.astype(np.uint64))),
        pa.LargeListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values))),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _numbers(block: bytes, where: str) -> NDArray[np.float64]:
    """All numbers of a text in their order, by pyarrow's reader of one column."""
    try:
        table = csv.read_csv(
            pa.py_buffer(block.translate(_SEPARATORS)),
            read_options=csv.ReadOptions(
                column_names=["number"], use_threads=False, block_size=2 * len(block) + 1024
            ),
            parse_options=csv.ParseOptions(quote_char=False),
            convert_options=csv.ConvertOptions(
                column_types={"number": pa.float64()}, null_values=[]
            ),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: not a libsvm file: there is text that is no number") from error
    numbers: NDArray[np.float64] = table.column(0).to_numpy()
    return numbers
