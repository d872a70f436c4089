"""The tile engine: combines the updates of a round by tiles and writes the next model.

One pass, or two where the rule surveys the updates first. All updates are read side by side, in the
order of their names; with them the global model, where the rule or the optimiser needs it, and the
optimiser's state.

Memory is a tile for each thread, TILES_BYTES together, however many participants there are and
however large the model is. Beside it each thread has what the rule allocates for some columns. The
rules that compare any two updates have a table of 8 k² bytes for their sum, and each thread has as
many more as fit into _EARLY_BYTES, one at least.

The result depends on the updates, the state and their order alone, so a second run after a crash
gives the same bytes: each column is computed by itself, and sums over columns are sums over blocks
whose size depends on the number of updates only, added in order.

Weights are little-endian, whatever the machine.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
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
from xain_coordinator.aggregation.newton import RULE as NEWTON
from xain_coordinator.aggregation.newton import take_step
from xain_coordinator.aggregation.optimizers import MAX_DIFFERENCE, Optimizer
from xain_coordinator.aggregation.publishing import Publication
from xain_coordinator.aggregation.rules import RULES, optimizer_of_session, rule_of_session
from xain_coordinator.aggregation.staleness import mixing_weights
from xain_coordinator.aggregation.tiles import (
    MAX_COLUMNS,
    DType,
    TileBuffer,
    Tiles,
    Vector,
)
from xain_coordinator.core.parts.attempts import RULE as ASSEMBLE
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.keys import model_key, state_key
from xain_coordinator.core.vocabulary.values import BYTES, GlobalModel, Layout
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.ports import WeightsStore
from xain_foundation.logs.logger import get_logger
from xain_foundation.threads import num_processors
from xain_wire.np import npy_header
from xain_workloads.model import Kind

log = get_logger(__name__)

# All tiles together. Large enough that a file is read in pieces of 128 KiB with 64 updates and two
# threads, and small beside what a coordinator holds anyway.
TILES_BYTES = 16 << 20

# A process may have 1024 files open by default, and the others are for connections. With more
# updates than this, each is opened again for every tile.
MAX_READERS = 64

MAX_THREADS = 8  # more would wait for memory

# Less than this is combined before a second thread has begun.
_SMALL_BYTES = 1 << 20

_BLOCK_BYTES = 1 << 20  # of the differences that are surveyed at a time
_EARLY_BYTES = 4 << 20  # of what blocks have given before it can be added


def aggregate(
    store: WeightsStore,
    work: Aggregate,
    stop: threading.Event | None = None,
    *,
    tile_bytes: int | None = None,
    max_readers: int = MAX_READERS,
    num_threads: int | None = None,
) -> GlobalModel:
    """Make and store the optimiser's state and the model of the round after `work.round`.

    Blocks; runs in a thread. A second call makes the same model.
    stop: once set, the work ends after the reads and the tiles at hand.
    tile_bytes: of the tile of one thread; None for its share of TILES_BYTES.
    num_threads: None for one for each processor.
    Raises UpdateChanged, Fenced, RuleFailed, PluginFailed, Stopped, and the store's errors.
    """
    if work.base.dtype == BYTES:
        # Trees and ensembles are read by modules of the workloads that other models do not need.
        from xain_coordinator.aggregation.trees import join_updates

        return join_updates(store, work, stop)
    if work.rule == ASSEMBLE:
        return assemble_slices(store, work, stop)
    if work.rule == NEWTON:
        return take_step(store, work, stop)
    rule = _rule(work)
    optimizer = None
    # An initialisation comes from nowhere, so there is no direction to step in.
    if work.optimizer and not work.base.is_empty:
        optimizer = optimizer_of_session(work.optimizer, work.optimizer_options)
    weights = work.updates[0].weights
    dtype, length = np.dtype(weights.dtype).newbyteorder("<"), weights.shape[0]
    if num_threads is None:
        is_small = length * dtype.itemsize * (len(work.updates) + 1) < _SMALL_BYTES
        num_threads = 1 if is_small else min(num_processors(), MAX_THREADS)
        if store.num_parallel > 1:
            num_threads = 2  # one tile is read while another is computed
    if tile_bytes is None:
        tile_bytes = TILES_BYTES // max(num_threads, 2)
    tiles = Tiles(
        store,
        length,
        stop or threading.Event(),
        num_threads=num_threads,
        tile_bytes=tile_bytes,
        max_readers=max_readers,
    )
    making = _Making(work, rule, optimizer, dtype, tiles)
    try:
        return making.make()
    except (RuleFailed, PluginFailed):
        # If an object in the store is not what was accepted, that is the reason, and a person can
        # put it right. Otherwise the rule would fail for ever.
        making.verify()
        raise


def _rule(work: Aggregate) -> Aggregator:
    """The rule that combines the updates of a round, checked; the weighted average for initial
    weights where the rule needs a base. Raises RuleFailed, and PluginFailed where a plug-in is not
    what it was when the session was opened: that can be put right, so it does not end the
    session."""
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
    """Context in which a part of a rule runs. Raises PluginFailed in place of an error from a
    plug-in."""
    try:
        yield
    except (RuleFailed, MemoryError):
        raise
    except Exception as error:
        # A plug-in may raise anything, and the message must name it. Once the plug-in is mended,
        # the session goes on.
        if work.rule in RULES:
            raise
        raise PluginFailed(
            f"the plug-in {work.rule!r} fails in {part}() in round {work.round}: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Making:
    """Aggregation of one round into one model. tiles: reads the updates; each pass adds its
    vectors."""

    work: Aggregate
    rule: Aggregator
    optimizer: Optimizer | None
    dtype: DType
    tiles: Tiles

    def make(self) -> GlobalModel:
        """Weigh the updates, by staleness or by a survey where that applies, and combine and store
        them. Raises RuleFailed, PluginFailed, UpdateChanged, Stopped, and the store's errors."""
        rows = [self._update(i) for i in range(len(self.work.updates))]
        num_samples = np.array([update.num_samples for update in self.work.updates], np.int64)
        weights: Weights = num_samples
        if self.work.total_samples:
            assert len(self.work.staleness) == len(rows)
            weights = mixing_weights(num_samples, self.work.staleness, self.work.total_samples)
            rows = [*rows, self._base] if weights[-1] else rows
            weights = weights[: len(rows)]
        elif is_surveyor(self.rule):
            weights = self._weigh(self.rule, num_samples)
            candidates = [*rows, *([] if self.work.base.is_empty else [self._base])]
            chosen = np.flatnonzero(weights)
            rows, weights = [candidates[i] for i in chosen], weights[chosen]
        return self._publish(rows, weights)

    def verify(self) -> None:
        """Read all objects of the aggregation again. Raises UpdateChanged if one has changed."""
        rows = [self._update(i) for i in range(len(self.work.updates))]
        is_compared = is_surveyor(self.rule) and not self.work.base.is_empty
        extras = []
        is_stepped = self.optimizer is not None or self.work.learning_rate is not None
        is_moved = is_stepped or self.work.control_share is not None
        if is_compared or self.work.total_samples or is_moved:
            extras = [self._base, *self._state().values()]
        replace(self.tiles, rows=rows, extras=extras).work_through(
            lambda tile, start: None, lambda nothing: None
        )

    def _update(self, index: int) -> Vector:
        """The vector of the update of this index."""
        weights = self.work.updates[index].weights
        return Vector(weights.ref, "accepted update", self.dtype)

    @property
    def _base(self) -> Vector:
        """The vector of the global model, which is as long as the updates."""
        base = self.work.base
        weights = self.work.updates[0].weights
        assert (base.shape, base.dtype) == (weights.shape, weights.dtype)
        return Vector(base.ref, "global model", self.dtype)

    def _state(self) -> Mapping[str, Vector]:
        """The optimiser's state by name; empty before its first step."""
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
        """Dtype of the optimiser's state: squares of differences need the range and the
        precision."""
        return np.promote_types(self.dtype, np.float32).newbyteorder("<")

    # --- the first pass, of rules that survey ---

    def _weigh(self, rule: Surveyor, num_samples: NDArray[np.int64]) -> Float64:
        """Survey the updates in one pass over them. Returns the weights that the rule gives them
        and the global model, (k + 1,). Statistics and control variates count as no difference.
        Raises RuleFailed."""
        k = len(num_samples)
        bases = [] if self.work.base.is_empty else [self._base]
        block = _block_columns(k)
        tiles = replace(
            self.tiles,
            rows=[self._update(i) for i in range(k)],
            extras=bases,
            block=block,
        )
        statistics = _Columns(self.work.base.layout, "statistic", "control")
        num_early = max(1, _EARLY_BYTES // (8 * k**2))
        total: Float64 | None = None

        def survey(tile: TileBuffer, start: int) -> Float64:
            """Let the rule measure the columns of a tile, whose first one is the column `start` of
            the model."""
            base = tile.extras[0] if bases else np.zeros(1, self.dtype)
            # The rule looks at what comes out.
            with np.errstate(over="ignore", invalid="ignore"), _calling(self.work, "survey"):
                differences = np.subtract(tile.rows, base, dtype=np.float64)
                for columns in statistics.among(start, tile.num_columns):
                    differences[:, columns] = 0
                return rule.survey(differences)

        def compute(tile: TileBuffer, start: int) -> Iterator[Float64]:
            """Measure each block of a tile; the last blocks only when they are added."""
            parts = (
                survey(tile.cut(at, min(at + block, tile.num_columns)), start + at)
                for at in range(0, tile.num_columns, block)
            )
            # Large tables are made when they can be added, since they would take much memory.
            return chain(list(islice(parts, num_early)), parts)

        def add(parts: Iterator[Float64]) -> None:
            """Add the measurements of a tile's blocks to the total."""
            nonlocal total
            for part in parts:
                with _calling(self.work, "survey"):
                    total = part.copy() if total is None else np.add(total, part, out=total)

        tiles.work_through(compute, add)
        assert total is not None, "there was nothing to add"
        with _calling(self.work, "weigh"):
            weights = rule.weigh(total, num_samples)
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
        """Combine the rows in one pass, take the step of the gradient, of the control variate or of
        the optimiser if there is one, and store the optimiser's state and the model. weights: of
        the rows. Raises RuleFailed for a model that is not finite, and the store's errors."""
        work, optimizer = self.work, self.optimizer
        state = self._state()
        names = sorted(optimizer.begin()) if optimizer is not None else []
        made = [self.dtype, *(self._state_dtype for _ in names)]
        is_stepped = optimizer is not None or work.learning_rate is not None
        is_moved = is_stepped or work.control_share is not None
        extras = [self._base, *state.values()] if is_moved else []
        tiles = replace(self.tiles, rows=rows, extras=extras, made=made)
        statistics = _Columns(work.base.layout, "statistic", "control")
        control = _Columns(work.base.layout, "control")
        num_skipped: list[int] = []  # for each piece, appended by any thread
        keys = [model_key(work.round + 1), *(state_key(work.round + 1, name) for name in names)]
        with ExitStack() as stack:
            begun = [
                stack.enter_context(Publication(tiles.store, key, tiles.length * dtype.itemsize))
                for key, dtype in zip(keys, made, strict=True)
            ]
            for one, dtype in zip(begun, made, strict=True):
                one.write(npy_header(dtype, (tiles.length,)))

            def combine(tile: TileBuffer, start: int) -> None:
                """Make the columns of the model and of the optimiser's state that begin with the
                column `start`. Raises RuleFailed if they are not finite."""
                with np.errstate(over="ignore", invalid="ignore"):  # looked at below
                    combined = self._combine(tile.rows, weights)
                    after: Iterable[Float64] = ()
                    # A sum, say, that no step makes meaningful.
                    is_usable = not is_stepped or bool(np.isfinite(combined).all())
                    columns = statistics.among(start, len(combined))
                    if work.control_share is not None:
                        for at in control.among(start, len(combined)):
                            before = tile.extras[0][at].astype(np.float64)
                            combined[at] = before + work.control_share * (combined[at] - before)
                    if work.learning_rate is not None:
                        combined = _descended(tile.extras[0], combined, work.learning_rate, columns)
                    if optimizer is not None:
                        combined, after, skipped = _step(
                            optimizer, combined, tile, names, list(state), columns
                        )
                        num_skipped.append(skipped)
                        combined = _within(self.dtype, combined)
                    model, *memory = tile.made
                    np.copyto(model, combined, casting="same_kind")
                    for target, values in zip(memory, after, strict=True):
                        np.copyto(target, _within(target.dtype, values), casting="same_kind")
                if not (is_usable and np.isfinite(model).all()):
                    stepped = "" if optimizer is None else f" with optimiser {work.optimizer!r}"
                    raise RuleFailed(
                        f"rule {work.rule!r}{stepped} leaves the range of {self.dtype.name} in "
                        f"round {work.round}"
                    )

            def compute(tile: TileBuffer, start: int) -> tuple[NDArray[Any], ...]:
                """Make all columns of a tile, at most MAX_COLUMNS at a time."""
                for at in range(0, tile.num_columns, MAX_COLUMNS):
                    combine(tile.cut(at, min(at + MAX_COLUMNS, tile.num_columns)), start + at)
                return tile.made

            def write(made: tuple[NDArray[Any], ...]) -> None:
                """Append the columns of a tile to the objects."""
                for one, values in zip(begun, made, strict=True):
                    one.write(values.view(np.uint8).data)

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
        return replace(
            work.base,
            round=work.round + 1,
            ref=ref,
            dtype=first.dtype,
            shape=first.shape,
            state=dict(zip(names, state_refs, strict=True)),
        )

    def _combine(self, tile: NDArray[Any], weights: Weights) -> Float64:
        """Let the rule combine columns. Raises RuleFailed if it makes another shape or dtype, and
        PluginFailed."""
        with _calling(self.work, "combine"):
            combined = self.rule.combine(tile, weights)
            if combined.shape != tile.shape[1:] or combined.dtype != np.float64:
                raise RuleFailed(
                    f"rule {self.work.rule!r} made {combined.dtype} of shape {combined.shape} out "
                    f"of {tile.shape[1]} columns; it must make as many float64"
                )
        return combined


class _Columns:
    """The columns of a model that belong to tensors of some kinds, from its layout."""

    def __init__(self, layout: Layout, *kinds: Kind) -> None:
        self._ranges: list[tuple[int, int]] = []
        end = 0
        for spec in layout:
            start, end = end, end + spec.size
            if spec.kind in kinds:
                self._ranges.append((start, end))

    def among(self, first: int, num_columns: int) -> list[slice]:
        """These columns among the columns from `first` on, as slices of those."""
        return [
            slice(max(start - first, 0), min(end - first, num_columns))
            for start, end in self._ranges
            if start < first + num_columns and end > first
        ]


def _descended(
    base: Tile, gradient: Float64, learning_rate: float, statistics: Sequence[slice]
) -> Float64:
    """Columns after a step against the gradient. statistics: columns that hold no gradient; they
    become what the rule has made of them."""
    stepped = base - learning_rate * gradient
    for columns in statistics:
        stepped[columns] = gradient[columns]
    return stepped


def _step(
    optimizer: Optimizer,
    result: Float64,
    tile: TileBuffer,
    names: Sequence[str],
    kept: Sequence[str],
    statistics: Sequence[slice],
) -> tuple[Float64, list[Float64], int]:
    """The optimiser's step on some columns.

    kept: the names of the state that the tile has. statistics: columns that become the result.
    Returns the columns of the model, the state in the order of `names`, and in how many columns no
    step was taken because the result is too far from the model: there model and state stay.
    """
    base, *before = (extra.astype(np.float64) for extra in tile.extras)
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
    """Clip values to the range of a dtype, so that one huge update does not end the session: the
    optimiser's memory of it would lead out of the range for many rounds."""
    largest = np.finfo(dtype).max
    clipped: Float64 = np.clip(values, -largest, largest, dtype=np.float64)
    return clipped


def _block_columns(num_updates: int) -> int:
    """Columns of a block. They depend on the number of updates alone, so that sums over blocks do
    not depend on anything else."""
    fitting = max(1, _BLOCK_BYTES // (8 * num_updates))
    return min(max(1 << (fitting.bit_length() - 1), 64), 8192)
