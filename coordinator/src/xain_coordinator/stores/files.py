"""Weights as files in a folder: the embedded default.

An upload is written to `root/.incoming/` and takes its name only when it is whole and on the disk,
so neither a reader nor a crash ever meets half an object. Files of removed updates may be
written over by later uploads; see spares.py. Folders that become empty stay: removing one would
race with an upload that is about to write into it.
"""

import contextlib
import errno
import fcntl
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from xain_coordinator.core.vocabulary.keys import is_attempt
from xain_coordinator.ports import KeyExists, KeyNotFound, Reader, StoreUnavailable
from xain_coordinator.stores.paths import folder_to_path, key_to_path, path_to_key
from xain_coordinator.stores.spares import MARK_BYTES, SpareFiles, read_mark, write_mark
from xain_coordinator.stores.spares import SUFFIX as SPARE_SUFFIX
from xain_foundation.durable import make_directory, sync_directory

_INCOMING = ".incoming"  # no key has this path: a dot at the beginning is written as %2e
_LOCK = "lock"
_UPLOAD_SUFFIX = ".part"

# Uploads that a process leaves when it ends are kept by the next run for so long.
UNFINISHED_S = 3600.0

_WRITE_BEHIND_BYTES = 8 << 20  # a write that is worth a disk's while
# Wait for the lock of an upload that is being committed, or of a file that is being removed.
_LOCKED_S = 1.0


class FileStore:
    """Objects below `root`, which is created if it is missing.

    Several stores, in several processes, may share a root. Raises StoreUnavailable if the root
    cannot be used.
    """

    num_parallel = 1

    def __init__(self, root: Path) -> None:
        """Make the folder, and remove what ended processes have left, resumable uploads aside."""
        self._root = root.absolute()
        self._incoming = self._root / _INCOMING
        # Folders whose own name is known to be on the disk.
        self._settled = {self._root}
        self.spares = SpareFiles(self._incoming)
        with _unavailable("use", self._root):
            make_directory(self._incoming)
            self._sweep()

    def close(self) -> None:
        """Remove the spare files."""
        self.spares.clear()

    def open(self, key: str, start: int = 0, length: int | None = None) -> "FileReader":
        """Open the object's file. Raises KeyNotFound, and StoreUnavailable, also if the root is
        gone."""
        path = self._path(key)
        with _unavailable("read", path):
            try:
                return FileReader(path)
            except (FileNotFoundError, NotADirectoryError):
                self._incoming.stat()  # a root that is gone says nothing about the key
                raise KeyNotFound(key) from None

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> "FileUpload":
        """Begin an upload to a file in .incoming: a spare file of about this size, or else a new
        one. Raises StoreUnavailable."""
        path = self._path(key)
        with _unavailable("write", path):
            temp = self._temp(label)
            taken = self.spares.take(size_bytes, temp) if size_bytes else None
            fd, spare_bytes = taken or (self._open_temp(temp), 0)
            return FileUpload(self, key, path, temp, fd, spare_bytes=spare_bytes)

    def find_unfinished(self, key: str, label: str) -> "FileUpload | None":
        """The file that an upload with this label has left in .incoming, locked for this one; None
        if there is none, or its writer lives. Raises StoreUnavailable."""
        path = self._path(key)
        with _unavailable("read", path):
            for temp in self._incoming.glob(f"{label}.*{_UPLOAD_SUFFIX}"):
                # Gone, or still being written by a process that has not ended.
                with contextlib.suppress(OSError):
                    fd = _open_locked(temp)
                    size = read_mark(fd, os.fstat(fd).st_size)
                    return FileUpload(self, key, path, temp, fd, size)
        return None

    def sweep(self) -> None:
        """Remove labelled files in .incoming that no living process has locked; errors are
        ignored."""
        with contextlib.suppress(OSError):
            for temp in self._labelled():
                with contextlib.suppress(OSError):
                    self._sweep_one(temp)

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Write small objects, each a file, with one sync for each folder."""
        folders = set()
        for key, data in objects.items():
            upload = self.upload(key)
            upload.write(data)
            folders.add(upload.take_name(overwrite=True))
        for folder in folders:  # one sync for all that is in it
            self.sync(folder)

    def settle(self, key: str) -> None:
        """Make the name of an object durable; its bytes were before they got it. Raises KeyNotFound
        and StoreUnavailable."""
        # The bytes were synced before they got their name; the name is what may be missing.
        path = self._path(key)
        if not path.exists():
            raise KeyNotFound(key)
        with _unavailable("sync", path):
            self._settle(path.parent)
        self.sync(path.parent)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that begin with a prefix, in any order. Raises StoreUnavailable, while
        iterating."""
        # Only the folder that the prefix names is looked through.
        folder = prefix.rpartition("/")[0]
        start = self._root
        if folder:
            try:
                start = self._root / folder_to_path(folder)
            except ValueError:
                return  # no key begins like this
        with _unavailable("list", start):
            self._incoming.stat()  # a root that is gone is not an empty one
            for found, _, names in os.walk(start, onerror=_raise_unless_gone):
                below = Path(found).relative_to(self._root).as_posix()
                for name in names:
                    key = path_to_key(f"{below}/{name}".removeprefix("./"))
                    if key is not None and key.startswith(prefix):
                        yield key

    def delete(self, *keys: str) -> None:
        """Remove objects; files of updates become spare ones. A power cut may bring them back."""
        aside: dict[Path, Path] = {}  # spare files, with the folder that each comes from
        try:
            for key in keys:
                path = self._path(key)
                with _unavailable("delete", path), contextlib.suppress(FileNotFoundError):
                    # Other programs read and map models without a lock.
                    spare = self.spares.set_aside(path) if is_attempt(key) else None
                    if spare is None:
                        path.unlink()
                    else:
                        aside[spare] = path.parent
            if aside:
                # Else a power cut could bring an object back with what was written over it.
                for folder in (self._incoming, *dict.fromkeys(aside.values())):
                    self.sync(folder)
        except BaseException:
            for spare in aside:
                with contextlib.suppress(OSError):
                    spare.unlink()
            raise
        self.spares.add(aside)

    def sync(self, folder: Path) -> None:
        """Make the names in a folder durable. Raises StoreUnavailable."""
        with _unavailable("sync", folder):
            sync_directory(folder)

    def rename(self, temp: Path, path: Path, *, overwrite: bool) -> None:
        """Rename a file. The name is durable only after a sync of the folder. Raises OSError:
        FileExistsError if the name is taken and `overwrite` is False."""
        self._settle(path.parent)
        if overwrite:
            temp.replace(path)
            return
        # A lock on the root makes looking and renaming one step; the kernel frees it when its
        # holder dies. A hard link would need none, but not every file system has them.
        with (self._incoming / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.lexists(path):
                raise FileExistsError(path)
            temp.replace(path)

    def _path(self, key: str) -> Path:
        """Path of the file that an object has. Raises ValueError, as check_key does."""
        return self._root / key_to_path(key)

    def _settle(self, folder: Path) -> None:
        """Create a folder, and make its name and those above it durable."""
        if folder == self._root:
            return
        try:
            folder.mkdir(exist_ok=True)  # possibly made by a process that has not synced it yet
        except FileNotFoundError:
            self._settle(folder.parent)
            folder.mkdir(exist_ok=True)
        if folder not in self._settled:
            self._settle(folder.parent)
            sync_directory(folder.parent)
            self._settled.add(folder)

    def _temp(self, label: str = "") -> Path:
        """Path of a new file in .incoming, whose name begins with the label."""
        start = f"{label}." if label else ""
        return self._incoming / f"{start}{uuid.uuid4().hex}{_UPLOAD_SUFFIX}"

    def _open_temp(self, temp: Path) -> int:
        """A new file for an upload, locked so that no other store takes it for abandoned."""
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        # Where locks are not supported, _sweep cannot take one either and removes nothing.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def _sweep(self) -> None:
        """Remove what processes that have died leave here, except the latest resumable uploads."""
        oldest = time.time() - UNFINISHED_S
        resumable = self._labelled()
        for temp in list(self._incoming.iterdir()):
            # Another store may sweep, or finish its upload, at the same time.
            with contextlib.suppress(OSError):
                is_kept = temp in resumable and temp.stat().st_mtime > oldest
                if temp.suffix in (_UPLOAD_SUFFIX, SPARE_SUFFIX) and not is_kept:
                    self._sweep_one(temp)

    def _labelled(self) -> set[Path]:
        """Files in .incoming of uploads that have a label, and may be resumed."""
        return set(self._incoming.glob(f"*.*{_UPLOAD_SUFFIX}"))

    def _sweep_one(self, temp: Path) -> None:
        """Remove a file in .incoming. Raises OSError if its writer lives, or it is gone."""
        fd = _open_locked(temp)
        try:
            temp.unlink()
        finally:
            os.close(fd)


class FileReader(Reader):
    """An open file. It goes on showing the same object if the key is overwritten or deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = _open_to_read(path)
        self.size = os.fstat(self._fd).st_size

    def fileno(self) -> int:
        """The descriptor, for sendfile; good until close()."""
        return self._open_fd()

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the object. Raises
        StoreUnavailable."""
        with _unavailable("read", self._path):
            return os.pread(self._open_fd(), length, offset)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer, and return how many bytes there were. Raises StoreUnavailable."""
        num_read = 0
        with _unavailable("read", self._path):
            while num_read < len(buffer):
                count = os.preadv(self._open_fd(), [buffer[num_read:]], offset + num_read)
                if not count:
                    break
                num_read += count
        return num_read

    def _open_fd(self) -> int:
        """The descriptor. Raises ValueError once the reader is closed."""
        if self._fd is None:
            raise ValueError("the reader is closed")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _open_to_read(path: Path) -> int:
    """Open an object's file with a shared lock, so that it is not written over. Raises OSError."""
    gives_up_at = time.monotonic() + _LOCKED_S
    while True:
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            if time.monotonic() > gives_up_at:
                os.close(fd)
                raise
            time.sleep(0.001)  # flock has no time limit of its own
        except FileNotFoundError:
            pass  # the next look says so
        except OSError:
            return fd  # without locks no file is written over
        os.close(fd)


def _open_locked(temp: Path) -> int:
    """Open and lock the file of an ended writer. Raises OSError while the writer lives, or if the
    file is gone."""
    fd = os.open(temp, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temp.stat()  # in between it may have become an object, or have been removed
    except BaseException:  # no other code has the descriptor
        os.close(fd)
        raise
    return fd


class FileUpload:
    """A file in .incoming, a new one or what an ended process has left there. A failed write or
    commit ends it: nothing of it stays.

    size: of what is written. spare_bytes: size of the file if it is written over: a mark at
    its end says how far that has come.
    """

    def __init__(
        self,
        store: FileStore,
        key: str,
        path: Path,
        temp: Path,
        fd: int,
        size: int = 0,
        *,
        spare_bytes: int = 0,
    ) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._temp = temp
        self._fd: int | None = fd
        self.size = size
        self._on_its_way = size  # bytes that the disk has been told of
        self._spare_bytes = spare_bytes

    def read(self, offset: int, length: int) -> bytes:
        with _unavailable("read", self._path):
            return os.pread(self._open_fd(), length, offset)

    def resume(self, size: int) -> Self:
        """Cut the file to its first `size` bytes, and go on after them. Raises StoreUnavailable."""
        with _unavailable("write", self._path):
            os.truncate(self._open_fd(), size)
            os.lseek(self._open_fd(), size, os.SEEK_SET)
        self.size = self._on_its_way = size
        return self

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes; on a full disk spare files make room. In a spare file the mark is moved on.
        After a failure nothing of the upload stays. Raises StoreUnavailable."""
        fd = self._open_fd()
        with self._ended_by_failure(), _unavailable("write", self._path):
            view = memoryview(chunk).cast("B")
            if self._spare_bytes and self.size + len(view) > self._spare_bytes - MARK_BYTES:
                self._cut(fd)  # the mark is in the way; from here on the size tells
            self.size += len(view)
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except OSError as error:
                    if error.errno != errno.ENOSPC or not self._store.spares.clear():
                        raise
            if self._spare_bytes:
                write_mark(fd, self._spare_bytes, self.size)
        if self.size - self._on_its_way >= _WRITE_BEHIND_BYTES:
            self._write_behind(fd)

    def _cut(self, fd: int) -> None:
        """Truncate a spare file behind the bytes that were written."""
        if self._spare_bytes > self.size:
            os.ftruncate(fd, self.size)
        self._spare_bytes = 0

    def _write_behind(self, fd: int) -> None:
        """Start writing the latest bytes to the disk, so that the sync at the end has little to
        do."""
        if sys.platform == "linux":
            # DONTNEED says that the pages are of no use in memory: the kernel begins to write
            # dirty pages, as all of these are, keeps them, and drops only clean ones.
            length = self.size - self._on_its_way
            with contextlib.suppress(OSError):  # advice: a file system may not take it
                os.posix_fadvise(fd, self._on_its_way, length, os.POSIX_FADV_DONTNEED)
        self._on_its_way = self.size

    def commit(self, *, overwrite: bool) -> None:
        """Give the object its name, durably. Raises KeyExists or StoreUnavailable. After the latter
        the object may be there all the same, whole, if only syncing its folder failed."""
        try:
            folder = self.take_name(overwrite=overwrite)
        except KeyExists:
            # The caller relies on an object that is there, and its writer may have died before
            # this step.
            self._store.sync(self._path.parent)
            raise
        self._store.sync(folder)

    def take_name(self, *, overwrite: bool) -> Path:
        """Sync the file and give it the name of its object: a commit but for the sync of the
        folder, whose path is returned. Raises KeyExists and StoreUnavailable."""
        fd = self._open_fd()
        with self._ended_by_failure(), _unavailable("write", self._path):
            self._cut(fd)
            os.fsync(fd)
            try:
                self._store.rename(self._temp, self._path, overwrite=overwrite)
            except FileExistsError:
                raise KeyExists(self._key) from None
        # The file is closed last: its lock keeps it from being swept.
        self._close()
        return self._path.parent

    def suspend(self) -> None:
        """Keep the upload for a later run; one without a label is swept by it."""
        if self._fd is not None:
            with _unavailable("write", self._path):
                self._cut(self._fd)
        self._close()

    def abort(self) -> None:
        """Remove the file; what cannot be removed is swept by the next run."""
        if self._fd is None:
            return
        self._close()
        # A file that cannot be removed now is swept by the next run.
        with contextlib.suppress(OSError):
            self._temp.unlink()

    @contextlib.contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        """Remove the file if the block raises; the error is raised again."""
        try:
            yield
        except BaseException:  # half an object is removed
            self._close()
            with contextlib.suppress(OSError):
                self._temp.unlink()
            raise

    def _open_fd(self) -> int:
        """The descriptor. Raises ValueError once the upload is over."""
        if self._fd is None:
            raise ValueError(f"the upload of {self._key!r} is over")
        return self._fd

    def _close(self) -> None:
        """Close the file, which releases its lock."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def _unavailable(verb: str, path: Path) -> Iterator[None]:
    """Raise StoreUnavailable in place of an OSError of the block. verb: what was tried, for the
    message."""
    try:
        yield
    except OSError as error:
        # Not the error's own text: it names the temporary file, which is of no use to an operator.
        reason = error.strerror or type(error).__name__
        raise StoreUnavailable(f"cannot {verb} {path}: {reason}") from error


def _raise_unless_gone(error: OSError) -> None:
    """Raise an error of os.walk, except for a folder that was removed meanwhile."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
