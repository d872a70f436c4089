"""Read bundles: objects in which earlier versions of the program put the small updates of a round
together. A session that such a version has opened may still have some."""

from xain_coordinator.core.keys import piece_of
from xain_coordinator.ports import Reader, WeightsStore


def open_weights(
    store: WeightsStore, key: str, start: int = 0, length: int | None = None
) -> Reader:
    """WeightsStore.open for weights that may be a piece of a bundle."""
    piece = piece_of(key)
    if piece is None:
        return store.open(key, start, length)
    return _PieceReader(store.open(piece.key, piece.start + start, length), piece.start, piece.size)


class _PieceReader(Reader):
    """`size` bytes of an object, from `start`; fewer if it ends before."""

    def __init__(self, whole: Reader, start: int, size: int) -> None:
        self._whole = whole
        self._start = start
        self.size = max(0, min(size, whole.size - start))

    def read(self, offset: int, length: int) -> bytes:
        return self._whole.read(self._start + offset, min(length, self._num_from(offset)))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._whole.read_into(self._start + offset, buffer[: self._num_from(offset)])

    def _num_from(self, offset: int) -> int:
        return max(0, self.size - offset)

    def close(self) -> None:
        self._whole.close()
