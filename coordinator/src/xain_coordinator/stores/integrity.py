"""Compare stored objects with the size and the digest that they were written with."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.core.vocabulary.values import Update, WeightsRef
from xain_coordinator.ports import KeyNotFound, StoreError, WeightsStore
from xain_coordinator.stores.reading import chunks
from xain_wire.np.codec import parse_npy_header


def why_damaged(
    store: WeightsStore, ref: WeightsRef, on_read: Callable[[int], None] = lambda num_bytes: None
) -> str:
    """Read an object. Returns how it differs from its reference; "" if it does not. Blocks.

    on_read: called with the number of bytes after each read; an exception that it raises is passed
        on.
    Raises StoreUnavailable.
    """
    digest = xxhash.xxh3_128()
    try:
        with store.open(ref.key) as reader:
            if reader.size != ref.size_bytes:
                return f"{ref.key} has {reader.size} bytes in the store, not {ref.size_bytes}"
            for chunk in chunks(reader):
                digest.update(chunk)
                on_read(len(chunk))
    except KeyNotFound:
        return f"{ref.key} is not in the store"
    found = digest.hexdigest()
    if found != ref.digest:
        return f"{ref.key} has the digest {found} in the store, not {ref.digest}"
    return ""


def read_weights(store: WeightsStore, key: str) -> bytes:
    """Read a whole object. Blocks. Raises the store's errors."""
    with store.open(key) as reader:
        return b"".join(chunks(reader))


def read_vector(store: WeightsStore, ref: WeightsRef) -> NDArray[Any]:
    """Read a whole vector. Blocks. Raises StoreError, also if the object is damaged."""
    return parse_vector(read_weights(store, ref.key), ref)


def parse_vector(data: bytes, ref: WeightsRef) -> NDArray[Any]:
    """The vector in the bytes of an object. Raises StoreError if they are damaged."""
    if xxhash.xxh3_128_hexdigest(data) != ref.digest:
        raise StoreError(f"{ref.key} is damaged: its bytes have another digest")
    header = parse_npy_header(data)
    if header is None:
        raise StoreError(f"{ref.key} is damaged: it ends within its header")
    return np.ndarray(header.shape, header.dtype, data, header.data_offset).copy()


def damaged_updates(
    store: WeightsStore,
    updates: Iterable[Update],
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, str]:
    """Read updates. Returns how each damaged one differs from what was accepted, by key."""
    found = {u.weights.ref.key: why_damaged(store, u.weights.ref, on_read) for u in updates}
    return {key: why for key, why in found.items() if why}
