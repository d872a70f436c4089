"""Optimisers on the server against Algorithm 2 of Reddi et al. 2021 in Python's own floats, through
the engine, over several rounds; and their state, kept and found again."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from support.aggregation import hand_in, load, model_of, work_on
from support.logs import capture_logs
from support.slow_step import slow_step
from xain_coordinator.aggregation.aggregator import Float64, RuleFailed, Tile, Weights
from xain_coordinator.aggregation.averages import Mean
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.aggregation.optimizers import MOMENTUM, OPTIMIZERS, SECOND_MOMENT
from xain_coordinator.aggregation.rules import BUILT_IN, RULES
from xain_coordinator.aggregation.sources import UpdateChanged
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.ports import Fenced
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore, MemoryUpload
from xain_workloads.model import TensorSpec

Array = NDArray[Any]
LENGTH = 11
ADAPTIVE = {"learning_rate": 0.3, "beta1": 0.8, "tau": 0.01}
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "fedadagrad": ADAPTIVE,
    "fedadam": {**ADAPTIVE, "beta2": 0.95},
    "fedavgm": {"learning_rate": 0.5, "beta": 0.7},
    "fedyogi": {**ADAPTIVE, "beta2": 0.95},
}


def next_round(
    store: MemoryStore | FileStore, name: str, model: GlobalModel, vectors: list[Array]
) -> Aggregate:
    return Aggregate(
        model.round,
        "mean",
        hand_in(store, vectors, round_=model.round),
        model,
        optimizer=name,
        optimizer_options=OPTIONS[name],
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_several_rounds(name, dtype):
    """The model and what is remembered, round after round."""
    chance = np.random.default_rng(8)
    store = MemoryStore()
    model = model_of(store, chance.normal(size=LENGTH).astype(dtype))
    x = load(store, model.ref).astype(float).tolist()
    m, v = [0.0] * LENGTH, [OPTIONS[name].get("tau", 0.0) ** 2] * LENGTH
    eps = float(np.finfo(dtype).eps)
    for _ in range(4):
        vectors = [(np.array(x) + chance.normal(size=LENGTH)).astype(dtype) for _ in range(3)]
        model = aggregate(store, next_round(store, name, model, vectors), tile_bytes=100)
        result = np.mean([vector.astype(float) for vector in vectors], axis=0)
        steps = [
            slow_step(name, OPTIONS[name], *one)
            for one in zip(x, result.tolist(), m, v, strict=True)
        ]
        x, m, v = (list(column) for column in zip(*steps, strict=True))
        found = load(store, model.ref)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, x, rtol=4 * eps, atol=8 * eps)
        expected = {MOMENTUM: m} if name == "fedavgm" else {MOMENTUM: m, SECOND_MOMENT: v}
        assert model.state.keys() == expected.keys()
        for part, values in expected.items():
            kept = load(store, model.state[part])
            assert model.state[part].key == f"optimizer/{model.round}/{part}"
            assert kept.dtype == (np.float64 if dtype == "float64" else np.float32)
            np.testing.assert_allclose(kept, values, rtol=1e-5, atol=1e-5)
            # The next round goes on from what was stored.
            if part == MOMENTUM:
                m = kept.astype(float).tolist()
            else:
                v = kept.astype(float).tolist()
        x = found.astype(float).tolist()


def test_momentum_of_none_is_not_kept():
    """A momentum of beta1 = 0 would be a vector as long as the model, for nothing."""
    assert OPTIMIZERS["fedadagrad"]().begin() == {SECOND_MOMENT: 1e-6}
    chance = np.random.default_rng(1)
    base, result = chance.normal(size=(2, 5))
    for name in ("fedadagrad", "fedadam", "fedyogi"):
        optimizer = OPTIMIZERS[name](beta1=0.0)  # type: ignore[call-arg]  # of these three
        state = {SECOND_MOMENT: np.full(5, 0.25)}
        stepped, after = optimizer.step(base, result, state)
        assert after.keys() == {SECOND_MOMENT}
        scale = np.sqrt(after[SECOND_MOMENT]) + 1e-3
        np.testing.assert_allclose(stepped, base + 0.1 * (result - base) / scale)


def test_the_defaults():
    """The defaults are those of the papers."""
    assert OPTIMIZERS["fedavgm"]() == OPTIMIZERS["fedavgm"](learning_rate=1.0, beta=0.9)  # type: ignore[call-arg]  # of this one
    for name in ("fedadam", "fedyogi"):
        made = OPTIMIZERS[name]()
        assert (made.beta1, made.beta2, made.tau) == (0.9, 0.99, 1e-3)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_any_way_to_read_gives_the_same_bytes(name):
    """Tile sizes, threads and readers; the state too."""
    made = []
    for tile_bytes, num_threads, max_readers in ((1, 1, 1), (200, 3, 64), (1 << 20, 2, 2)):
        store = MemoryStore()
        chance = np.random.default_rng(3)
        model = model_of(store, chance.normal(size=LENGTH).astype(np.float32))
        for _ in range(2):
            vectors = [chance.normal(size=LENGTH).astype(np.float32) for _ in range(3)]
            model = aggregate(
                store,
                next_round(store, name, model, vectors),
                tile_bytes=tile_bytes,
                num_threads=num_threads,
                max_readers=max_readers,
            )
        made.append(model)
    assert made[0] == made[1] == made[2]


def test_an_initialisation_takes_no_step():
    """There is nothing to step from: the rule's result is the model, and the state begins after
    it."""
    store = MemoryStore()
    vectors = [np.full(4, value, np.float32) for value in (1, 3)]
    work = work_on(store, "mean", vectors, None, optimizer="fedadam")
    model = aggregate(store, work)
    assert load(store, model.ref).tolist() == [2.0] * 4
    assert model.state == {}
    assert sorted(store.keys("optimizer/")) == []


def test_stale_updates_and_an_optimiser():
    """The rule mixes; the optimiser steps towards what comes of it."""
    store = MemoryStore()
    base = np.zeros(3, np.float32)
    vectors = [np.full(3, 8, np.float32)]
    work = work_on(store, "weighted_average", vectors, base, staleness=(3,), optimizer="fedavgm")
    work = replace(work, total_samples=8 * work.updates[0].num_samples)
    model = aggregate(store, work)
    assert load(store, model.ref).tolist() == [4.0] * 3
    assert load(store, model.state[MOMENTUM]).tolist() == [4.0] * 3


@dataclass(frozen=True)
class Nothing(Mean):
    """A rule that makes no numbers."""

    value: ClassVar[float] = math.nan

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return np.full(tile.shape[1], self.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_leaves_the_range(value, monkeypatch):
    """After a step out of the dtype's range neither model nor state is published."""
    for rules in (RULES, BUILT_IN):
        monkeypatch.setitem(cast(dict[str, Any], rules), "nothing", Nothing)
    monkeypatch.setattr(Nothing, "value", value)
    store = MemoryStore()
    vectors = [np.full(3, 3e38, np.float32)]
    work = work_on(store, "nothing", vectors, np.zeros(3, np.float32), optimizer="fedavgm")
    with pytest.raises(RuleFailed, match=r"'nothing' .*'fedavgm' .*float32 in round 3"):
        aggregate(store, work)
    assert not [*store.keys("4/"), *store.keys("optimizer/")]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_one_huge_round_does_not_end_the_session(name):
    """No step is taken in the huge elements, and the rounds after it step as if it had not been. A
    second moment at the end of its range would be too small for the momentum, and the model would
    walk to 1e9. The log tells how many elements it was."""
    with capture_logs() as told:
        disturbed = models_after(name, [1.0, 1e30, 1.0, 1.0, -1e30, 1.0])
    undisturbed = models_after(name, [1.0, 1.0, 1.0, 1.0])
    assert disturbed[0] == disturbed[2] == undisturbed[0]
    assert disturbed[1] != undisturbed[1], "the other element takes all steps"
    lines = [line for line in told if line["event"] == "optimizer_step_skipped"]
    assert [(line["round"], line["num_elements"], line["optimizer"]) for line in lines] == [
        (4, 2, name),
        (7, 2, name),
    ]


def models_after(name: str, sizes: Sequence[float]) -> Array:
    """The model after a round for each size, whose results are [size, 1, size]."""
    store = MemoryStore()
    model = model_of(store, np.zeros(3, np.float32))
    for size in sizes:
        model = aggregate(store, next_round(store, name, model, [np.float32([size, 1.0, size])]))
    return load(store, model.ref)


LAYOUT = (
    TensorSpec("w", (2, 2), "float32"),
    TensorSpec("running_mean", (3,), "float32", "statistic"),
    TensorSpec("running_var", (2,), "float32", "statistic"),
    TensorSpec("b", (2,), "float32"),
)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("tile_bytes", [1, 200, 1 << 20])
def test_statistics_take_no_step(name, tile_bytes):
    """Statistics become the rule's result in every round, and the weights step as without them."""
    chance = np.random.default_rng(2)
    stores = MemoryStore(), MemoryStore()
    first = chance.normal(size=LENGTH).astype(np.float32)
    mixed = replace(model_of(stores[0], first), layout=LAYOUT)
    plain = model_of(stores[1], first)
    for _ in range(3):
        vectors = [chance.normal(size=LENGTH).astype(np.float32) for _ in range(2)]
        mixed = aggregate(
            stores[0], next_round(stores[0], name, mixed, vectors), tile_bytes=tile_bytes
        )
        plain = aggregate(stores[1], next_round(stores[1], name, plain, vectors))
        found, expected = load(stores[0], mixed.ref), load(stores[1], plain.ref)
        result = np.mean([vector.astype(float) for vector in vectors], axis=0)
        np.testing.assert_array_equal(found[4:9], result[4:9].astype(np.float32))
        np.testing.assert_array_equal(found[[0, 1, 2, 3, 9, 10]], expected[[0, 1, 2, 3, 9, 10]])
        for part, begin in OPTIMIZERS[name](**OPTIONS[name]).begin().items():  # type: ignore[call-arg]  # of each
            assert (load(stores[0], mixed.state[part])[4:9] == np.float32(begin)).all()


@pytest.mark.parametrize("name", ["", *sorted(OPTIMIZERS)])
@pytest.mark.parametrize("tile_bytes", [1, 200, 1 << 20])
def test_control_variate_moves_by_the_share_of_its_sites(name, tile_bytes):
    """No optimiser steps it, and the weights step as without it."""
    chance = np.random.default_rng(2)
    layout = (TensorSpec("w", (5,), "float32"), TensorSpec("control", (5,), "float32", "control"))
    store, alone = MemoryStore(), MemoryStore()
    first = chance.normal(size=10).astype(np.float32)
    model = replace(model_of(store, first), layout=layout)
    plain = model_of(alone, first[:5])
    vectors = [chance.normal(size=10).astype(np.float32) for _ in range(2)]
    options = {"optimizer": name, "optimizer_options": OPTIONS.get(name, {})}
    updates = hand_in(store, vectors, [10, 30], round_=3)
    work = Aggregate(3, "weighted_average", updates, model, control_share=0.4, **options)
    found = load(store, aggregate(store, work, tile_bytes=tile_bytes).ref)
    updates = hand_in(alone, [vector[:5] for vector in vectors], [10, 30], round_=3)
    expected = aggregate(alone, Aggregate(3, "weighted_average", updates, plain, **options))
    np.testing.assert_array_equal(found[:5], load(alone, expected.ref))
    mean = np.average(vectors, axis=0, weights=[10, 30])[5:]
    np.testing.assert_allclose(found[5:], first[5:] + 0.4 * (mean - first[5:]), rtol=1e-6)


# --- state that is there already, or not any more -------------------------------------------------


class Died(Exception):
    pass


def dying_before(key: str) -> type[MemoryStore]:
    """Stores in which the process dies when it comes to publish this key."""

    class Dying(MemoryStore):
        is_to_die = True

        def upload(self, wanted: str, label: str = "", size_bytes: int = 0) -> MemoryUpload:
            upload = super().upload(wanted)
            commit: Callable[..., None] = upload.commit

            def die(*, overwrite: bool) -> None:
                if wanted == key and self.is_to_die:
                    raise Died
                commit(overwrite=overwrite)

            upload.commit = die  # type: ignore[method-assign]  # a probe
            return upload

    return Dying


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("died_before", ["optimizer/4/second_moment", "4/global"])
def test_done_again_after_a_crash(name, died_before):
    """The state is there before its model; done again it is met as it is, to the bit."""
    store, other = dying_before(died_before)(), MemoryStore()
    store.is_to_die = True
    models = []
    for one in (store, other):
        vectors = [np.arange(5, dtype=np.float32) * i for i in range(3)]
        models.append(next_round(one, name, model_of(one, np.ones(5, np.float32)), vectors))
    work = models[0]
    undisturbed = aggregate(other, models[1])
    if died_before == "4/global" or name != "fedavgm":
        with pytest.raises(Died):
            aggregate(store, work)
        assert not list(store.keys("4/"))  # no model without its state
        if died_before == "4/global":
            assert set(store.keys("optimizer/")) == set(other.keys("optimizer/"))
    store.is_to_die = False
    assert aggregate(store, work) == undisturbed


def test_state_that_another_coordinator_wrote(tmp_path):
    """Another coordinator's state is not written over, and no model is published beside it."""
    store = FileStore(tmp_path)
    work = work_on(store, "mean", [np.ones(3, np.float32)], np.zeros(3, np.float32))
    upload = store.upload("optimizer/4/momentum")
    upload.write(b"another")
    upload.commit(overwrite=False)
    with pytest.raises(Fenced, match="optimizer/4/momentum"):
        aggregate(store, replace(work, optimizer="fedavgm"))
    assert not list(store.keys("4/"))


def test_state_that_has_changed(tmp_path):
    """The optimiser's state is checked against its digest, as models are."""
    store = FileStore(tmp_path)
    model = model_of(store, np.ones(3, np.float32))
    model = aggregate(store, next_round(store, "fedavgm", model, [np.zeros(3, np.float32)]))
    again = next_round(store, "fedavgm", model, [np.zeros(3, np.float32)])
    (file,) = tmp_path.rglob("momentum*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UpdateChanged, match="the optimiser's state 'optimizer/4/momentum' has"):
        aggregate(store, again)
