"""Models as XAIN's participants see them, and the updates that they hand in."""

import pickle

import numpy as np
import pytest

from support.aggregation import read
from support.refusals import refused_as
from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.values import GlobalModel, StoredWeights
from xain_coordinator.driver.effects import store_model
from xain_coordinator.ports import Fenced, StoreError
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.updates.measuring import measure
from xain_coordinator.updates.sources import fetch_and_measure
from xain_coordinator.upkeep.fence import FencedStore
from xain_coordinator.xain06.bucket import PICKLE_BYTES, XainBucket
from xain_wire.np import proto_to_ndarray
from xain_wire.np.ndarray_pb2 import NDArray
from xain_workloads.model import Model

MAX_UPDATE_BYTES = 2_000_000
VECTOR = np.float32([1.5, -2, 3.25])
LONG = np.arange(400_000, dtype=np.float32)


class Stores:
    """A bucket, a session's part of it, and what is between them."""

    def __init__(self) -> None:
        self.bare = MemoryStore()
        self.store = PrefixedStore(self.bare, "session")
        self.bucket = XainBucket(self.bare, self.store, MAX_UPDATE_BYTES)

    def model(self, vector: np.ndarray, round_: int = 1) -> GlobalModel:
        return store_model(self.store, round_, Model(vector, ()))

    def hand_in(self, data: bytes) -> None:
        self.bare.put({"1/name": data})

    def fetch(self) -> StoredWeights:
        return fetch_and_measure(self.bucket, self.store, 1, "name", "1/name", None)

    def fetched(self) -> np.ndarray:
        self.fetch()
        return proto_to_ndarray(NDArray(ndarray=read(self.store, "1/name")))


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.mark.parametrize("vector", [VECTOR, LONG, np.empty((0,), np.float32)], ids=len)
def test_a_model_is_shown_as_a_pickle(stores, vector):
    """XAIN's SDK unpickles it, under XAIN's key, as an array."""
    stores.bucket.publish(stores.model(vector))
    shown = pickle.loads(read(stores.bare, "1/global"))
    assert shown.dtype == vector.dtype
    np.testing.assert_array_equal(shown, vector)


def test_showing_it_again_changes_nothing(stores):
    """After a crash between publication and its record it is done again."""
    model = stores.model(VECTOR)
    stores.bucket.publish(model)
    before = read(stores.bare, "1/global")
    stores.bucket.publish(model)
    assert read(stores.bare, "1/global") == before


def test_existing_object_is_never_replaced_by_a_model(stores):
    """The object may be of an old session in the same bucket, or of a newer coordinator."""
    stores.bare.put({"1/global": b"another"})
    with pytest.raises(Fenced, match=r"second coordinator .*participant"):
        stores.bucket.publish(stores.model(VECTOR))
    assert read(stores.bare, "1/global") == b"another"


def test_takeover_while_a_model_is_shown_is_told_as_that_alone(stores):
    """The message of another object under the key would send an operator to the credentials."""

    def check():
        raise Fenced("another coordinator has taken over")

    stores.bucket = XainBucket(FencedStore(stores.bare, check), stores.store, MAX_UPDATE_BYTES)
    with pytest.raises(Fenced, match=r"^another coordinator has taken over$"):
        stores.bucket.publish(stores.model(VECTOR))
    assert list(stores.bare.keys("1/")) == []


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"\x01", lambda data: data[:-4]])
def test_a_model_that_has_changed_is_not_shown(stores, change):
    """The bytes of the store must be those that were published."""
    model = stores.model(VECTOR)
    stores.store.put({"1/global": change(read(stores.store, "1/global"))})
    with pytest.raises(StoreError, match="'1/global' has changed in the store"):
        stores.bucket.publish(model)
    assert list(stores.bare.keys("1/")) == []


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("vector", [VECTOR, LONG], ids=["f4", "long"])
def test_an_update_becomes_one_of_ours(stores, vector, protocol):
    """A .npy file that is measured, accepted and aggregated like all others."""
    stores.hand_in(pickle.dumps(vector, protocol))
    measured = stores.fetch()
    assert (measured.dtype, measured.shape) == (vector.dtype.name, vector.shape)
    assert measured == measure(stores.store, "1/name")
    np.testing.assert_array_equal(stores.fetched(), vector)


def test_an_update_is_not_read_again_to_be_measured(stores, monkeypatch):
    stores.hand_in(pickle.dumps(VECTOR))
    monkeypatch.setattr(PrefixedStore, "open", None)
    assert stores.fetch().shape == VECTOR.shape


def test_the_limit_is_for_the_elements(stores):
    """A pickle of the largest update allowed is taken; what is larger is not even opened."""
    largest = np.zeros(MAX_UPDATE_BYTES // 4, np.float32)
    stores.hand_in(pickle.dumps(largest))
    np.testing.assert_array_equal(stores.fetched(), largest)
    stores.hand_in(b"?" * (MAX_UPDATE_BYTES + PICKLE_BYTES + 1))
    with refused_as("TOO_LARGE", match=r"2001025 bytes; .*2000000"):
        stores.fetch()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(Vecho\ntR.",
        b"\x80\x03cos\nsystem\nX\x01\x00\x00\x00a\x85R.",
        pickle.dumps([VECTOR]),
        pickle.dumps(LONG)[:-10],
        b"",
    ],
)
def test_an_update_that_is_no_array_is_refused(stores, data):
    """Nothing of it comes into the session's own objects."""
    stores.hand_in(data)
    with pytest.raises(InvalidUpdate, match="'1/name' is no XAIN update"):
        stores.fetch()
    assert list(stores.store.keys()) == []


class Untouched(MemoryStore):
    """Nothing may be written here."""

    def upload(self, key: str, label: str = "", size_bytes: int = 0):
        raise AssertionError(f"{key!r} is being written")


@pytest.mark.parametrize(
    ("array", "refusal", "reason"),
    [
        (np.arange(3), InvalidUpdate, "hand in one flat vector"),
        (np.ones((2, 3)), InvalidUpdate, "hand in one flat vector"),
        (
            np.ones(MAX_UPDATE_BYTES // 4 + 1000, np.float32),
            InvalidUpdate,
            "at most 2000000 are taken",
        ),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_update_that_cannot_count_is_not_written(stores, array, refusal, reason):
    """The pickle's head tells dtype and shape before any element is read."""
    stores.hand_in(pickle.dumps(array))
    bucket = XainBucket(stores.bare, Untouched(), MAX_UPDATE_BYTES)
    with pytest.raises(refusal, match=reason):
        fetch_and_measure(bucket, Untouched(), 1, "name", "1/name", None)
