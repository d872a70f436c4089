"""The rows of a share, whatever the format and the place of its files."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from xain_workloads.errors import DataError
from xain_workloads.sources import delimited, libsvm, lines, row_groups
from xain_workloads.sources.parts import Part
from xain_workloads.sources.shares import Piece, Share

BLOCK_BYTES = lines.BLOCK_BYTES


def schema(parts: Sequence[Part]) -> pa.Schema:
    """Names and types of the columns, by the first file with rows; the others must have them too.

    libsvm: "target", and the lists "keys" and "values". CSV: float64 where the first rows have
    numbers, else string. Raises DataError, also if CSV files have headers alone.
    """
    for part in parts:
        match part.format:
            case "libsvm":
                return libsvm.SCHEMA
            case "parquet":
                return row_groups.schema_of(part)
            case _ if (found := delimited.inferred(part)) is not None:
                return found
    raise DataError(f"{parts[0].source} has no rows")


def read(
    share: Share, schema: pa.Schema | None = None, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """The rows of a share in the order of the files, in tables of some megabytes.

    schema: of schema(); without it the columns of a CSV file are text.
    block_bytes: read at once, and a row more.
    Raises DataError, with file and byte, also where a file has other columns than the schema.
    """
    for piece in share:
        for table in _tables(piece, schema, block_bytes):
            if schema is not None and not table.schema.equals(schema):
                raise DataError(f"{piece.part.path}: {_difference(table.schema, schema)}")
            yield table


def _tables(piece: Piece, schema: pa.Schema | None, block_bytes: int) -> Iterator[pa.Table]:
    """Read the rows of a piece by the format of its file."""
    part, start, stop = piece.part, piece.start, piece.stop
    if part.format == "parquet":
        yield from row_groups.read(part, start, stop, block_bytes)
    elif part.format == "csv":
        yield from delimited.read(part, start, stop, schema, block_bytes)
    else:
        for offset, block in lines.blocks(part, start, stop, block_bytes):
            table = libsvm.parse(block, f"{part.path} behind byte {offset}")
            if table.num_rows:
                yield table


def _difference(found: pa.Schema, expected: pa.Schema) -> str:
    """How a file's columns differ from those of the first one."""
    if found.names != expected.names:
        for one, other in zip(found.names, expected.names, strict=False):
            if one != other:
                return f"there is a column {one!r} where the first file has {other!r}"
        return f"{len(found.names)} columns, and the first file has {len(expected.names)}"
    name = next(name for name in found.names if found.field(name) != expected.field(name))
    types = found.field(name).type, expected.field(name).type
    return f"column {name!r} is {types[0]}, and {types[1]} in the first file"
