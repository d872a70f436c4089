"""The tile engine: reads the updates of a round side by side, by tiles, and writes the next model.

One pass, two where the rule surveys the updates first. All updates are read in the order of their
names; with them the global model, where the rule or the optimiser needs it, and the optimiser's
state.

Memory is two tiles of TILE_BYTES, however many participants there are and however large the model
is: all that is read and made of some columns, and the same of those that are read meanwhile. Beside
them each thread has its scratch of a few pieces that fit into a processor's cache, and the rules
that compare any two updates have a table of 8 k² bytes for their sum, and one more for each thread:
no thread surveys a block before all but the last few before it are added.

The result depends on the updates, the state and their order alone, so making it again after a crash
gives the same bytes: columns are worked on each by itself, and what is summed over columns is
summed over blocks that depend on the number of updates only, added in order.

Weights are little-endian, whatever the machine.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from xain_coordinator.aggregation.aggregator import (
    Aggregator,
    Float64,
    RuleFailed,
    Surveyor,
    Tile,
    Weights,
    is_surveyor,
)
from xain_coordinator.aggregation.assembling import assemble_slices
from xain_coordinator.aggregation.averages import WeightedAverage
from xain_coordinator.aggregation.crew import Crew, Job
from xain_coordinator.aggregation.optimizers import MAX_DIFFERENCE, Optimizer
from xain_coordinator.aggregation.publishing import Publication, publication
from xain_coordinator.aggregation.rules import RULES, optimizer_of_session, rule_of_session
from xain_coordinator.aggregation.staleness import mixing_weights
from xain_coordinator.aggregation.tiles import DType, Slot, Tiles, Vector, spans
from xain_coordinator.aggregation.trees import join_updates
from xain_coordinator.core.attempts import RULE as ASSEMBLE
from xain_coordinator.core.effects import Aggregate
from xain_coordinator.core.keys import model_key, state_key
from xain_coordinator.core.values import BYTES, GlobalModel, Layout
from xain_coordinator.plugins import PluginFailed
from xain_coordinator.ports import WeightsStore
from xain_proto.np import npy_header

log = structlog.get_logger(__name__)

# Large enough that a file is read in pieces of some 100 KB with 64 updates, and small beside what a
# coordinator holds anyway.
TILE_BYTES = 8 << 20

# A process may have 1024 files open by default, and the others are for connections. With more
# updates than this, each is opened again for every tile.
MAX_READERS = 64

MAX_THREADS = 8  # more would wait for memory

# Less than this is combined before a second thread has begun.
_SMALL_BYTES = 1 << 20

_BLOCK_BYTES = 1 << 20  # of the differences that are surveyed at a time
_WRITE_BYTES = 1 << 20


def aggregate(
    store: WeightsStore,
    work: Aggregate,
    stop: threading.Event | None = None,
    *,
    tile_bytes: int = TILE_BYTES,
    max_readers: int = MAX_READERS,
    num_threads: int | None = None,
) -> GlobalModel:
    """Make and store the model of the round after `work.round`, and before it what the optimiser is
    to go on from.

    Blocks; runs in a thread. Doing it again gives the same model.
    stop: once set, the work ends after the reads and the pieces at hand.
    num_threads: None for one for each processor.
    Raises UpdateChanged, Fenced, RuleFailed, PluginFailed, Stopped, and the store's errors.
    """
    if work.base.dtype == BYTES:
        return join_updates(store, work, stop)
    if work.rule == ASSEMBLE:
        return assemble_slices(store, work, stop)
    rule = _rule(work)
    optimizer = None
    # An initialisation comes from nowhere, so there is no direction to step in.
    if work.optimizer and not work.base.is_empty:
        optimizer = optimizer_of_session(work.optimizer, work.optimizer_options)
    weights = work.updates[0].weights
    dtype, length = _little_endian(weights.dtype), weights.shape[0]
    num_rows = len(work.updates) + 1
    if num_threads is None:
        is_small = length * dtype.itemsize * num_rows < _SMALL_BYTES
        num_threads = 1 if is_small else min(_num_processors(), MAX_THREADS)
    num_readers = max(1, min(max(store.num_parallel, num_threads), max_readers, num_rows))
    with Crew(num_threads, num_readers, stop or threading.Event()) as crew:
        tiles = Tiles(store, crew, length, rows=(), tile_bytes=tile_bytes, max_readers=max_readers)
        making = _Making(work, rule, optimizer, dtype, tiles, num_threads)
        try:
            return making.make()
        except (RuleFailed, PluginFailed):
            # If what lies in the store is not what was accepted, that is why, and a person can put
            # it right. Otherwise a rule would fail for ever.
            making.verify()
            raise


def _rule(work: Aggregate) -> Aggregator:
    """Raises RuleFailed, and PluginFailed where a plug-in is not what it was when the session was
    opened: that can be put right, so it does not end the session."""
    rule = rule_of_session(work.rule, work.options)
    with _calling(work, "check"):
        rule.check(len(work.updates))
    if any(work.staleness) and not rule.takes_stale:
        usable = ", ".join(name for name, one in sorted(RULES.items()) if one.takes_stale)
        raise RuleFailed(
            f"rule {work.rule!r} takes no stale updates, and round {work.round} has some that are "
            f"{max(work.staleness)} models behind; use one of: {usable}"
        )
    if is_surveyor(rule) and rule.needs_base and work.base.is_empty:
        return WeightedAverage()  # there is nothing to be near to yet
    return rule


@contextmanager
def _calling(work: Aggregate, part: str) -> Iterator[None]:
    """Part of a rule. What it raises of a plug-in's own is told as the plug-in's failure."""
    try:
        yield
    except (RuleFailed, MemoryError):
        raise
    except Exception as error:
        # It is another's code that runs here, and may raise anything; whose it is must be told. Put
        # right, it can do its work: the session goes on.
        if work.rule in RULES:
            raise
        raise PluginFailed(
            f"the plug-in {work.rule!r} fails in {part}() in round {work.round}: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Making:
    """One model in the making. tiles: how to read, without what."""

    work: Aggregate
    rule: Aggregator
    optimizer: Optimizer | None
    dtype: DType
    tiles: Tiles
    num_threads: int

    def make(self) -> GlobalModel:
        rows = [self._update(i) for i in range(len(self.work.updates))]
        num_samples = np.array([update.num_samples for update in self.work.updates], np.int64)
        weights: Weights = num_samples
        if any(self.work.staleness):
            assert len(self.work.staleness) == len(rows)
            weights = mixing_weights(num_samples, self.work.staleness)
            rows = [*rows, self._base]
        elif is_surveyor(self.rule):
            weights = self._weigh(self.rule, num_samples)
            candidates = [*rows, *([] if self.work.base.is_empty else [self._base])]
            chosen = np.flatnonzero(weights)
            rows, weights = [candidates[i] for i in chosen], weights[chosen]
        return self._publish(rows, weights)

    def verify(self) -> None:
        """Raises UpdateChanged if anything that was read is not what it was."""
        rows = [self._update(i) for i in range(len(self.work.updates))]
        is_compared = is_surveyor(self.rule) and not self.work.base.is_empty
        extras = []
        is_stepped = self.optimizer is not None or self.work.learning_rate is not None
        if is_compared or any(self.work.staleness) or is_stepped:
            extras = [self._base, *self._state().values()]
        replace(self.tiles, rows=rows, extras=extras).work_through(lambda slot, start: ())

    def _update(self, index: int) -> Vector:
        weights = self.work.updates[index].weights
        return Vector(weights.ref, "accepted update", self.dtype)

    @property
    def _base(self) -> Vector:
        base = self.work.base
        weights = self.work.updates[0].weights
        assert (base.shape, base.dtype) == (weights.shape, weights.dtype)
        return Vector(base.ref, "global model", self.dtype)

    def _state(self) -> Mapping[str, Vector]:
        """What the optimiser remembers, by name; none before its first step."""
        if self.optimizer is None:
            return {}
        kept = self.work.base.state
        return {
            name: Vector(kept[name], "optimiser's state", self._state_dtype)
            for name in sorted(self.optimizer.begin())
            if name in kept
        }

    @property
    def _state_dtype(self) -> DType:
        """Squares of differences need the range and the precision."""
        return np.promote_types(self.dtype, np.float32).newbyteorder("<")

    # --- the first pass, of rules that survey ---

    def _weigh(self, rule: Surveyor, num_samples: NDArray[np.int64]) -> Float64:
        k = len(num_samples)
        bases = [] if self.work.base.is_empty else [self._base]
        block = _block_columns(k)
        tiles = replace(
            self.tiles,
            rows=[self._update(i) for i in range(k)],
            extras=bases,
            block=block,
        )
        total = _OrderedSum(self.num_threads)
        statistics = _Statistics(self.work.base.layout)

        def survey(slot: Slot, index: int) -> None:
            base = slot.extras[0] if bases else np.zeros(1, self.dtype)
            with total.turn_of(index) as turn:
                if turn is None:
                    return
                # The rule looks at what comes out.
                with np.errstate(over="ignore", invalid="ignore"), _calling(self.work, "survey"):
                    differences = np.subtract(slot.rows, base, dtype=np.float64)
                    for columns in statistics.among(index * block, differences.shape[1]):
                        differences[:, columns] = 0
                    turn(rule.survey(differences))

        def compute(slot: Slot, start: int) -> Iterator[Job]:
            num_columns = slot.rows.shape[1]
            for first in range(0, num_columns, block):
                piece = slot.cut(first, min(first + block, num_columns))
                yield partial(survey, piece, (start + first) // block)

        tiles.work_through(compute)
        with _calling(self.work, "weigh"):
            weights = rule.weigh(total.result, num_samples)
            if weights.shape != (k + 1,) or not np.isfinite(weights).all() or not weights.any():
                raise RuleFailed(
                    f"rule {self.work.rule!r} gives {k} updates and the global model no usable "
                    f"weights in round {self.work.round}"
                )
            if weights[k] and not bases:
                raise RuleFailed(
                    f"rule {self.work.rule!r} gives the global model a weight of {weights[k]:g} in "
                    f"round {self.work.round}, which initialises: there is no global model yet"
                )
        return weights

    # --- the last pass ---

    def _publish(self, rows: Sequence[Vector], weights: Weights) -> GlobalModel:
        work, optimizer = self.work, self.optimizer
        state = self._state()
        names = sorted(optimizer.begin()) if optimizer is not None else []
        made = [self.dtype, *(self._state_dtype for _ in names)]
        is_stepped = optimizer is not None or work.learning_rate is not None
        extras = [self._base, *state.values()] if is_stepped else []
        tiles = replace(self.tiles, rows=rows, extras=extras, made=made)
        statistics = _Statistics(work.base.layout)
        num_skipped: list[int] = []  # for each piece, appended by any thread
        keys = [model_key(work.round + 1), *(state_key(work.round + 1, name) for name in names)]
        with ExitStack() as stack:
            begun = [stack.enter_context(publication(tiles.store, key)) for key in keys]
            for one, dtype in zip(begun, made, strict=True):
                one.write(npy_header(dtype, (tiles.length,)))

            def combine(slot: Slot, start: int) -> None:
                with np.errstate(over="ignore", invalid="ignore"):  # looked at below
                    combined = self._combine(slot.rows, weights)
                    after: Iterable[Float64] = ()
                    # A sum, say, that no step makes meaningful.
                    is_usable = not is_stepped or bool(np.isfinite(combined).all())
                    columns = statistics.among(start, len(combined))
                    if work.learning_rate is not None:
                        combined = _descended(slot.extras[0], combined, work.learning_rate, columns)
                    if optimizer is not None:
                        combined, after, skipped = _step(
                            optimizer, combined, slot, names, list(state), columns
                        )
                        num_skipped.append(skipped)
                        combined = _within(self.dtype, combined)
                    model, *memory = slot.made
                    np.copyto(model, combined, casting="same_kind")
                    for place, values in zip(memory, after, strict=True):
                        np.copyto(place, _within(place.dtype, values), casting="same_kind")
                if not (is_usable and np.isfinite(model).all()):
                    raise RuleFailed(
                        f"{self._maker} leaves the range of {self.dtype.name} in round {work.round}"
                    )

            def compute(slot: Slot, start: int) -> Iterator[Job]:
                for first, end in spans(slot.rows.shape[1], self.num_threads):
                    yield partial(combine, slot.cut(first, end), start + first)

            def write(slot: Slot) -> Iterator[Job]:
                for one, values in zip(begun, slot.made, strict=True):
                    yield partial(_write, one, values)

            tiles.work_through(compute, write)
            # The state first: where the model is, what it goes on from is too.
            *state_refs, ref = [one.commit() for one in (*begun[1:], begun[0])]
        if any(num_skipped):
            log.warning(
                "optimizer_step_skipped",
                round=work.round,
                optimizer=work.optimizer,
                num_elements=sum(num_skipped),
                max_difference=MAX_DIFFERENCE,
            )
        first = work.updates[0].weights
        return GlobalModel(
            round=work.round + 1,
            ref=ref,
            dtype=first.dtype,
            shape=first.shape,
            layout=work.base.layout,
            metadata=work.base.metadata,
            state=dict(zip(names, state_refs, strict=True)),
        )

    def _combine(self, tile: NDArray[Any], weights: Weights) -> Float64:
        with _calling(self.work, "combine"):
            combined = self.rule.combine(tile, weights)
            self._check_combined(combined, tile)
        return combined

    def _check_combined(self, combined: Float64, tile: NDArray[Any]) -> None:
        if combined.shape != tile.shape[1:] or combined.dtype != np.float64:
            raise RuleFailed(
                f"rule {self.work.rule!r} made {combined.dtype} of shape {combined.shape} out of "
                f"{tile.shape[1]} columns; it must make as many float64"
            )

    @property
    def _maker(self) -> str:
        rule = f"rule {self.work.rule!r}"
        return rule if self.optimizer is None else f"{rule} with optimiser {self.work.optimizer!r}"


class _Statistics:
    """The columns of a model that are statistics, from its layout."""

    def __init__(self, layout: Layout) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        end = 0
        for spec in layout:
            start, end = end, end + spec.size
            if spec.kind == "statistic":
                self._starts.append(start)
                self._ends.append(end)

    def among(self, first: int, num_columns: int) -> list[slice]:
        """The statistics among the columns from `first` on, as slices of those."""
        at = bisect_right(self._ends, first)
        slices: list[slice] = []
        while at < len(self._starts) and self._starts[at] < first + num_columns:
            start, end = self._starts[at] - first, self._ends[at] - first
            slices.append(slice(max(start, 0), min(end, num_columns)))
            at += 1
        return slices


def _descended(
    base: Tile, gradient: Float64, learning_rate: float, statistics: Sequence[slice]
) -> Float64:
    """A step against the gradient. statistics: columns that are no gradient, and stay."""
    stepped = base - learning_rate * gradient
    for columns in statistics:
        stepped[columns] = gradient[columns]
    return stepped


def _step(
    optimizer: Optimizer,
    result: Float64,
    slot: Slot,
    names: Sequence[str],
    kept: Sequence[str],
    statistics: Sequence[slice],
) -> tuple[Float64, list[Float64], int]:
    """The optimiser's step on some columns.

    kept: the names of the state that the slot has. statistics: columns that become the result.
    Returns the columns of the model, the state in the order of `names`, and in how many columns no
    step was taken because the result is too far from the model: there model and state stay.
    """
    base, *before = (extra.astype(np.float64) for extra in slot.extras)
    state = {name: np.full(len(base), value) for name, value in optimizer.begin().items()}
    state |= zip(kept, before, strict=True)
    stepped, after = optimizer.step(base, result, state)
    distances = np.subtract(result, base)
    np.abs(distances, out=distances)
    for columns in statistics:
        distances[columns] = 0
    num_skipped = 0
    if distances.max(initial=0) > MAX_DIFFERENCE:
        is_skipped = distances > MAX_DIFFERENCE
        num_skipped = int(np.count_nonzero(is_skipped))
        stepped = np.where(is_skipped, base, stepped)
        after = {name: np.where(is_skipped, state[name], after[name]) for name in names}
    for columns in statistics:
        stepped[columns] = result[columns]
        for name in names:
            after[name][columns] = state[name][columns]
    return stepped, [after[name] for name in names], num_skipped


def _within(dtype: DType, values: Float64) -> Float64:
    """What leaves the range stays at its end, so that one huge update does not end the session:
    what an optimiser remembers of it would lead out of the range for many rounds."""
    largest = np.finfo(dtype).max
    clipped: Float64 = np.clip(values, -largest, largest, dtype=np.float64)
    return clipped


def _write(begun: Publication, values: NDArray[Any]) -> None:
    per_piece = max(1, _WRITE_BYTES // values.itemsize)
    for start in range(0, len(values), per_piece):
        begun.write(values[start : start + per_piece].tobytes())


class _OrderedSum:
    """Adds parts in the order of their numbers, from 0, in whatever order they come.

    max_parts: so many exist at a time. Who would make a later one waits; whoever takes numbers in
    order, as the jobs of a crew do, never waits for ever, because the first one does not wait.
    """

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._changed = threading.Condition()
        self._early: dict[int, Float64] = {}
        self._num_added = 0
        self._total: Float64 | None = None
        self._has_failed = False

    @contextmanager
    def turn_of(self, index: int) -> Iterator[Callable[[Float64], None] | None]:
        """Waits until the part may be made, and gives what takes it; None if another part could
        not be made, and this one would be for nothing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_failed or index < self._num_added + self._max_parts
            )
            has_failed = self._has_failed
        try:
            yield None if has_failed else partial(self._add, index)
        except BaseException:  # whatever it is, nobody may wait for this part
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            raise

    def _add(self, index: int, part: Float64) -> None:
        with self._changed:
            self._early[index] = part
            while self._num_added in self._early:
                next_ = self._early.pop(self._num_added)
                if self._total is None:
                    self._total = next_.copy()
                else:
                    self._total += next_
                self._num_added += 1
            self._changed.notify_all()

    @property
    def result(self) -> Float64:
        assert self._total is not None, "there was nothing to add"
        assert not self._early, "a part is missing"
        return self._total


def _block_columns(num_updates: int) -> int:
    """By the number of updates alone, so that sums over blocks do not depend on anything else."""
    fitting = max(1, _BLOCK_BYTES // (8 * num_updates))
    return min(max(1 << (fitting.bit_length() - 1), 64), 8192)


def _num_processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def _little_endian(dtype: str) -> DType:
    return np.dtype(dtype).newbyteorder("<")
