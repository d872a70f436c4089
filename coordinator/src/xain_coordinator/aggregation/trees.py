"""The rules for models of bytes. The rule "trees" makes the next booster: it grows trees from the
histograms that participants send, or appends the trees that they send. The rule "ensemble" appends
the fitted estimators that participants send, and fits the linear model that weighs their votes.

A model is a vector of bytes (uint8) whose length differs from update to update, so the tile
engine cannot combine it. Memory: the model, and the sum and one update of histograms; or the trees
of all updates of the round, and one update as parsed JSON, some 20 times as large as its text; or
the ensemble twice, and the updates of the round, or one of them and the sum of all.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from xain_coordinator.aggregation.aggregator import RuleFailed, Stopped
from xain_coordinator.aggregation.publishing import publish
from xain_coordinator.aggregation.sources import Source
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.ports import WeightsStore
from xain_foundation.settings.hints import hint
from xain_wire.np import npy_header
from xain_workloads.ensembles import ensembles, stacking
from xain_workloads.ensembles.stacking import Stack
from xain_workloads.errors import InvalidContent
from xain_workloads.trees.boosting_options import HISTOGRAM, options_of_model
from xain_workloads.trees.growing import grown
from xain_workloads.trees.histograms import growing, parse_sums
from xain_workloads.trees.trees import ANY_NUMBER, BoosterKind, joined, parse_update

_DTYPE = np.dtype(np.uint8)


def join_updates(
    store: WeightsStore, work: Aggregate, stop: threading.Event | None = None
) -> GlobalModel:
    """Make and store the model of the round after `work.round`. Blocks; runs in a thread.

    The model depends on the updates and their order alone, so a second call after a crash makes the
    same bytes. Raises UpdateChanged, RuleFailed, Stopped, and the store's errors.
    """
    base = work.base
    expected = "ensemble" if ensembles.KEY in base.metadata else "trees"
    if work.rule != expected:
        raise RuleFailed(
            f"rule {work.rule!r} cannot combine models of bytes of the workload "
            f"{base.metadata.get('workload')!r}; "
            + hint("xain-coordinator", f'aggregation.rule = "{expected}"')
        )
    try:
        before = _read(store, base.ref, "global model", base.shape[0])
        if work.rule == "ensemble":
            names = (update.participant_id for update in work.updates)
            updates = ((n, *u) for n, u in zip(names, _updates(store, work, stop), strict=True))
            model = stacking.next_model(_stack(before), updates, base.metadata)
        elif options_of_model(base.metadata).mode == HISTOGRAM:
            state = growing(before, base.metadata)
            sums = (parse_sums(data, state) for data, _ in _updates(store, work, stop))
            model = grown(before, base.metadata, sums)
        else:
            kind = BoosterKind.from_metadata(base.metadata)
            parsed = [
                (parse_update(data, kind, ANY_NUMBER), num_samples)
                for data, num_samples in _updates(store, work, stop)
            ]
            model = joined(before, parsed, kind)
    except InvalidContent as error:
        raise RuleFailed(f"an accepted update of round {work.round}: {error}") from error
    except ValueError as error:
        raise RuleFailed(f"the global model of round {work.round}: {error}") from error
    shape = (len(model),)
    ref = publish(store, model_key(work.round + 1), [npy_header(_DTYPE, shape), model])
    return replace(base, round=work.round + 1, ref=ref, shape=shape, state={})


def _stack(before: bytes) -> Stack:
    """The ensemble and the linear model of votes that the global model is. Raises ValueError if its
    bytes are damaged."""
    try:
        return Stack.parse(before)
    except InvalidContent as error:
        raise ValueError(str(error)) from None


def _updates(
    store: WeightsStore, work: Aggregate, stop: threading.Event | None
) -> Iterator[tuple[bytes, int]]:
    """The bytes of each update and its number of samples, one update in memory at a time. Raises
    Stopped and UpdateChanged."""
    for update in work.updates:
        if stop is not None and stop.is_set():
            raise Stopped
        weights = update.weights
        yield _read(store, weights.ref, "accepted update", weights.shape[0]), update.num_samples


def _read(store: WeightsStore, ref: WeightsRef, kind: str, length: int) -> bytes:
    """The bytes of a stored vector. Raises UpdateChanged if its digest is not that of ref."""
    with Source(store, ref, kind, _DTYPE, length) as source:
        data = np.empty(length, _DTYPE)
        source.read_into(0, data)
        source.add_to_digest(data)
        source.check()
        return data.tobytes()
