"""Parts of checkpoints below an fsspec URL; the scheduler writes the manifests."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from xain_foundation.durable import make_directory, replace_file
from xain_parameters import cutfile
from xain_parameters.replica import Replica
from xain_parameters.scheduler.manifests import read_manifest
from xain_parameters.specs import RangeView
from xain_parameters.tables.part import Piece


def part_name(range_: int) -> str:
    return f"range-{range_}.cut"


def write_part(url: str, folder: str, name: str, pieces: Iterable[Piece]) -> None:
    """Write the part of a range, and force it to disk where the folder is local. Raises OSError,
    and what `pieces` raises; then there is no such file in a local folder."""
    files, root = fsspec.core.url_to_fs(url)
    where = f"{root.rstrip('/')}/{folder}"
    content = cutfile.encoded(pieces)
    if isinstance(files, LocalFileSystem):
        make_directory(Path(where))
        replace_file(Path(where) / name, content)
        return
    # An error may leave a part that is cut short. No manifest names it, and no later checkpoint has
    # its number.
    with files.open(f"{where}/{name}", "wb") as file:
        for data in content:
            file.write(data)


def load(url: str, folder: str, replica: Replica, range_: RangeView) -> None:
    """Fill a new replica with a checkpoint, whichever ranges there were then. Raises OSError, and
    Damaged."""
    files, root = fsspec.core.url_to_fs(url)
    where = f"{root.rstrip('/')}/{folder}"
    manifest = read_manifest(url, folder)
    names = [
        name
        for each, name in manifest.ranges
        if each.start < range_.stop and range_.start < each.stop
    ]

    def pieces(name: str) -> Iterator[Piece]:
        with files.open(f"{where}/{name}", "rb") as file:
            yield from cutfile.read(file, f"{where}/{name}")

    replica.load(pieces(name) for name in names)
