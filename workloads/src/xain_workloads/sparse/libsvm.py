"""Reader of libsvm files by byte ranges, from any location that fsspec supports.

The files are taken as one text in the order of their names. Part i of k has the lines that begin in
bytes [i/k, (i+1)/k) of it, so each line is read exactly once however many parts there are, and no
part reads more than its bytes and the rest of its last line.
"""

import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import fsspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv
from scipy.sparse import csr_matrix, vstack

from xain_workloads.errors import DataError, NoData

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
LINE_BYTES = 64 << 10  # read at once where the end of a line is looked for
MAX_KEY = 1 << 53  # keys are read as float64

# hdfs-native tries a name node fifteen times, for minutes and without a word. A first look with
# these settings shows within seconds whether one answers; reading is as patient as configured.
_FIRST_LOOK = {"hdfs": {"dfs.client.failover.max.attempts": "3"}}

_COMMENT = re.compile(rb"#[^\n]*")
_QUERY = re.compile(rb"\bqid:\d+")
_BLANK = re.compile(rb"\n[ \t\r\n]*")
_SEPARATORS = bytes.maketrans(b" :\t\r", b"\n\n\n\n")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a file: the lines that begin there."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a sparse matrix whose columns are numbered anew.

    keys: (m,) uint64, ascending: the column numbers of the file that occur.
    features: (n, m) float64; column j is column keys[j] of the file.
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
    """All rows of some blocks."""
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


class LibsvmFiles:
    """Files of rows "target key:value key:value ...", keys ascending within a row.

    source: a path, a folder, or a pattern with *, local or as a URL (s3://, hdfs://) that a driver
        of fsspec reads. Hidden files are left out of a folder.
    fingerprint: equal for two sources whose files have the same names and sizes; below 2**32.
    Raises DataError if there is no such file, and NoData if all are empty.
    """

    def __init__(self, source: str) -> None:
        scheme, _ = fsspec.core.split_protocol(source)
        try:
            fsspec.get_filesystem_class(scheme or "file")
        except (ImportError, ValueError):
            raise DataError(
                f"{source}: no driver for {scheme}:// is installed; those for s3:// and hdfs:// "
                "come with the extras s3 and hdfs of xain-participant"
            ) from None
        with _driver_errors(source):
            if scheme in _FIRST_LOOK:
                files, _ = fsspec.core.url_to_fs(source, **_FIRST_LOOK[scheme])
                files.info("/")
            self._files, found = fsspec.core.url_to_fs(source)
            if self._files.isdir(found):
                found = posixpath.join(found, "*")
            names = sorted(self._files.glob(found)) if "*" in found else [found]
            sizes = [
                (name, int(self._files.size(name) or 0))
                for name in names
                if self._files.isfile(name) and not posixpath.basename(name).startswith((".", "_"))
            ]
        if not sizes:
            raise DataError(f"there is no file {source}")
        self._sizes = dict(sizes)
        named = [(posixpath.basename(name), size) for name, size in sizes]
        self.fingerprint = zlib.crc32(repr(named).encode())  # of names and sizes
        self.num_bytes = sum(self._sizes.values())
        if not self.num_bytes:
            raise NoData(f"{source} is empty")

    def part(self, index: int, num_parts: int) -> list[Piece]:
        """The pieces of part `index` of `num_parts`; an empty list if no line may begin there."""
        start = self.num_bytes * index // num_parts
        stop = self.num_bytes * (index + 1) // num_parts
        pieces, offset = [], 0
        for name, size in self._sizes.items():
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high:
                pieces.append(Piece(name, low, high))
            offset += size
        return pieces

    def read(self, pieces: Sequence[Piece], block_bytes: int = BLOCK_BYTES) -> Iterator[Rows]:
        """The rows of pieces, some megabytes at a time. Raises DataError with file and byte."""
        for piece in pieces:
            for offset, block in self._blocks(piece, block_bytes):
                yield _parsed(block, f"{piece.path} behind byte {offset}")

    def _blocks(self, piece: Piece, block_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Whole lines that begin in a piece, with the offset of the first."""
        position = piece.start
        if position:  # a line that began before it is of the piece before
            position += len(self._line(piece.path, position - 1)) - 1
        while position < piece.stop:
            block = self._bytes(piece.path, position, min(position + block_bytes, piece.stop))
            if not block:
                break
            if not block.endswith(b"\n"):
                block += self._line(piece.path, position + len(block))
            if len(block) > block_bytes + MAX_LINE_BYTES - 1:
                raise DataError(
                    f"{piece.path}: a line behind byte {position} has more than "
                    f"{MAX_LINE_BYTES} bytes"
                )
            yield position, block
            position += len(block)

    def _line(self, path: str, start: int) -> bytes:
        """The bytes of a file from `start` to the end of the line, at most MAX_LINE_BYTES."""
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            begin = start + len(line)
            more = self._bytes(path, begin, begin + LINE_BYTES)
            if not more:
                break
            line += more[: more.find(b"\n") + 1 or None]
        return line

    def _bytes(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, or as far as it goes. Raises DataError."""
        stop = min(stop, self._sizes[path])
        if start >= stop:
            return b""
        with _driver_errors(path):
            # By name: the second parameter of s3fs is the version of an object.
            found = bytes(self._files.cat_file(path, start=start, end=stop))
        if len(found) != stop - start:
            raise DataError(
                f"{path}: bytes {start} to {stop} were asked for, and {len(found)} came; the file "
                "has changed while it was read, or its file system reads no ranges"
            )
        return found


@contextmanager
def _driver_errors(source: str) -> Iterator[None]:
    """Turn what a driver of fsspec raises, which may be of any class, into a DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"there is no file {source}") from None
    except PermissionError as error:
        raise DataError(f"{source} may not be read with the credentials of this process") from error
    except Exception as error:  # a driver may raise any class
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{source} cannot be read; its file system says: {why}") from error


def _parsed(block: bytes, where: str) -> Rows:
    """Rows of whole lines. Raises DataError."""
    if b"#" in block:
        block = _COMMENT.sub(b"", block)
    if b"qid:" in block:
        block = _QUERY.sub(b"", block)
    block = _BLANK.sub(b"\n", block.strip(b" \t\r\n") + b"\n")
    text = np.frombuffer(block, np.uint8)
    line_ends = np.flatnonzero(text == ord("\n"))
    if block == b"\n":
        return Rows(np.empty(0, np.uint64), csr_matrix((0, 0)), np.empty(0))
    # Rows have one number each, and two for each colon.
    stops = np.searchsorted(np.flatnonzero(text == ord(":")), line_ends)
    numbers = _numbers(block, where)
    at = np.arange(len(stops)) + 2 * np.concatenate(([0], stops[:-1]))
    if len(numbers) != len(stops) + 2 * stops[-1]:
        raise DataError(f"{where}: a line is not 'target key:value key:value ...'")
    targets, pairs = numbers[at], np.delete(numbers, at).reshape(-1, 2)
    keys, values = pairs[:, 0], pairs[:, 1]
    if not (np.isfinite(values).all() and np.isfinite(targets).all()):
        raise DataError(f"{where}: a value is not finite")
    if not ((keys >= 0) & (keys <= MAX_KEY) & (keys == np.floor(keys))).all():
        raise DataError(f"{where}: keys are whole numbers from 0 to {MAX_KEY}")
    ascends = np.diff(keys) > 0
    first_of_row = stops[:-1][(stops[:-1] > 0) & (stops[:-1] < len(keys))]
    ascends[first_of_row - 1] = True
    if not ascends.all():
        raise DataError(f"{where}: the keys of a row ascend, each once")
    used, columns = np.unique(keys.astype(np.uint64), return_inverse=True)
    features = csr_matrix(
        (values, columns, np.concatenate(([0], stops))), shape=(len(targets), len(used))
    )
    return Rows(used, features, targets)


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
