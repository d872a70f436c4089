"""Reading a range of a checkpoint below an fsspec URL."""

from collections.abc import Iterator

from xain_parameters import cutfile
from xain_parameters.replica import Replica
from xain_parameters.scheduler.manifests import open_folder, read_manifest
from xain_parameters.specs import RangeView
from xain_parameters.tables.part import Piece


def load(url: str, folder: str, replica: Replica, range_: RangeView) -> None:
    """Fill a new replica with a checkpoint, of whichever ranges. Raises OSError, and Damaged."""
    files, where = open_folder(url, folder)
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
