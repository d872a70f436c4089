"""Files of removed updates, kept to be written over by later uploads.

Their pages are in the page cache already, and writing to those takes a tenth of the time that the
kernel needs for new ones. A spare file has a name in the folder of unfinished uploads that is none
of an object or of an upload, so after a crash nothing takes it for either; the next start removes
it.

A file is written over under an exclusive lock. Readers of the coordinator hold a shared one, so a
file that is read is removed instead, and so are all files where the system has no such locks. Other
programs take no lock, so models, which people read and map, are never kept, and neither is a file
with a second name or a symbolic link.
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

SUFFIX = ".spare"
MIN_BYTES = 1 << 20  # of a file that is worth keeping

_MARK = struct.Struct("<8sQ")
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

    def set_aside(self, path: Path) -> Path | None:
        """Rename the file of a removed object. Returns its new path, for add(), or None if the file
        is to be removed."""
        with suppress(OSError):
            status = path.lstat()
            if _has_one_name(status) and status.st_size >= MIN_BYTES:
                return path.rename(self._folder / f"{uuid.uuid4().hex}{SUFFIX}")
        return None

    def add(self, files: Iterable[Path]) -> None:
        """Let files be written over, now that their new names are on the disk. Files beyond the
        bounds are removed."""
        for file in files:
            with suppress(OSError), self._lock:
                size = file.stat().st_size
                num_bytes = sum(self._files.values()) + size
                if len(self._files) < self.max_files and num_bytes <= self.max_bytes:
                    self._files[file] = size
                else:
                    file.unlink()

    def take(self, size_bytes: int, target: Path) -> tuple[int, int] | None:
        """Give a spare file the name `target`. Returns its descriptor, exclusively locked, and its
        size; None if there is none that suits an object of `size_bytes`. A mark at its end says
        that nothing is written yet."""
        while (spare := self._best(size_bytes)) is not None:
            with suppress(OSError):
                fd = os.open(spare, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    status = os.fstat(fd)
                    if _has_one_name(status):
                        write_mark(fd, status.st_size, 0)
                        spare.rename(target)
                        return fd, status.st_size
                except BaseException:  # no other code has the descriptor
                    os.close(fd)
                    raise
                os.close(fd)
            with suppress(OSError):  # a reader has it open, or the disk refuses it
                spare.unlink()
        return None

    def _best(self, size_bytes: int) -> Path | None:
        """Take out the file whose size is closest; None if none is between half and twice."""
        with self._lock:
            suitable = {
                file: abs(size - size_bytes)
                for file, size in self._files.items()
                if size_bytes <= 2 * size and size <= 2 * size_bytes
            }
            best = min(suitable, key=suitable.__getitem__, default=None)
            if best is not None:
                del self._files[best]
            return best

    def clear(self) -> bool:
        """Remove all files. Returns whether there were any."""
        with self._lock:
            files, self._files = list(self._files), {}
        for file in files:
            with suppress(OSError):
                file.unlink()
        return bool(files)


def _has_one_name(status: os.stat_result) -> bool:
    """Whether the file can be reached by one name only: a backup may be a second hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def write_mark(fd: int, size: int, written: int) -> None:
    """Note at the end of a file of `size` bytes how many of them an upload has written."""
    os.pwrite(fd, _MARK.pack(_MAGIC, written), size - MARK_BYTES)


def read_mark(fd: int, size: int) -> int:
    """Number of bytes that an upload has written to a file of `size` bytes: all, unless a mark at
    its end says otherwise."""
    if size < MARK_BYTES:
        return size
    magic, written = _MARK.unpack(os.pread(fd, MARK_BYTES, size - MARK_BYTES))
    return written if magic == _MAGIC and written <= size - MARK_BYTES else size
