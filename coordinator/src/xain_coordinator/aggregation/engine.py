"""The tile engine: one pass over the same slice of every update, in the order of names; of the
global model too, where stale updates are mixed with it.

Memory is a few tiles, however many participants there are and however large the model is. The
result depends on the updates and their order alone, so making it again after a crash gives the same
bytes.
Weights are little-endian, whatever the machine.
"""

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.admission import chunks
from xain_coordinator.aggregation.rules import RULES, Aggregator, RuleFailed, Weights
from xain_coordinator.aggregation.staleness import mixing_weights
from xain_coordinator.core.effects import Aggregate
from xain_coordinator.core.keys import model_key
from xain_coordinator.core.values import GlobalModel, StoredWeights, WeightsRef
from xain_coordinator.ports import KeyClaimed, KeyExists, Reader, StoreError, WeightsStore
from xain_proto.np import npy_header

TILE_BYTES = 32 << 20  # the same slice of all updates together

# A process may have 1024 files open by default, and the others are for connections. With more
# updates than this, each is opened again for every tile.
MAX_READERS = 64


class UpdateChanged(StoreError):
    """An accepted update, or the global model it is mixed with, is no longer what it was."""


class Fenced(StoreError):
    """The model to be published is there already, and it is another one: a newer coordinator works
    on this store."""


class Stopped(Exception):
    """The process is to end; nothing was written."""


class _Source:
    """One accepted update, or the global model, read front to back and checked against what was
    accepted or published.

    keep_open: one reader serves for all; otherwise each read opens the object anew. The digest goes
    on over all that is read, whichever reader it came from.
    """

    def __init__(
        self, store: WeightsStore, weights: StoredWeights | GlobalModel, *, keep_open: bool
    ) -> None:
        self._store = store
        self._ref = weights.ref
        kind = "global model" if isinstance(weights, GlobalModel) else "accepted update"
        self._name = f"the {kind} {self._ref.key!r}"
        self._keep_open = keep_open
        self._reader: Reader | None = None
        self._digest = xxhash.xxh3_128()
        self._dtype = _dtype_of(weights)
        self._header_bytes = self._ref.size_bytes - weights.shape[0] * self._dtype.itemsize
        self._offset = 0

    def read_into(self, row: NDArray[Any]) -> None:
        """The next len(row) elements. Raises UpdateChanged and the store's errors."""
        header_bytes = self._header_bytes if self._offset == 0 else 0
        if self._reader is None:
            self._reader = self._open(header_bytes + row.nbytes)
        if header_bytes:
            self._next(self._reader, header_bytes)
        row[:] = np.frombuffer(self._next(self._reader, row.nbytes), self._dtype)
        if not self._keep_open:
            self.close()

    def _open(self, length: int) -> Reader:
        """length: of what will be read next."""
        reader = self._store.open(self._ref.key, self._offset, length)
        if reader.size != self._ref.size_bytes:
            reader.close()
            raise UpdateChanged(
                f"{self._name} has {reader.size} bytes in the store, it had {self._ref.size_bytes}"
            )
        return reader

    def _next(self, reader: Reader, length: int) -> bytes:
        data = reader.read(self._offset, length)
        if len(data) != length:
            raise UpdateChanged(f"{self._name} has become shorter")
        self._offset += length
        self._digest.update(data)
        return data

    def check(self) -> None:
        """After the last element. Raises UpdateChanged."""
        if self._digest.hexdigest() != self._ref.digest:
            raise UpdateChanged(f"{self._name} has changed in the store")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def aggregate(
    store: WeightsStore,
    work: Aggregate,
    stop: threading.Event | None = None,
    *,
    tile_bytes: int = TILE_BYTES,
    max_readers: int = MAX_READERS,
) -> GlobalModel:
    """Make and store the model of the round after `work.round`.

    Blocks; runs in a thread. Doing it again gives the same model.
    stop: once set, the work ends after the reads and the tile at hand.
    Raises UpdateChanged, Fenced, RuleFailed, Stopped, and the store's errors.
    """
    first = work.updates[0].weights
    stop = stop or threading.Event()
    # Closed at once when the store fails, so that no reader stays open as long as the error does.
    with closing(_combined(store, work, stop, tile_bytes, max_readers)) as pieces:
        ref = publish(store, model_key(work.round + 1), pieces)
    return GlobalModel(
        round=work.round + 1,
        ref=ref,
        dtype=first.dtype,
        shape=first.shape,
        layout=work.base.layout,
        metadata=work.base.metadata,
    )


def _combined(
    store: WeightsStore, work: Aggregate, stop: threading.Event, tile_bytes: int, max_readers: int
) -> Generator[bytes, None, None]:
    """The new model's bytes: the header, then tile by tile."""
    rule = RULES[work.rule]()
    rule.check(len(work.updates))
    rows, weights = _rows(work, rule)
    dtype, shape = _dtype_of(rows[0]), rows[0].shape
    yield npy_header(dtype, shape)
    width = max(1, min(shape[0], tile_bytes // (len(rows) * dtype.itemsize)))
    tile = np.empty((len(rows), width), dtype)
    keep_open = len(rows) <= max_readers
    sources = [_Source(store, row, keep_open=keep_open) for row in rows]
    with ExitStack() as stack:
        for source in sources:
            stack.callback(source.close)
        # Its end, before that of the sources, waits for what is being read.
        num_threads = min(store.num_parallel, max_readers, len(sources))
        pool = stack.enter_context(ThreadPoolExecutor(num_threads, "aggregate"))
        for start in range(0, shape[0], width):
            num_columns = min(width, shape[0] - start)
            _read_tile(pool, num_threads, sources, tile[:, :num_columns], stop)
            combined = rule.combine(tile[:, :num_columns], weights)
            with np.errstate(over="ignore"):
                rounded = combined.astype(dtype)
            if not np.isfinite(rounded).all():
                raise RuleFailed(
                    f"rule {work.rule!r} leaves the range of {dtype.name} in round {work.round}"
                )
            yield rounded.tobytes()
        for source in sources:
            source.check()


def _rows(work: Aggregate, rule: Aggregator) -> tuple[list[StoredWeights | GlobalModel], Weights]:
    """What is combined, and how much each weighs: the updates, and behind them the global model if
    any of them is stale.

    Raises RuleFailed.
    """
    updates: list[StoredWeights | GlobalModel] = [update.weights for update in work.updates]
    num_samples = np.array([update.num_samples for update in work.updates], np.int64)
    if not any(work.staleness):
        return updates, num_samples
    if not rule.takes_stale:
        usable = ", ".join(name for name, one in sorted(RULES.items()) if one.takes_stale)
        raise RuleFailed(
            f"rule {work.rule!r} takes no stale updates, and round {work.round} has some that are "
            f"{max(work.staleness)} models behind; use one of: {usable}"
        )
    assert len(work.staleness) == len(updates)
    assert (work.base.shape, work.base.dtype) == (updates[0].shape, updates[0].dtype)
    return [*updates, work.base], mixing_weights(num_samples, work.staleness)


def _read_tile(
    pool: ThreadPoolExecutor,
    num_threads: int,
    sources: Sequence[_Source],
    tile: NDArray[Any],
    stop: threading.Event,
) -> None:
    """The next elements of every source into its row, in this thread and in those of the pool.

    Raises what _Source.read_into does, and Stopped; others may still be read then.
    """
    rows = list(zip(sources, tile, strict=True))
    failed = threading.Event()

    def read_some(first: int) -> None:
        for source, row in rows[first::num_threads]:
            if stop.is_set() or failed.is_set():
                return
            try:
                source.read_into(row)
            except BaseException:  # whatever it is, the other threads need not read on
                failed.set()
                raise

    reads = [pool.submit(read_some, first) for first in range(1, num_threads)]
    read_some(0)
    for read in reads:
        read.result()
    if stop.is_set():
        raise Stopped


def _dtype_of(weights: StoredWeights | GlobalModel) -> np.dtype[Any]:
    return np.dtype(weights.dtype).newbyteorder("<")


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
    except KeyClaimed as error:
        raise Fenced(str(error)) from None
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
