"""The tile engine: one pass over the same slice of every update, in the order of selection.

Memory is one tile, however many participants there are and however large the model is. The result
depends on the updates and their order alone, so making it again after a crash gives the same bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.admission import chunks
from xain_coordinator.aggregation.rules import RULES
from xain_coordinator.core.effects import Aggregate
from xain_coordinator.core.session import model_key
from xain_coordinator.core.values import GlobalModel, Update, WeightsRef
from xain_coordinator.ports import KeyExists, Reader, StoreError, WeightsStore
from xain_proto.np import npy_header

TILE_BYTES = 32 << 20  # the same slice of all updates together


class UpdateChanged(StoreError):
    """An accepted update is no longer what was accepted."""


class Fenced(StoreError):
    """The model to be published is there already, and it is another one: a newer coordinator works
    on this store."""


class _Source:
    """One accepted update, read front to back and checked against what was accepted."""

    def __init__(self, update: Update, reader: Reader) -> None:
        self._ref = update.weights.ref
        self._reader = reader
        self._digest = xxhash.xxh3_128()
        self._dtype = np.dtype(update.weights.dtype)
        self._offset = self._ref.size_bytes - update.weights.shape[0] * self._dtype.itemsize
        self._digest.update(self._read(0, self._offset))

    def _read(self, offset: int, length: int) -> bytes:
        data = self._reader.read(offset, length)
        if len(data) != length:
            raise UpdateChanged(f"the accepted update {self._ref.key!r} has become shorter")
        return data

    def read_into(self, row: NDArray[Any]) -> None:
        """The next len(row) elements."""
        data = self._read(self._offset, row.nbytes)
        self._offset += row.nbytes
        self._digest.update(data)
        row[:] = np.frombuffer(data, self._dtype)

    def check(self) -> None:
        """After the last element. Raises UpdateChanged."""
        if self._digest.hexdigest() != self._ref.digest:
            raise UpdateChanged(f"the accepted update {self._ref.key!r} has changed in the store")


def aggregate(store: WeightsStore, work: Aggregate, tile_bytes: int = TILE_BYTES) -> GlobalModel:
    """Make and store the model of the round after `work.round`.

    Blocks; runs in a thread. Doing it again gives the same model.
    Raises UpdateChanged, Fenced, ValueError where the rule does not allow so many updates, and the
    store's errors.
    """
    first = work.updates[0].weights
    header = npy_header(np.dtype(first.dtype), first.shape)
    ref = publish(store, model_key(work.round + 1), _combined(store, work, header, tile_bytes))
    return GlobalModel(
        round=work.round + 1,
        ref=ref,
        dtype=first.dtype,
        shape=first.shape,
        layout=work.base.layout,
        metadata=work.base.metadata,
    )


def _combined(
    store: WeightsStore, work: Aggregate, header: bytes, tile_bytes: int
) -> Iterator[bytes]:
    """The new model's bytes, tile by tile."""
    yield header
    rule = RULES[work.rule]()
    rule.check(len(work.updates))
    num_samples = np.array([update.num_samples for update in work.updates], np.int64)
    first = work.updates[0].weights
    dtype, length = np.dtype(first.dtype), first.shape[0]
    width = max(1, min(length, tile_bytes // (len(work.updates) * dtype.itemsize)))
    tile = np.empty((len(work.updates), width), dtype)
    with ExitStack() as stack:
        sources = [
            _Source(update, stack.enter_context(store.open(update.weights.ref.key)))
            for update in work.updates
        ]
        for start in range(0, length, width):
            stop = min(start + width, length)
            for row, source in zip(tile, sources, strict=True):
                source.read_into(row[: stop - start])
            combined = rule.combine(tile[:, : stop - start], num_samples)
            if not (np.abs(combined) <= np.finfo(dtype).max).all():
                raise ValueError(f"rule {work.rule!r} leaves the range of {dtype} in this round")
            yield combined.astype(dtype).tobytes()
        for source in sources:
            source.check()


def publish(store: WeightsStore, key: str, pieces: Iterator[bytes] | Sequence[bytes]) -> WeightsRef:
    """Write an object that never changes.

    If the very same one is there already, whoever wrote it died before it could say so, and all is
    well. Raises Fenced if it is another one, and the store's errors; then nothing was written.
    """
    digest = xxhash.xxh3_128()
    size = 0
    upload = store.upload(key)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            upload.write(piece)
        upload.commit(overwrite=False)
    except KeyExists:
        if _digest_of(store, key) != digest.hexdigest():
            raise Fenced(
                f"another model lies under {key!r} than this coordinator would publish: "
                "a second coordinator works on the same store, or an old session's files are in it"
            ) from None
    finally:
        upload.abort()
    return WeightsRef(key, size, digest.hexdigest())


def _digest_of(store: WeightsStore, key: str) -> str:
    digest = xxhash.xxh3_128()
    with store.open(key) as reader:
        for chunk in chunks(reader):
            digest.update(chunk)
    return digest.hexdigest()
