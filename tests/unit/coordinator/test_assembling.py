"""The rule "assemble": slices of the flat vector, put together to a model."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.support.aggregation import load, model_of, npy, put

from xain_coordinator.aggregation.aggregator import RuleFailed, Stopped
from xain_coordinator.aggregation.assembling import assemble_slices
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.aggregation.sources import UpdateChanged
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.values import Update
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.updates.measuring import measure
from xain_workloads.model import TensorSpec, size_of

LAYOUT = tuple(
    TensorSpec(name, (size,), "float32") for name, size in zip("pqrs", (1, 2, 3, 4), strict=True)
)
VECTOR = np.arange(10, dtype=np.float32)


def work(store: MemoryStore, **slices: str) -> Aggregate:
    """The assembly of a round. slices: names of the tensors of each participant's stage."""
    updates = []
    for name, tensors in slices.items():
        start = size_of(LAYOUT["pqrs".index(tensors[0]) :])
        owned = tuple(spec for spec in LAYOUT if spec.name in tensors)
        first = len(VECTOR) - start
        put(store, f"3/{name}", npy(VECTOR[first : first + size_of(owned)]))
        updates.append(Update(name, measure(store, f"3/{name}"), 5, owned))
    base = replace(model_of(store, 0 * VECTOR), layout=LAYOUT, metadata={"a": "b"})
    return Aggregate(3, "assemble", tuple(updates), base)


@pytest.mark.parametrize(
    "slices", [{"a": "pqrs"}, {"a": "pq", "b": "rs"}, {"a": "s", "b": "pq", "c": "r"}]
)
def test_slices_in_any_order_of_names_make_up_the_model(slices):
    store = MemoryStore()
    effect = work(store, **slices)
    model = aggregate(store, effect)
    np.testing.assert_array_equal(load(store, model.ref), VECTOR)
    assert (model.round, model.layout, model.metadata) == (4, LAYOUT, {"a": "b"})
    assert (model.dtype, model.shape) == ("float32", (10,))
    assert aggregate(store, effect) == model, "a second call makes the same bytes"


def test_slices_are_copied_in_pieces():
    store = MemoryStore()
    model = assemble_slices(store, work(store, a="pqr", b="s"), piece_bytes=8)
    np.testing.assert_array_equal(load(store, model.ref), VECTOR)


@pytest.mark.parametrize("slices", [{"a": "p", "b": "rs"}, {"a": "pqr", "b": "rs"}, {"a": "pqr"}])
def test_gaps_and_overlaps_are_refused(slices):
    store = MemoryStore()
    with pytest.raises(RuleFailed, match="do not make up the 10 elements"):
        aggregate(store, work(store, **slices))


def test_changed_slice_is_noticed_and_a_stop_is_heeded():
    store = MemoryStore()
    effect = work(store, a="pq", b="rs")
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        aggregate(store, effect, stop)
    put(store, "3/b", npy(VECTOR[3:] + 1))
    with pytest.raises(UpdateChanged):
        aggregate(store, effect)
