"""The tile engine: the same bytes however it goes about them, and nothing left behind if it
cannot."""

import io
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracle.staleness import shares as shares_of
from support.aggregation import hand_in, model_of, npy, put, read
from xain_coordinator.aggregation.aggregator import RuleFailed, Stopped
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.aggregation.rules import RULES
from xain_coordinator.aggregation.sources import UpdateChanged
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.values import GlobalModel, Update, WeightsRef
from xain_coordinator.ports import Fenced, KeyNotFound, Reader, StoreUnavailable, WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore, MemoryUpload
from xain_coordinator.stores.paths import key_to_path

Array = NDArray[Any]

NUM_UPDATES = 5
LENGTH = 23  # a prime: no width but 1 divides it
BASE = GlobalModel(3, WeightsRef("3/global", 0, ""), "float32", (LENGTH,), (), {"workload": "sgd"})


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WeightsStore:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path)


def random_vectors(dtype: str = "float32") -> list[Array]:
    chance = np.random.default_rng(5)
    return [chance.normal(size=LENGTH).astype(dtype) for _ in range(NUM_UPDATES)]


def work_on(updates: tuple[Update, ...], rule: str = "weighted_average") -> Aggregate:
    return Aggregate(3, rule, updates, BASE)


STALENESS = (0, 3, 1, 0, 8)
TOTAL = 100  # samples of all sites; the updates have 15


def stale_work_on(
    store: WeightsStore, updates: tuple[Update, ...], base: Array, rule: str = "weighted_average"
) -> Aggregate:
    """Some of the updates were trained from earlier models than the one there is."""
    base_model = model_of(store, base)
    return Aggregate(3, rule, updates, base_model, STALENESS, total_samples=TOTAL)


class CountingStore(MemoryStore):
    """Knows how many readers are open, and whether what is read first is what was said to be."""

    def __init__(self, num_parallel: int = 1) -> None:
        super().__init__()
        self.num_parallel = num_parallel
        self.num_open = self.most_open = self.num_opened = self.num_beyond = 0
        self._counting = threading.Lock()

    def open(self, key: str, start: int = 0, length: int | None = None) -> Any:
        reader = super().open(key)
        with self._counting:
            self.num_open += 1
            self.num_opened += 1
            self.most_open = max(self.most_open, self.num_open)
        read_into, close = reader.read_into, reader.close
        end = start + (length or 0)

        def count_and_read(offset: int, buffer: memoryview) -> int:
            with self._counting:
                self.num_beyond += offset < start or offset + len(buffer) > end
            return read_into(offset, buffer)

        def count_and_close() -> None:
            reader.close = close  # type: ignore[method-assign]  # a probe
            with self._counting:
                self.num_open -= 1
            close()

        reader.read_into = count_and_read  # type: ignore[method-assign]  # a probe
        reader.close = count_and_close  # type: ignore[method-assign]  # a probe
        return reader


class FarStore(CountingStore):
    """Where a read takes as long as one likes: meet(key) is called in each."""

    def __init__(self, meet: Callable[[str], object], num_parallel: int = NUM_UPDATES) -> None:
        super().__init__(num_parallel)
        self.meet: Callable[[str], object] = lambda key: None
        self._meet = meet

    def open(self, key: str, start: int = 0, length: int | None = None) -> Any:
        reader = super().open(key, start, length)
        read_into = reader.read_into

        def meet_and_read(offset: int, buffer: memoryview) -> int:
            self.meet(key)
            return read_into(offset, buffer)

        reader.read_into = meet_and_read
        return reader

    def begin(self) -> None:
        """All before was preparation."""
        self.meet = self._meet


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_readers", [1, NUM_UPDATES - 1])
def test_more_updates_than_readers(max_readers):
    """2,000 participants are more than a process may have files open."""
    store = CountingStore()
    updates = hand_in(store, random_vectors())
    usual = aggregate(store, work_on(updates), tile_bytes=64)
    assert store.most_open == NUM_UPDATES
    for num_parallel in (1, 16):
        store.num_parallel = num_parallel
        store.most_open = 0
        store.delete("4/global")
        assert aggregate(store, work_on(updates), tile_bytes=64, max_readers=max_readers) == usual
        assert store.most_open <= max_readers
        assert store.num_open == 0


# --- stores far away ------------------------------------------------------------------------------


def test_rows_are_read_at_the_same_time():
    """The store says how many; the model is the same."""
    gate = threading.Barrier(NUM_UPDATES, timeout=60)
    store = FarStore(lambda key: gate.wait())
    updates = hand_in(store, random_vectors())
    near = MemoryStore()
    assert hand_in(near, random_vectors()) == updates
    store.begin()
    # One tile: of two, one could wait here for rows that the other reads later.
    assert aggregate(store, work_on(updates)) == aggregate(near, work_on(updates))


def test_the_failure_of_one_row_ends_all():
    """With its own error. Nothing is being read any more then, and no reader is open."""
    gate = threading.Barrier(NUM_UPDATES, timeout=60)
    failing = threading.Event()
    under_way = set()

    def meet(key):
        if failing.is_set():
            return
        under_way.add(key)
        gate.wait()
        if key == "3/p003":
            failing.set()
            raise StoreUnavailable("gone")
        assert failing.wait(60)
        under_way.remove(key)

    store = FarStore(meet)
    updates = hand_in(store, random_vectors())
    store.begin()
    with pytest.raises(StoreUnavailable, match="gone") as caught:
        aggregate(store, work_on(updates))
    assert (under_way, store.num_open) == ({"3/p003"}, 0), caught.value
    assert list(store.keys("4/")) == []


@pytest.mark.parametrize("where", ["combine", "write"])
def test_failure_in_one_thread_ends_the_other_threads(where, monkeypatch):
    """A thread that waits for its turn to hand on a tile ends when the tile before it fails, and
    the call returns when all threads have ended."""

    class Broken(Exception):
        pass

    both, num_combining = threading.Barrier(2, timeout=60), itertools.count()
    names = set()

    def combine(rule, tile, weights):
        names.add(threading.current_thread().name)
        if next(num_combining) < 2:
            both.wait()
            if where == "combine" and threading.current_thread() is threading.main_thread():
                raise Broken
        return np.zeros(tile.shape[1])

    class Upload(MemoryUpload):
        num_written = 0

        def write(self, chunk: bytes | memoryview) -> None:
            self.num_written += 1
            if where == "write" and self.num_written == 2:  # after the header
                raise Broken
            super().write(chunk)

    class Store(CountingStore):
        def upload(self, key: str, label: str = "", size_bytes: int = 0) -> MemoryUpload:
            return Upload(self, key) if key == "4/global" else super().upload(key)

    monkeypatch.setattr(RULES["mean"], "combine", combine)
    store = Store()
    updates = hand_in(store, random_vectors())
    before = set(threading.enumerate())
    with pytest.raises(Broken):
        aggregate(store, work_on(updates, "mean"), tile_bytes=64, num_threads=2)
    assert len(names) == 2
    assert set(threading.enumerate()) == before
    assert store.num_open == 0


# --- updates that are not what they were ----------------------------------------------------------


@pytest.mark.parametrize("max_readers", [1, NUM_UPDATES])
@pytest.mark.parametrize("at", [0, 100, -1])
def test_an_update_whose_bytes_have_changed(store, at, max_readers):
    """In its header too: all that was accepted is under the digest. No model comes of it."""
    updates = hand_in(store, random_vectors())
    data = bytearray(read(store, "3/p002"))
    data[at] ^= 1
    put(store, "3/p002", bytes(data))
    with pytest.raises(UpdateChanged, match="'3/p002' has changed in the store"):
        aggregate(store, work_on(updates), tile_bytes=64, max_readers=max_readers)
    with pytest.raises(KeyNotFound):
        store.open("4/global")


@pytest.mark.parametrize("change", [-1, 1])
def test_an_update_of_another_length(store, change):
    """Seen before anything is read."""
    updates = hand_in(store, random_vectors())
    data = read(store, "3/p002")
    put(store, "3/p002", data[:change] if change < 0 else data + b"\0")
    with pytest.raises(UpdateChanged, match=f"has {len(data) + change} bytes in the store"):
        aggregate(store, work_on(updates))


def test_an_update_that_becomes_shorter_while_it_is_read(tmp_path):
    """A file may be truncated while it is open."""
    store = FileStore(tmp_path)
    updates = hand_in(store, random_vectors())

    class Truncating(MemoryStore):
        def open(self, key: str, start: int = 0, length: int | None = None) -> Any:
            reader: Reader = store.open(key)
            for file in (path for path in tmp_path.rglob("*") if path.is_file()):
                os.truncate(file, min(130, file.stat().st_size))
            return reader

    with pytest.raises(UpdateChanged, match="become shorter"):
        aggregate(Truncating(), work_on(updates))


def test_an_update_that_changes_between_two_tiles():
    """Where every tile opens its updates anew, the digest still covers all that was read."""
    store = MemoryStore()
    updates = hand_in(store, random_vectors())
    changed = npy(random_vectors()[0] + 1)

    class Changing(CountingStore):
        def open(self, key: str, start: int = 0, length: int | None = None) -> Any:
            self.num_opened += 1
            if self.num_opened == NUM_UPDATES + 1:  # the second tile begins
                put(store, "3/p000", changed)
            return store.open(key)

    with pytest.raises(UpdateChanged, match="'3/p000' has changed"):
        aggregate(Changing(), work_on(updates), tile_bytes=64, max_readers=1)


# --- stale updates --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_global_model_gets_the_weight_that_is_left(store, dtype):
    """An update weighs n (1 + τ) of the samples of all sites."""
    vectors = random_vectors(dtype)
    base = np.linspace(-2, 2, LENGTH).astype(dtype)
    aggregate(store, stale_work_on(store, hand_in(store, vectors), base))
    published = np.load(io.BytesIO(read(store, "4/global")))
    assert published.dtype == np.dtype(dtype)
    shares, rest = shares_of(range(1, 6), STALENESS, TOTAL)
    expected = float(rest) * base.astype(float)
    for share, vector in zip(shares, vectors, strict=True):
        expected += float(share) * vector.astype(float)
    # The rounding of the result, and in float64 that of the sums of both.
    np.testing.assert_allclose(published, expected, rtol=0, atol=8 * float(np.finfo(dtype).eps))


def test_without_staleness_the_global_model_is_not_read(store):
    """The bytes are those of updates in BSP where all sites have brought one."""
    updates = hand_in(store, random_vectors())
    usual = aggregate(store, work_on(updates))
    store.delete("4/global")
    assert "3/global" not in set(store.keys())
    fresh = replace(work_on(updates), staleness=(0,) * NUM_UPDATES, total_samples=15)
    assert aggregate(store, fresh) == usual


@pytest.mark.parametrize("change", ["a bit", "shorter"])
def test_a_global_model_that_has_changed(store, change):
    """No model is made from a changed global model, and the error names it rather than an
    update."""
    updates = hand_in(store, random_vectors())
    work = stale_work_on(store, updates, np.ones(LENGTH, np.float32))
    data = bytearray(read(store, "3/global"))
    data[-1] ^= 1
    put(store, "3/global", bytes(data if change == "a bit" else data[:-1]))
    with pytest.raises(UpdateChanged, match="the global model '3/global' has "):
        aggregate(store, work, tile_bytes=64)
    assert "4/global" not in set(store.keys())


# --- rules that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_sum_that_leaves_the_range(store, dtype):
    """Says which rule and which dtype; no infinity is ever published."""
    updates = hand_in(store, [np.full(3, np.finfo(dtype).max, dtype)] * 2)
    with pytest.raises(RuleFailed, match=f"'sum' .*{dtype} in round 3"):
        aggregate(store, work_on(updates, "sum"))
    assert "4/global" not in set(store.keys())


# --- publishing -----------------------------------------------------------------------------------


def test_publish_meets_its_own_object(store):
    """A coordinator died after it had written the model: the next one uses the object."""
    updates = hand_in(store, random_vectors())
    first = aggregate(store, work_on(updates))
    assert aggregate(store, work_on(updates)) == first


def test_model_is_written_over_the_file_of_a_removed_update(tmp_path):
    """The store is told the size, so it can take a file whose pages are in the page cache."""
    store = FileStore(tmp_path)
    vectors = [np.full(300_000, i, np.float32) for i in range(2)]  # worth keeping a file of
    work = work_on(hand_in(store, vectors), "mean")
    dropped = f"2/a.{'0' * 32}"
    store.put({dropped: bytes(1_200_000)})
    inode = (tmp_path / key_to_path(dropped)).stat().st_ino
    store.delete(dropped)
    aggregate(store, work)
    assert (tmp_path / key_to_path("4/global")).stat().st_ino == inode
    assert read(store, "4/global") == npy(np.full(300_000, 0.5, np.float32))


# --- nothing left behind --------------------------------------------------------------------------


def test_failed_aggregation_leaves_no_object(tmp_path):
    """An upload that will not be finished leaves no file."""
    store = FileStore(tmp_path)
    updates = hand_in(store, random_vectors())
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        aggregate(store, work_on(updates), stop)
    with pytest.raises(RuleFailed):
        aggregate(store, work_on(updates, "identity"))
    put(store, "4/global", b"another")
    with pytest.raises(Fenced):
        aggregate(store, work_on(updates))
    put(store, "3/p001", b"short")
    with pytest.raises(UpdateChanged):
        aggregate(store, work_on(updates))
    store.delete("3/p001")
    with pytest.raises(KeyNotFound):
        aggregate(store, work_on(updates))
    assert list((tmp_path / ".incoming").glob("*.part")) == []


def test_stop_ends_after_the_tile_at_hand():
    """A long aggregation does not hold a process that is to end."""
    stop = threading.Event()

    written = []

    class StoppingUpload(MemoryUpload):
        def write(self, chunk: bytes) -> None:
            written.append(len(chunk))
            if len(written) == 2:
                stop.set()
            super().write(chunk)

    class Stopping(MemoryStore):
        def upload(self, key: str, label: str = "", size_bytes: int = 0) -> MemoryUpload:
            return StoppingUpload(self, key) if key == "4/global" else super().upload(key)

    store = Stopping()
    updates = hand_in(store, random_vectors())
    with pytest.raises(Stopped):
        aggregate(store, work_on(updates), stop, tile_bytes=NUM_UPDATES * 4)
    assert written == [128, 4]  # the header and one element
    assert "4/global" not in set(store.keys())
