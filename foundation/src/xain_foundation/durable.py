"""Changes of files and names that outlive a power cut."""

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no such operation: there is nothing more we can ask for.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Create a directory with its parents, durably. mode: of the last one. Raises OSError."""
    missing = []
    current = directory
    while not current.exists():
        missing.append(current)
        current = current.parent
    directory.mkdir(mode=mode, parents=True, exist_ok=True)
    for created in missing:
        sync_directory(created.parent)


def replace_file(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Replace a file by a renamed new one, durably. Raises OSError, and what `pieces` raises."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:  # raised again
        with suppress(OSError):
            part.unlink(missing_ok=True)  # it would take the space that others need
        raise
    sync_directory(path.parent)
