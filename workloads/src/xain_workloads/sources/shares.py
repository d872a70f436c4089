"""Division of files into shares by their bytes, without reading them."""

from collections.abc import Sequence
from dataclasses import dataclass

from xain_workloads.sources.parts import Part


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows that begin in bytes [start, stop) of a file: its lines, or its row groups."""

    part: Part
    start: int
    stop: int


Share = tuple[Piece, ...]


def shares(parts: Sequence[Part], num_shares: int) -> list[Share]:
    """Divide files, taken as one text in their order, into shares of as many bytes.

    Each row is in exactly one share, whatever num_shares is. A share in which no row begins is
    read as no rows, and is empty if there are fewer bytes than shares.
    """
    total = sum(part.size for part in parts)
    bounds = [total * index // num_shares for index in range(num_shares + 1)]
    found: list[list[Piece]] = [[] for _ in range(num_shares)]
    offset, index = 0, 0
    for part in parts:
        end = offset + part.size
        while index < num_shares and bounds[index] < end:
            low, high = max(bounds[index], offset), min(bounds[index + 1], end)
            if low < high:
                found[index].append(Piece(part, low - offset, high - offset))
            if bounds[index + 1] > end:
                break
            index += 1
        offset = end
    return [tuple(pieces) for pieces in found]
