"""Files of rows at a path or URL, with their sizes, and ranges of their bytes, by fsspec."""

import posixpath
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import fsspec

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_workloads.errors import DataError

FORMATS: Final = ("libsvm", "csv", "parquet")
_BY_SUFFIX: Final = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst", ".zip")
_HTTP: Final = ("http", "https")
# A web server is down for seconds when it is started again; these are 15 s in all.
NUM_HTTP_READS: Final = 6
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 8.0
# Statuses of a server that is too busy, or starts, or waits for another one.
_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "hdfs": "hdfs", "http": "http", "https": "http"}

# Ranges are of the bytes that are stored, and not of those that a server packs for the way.
_PLAIN_BYTES: Final = {
    "client_kwargs": {"trust_env": True, "headers": {"Accept-Encoding": "identity"}}
}
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = dict.fromkeys(_HTTP, _PLAIN_BYTES)

# hdfs-native tries a name node fifteen times, for minutes and without a word. A first look with
# these settings shows within seconds whether one answers; reading is as patient as configured.
_FIRST_LOOK: Final = {"hdfs": {"dfs.client.failover.max.attempts": "3"}}


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A file of rows. Plain values, which another process or machine can read with.

    source: as the user named it. path: of the file, in the file system of source.
    size: bytes. format: one of FORMATS.
    """

    source: str
    path: str
    size: int
    format: str

    @property
    def name(self) -> str:
        """The last part of the path, without the query of a URL."""
        return _name(self.path)


def find(source: str, file_format: str = "") -> list[Part]:
    """The files of a source, in the order of their paths; empty files are left out.

    source: a path, a folder, or a pattern with *; local, or a URL that a driver of fsspec reads:
        s3://, hdfs://, http:// or https://. Files of a folder or a pattern whose names begin with
        "." or "_" are left out. Folders and patterns at http:// need the server's page of links; a
        folder there ends with "/".
    file_format: one of FORMATS; "" for what the names tell: .csv or .tsv, .parquet or .pq, else
        libsvm.
    Raises DataError if there is no such file, if an HTTP server reads no ranges of bytes, and if
    all files are empty.
    """
    scheme = _scheme(source)
    with _driver_errors(source):
        if scheme in _FIRST_LOOK:
            fsspec.core.url_to_fs(source, **_FIRST_LOOK[scheme])[0].info("/")
        files, path = fsspec.core.url_to_fs(source, **_OPTIONS.get(scheme, {}))
        files.invalidate_cache()  # of what was there at an earlier look
        if path.endswith("/") if scheme in _HTTP else files.isdir(path):
            path = posixpath.join(path, "*")
        if "*" in (path.partition("?")[0] if scheme in _HTTP else path):
            found = files.glob(path, detail=True)
            found = {each: found[each] for each in sorted(found) if not _is_hidden(each)}
        else:
            found = {path: files.info(path)}
        sizes = {
            each: _size(files, each, about)
            for each, about in found.items()
            # A link in a local folder is "other": fsspec does not follow it there.
            if about["type"] == "file" or (about.get("islink") and files.isfile(each))
        }
    if not sizes:
        raise DataError(f"there is no file {source}")
    parts = [
        Part(source, each, size, file_format or _format_of(each))
        for each, size in sizes.items()
        if size
    ]
    if not parts:
        raise DataError(f"{source} is empty")
    if len(formats := {part.format for part in parts}) > 1:
        raise DataError(f"{source} has files of several formats: {', '.join(sorted(formats))}")
    if scheme in _HTTP:
        _require_ranges(files, max(parts, key=lambda part: part.size))
    return parts


def fingerprint(parts: Sequence[Part]) -> int:
    """A number below 2**32 that is equal for files of the same names, sizes and format.

    Names are without folders: machines may have the same files in different places.
    """
    return zlib.crc32(repr([(part.name, part.size, part.format) for part in parts]).encode())


def read_bytes(part: Part, start: int, stop: int, first_wait_s: float = FIRST_WAIT_S) -> bytes:
    """Bytes [start, stop) of a file, or as far as it goes.

    A read over HTTP that fails in a way that may pass, or is cut, is done again up to
    NUM_HTTP_READS times in all; the drivers for S3 and HDFS do so themselves. Raises DataError.

    first_wait_s: before the second read; each other wait is twice as long.
    """
    stop = min(stop, part.size)
    if start >= stop:
        return b""
    scheme = _scheme(part.source)
    waits = Backoff(first_wait_s, LONGEST_WAIT_S)
    for left in reversed(range(NUM_HTTP_READS if scheme in _HTTP else 1)):
        try:
            with _driver_errors(part.path):
                files, _ = fsspec.core.url_to_fs(part.source, **_OPTIONS.get(scheme, {}))
                # Arguments by name: the second parameter of s3fs is the version of an object.
                found = bytes(files.cat_file(part.path, start=start, end=stop))
        except DataError as error:
            cause = error.__cause__
            if not left or not _may_pass(cause):
                raise
            # Not the text of a status, which has the URL, and a URL may be signed.
            status = getattr(cause, "status", None)
            why = f"{type(cause).__name__}: {cause}" if status is None else f"status {status}"
        else:
            if not left or len(found) >= stop - start:
                break
            why = f"{len(found)} of {stop - start} bytes came"
        wait_s = waits.next_s()
        log.warning("reading_again", file=part.name, start=start, reason=why, wait_s=wait_s)
        time.sleep(wait_s)  # the file system may be back then
    if len(found) != stop - start:
        raise DataError(
            f"{part.path}: bytes {start} to {stop} were asked for, and {len(found)} came; the file "
            "has changed while it was read, or its file system reads no ranges"
        )
    return found


def _may_pass(error: BaseException | None) -> bool:
    """Whether a server that answered so, or did not answer, may send the bytes a moment later.
    None: there is no such file."""
    if error is None or isinstance(error, PermissionError):
        return False
    status = getattr(error, "status", None)
    return status is None or status in _PASSING


def _scheme(source: str) -> str:
    """The scheme of a URL, or "file". Raises DataError if fsspec has no driver for it."""
    scheme, _ = fsspec.core.split_protocol(source)
    scheme = scheme or "file"
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError):
        extra = _EXTRAS.get(scheme)
        which = f"it comes with xain-participant[{extra}]" if extra else "no extra has one"
        raise DataError(f"{source}: no driver for {scheme}:// is installed; {which}") from None
    return scheme


def _size(files: Any, path: str, about: Mapping[str, Any]) -> int:
    """Size of a file in bytes, asked of the server if its listing lacks it. Raises DataError."""
    size = about.get("size")
    if size is None:  # a link in a page of an HTTP server
        size = files.info(path).get("size")
    if size is None:
        raise DataError(f"{path}: the server does not tell how large the file is")
    return int(size)


def _require_ranges(files: Any, part: Part) -> None:
    """Raise DataError if an HTTP server sends the whole of a file where one byte was asked for."""
    if part.size < 2:
        return
    with _driver_errors(part.path), files.open(part.path, size=part.size, block_size=1) as file:
        file.seek(part.size - 1)
        try:
            file.read(1)
        except ValueError:  # before it has read the whole file
            raise DataError(
                f"{part.path}: the server sends whole files only, and a share of the rows is a "
                "range of bytes; use a server that knows Range requests, such as nginx, or copy "
                "the files"
            ) from None


def _name(path: str) -> str:
    return posixpath.basename(path.partition("?")[0] if "://" in path else path)


def _is_hidden(path: str) -> bool:
    """Also a link of a server's page that sorts the page, such as ?C=N;O=D: it has no name."""
    name = _name(path)
    return not name or name.startswith((".", "_"))


def _format_of(path: str) -> str:
    """Format of a file by the end of its name. Raises DataError for a compressed one."""
    name = _name(path).lower()
    if name.endswith(_COMPRESSED):
        raise DataError(
            f"{path}: a packed file cannot be read from its middle on; unpack it, or write "
            "Parquet, which is packed by row group"
        )
    return _BY_SUFFIX.get(posixpath.splitext(name)[1], "libsvm")


@contextmanager
def _driver_errors(source: str) -> Iterator[None]:
    """Turn what a driver of fsspec raises, which may be of any class, into a DataError."""
    try:
        yield
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{source} may not be read with the credentials of this process") from error
    except Exception as error:  # a driver may raise any class
        cause: BaseException | None = error
        if isinstance(error, FileNotFoundError):
            # The driver for HTTP says of every failure that there is no such file.
            cause = error.__cause__ if source.startswith("http") else None
        if cause is None or getattr(cause, "status", None) in (404, 410):
            raise DataError(f"there is no file {source}") from None
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise DataError(f"{source} cannot be read; its file system says: {why}") from error
