"""A checkpoint of a key range while it is made."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from xain_parameters.keys import Keys
from xain_parameters.messages import Entry, encode_head
from xain_parameters.specs import TableSpec
from xain_parameters.tables.part import Array, Part, Piece


class CutHead(msgspec.Struct, frozen=True):
    """The head of a checkpoint's file: its range and its tables.

    last: the last position of the range. sequence: the last entry that the state has; the pushes
        recorded in the file came later.
    """

    cut: int
    generation: int
    range: int
    start: int
    last: int  # msgpack has no room for a stop of 2**64
    sequence: int
    tables: list[TableSpec]


class Cut:
    """A checkpoint of a range: the state at the first mark (Chandy and Lamport 1985), and the
    pushes that came later by workers that had not passed the mark.

    `pieces` is read step by step while entries are applied, and when all workers have passed the
    mark, or have ended, `finish` gives what is left. Training goes on meanwhile: rows are saved
    before they are first changed.
    """

    def __init__(self, head: CutHead, state: Iterable[Piece], parts: Sequence[Part]) -> None:
        """Keep the state of a range as it is now. state: what the parts lack, see Replica.tiles."""
        self.number = head.cut
        self.sequence = head.sequence
        self.is_open = True
        self.marked: set[str] = set()
        self._recorded: list[tuple[Entry, Keys | None, Array]] = []
        self._snapshots = [(part, part.snapshot()) for part in parts]
        empty = np.empty(0, np.uint8)
        self._first = [Piece("cut", msgspec.msgpack.encode(head), None, empty), *state]
        self._is_read = False

    def pieces(self) -> Iterator[Piece]:
        """Yield the state at the first mark. Entries may be applied between two steps. Raises
        Abandoned after close()."""
        yield from self._first
        self._first = []
        for part, snapshot in self._snapshots:
            pieces = part.pieces(snapshot)
            while self.is_open and (piece := next(pieces, None)) is not None:
                yield piece
            if not self.is_open:
                raise Abandoned(self.number)
            snapshot.close()
        self._is_read = True

    def finish(self) -> Iterator[Piece]:
        """End the checkpoint and yield the recorded pushes, after the last of `pieces`."""
        if not self.is_open:
            raise Abandoned(self.number)
        assert self._is_read, "finish() before the end of pieces()"
        self.close()
        for entry, keys, values in self._recorded:
            body = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            yield Piece("recorded", encode_head(entry), keys, body)

    def record(self, entry: Entry, keys: Keys | None, values: Array) -> None:
        self._recorded.append((entry, keys, values))

    def close(self) -> None:
        """Give the checkpoint up, or end it: nothing is saved or recorded from now on."""
        self.is_open = False
        for _, snapshot in self._snapshots:
            snapshot.close()


class Abandoned(Exception):
    """A checkpoint was given up before it was whole."""

    def __init__(self, number: int) -> None:
        super().__init__(f"checkpoint {number} was given up")
