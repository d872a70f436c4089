"""A replica under random requests: the same bits wherever its entries are applied."""

import io
import itertools
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.parameter_state import (
    Oracle,
    everything,
    keys_of,
    pull,
    push,
    range_view,
    send,
    state_of,
    table,
)
from xain_parameters import cutfile
from xain_parameters.cut import Abandoned
from xain_parameters.errors import Damaged, Invalid
from xain_parameters.keys import END, even
from xain_parameters.messages import Mark
from xain_parameters.replica import Replica
from xain_parameters.tables.dense import BoundedPart
from xain_parameters.tables.initialisers import Normal, Uniform
from xain_parameters.tables.part import Part
from xain_parameters.tables.rules import FTRL, Adagrad, Adam, Momentum
from xain_parameters.tables.sparse import OpenPart, _Live

BOUND = 24
TABLES = [
    table(1, bound=BOUND, dim=3, is_dense=True, update=Adam(0.1), init=Normal(1.0, seed=4)),
    table(2, bound=BOUND, dim=2, update=Adagrad(0.5), init=Uniform(0.5, seed=3)),
    table(3, update=Momentum(0.1), init=Uniform(2.0)),
    table(4, dim=2, dtype="float64", update=FTRL(0.5, l1=0.1)),
    table(5, bound=BOUND, dim=1),
]
WORKERS = ["w1", "w2", "w3"]
BIG = 1 << 57  # keys of tables without a bound are spread over all 64 bits


@pytest.fixture(autouse=True, scope="module")
def _small_sizes():
    """Blocks, pieces and first capacities of a few rows, so that small examples have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "block_values", 6)
        patch.setattr(Part, "piece_bytes", 100)
        patch.setattr(BoundedPart, "scan_rows", 5)
        patch.setattr(OpenPart, "first_rows", 2)
        patch.setattr(_Live, "chunk_keys", 4)
        patch.setattr(_Live, "few_keys", 3)
        yield


few = settings(max_examples=60)
numbers = st.sets(st.integers(0, BOUND - 1), min_size=1, max_size=8)
pushes = st.tuples(
    st.sampled_from(WORKERS),
    st.integers(0, len(TABLES) - 1),
    numbers,
    st.integers(0, 1 << 16),
    st.booleans(),
)
scripts = st.lists(
    st.one_of(
        pushes,
        st.tuples(st.just("tick"), st.sampled_from(WORKERS)),
        st.tuples(st.just("mark"), st.sampled_from(WORKERS)),
        st.just(("step",)),
        st.just(("step",)),
        st.just(("open",)),
        st.just(("again",)),
    ),
    max_size=40,
)


def body(spec, chosen, seed):
    """(keys or None, start, stop, values) of a push. Consecutive rows of a dense array go by
    number."""
    first, last = min(chosen), max(chosen)
    rows = np.random.default_rng(seed)
    if spec.is_dense and seed % 2:
        keys, start, stop = None, first, last + 1
        num_rows = stop - start
    else:
        keys = keys_of(sorted(chosen)) * np.uint64(1 if spec.bound else BIG)
        start, stop, num_rows = 0, 0, len(keys)
    values = rows.standard_normal((num_rows, spec.dim)).astype(spec.dtype)
    return keys, start, stop, values


class Run:
    """A primary and what a script does to it.

    log: all entries with their bodies, in order.
    """

    def __init__(self, is_held=None, span=(0, END)):
        self.primary = Replica(range_view(1, *span), TABLES, generation=1)
        self.primary.keeps_cuts = True
        self.log = []
        self.clocks = dict.fromkeys(WORKERS, 0)
        self.part = itertools.count()
        self.is_held = is_held
        self.last = None

    def do(self, op):
        """The entries that an op makes, applied."""
        before = len(self.log)
        match op:
            case ("tick", worker):
                self.clocks[worker] += 1
                self._apply(self.primary.open(min(self.clocks.values()), {}))
            case ("open",):
                for worker in WORKERS:
                    self.clocks[worker] += 1
                self._apply(self.primary.open(min(self.clocks.values()), {}))
            case ("mark", worker):
                mark = Mark(1, (1, 1), 1, 0, cut=1, clock=self.clocks[worker])
                self._apply(self.primary.mark(worker, mark))
            case ("again",):
                if self.last is not None:
                    assert self.primary.prepare(*self.last) is None
            case (worker, index, chosen, seed, is_held):
                keys, start, stop, values = body(TABLES[index], chosen, seed)
                head = push(
                    TABLES[index],
                    clock=self.clocks[worker],
                    part=next(self.part),
                    start=start,
                    stop=stop,
                    is_held=is_held if self.is_held is None else self.is_held,
                )
                self.last = (worker, head, keys, values)
                self._apply(self.primary.prepare(*self.last), keys, values)
        return self.log[before:]

    def _apply(self, entry, keys=None, values=None):
        if entry is not None:
            self.primary.apply(entry, keys, values)
            self.log.append((entry, keys, values))


def replay(log, span=(0, END)):
    replica = Replica(range_view(1, *span), TABLES, generation=1)
    for entry in log:
        replica.apply(*entry)
    return replica


def assert_same(a, b):
    assert everything(a) == everything(b)
    assert state_of(a) == state_of(b)


@few
@given(scripts)
def test_replay_of_the_entries_has_the_same_bits(script):
    run = Run()
    for op in script:
        run.do(op)
    assert_same(replay(run.log), run.primary)


@few
@given(scripts)
def test_rows_are_those_of_the_slow_version(script):
    run = Run()
    oracle = Oracle(TABLES)
    for op in script:
        for entry in run.do(op):
            oracle.apply(*entry)
    oracle.assert_equals(run.primary)


@few
@given(scripts, st.randoms(use_true_random=False))
def test_held_pushes_have_the_same_bits_in_any_order_of_arrival(script, random):
    first = Run(is_held=True)
    for op in script:
        first.do(op)
    pushes = [one for one in first.log if one[0].kind == "push"]
    random.shuffle(pushes)
    pushes.sort(key=lambda one: one[0].clock)  # each worker sends its clocks in order
    other = Replica(range_view(1), TABLES, generation=1)
    for number, (entry, keys, values) in enumerate(pushes, 1):
        spec = TABLES[entry.table - 1]
        head = push(
            spec,
            clock=entry.clock,
            part=entry.part,
            start=entry.start,
            stop=entry.stop,
            is_held=True,
        )
        assert send(other, entry.worker, head, keys, values)[0].sequence == number
    first.primary.apply(first.primary.open(1 << 20, {}))
    other.apply(other.open(1 << 20, {}))
    assert everything(first.primary) == everything(other)


@few
@given(scripts, st.integers(0, 20))
def test_learner_filled_between_entries_ends_as_its_primary(script, start):
    run = Run()
    for op in script[:start]:
        run.do(op)
    learner = Replica(range_view(1), TABLES, generation=1, is_whole=False)
    tiles = run.primary.tiles()
    learner.take(*next(tiles))
    for op in script[start:]:
        if op == ("step",):
            with suppress(StopIteration):
                learner.take(*next(tiles))
        for entry in run.do(op):
            learner.apply(*entry)
    assert not learner.is_whole or next(tiles, None) is None
    for tile in tiles:
        learner.take(*tile)
    assert learner.is_whole
    assert_same(learner, run.primary)
    for entry in run.do(("w1", 2, {1, 2, 23}, 7, False)):
        learner.apply(*entry)
    assert_same(learner, run.primary)


def before_marks(log):
    """The pushes that the checkpoint has: up to the first mark all entries, then pushes of workers
    that have not passed it."""
    marked, chosen = set(), []
    for entry, keys, values in log:
        if entry.kind == "mark":
            marked.add(entry.worker)
        elif not marked or (entry.kind == "push" and entry.worker not in marked):
            chosen.append((entry, keys, values))
    return chosen


def renumbered(log):
    for number, (entry, keys, values) in enumerate(log, 1):
        yield type(entry)(**{**fields_of(entry), "sequence": number}), keys, values


def fields_of(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def cut_of(script, start):
    """A run with a checkpoint whose first mark comes after `start` ops, and the file's pieces."""
    run = Run()
    for op in script[:start]:
        if op[0] != "mark":
            run.do(op)
    run.do(("mark", "w2"))
    cut = run.primary.cuts[1]
    pieces, reading = [], cut.pieces()
    for op in script[start:]:
        if op == ("step",) and (piece := next(reading, None)) is not None:
            pieces.append(piece)
        run.do(op)
    pieces += reading
    pieces += cut.finish()
    run.primary.end_cut(1)
    return run, b"".join(cutfile.encoded(pieces))


def loaded(files, span=(0, END), **options):
    replica = Replica(range_view(1, *span), TABLES, generation=2)
    replica.load([cutfile.read(io.BytesIO(file), "a.cut") for file in files], **options)
    return replica


@few
@given(scripts, st.integers(0, 20))
def test_cut_is_the_state_of_exactly_the_pushes_before_the_marks(script, start):
    run, file = cut_of(script, start)
    restored = loaded([file])
    reference = replay(renumbered(before_marks(run.log)))
    assert everything(restored) == everything(reference)
    for replica in (restored, reference):
        replica.apply(replica.open(1 << 20, {}))
    assert everything(restored) == everything(reference)


@few
@given(scripts, st.integers(0, 20))
def test_cut_without_its_recorded_pushes_and_the_log_after_it_give_the_last_state(script, start):
    run, file = cut_of(script, start)
    restored = loaded([file], with_recorded=False)
    for entry, keys, values in run.log:
        if entry.sequence > restored.sequence:
            restored.apply(entry, keys, values)
    assert_same(restored, run.primary)


@few
@given(scripts, st.integers(0, 20), st.integers(1, 4))
def test_cut_can_be_loaded_into_parts_of_its_range_and_put_together_again(script, start, num_parts):
    _, file = cut_of(script, start)
    whole = loaded([file])
    whole.apply(whole.open(1 << 20, {}))
    together = {number: {} for number in everything(whole)}
    files = []
    for number, span in enumerate(even(num_parts)):
        replica = loaded([file], span)
        replica.keeps_cuts = True
        if number:
            replica.apply(replica.open(1 << 19, {}))
        replica.apply(replica.cut(9))
        cut = replica.cuts[9]
        files.append(b"".join(cutfile.encoded([*cut.pieces(), *cut.finish()])))
        replica.apply(replica.open((1 << 20) + number, {}))
        for one, rows in everything(replica).items():
            assert not together[one].keys() & rows.keys()
            together[one] |= rows
    assert together == everything(whole)
    merged = loaded(files)
    merged.apply(merged.open(1 << 19, {}))
    assert everything(merged) == everything(whole)


def test_cut_that_is_given_up_is_read_no_further():
    run = Run()
    run.do(("w1", 1, {1, 2, 3}, 0, False))
    run.do(("mark", "w1"))
    cut = run.primary.cuts[1]
    pieces = cut.pieces()
    next(pieces)
    run.primary.end_cut(1)
    with pytest.raises(Abandoned):
        list(pieces)


@few
@given(scripts, st.data())
def test_damaged_file_is_refused_and_named(script, data):
    _, file = cut_of(script, 0)
    at = data.draw(st.integers(0, len(file) - 1))
    changed = bytearray(file)
    changed[at] ^= data.draw(st.integers(1, 255))
    for bad in (file[:at], bytes(changed)):
        with pytest.raises(Damaged, match=r"a\.cut"):
            list(cutfile.read(io.BytesIO(bad), "a.cut"))


@few
@given(scripts, pushes)
def test_invalid_push_changes_nothing(script, wrong):
    run = Run()
    for op in script:
        run.do(op)
    before, state = everything(run.primary), state_of(run.primary)
    worker, index, chosen, seed, is_held = wrong
    spec = TABLES[index]
    keys, start, stop, values = body(spec, chosen, seed)
    values[-1, -1] = np.nan
    head = push(spec, clock=99, start=start, stop=stop, is_held=is_held)
    with pytest.raises(Invalid, match=f"table {spec.name!r}, range 1"):
        run.primary.prepare(worker, head, keys, values)
    with pytest.raises(Invalid, match=f"table {spec.name!r}, range 1"):
        run.primary.prepare(worker, head, keys, values[1:])
    assert everything(run.primary) == before
    assert state_of(run.primary) == state


@few
@given(st.sets(st.integers(0, END - 1), min_size=1, max_size=300), st.integers(1, 7))
def test_first_values_of_a_row_depend_on_seed_and_key_only(chosen, num_ranges):
    """Cut into any ranges, pushed or not, at any time, and beside any other keys."""
    spec = table(1, dim=5, init=Normal(1.0, seed=9))
    keys = keys_of(sorted(chosen))
    expected = Normal(1.0, seed=9).rows(keys, 5, np.dtype("float32"))
    whole = Replica(range_view(1), [spec], generation=1)
    send(whole, "w", push(spec), keys[::2], np.zeros((len(keys[::2]), 5), np.float32))
    assert (whole.pull(pull(spec), keys) == expected).all()
    for span in even(num_ranges):
        replica = Replica(range_view(1, *span), [spec], generation=1)
        for key, row in zip(keys, expected, strict=True):
            with suppress(Invalid):
                assert (replica.pull(pull(spec), keys_of([key]))[0] == row).all()
