"""Sparse rows of files in any format, in blocks and in batches, with their columns by key."""

import shlex
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pyarrow import compute
from scipy.sparse import csr_matrix, vstack

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.sources.libsvm import MAX_KEY
from xain_workloads.sources.parts import find, fingerprint
from xain_workloads.sources.reading import BLOCK_BYTES, read, schema
from xain_workloads.sources.shares import Share, shares


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a sparse matrix whose columns are numbered anew.

    keys: (m,) uint64, ascending: the keys that occur.
    features: (n, m) float64; column j is that of keys[j].
    targets: (n,) float64.
    """

    keys: NDArray[np.uint64]
    features: csr_matrix
    targets: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        return len(self.targets)

    def batches(self, num_rows: int) -> Iterator["Rows"]:
        """Consecutive batches of at most so many rows, each with the keys that occur in it."""
        for start in range(0, self.num_rows, num_rows):
            part = self.features[start : start + num_rows]
            used = np.unique(part.indices)
            columns = np.searchsorted(used, part.indices)
            features = csr_matrix(
                (part.data, columns, part.indptr), shape=(part.shape[0], len(used))
            )
            yield Rows(self.keys[used], features, self.targets[start : start + num_rows])


def batches_of(blocks: Iterable[Rows], num_rows: int) -> Iterator[Rows]:
    """Batches of exactly so many rows, and the rest last, wherever the blocks end."""
    held: list[Rows] = []
    num_held = 0
    for block in blocks:
        held.append(block)
        num_held += block.num_rows
        if num_held < num_rows:
            continue
        for batch in _joined(held).batches(num_rows):
            held, num_held = [batch], batch.num_rows
            if num_held == num_rows:
                yield batch
                held, num_held = [], 0
    if num_held:
        yield _joined(held)


def _joined(blocks: Sequence[Rows]) -> Rows:
    """Join the rows of blocks into one matrix, with all of their keys."""
    if len(blocks) == 1:
        return blocks[0]
    keys = np.unique(np.concatenate([block.keys for block in blocks]))
    features = [
        csr_matrix(
            (
                block.features.data,
                np.searchsorted(keys, block.keys)[block.features.indices],
                block.features.indptr,
            ),
            shape=(block.num_rows, len(keys)),
        )
        for block in blocks
    ]
    targets = np.concatenate([block.targets for block in blocks])
    return Rows(keys, vstack(features, format="csr"), targets)


class Source:
    """Rows at a path or URL: see sources.parts.find() for source and file_format.

    A row of libsvm has its keys. Of CSV and Parquet a column of numbers has its position, from 0,
    as key, and a row has its value there, or nothing where the value is 0 or missing. A column of
    text has a key for each category, a 1 there, and nothing where it is missing: with c columns and
    a bound b the key of NAME=CATEGORY is c + xxh3_64 mod (b - c), of these characters in UTF-8.

    target: column of CSV or Parquet with 0 and 1, or -1 and 1; "" for the last.
    categories: columns of numbers that are categories too.
    bound: keys are below; None for 2**53.
    encoding: a number below 2**32 that is equal for sources whose rows have the same keys.
    Raises DataError if files or columns are not there, and if there are no rows.
    """

    def __init__(
        self,
        source: str,
        file_format: str = "",
        target: str = "",
        categories: Collection[str] = (),
        bound: int | None = None,
    ) -> None:
        """Find the files, read their columns, and choose how rows get keys. Raises DataError."""
        self._parts = find(source, file_format)
        self._schema = schema(self._parts)
        self._encoder: _Encoder | None = None
        if self._parts[0].format != "libsvm":
            self._encoder = _Encoder(source, self._schema, target, categories, bound)
        elif target or categories:
            raise DataError(f"{source}: columns of libsvm files have numbers, and no names")
        if self._parts[0].format == "csv":  # categories as they are written, such as 007
            for name in categories:
                at = self._schema.get_field_index(name)
                self._schema = self._schema.set(at, pa.field(name, pa.string()))
        self.num_bytes = sum(part.size for part in self._parts)
        self.fingerprint = fingerprint(self._parts)
        about = None if self._encoder is None else self._encoder.about
        self.encoding = zlib.crc32(repr(about).encode())

    def shares(self, num_shares: int) -> list[Share]:
        """Divide the rows; a share may have none."""
        return shares(self._parts, num_shares)

    def read(self, share: Share, block_bytes: int = BLOCK_BYTES) -> Iterator[Rows]:
        """The rows of a share, some megabytes at a time. Raises DataError with file and byte."""
        for table in read(share, self._schema, block_bytes):
            yield _of_lists(table) if self._encoder is None else self._encoder.rows(table)


def _of_lists(table: pa.Table) -> Rows:
    """Convert a table with the columns of libsvm to rows."""
    targets, keys, values = (column.combine_chunks() for column in table.columns)
    used, columns = np.unique(keys.values.to_numpy(), return_inverse=True)
    features = csr_matrix(
        (values.values.to_numpy(), columns, keys.offsets.to_numpy()),
        shape=(table.num_rows, len(used)),
    )
    return Rows(used, features, targets.to_numpy())


class _Encoder:
    """Keys and values of the columns of a table.

    about: what two sources have in common whose rows have the same keys.
    """

    def __init__(
        self,
        source: str,
        columns: pa.Schema,
        target: str,
        categories: Collection[str],
        bound: int | None,
    ) -> None:
        """Check target, categories and bound, and tell columns of categories. Raises DataError."""
        self._source = source
        self._target = target or columns.names[-1]
        if missing := [name for name in (self._target, *categories) if name not in columns.names]:
            raise DataError(
                f"{source} has no column {missing[0]!r}; there are: {_listed(columns.names)}"
            )
        self._num_columns = len(columns.names)
        self._num_hashed = (bound or MAX_KEY) - self._num_columns
        if self._num_hashed < 1:
            raise DataError(
                f"{source} has {self._num_columns} columns, and keys are below {bound}: give a "
                f"bound above {self._num_columns}"
            )
        self._is_category = [
            name in categories or self._is_text(field)
            for name, field in zip(columns.names, columns, strict=True)
        ]
        self.about = (columns.names, self._target, self._is_category, self._num_hashed)

    def rows(self, table: pa.Table) -> Rows:
        """The rows of a table as keys and values: the position of a number's column, or the hash of
        a category. Raises DataError for a target that is missing, and for a value that is not
        finite."""
        targets = self._numbers(table, self._target)
        if np.isnan(targets).any():
            raise DataError(f"{self._source}: a row has no target {self._target!r}")
        at, keys, values = [], [], []
        for position, name in enumerate(table.column_names):
            if name == self._target:
                continue
            if self._is_category[position]:
                rows, found = self._hashed(table, name)
                numbers = np.ones(len(rows))
            else:
                column = self._numbers(table, name)
                rows = np.flatnonzero(column)
                rows = rows[~np.isnan(column[rows])]
                numbers = column[rows]
                found = np.full(len(rows), position, np.uint64)
            at.append(rows)
            keys.append(found)
            values.append(numbers)
        used, columns = np.unique(_concatenated(keys, np.uint64), return_inverse=True)
        features = csr_matrix(
            (
                _concatenated(values, np.float64),
                (_concatenated(at, np.intp), columns),
            ),
            shape=(table.num_rows, len(used)),
        )  # the values of equal keys are added
        return Rows(used, features, targets)

    def _hashed(self, table: pa.Table, name: str) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
        """(Rows that have a category, the keys of the categories)."""
        try:
            texts = table.column(name).cast(pa.large_string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise self._unfit(table.schema.field(name)) from error
        encoded = texts.combine_chunks().dictionary_encode()
        keys = [
            xxhash.xxh3_64_intdigest(f"{name}={text}".encode()) % self._num_hashed
            for text in encoded.dictionary.to_pylist()
        ]
        rows = np.flatnonzero(encoded.is_valid().to_numpy(zero_copy_only=False))
        indices = encoded.indices.drop_null().to_numpy()
        return rows, np.array(keys, np.uint64)[indices] + np.uint64(self._num_columns)

    def _numbers(self, table: pa.Table, name: str) -> NDArray[np.float64]:
        """The values of a column, nan where they are missing."""
        try:
            column = compute.cast(table.column(name), pa.float64())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            field = table.schema.field(name)
            if name != self._target and pa.types.is_integer(field.type):
                raise DataError(
                    f"{self._source}: column {name!r} has whole numbers beyond 2**53; "
                    + hint("xain-participant", f"--categories {shlex.quote(name)}")
                ) from error
            raise self._unfit(field) from error
        found: NDArray[np.float64] = column.to_numpy()
        if np.isinf(found).any():
            raise DataError(f"{self._source}: column {name!r} has a value that is not finite")
        return found

    def _is_text(self, field: Any) -> bool:
        """Whether a column has text. Raises DataError if it has neither text nor numbers."""
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        is_number = (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_null(kind)
        )
        is_text: bool = (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
        )
        if not (is_number or is_text):
            raise self._unfit(field)
        return is_text

    def _unfit(self, field: Any) -> DataError:
        """The error of a column, or the target, whose type cannot be used."""
        if field.name == self._target:
            return DataError(
                f"{self._source}: the target {field.name!r} is {field.type}, and it must be 0 and "
                "1, or -1 and 1"
            )
        return DataError(
            f"{self._source}: column {field.name!r} is {field.type}, neither numbers nor text"
        )


def _concatenated(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown
