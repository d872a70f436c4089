"""A damaged global model is rebuilt, on every store in the same way."""

from collections.abc import Callable

import pytest
import xxhash
from tests.unit.core.bench import make_rules

from support.stores import get, put
from xain_coordinator.aggregation.publishing import publish
from xain_coordinator.core.machine.evolve import fold, open_session
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.effects import Effect, InitialiseModel
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.driver.rebuilding import DAMAGED, rebuild_damaged_model
from xain_coordinator.ports import Fenced, StoreError, StoreUnavailable, WeightsStore
from xain_coordinator.upkeep.fence import FencedStore

DATA = bytes(range(256)) * 1000
ROTTEN = DATA[:5000] + b"\xff" + DATA[5001:]
KEY = "0/global"


def session_with_a_model() -> Session:
    session, _ = open_session("s", make_rules(initial="empty"), 0.0)
    ref = WeightsRef(KEY, len(DATA), xxhash.xxh3_128(DATA).hexdigest())
    model = GlobalModel(0, ref, "float32", (0,))
    return fold(session, [e.ModelRequested(()), e.ModelInitialised(model, 0.0)])


def making(data: bytes) -> Callable[[WeightsStore, Effect], object]:
    """Work whose result is these bytes."""

    def make(into: WeightsStore, effect: Effect) -> object:
        assert isinstance(effect, InitialiseModel)
        return publish(into, KEY, [data[:1000], data[1000:]])

    return make


def test_damaged_object_is_replaced_and_set_aside(store):
    session = session_with_a_model()
    put(store, KEY, DATA)
    assert not rebuild_damaged_model(store, session, {}, making(b"never made"))
    put(store, KEY, ROTTEN, overwrite=True)
    assert rebuild_damaged_model(store, session, {}, making(DATA))
    assert (get(store, KEY), get(store, f"{DAMAGED}{KEY}")) == (DATA, ROTTEN)
    assert not rebuild_damaged_model(store, session, {}, making(b"never made"))
    put(store, KEY, ROTTEN[:-1], overwrite=True)
    assert rebuild_damaged_model(store, session, {}, making(DATA))
    assert get(store, KEY) == DATA


def test_coordinator_that_was_overtaken_replaces_nothing(store):
    """The newer one may have another model there. It is not told as damage."""

    def check() -> None:
        raise Fenced("another coordinator has taken over")

    put(store, KEY, ROTTEN)
    with pytest.raises(Fenced):
        rebuild_damaged_model(FencedStore(store, check), session_with_a_model(), {}, making(DATA))
    assert get(store, KEY) == ROTTEN
    store.delete(KEY)
    with pytest.raises(Fenced):
        rebuild_damaged_model(FencedStore(store, check), session_with_a_model(), {}, making(DATA))
    assert set(store.keys()) == set()


def test_object_that_is_gone_is_made_again(store):
    assert rebuild_damaged_model(store, session_with_a_model(), {}, making(DATA))
    assert get(store, KEY) == DATA
    assert set(store.keys()) == {KEY}


def test_another_result_changes_nothing(store):
    """Another result, as of another version of a plug-in, is no proof that the object was right."""
    put(store, KEY, ROTTEN)
    with pytest.raises(StoreError, match="its rebuilt copy has the digest"):
        rebuild_damaged_model(store, session_with_a_model(), {}, making(DATA + b"more"))
    assert get(store, KEY) == ROTTEN
    assert set(store.keys()) == {KEY}


def test_store_that_is_away_is_no_damage(store):
    put(store, KEY, ROTTEN)

    def away(into: WeightsStore, effect: Effect) -> object:
        raise StoreUnavailable("no route")

    with pytest.raises(StoreUnavailable):
        rebuild_damaged_model(store, session_with_a_model(), {}, away)
