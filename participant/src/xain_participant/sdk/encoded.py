"""The encoding of a local update, made once, at the end of training."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_wire.np import DeltaCodec, can_encode


@dataclass(frozen=True, slots=True)
class Encoded:
    """The form of an update in half precision. The participant keeps it in memory only.

    tiles: the encoded tiles of xain_wire.np.delta, one after another, uint8.
    tile_bytes: size of a tile; the last one may be shorter.
    """

    tiles: NDArray[np.uint8]
    tile_bytes: int

    def tiles_from(self, number: int) -> memoryview:
        """Encoded bytes of this tile and of all later tiles."""
        return self.tiles[number * self.tile_bytes :].data


def quantise(vector: NDArray[Any], base: NDArray[Any]) -> Encoded | None:
    """Encode an update, and overwrite `base` with the values that the coordinator will decode.

    vector: the update, (d,). base: the model that it was trained from, (d,) float32.
    Returns None if the update has no encoding; `base` is then partly overwritten.

    The decoded values are the update from now on. A second encoding of them would change them, so
    each update is encoded once.
    """
    if not can_encode(vector, base):
        return None
    codec = DeltaCodec()
    size = codec.tile_elements
    borders = [slice(at, at + size) for at in range(0, len(base), size)]
    num_bytes = sum(codec.encoded_bytes(len(base[tile])) for tile in borders)
    tiles, at = np.empty(num_bytes, np.uint8), 0
    for tile in borders:
        try:
            encoded = codec.encode(vector[tile], base[tile])
        except ValueError:
            return None  # travels plain: the coordinator refuses it and names the element
        tiles[at : at + len(encoded)] = encoded
        at += len(encoded)
        base[tile] = codec.decode(encoded, base[tile])
    return Encoded(tiles, codec.encoded_bytes(size))
