"""Files of removed updates, kept to be written over by later uploads.

Their pages are in the page cache already, and writing to those takes a tenth of the time that the
kernel needs for new ones. A spare file has a name in the folder of unfinished uploads that is none
of an object or of an upload, so after a crash nothing takes it for either; the next start removes
it.

A file that the coordinator reads is not kept: its readers hold a shared lock, and a file becomes
spare, and is written over, under an exclusive one. Where the system has no such locks no file is
kept. Other programs take no lock, so models, which people read and map, are never kept, and neither
is a file with a second name or a symbolic link.
"""

import fcntl
import os
import stat
import struct
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

SUFFIX = ".spare"
MIN_BYTES = 1 << 20  # of a file that is worth keeping

_MARK = struct.Struct("<8sQQ")
_MAGIC = b"\x93written"
MARK_BYTES = _MARK.size


class SpareFiles:
    """Safe to use from several threads.

    folder: where they lie; renaming a file into it must be possible.
    """

    max_files = 64
    max_bytes = 2 << 30  # of all of them

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}  # with their sizes
        self._released: set[Path] = set()

    def keep(self, path: Path) -> Path | None:
        """Make a spare file of an object's. Returns it for release() or drop(), or None if the
        object is still where it was."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # not ours to write to, or gone; removing it may be allowed all the same
            return None
        try:
            return self._keep(fd, path)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _keep(self, fd: int, path: Path) -> Path | None:
        if not _is_locked(fd, path):
            return None
        status = os.fstat(fd)
        if not _has_one_name(status) or status.st_size < MIN_BYTES:
            return None
        spare = self._folder / f"{uuid.uuid4().hex}{SUFFIX}"
        with self._lock:
            num_bytes = sum(self._files.values()) + status.st_size
            if len(self._files) >= self.max_files or num_bytes > self.max_bytes:
                return None
            self._files[spare] = status.st_size
        try:
            path.rename(spare)
        except OSError:
            with self._lock:
                self._files.pop(spare, None)
            raise
        return spare

    def release(self, spares: Iterable[Path]) -> None:
        """Let files be written over, now that their new names are on the disk."""
        with self._lock:
            self._released.update(spare for spare in spares if spare in self._files)

    def drop(self, spares: Iterable[Path]) -> None:
        """Remove files that cannot be released."""
        for spare in spares:
            with self._lock:
                self._files.pop(spare, None)
            with suppress(OSError):
                spare.unlink()

    def take(self, size_bytes: int, target: Path, *, marked: bool) -> tuple[int, int] | None:
        """Give a spare file the name `target`. Returns its descriptor, exclusively locked, and its
        size; None if there is none that suits an object of `size_bytes`.

        marked: with a mark at its end that nothing is written yet.
        """
        while (spare := self._best(size_bytes)) is not None:
            with suppress(OSError):
                fd = os.open(spare, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    status = os.fstat(fd)
                    if _is_locked(fd, spare) and _has_one_name(status):
                        if marked:
                            write_mark(fd, status.st_size, 0)
                        spare.rename(target)
                        return fd, status.st_size
                except BaseException:  # nobody else knows the descriptor
                    os.close(fd)
                    raise
                os.close(fd)
            with suppress(OSError):  # somebody reads it still, or the disk refuses it
                spare.unlink()
        return None

    def _best(self, size_bytes: int) -> Path | None:
        """Take out the file whose size is closest; None if none is between half and twice."""
        with self._lock:
            suitable = {
                file: abs(size - size_bytes)
                for file, size in self._files.items()
                if file in self._released and size_bytes <= 2 * size and size <= 2 * size_bytes
            }
            if not suitable:
                return None
            best = min(suitable, key=suitable.__getitem__)
            del self._files[best]
            self._released.remove(best)
            return best

    def clear(self) -> bool:
        """Remove all files. Whether there were any."""
        with self._lock:
            files, self._files = list(self._files), {}
            self._released.clear()
        for file in files:
            with suppress(OSError):
                file.unlink()
        return bool(files)


def _has_one_name(status: os.stat_result) -> bool:
    """Whether the file can be reached by one name only: a backup may be a second hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _is_locked(fd: int, path: Path) -> bool:
    """Lock an open file exclusively; False if others hold a lock, the system has no locks, or the
    path names another file by now. Raises FileNotFoundError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.path.samestat(os.fstat(fd), path.stat())


def write_mark(fd: int, size: int, written: int) -> None:
    """Note at the end of a file of `size` bytes how many of them an upload has written."""
    digest = xxhash.xxh3_64_intdigest(written.to_bytes(8, "little"))
    os.pwrite(fd, _MARK.pack(_MAGIC, written, digest), size - MARK_BYTES)


def read_mark(fd: int, size: int) -> int:
    """Number of bytes that an upload has written to a file of `size` bytes: all, unless a mark at
    its end says otherwise."""
    if size < MARK_BYTES:
        return size
    magic, written, digest = _MARK.unpack(os.pread(fd, MARK_BYTES, size - MARK_BYTES))
    is_mark = magic == _MAGIC and digest == xxhash.xxh3_64_intdigest(written.to_bytes(8, "little"))
    return written if is_mark and written <= size - MARK_BYTES else size
