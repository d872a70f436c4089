"""Rows of Parquet files: a row group is of the range of bytes in which its middle lies.

Positions are as if the row groups filled the whole file, so that a large footer makes no share
smaller than others.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from xain_workloads.errors import DataError
from xain_workloads.sources.parts import Part, read_bytes

BATCH_BYTES: Final = 4 << 20
_MAX_BATCH_ROWS: Final = 1 << 16
_BUFFER_BYTES: Final = 1 << 20  # of a column, read at once


def schema_of(part: Part) -> pa.Schema:
    """Names and types of the columns. Raises DataError."""
    with _open(part) as file:
        return file.schema_arrow.remove_metadata()


def read(part: Part, start: int, stop: int, batch_bytes: int = BATCH_BYTES) -> Iterator[pa.Table]:
    """Rows of the row groups whose middle is in bytes [start, stop), some megabytes at a time.
    Raises DataError."""
    with _open(part) as file:
        before_footer = max(1, part.size - file.metadata.serialized_size)
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            position = min(_middle(group) * part.size // before_footer, part.size - 1)
            if group.num_rows and start <= position < stop:
                row_bytes = max(1, group.total_byte_size // group.num_rows)
                rows = max(1, min(_MAX_BATCH_ROWS, batch_bytes // row_bytes))
                for batch in file.iter_batches(rows, row_groups=[index], use_threads=False):
                    yield pa.Table.from_batches([batch])


def _middle(group: Any) -> int:
    """The byte in the middle of a row group, between the first one and the last one of the file."""
    columns = [group.column(index) for index in range(group.num_columns)]
    # A column begins with its dictionary, if it has one.
    begins = [each.dictionary_page_offset or each.data_page_offset for each in columns]
    num_bytes = sum(int(each.total_compressed_size) for each in columns)
    return int(min(begins)) + num_bytes // 2


@contextmanager
def _open(part: Part) -> Iterator[Any]:
    """Open a Parquet file within a block, in which errors of pyarrow become DataError."""
    try:
        # Without pre_buffer a row group of any size takes a page and a buffer of each column.
        with parquet.ParquetFile(
            pa.PythonFile(_Bytes(part), mode="r"), buffer_size=_BUFFER_BYTES, pre_buffer=False
        ) as file:
            yield file
    except pa.ArrowException as error:
        raise DataError(f"{part.path}: no Parquet file, or a damaged one: {error}") from error


class _Bytes(io.RawIOBase):
    """A file to be read and sought in, each read of which is one of read_bytes()."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._part.size}
        self._position = begin[whence] + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._part.size if size is None or size < 0 else self._position + size
        found = read_bytes(self._part, self._position, stop)
        self._position += len(found)
        return found
