"""Promises of the engine for every rule, built in or plugged in: the same bytes however it goes
about them, and memory that does not grow."""

import itertools
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.aggregation import OPTIONS, hand_in, load, model_of, npy, put, work_on
from xain_coordinator.aggregation import engine
from xain_coordinator.aggregation.aggregator import RuleFailed, is_surveyor
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.aggregation.robust import distances
from xain_coordinator.aggregation.rules import BUILT_IN, RULES, known_rules, make_rule
from xain_coordinator.aggregation.sources import UpdateChanged
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore
from xain_workloads.model import TensorSpec

Array = NDArray[Any]

# Several blocks of a survey and several spans, and no multiple of either.
LENGTH = 3 * 8192 + 77
NUM_UPDATES = 7
# With the plug-ins that are installed, each with its default options.
EVERY_RULE = sorted(set(known_rules()) - (set(BUILT_IN) - set(RULES)))
SURVEYORS = [name for name in EVERY_RULE if is_surveyor(make_rule(name, OPTIONS.get(name, {})))]


def num_updates_of(rule: str) -> int:
    return 1 if rule == "identity" else NUM_UPDATES


def random_round(
    rule: str, dtype: str = "float32", length: int = LENGTH
) -> tuple[list[Array], Array]:
    chance = np.random.default_rng(5)
    base = chance.normal(size=length)
    vectors = [
        (base + chance.normal(size=length) * (i + 1) / 100).astype(dtype)
        for i in range(num_updates_of(rule))
    ]
    return vectors, base.astype(dtype)


def whole(rule_name: str, vectors: Sequence[Array], base: Array | None) -> Array:
    """The rule applied to whole vectors at once, in float64."""
    rule = make_rule(rule_name, OPTIONS.get(rule_name, {}))
    num_samples = np.arange(1, len(vectors) + 1)
    rows = np.stack(vectors)
    if not is_surveyor(rule):
        return rule.combine(rows, num_samples)
    differences = rows.astype(np.float64) - base
    weights = rule.weigh(rule.survey(differences), num_samples)
    return rule.combine(np.concatenate([rows, [base]]), weights)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_engine_and_rule_give_the_same(rule, dtype):
    """Read by tiles or held at once."""
    vectors, base = random_round(rule, dtype)
    store = MemoryStore()
    model = aggregate(store, work_on(store, rule, vectors, base), tile_bytes=1 << 16)
    eps = float(np.finfo(dtype).eps)
    expected = whole(rule, vectors, base)
    np.testing.assert_allclose(load(store, model.ref), expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_any_way_to_read_gives_the_same_bytes(rule, tmp_path):
    """Tile sizes, threads, readers, order of arrival and stores."""
    vectors, base = random_round(rule)
    stores = [MemoryStore(), FileStore(tmp_path)]
    arrivals = [range(len(vectors)), reversed(range(len(vectors)))]
    works = []
    for store, arrival in zip(stores, arrivals, strict=True):
        for i in arrival:
            put(store, f"3/p{i:03}", npy(vectors[i]))
        works.append(work_on(store, rule, vectors, base))
    models = []
    for tile_bytes, num_threads, max_readers, which in (
        (1 << 24, 1, 64, 0),
        (1 << 13, 2, 1, 0),
        (50_000, 1, 64, 1),
        (300_000, 3, 64, 1),
        (1 << 24, 5, 2, 0),
    ):
        store = stores[which]
        models.append(
            aggregate(
                store,
                works[which],
                tile_bytes=tile_bytes,
                num_threads=num_threads,
                max_readers=max_readers,
            )
        )
        store.delete("4/global")
    assert len({model.ref for model in models}) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_any_number_of_threads_gives_the_same_bytes(rule, dtype):
    """The last bits of a float64 model show an order of summation that float32 rounds away.

    Rounds of as many columns as one block, of several blocks, and of one more column than that.
    """
    for length in (8192, LENGTH, 4 * 8192 + 1):
        vectors, base = random_round(rule, dtype, length)
        store = MemoryStore()
        work = work_on(store, rule, vectors, base)
        models = []
        for tile_bytes, num_threads in itertools.product((1 << 16, 1 << 24), (1, 2, 3, 4)):
            models.append(aggregate(store, work, tile_bytes=tile_bytes, num_threads=num_threads))
            store.delete("4/global")
        assert len({model.ref for model in models}) == 1, f"length {length}"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_round_that_initialises(rule):
    """There is no global model to lie near to: rules that need one average instead."""
    expected = {"sum": 21.0, "identity": 0.0, "krum": 2.0, "multi_krum": 2.5}.get(rule, 3.0)
    store = MemoryStore()
    vectors = [np.full(4, i, np.float32) for i in range(num_updates_of(rule))]
    counts = [0] * len(vectors)
    model = aggregate(store, work_on(store, rule, vectors, None, counts))
    found = load(store, model.ref)
    if rule == "geometric_median":  # iterations only come near to it
        np.testing.assert_allclose(found, [expected] * 4, rtol=1e-6)
    else:
        assert found.tolist() == [expected] * 4


@pytest.mark.parametrize("rule", SURVEYORS)
@pytest.mark.parametrize("which", ["3/p001", "3/global"])
def test_surveys_are_checked(rule, which):
    """Damage is found in an object that gets no weight and is not read a second time."""
    store = MemoryStore()
    vectors, base = random_round(rule)
    work = work_on(store, rule, vectors, base)
    data = bytearray(npy(base if which == "3/global" else vectors[1]))
    data[-2] ^= 1
    put(store, which, bytes(data))
    with pytest.raises(UpdateChanged, match=which):
        aggregate(store, work)


@pytest.mark.parametrize("rule", ["sum", "krum"])
def test_damage_is_told_from_a_rule_that_fails(rule):
    """A damaged update can be handed in again; a rule that fails ends the session for ever."""
    store = MemoryStore()
    vectors, base = random_round(rule)
    work = work_on(store, rule, vectors, base)
    for i in range(NUM_UPDATES):
        put(store, f"3/p{i:03}", npy(np.full(LENGTH, np.inf, np.float32)))
    with pytest.raises(UpdateChanged):
        aggregate(store, work)


@pytest.mark.parametrize("weights", [[1.0], [np.nan] * 8, [0.0] * 8])
def test_a_rule_that_gives_no_usable_weights(weights, monkeypatch):
    """The error says that the rule has failed, and not an update."""
    monkeypatch.setattr(RULES["krum"], "weigh", lambda *_: np.array(weights))
    store = MemoryStore()
    vectors, base = random_round("krum")
    with pytest.raises(RuleFailed, match=r"'krum' .* 7 updates .*no usable"):
        aggregate(store, work_on(store, "krum", vectors, base))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("num_updates", [1, 4, 70])
def test_weighted_average_has_the_bits_of_a_loop_over_elements(num_updates, dtype, tmp_path):
    """Each element is 0.0, then plus share times value for one update after the other, in float64,
    rounded to the dtype at the end."""
    length = 1000
    chance = np.random.default_rng(num_updates)
    vectors = [chance.normal(size=length).astype(dtype) for _ in range(num_updates)]
    for vector in vectors:
        vector[::7] = -0.0
        vector[1::7] = np.finfo(dtype).max
        vector[2::7] = np.finfo(dtype).smallest_subnormal
    shares = [(i + 1) / sum(range(num_updates + 1)) for i in range(num_updates)]
    largest = float(np.finfo(dtype).max)
    expected = []
    for values in zip(*(vector.tolist() for vector in vectors), strict=True):
        total = 0.0
        for share, value in zip(shares, values, strict=True):
            total += share * value
        expected.append(min(max(total, -largest), largest))
    store = FileStore(tmp_path)
    for num_threads in (1, 2, 5):
        work = work_on(store, "weighted_average", vectors, None)
        model = aggregate(store, work, tile_bytes=1 << 14, num_threads=num_threads)
        assert load(store, model.ref).tobytes() == np.array(expected).astype(dtype).tobytes()
        store.delete("4/global")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("num_updates", [3, 4, 16, 17, 41])
@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_order_statistics_have_the_bits_of_a_loop_over_columns(rule, num_updates, dtype, tmp_path):
    """Each column is sorted; the kept values, each divided by their number, are added from the
    least to the greatest onto 0.0, so that no model has a -0.0."""
    length = 1500
    chance = np.random.default_rng(num_updates)
    vectors = [chance.integers(-4, 5, length).astype(dtype) / 3 for _ in range(num_updates)]
    for i, vector in enumerate(vectors):
        vector[i :: num_updates + 3] = -0.0
    first = (num_updates - 1) // 2 if rule == "median" else 1
    end = num_updates // 2 + 1 if rule == "median" else num_updates - 1
    expected = []
    for values in zip(*(vector.tolist() for vector in vectors), strict=True):
        total = 0.0
        for value in sorted(values)[first:end]:
            total += 1 / (end - first) * value
        expected.append(total)
    store = FileStore(tmp_path)
    for num_threads in (1, 2, 5):
        work = work_on(store, rule, vectors, None)
        model = aggregate(store, work, tile_bytes=1 << 14, num_threads=num_threads)
        assert load(store, model.ref).tobytes() == np.array(expected).astype(dtype).tobytes()
        store.delete("4/global")


# --- memory ---------------------------------------------------------------------------------------


def traced_peak(store: WeightsStore, work: Aggregate) -> int:
    """Bytes, of what Python and numpy allocate."""
    tracemalloc.start()
    try:
        aggregate(store, work, num_threads=2)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_survey_that_is_held_up_takes_no_memory(tmp_path, monkeypatch):
    """Tables of the blocks after it do not pile up: there is one for the sum, and one a thread."""
    k = 500
    calls, is_ahead = itertools.count(), threading.Event()

    def gram(differences):
        call = next(calls)
        if call == 0:
            is_ahead.wait(0.5)
        elif call == 12:
            is_ahead.set()
        return np.ones((len(differences), len(differences)))

    monkeypatch.setattr(distances, "gram", gram)
    store = FileStore(tmp_path)
    work, _ = large_round(store, "krum", k, 8192)
    peak = traced_peak(store, work)
    # Two tiles, the sum, for each of two threads early tables and one more, and the differences.
    num_tables = 1 + 2 * (engine._EARLY_BYTES // (8 * k**2) + 1)
    assert peak < engine.TILES_BYTES + num_tables * 8 * k**2 + (6 << 20), peak


def large_round(
    store: WeightsStore, rule: str, num_updates: int, length: int
) -> tuple[Aggregate, GlobalModel]:
    chance = np.random.default_rng(1)
    base = np.zeros(length, np.float32)
    vectors = [chance.standard_normal(length, np.float32) for _ in range(num_updates)]
    model = model_of(store, base)
    options = OPTIONS.get(rule, {})
    if rule in ("krum", "multi_krum"):
        options = {"num_byzantine": 0}
    if rule == "trimmed_mean":
        options = {"trim": 0}
    return Aggregate(3, rule, hand_in(store, vectors), model, options=options), model


@pytest.mark.parametrize("rule", sorted({*EVERY_RULE} - {"identity"}))
def test_memory_does_not_grow(rule, tmp_path):
    """Memory is two tiles and the needs of the threads, for any number of updates and any model."""
    store = FileStore(tmp_path)
    aggregate(store, large_round(store, rule, 3, 1000)[0])  # what is imported and kept is not meant
    peaks = []
    for num_updates, length in ((3, 2_000_000), (16, 500_000), (3, 4_000_000)):
        store.delete("4/global")
        work, _ = large_round(store, rule, num_updates, length)
        peaks.append(traced_peak(store, work))
    assert max(peaks) < engine.TILES_BYTES + (12 << 20), peaks


@pytest.mark.parametrize("rule", SURVEYORS)
def test_distances_between_updates_leave_out_statistics(rule):
    """The statistics of one site may be of any size, and say nothing of how far its weights are.
    Whatever the rule makes of an update holds for its statistics as well."""
    chance = np.random.default_rng(4)
    base = chance.normal(size=LENGTH).astype(np.float32)
    vectors = [base + chance.normal(size=LENGTH).astype(np.float32) for _ in range(NUM_UPDATES)]
    size = 9000  # beyond a block of the survey
    layout = (
        TensorSpec("w", (50,), "float32"),
        TensorSpec("mean", (size,), "float32", "statistic"),
        TensorSpec("v", (LENGTH - size - 50,), "float32"),
    )
    made = []
    for scale in (1, 1000):
        store = MemoryStore()
        scaled = [vector.copy() for vector in vectors]
        for number, vector in enumerate(scaled):
            vector[50 : 50 + size] = scale * number
        work = work_on(store, rule, scaled, base)
        work = replace(work, base=replace(work.base, layout=layout))
        model = load(store, aggregate(store, work).ref)
        made.append(np.delete(model, np.s_[50 : 50 + size]))
        assert (model[50 : 50 + size] >= base[50 : 50 + size].min()).all()
    np.testing.assert_array_equal(*made)
