"""The rule "trees", which appends the trees that participants send to the model's booster.

A booster is a vector of bytes (uint8) whose length differs from update to update, so the tile
engine cannot combine it. Memory: the model, the trees of all updates of the round, and one update
as parsed JSON, which is some 20 times as large as its text.
"""

import threading
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from xain_coordinator.aggregation.aggregator import Float64, RuleFailed, Tile, Weights
from xain_coordinator.aggregation.crew import Stopped
from xain_coordinator.aggregation.publishing import publish
from xain_coordinator.aggregation.sources import Source
from xain_coordinator.core.effects import Aggregate
from xain_coordinator.core.keys import model_key
from xain_coordinator.core.values import BYTES, GlobalModel, WeightsRef
from xain_coordinator.ports import WeightsStore
from xain_proto.np import npy_header
from xain_workloads.trees import ANY_NUMBER, BoosterKind, InvalidTrees, joined, parse_update

_DTYPE = np.dtype(np.uint8)


@dataclass(frozen=True)
class Trees:
    """Append the new trees of all updates to the model, in the order of the participants' names.

    mode: "bagging" takes the trees of all selected participants, each scaled by the participant's
        share of samples. "cyclic" is for one participant a round, which the configuration checks.
    """

    takes_stale: ClassVar[bool] = False

    mode: Literal["bagging", "cyclic"] = "bagging"

    def check(self, num_updates: int) -> None:
        pass

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        raise RuleFailed('rule "trees" joins trees and cannot combine weights')


def join_updates(
    store: WeightsStore, work: Aggregate, stop: threading.Event | None = None
) -> GlobalModel:
    """Make and store the model of the round after `work.round`. Blocks; runs in a thread.

    The model depends on the updates and their order alone, so a second call after a crash makes the
    same bytes. Raises UpdateChanged, RuleFailed, Stopped, and the store's errors.
    """
    if work.rule != "trees":
        raise RuleFailed(
            f'rule {work.rule!r} cannot combine models of trees; set aggregation.rule = "trees"'
        )
    base = work.base
    try:
        kind = BoosterKind.from_metadata(base.metadata)
        updates = []
        for update in work.updates:
            if stop is not None and stop.is_set():
                raise Stopped
            weights = update.weights
            data = _read(store, weights.ref, "accepted update", weights.shape[0])
            updates.append((parse_update(data, kind, ANY_NUMBER), update.num_samples))
        model = joined(_read(store, base.ref, "global model", base.shape[0]), updates, kind)
    except InvalidTrees as error:
        raise RuleFailed(f"an accepted update of round {work.round}: {error}") from error
    except ValueError as error:
        raise RuleFailed(f"the global model of round {work.round}: {error}") from error
    shape = (len(model),)
    ref = publish(store, model_key(work.round + 1), [npy_header(_DTYPE, shape), model])
    return GlobalModel(
        round=work.round + 1,
        ref=ref,
        dtype=BYTES,
        shape=shape,
        layout=base.layout,
        metadata=base.metadata,
    )


def _read(store: WeightsStore, ref: WeightsRef, kind: str, length: int) -> bytes:
    """The bytes of a stored vector. Raises UpdateChanged if its digest is not that of ref."""
    source = Source(store, ref, kind, _DTYPE, length, keep_open=True)
    try:
        data = np.empty(length, _DTYPE)
        source.read_into(data)
        source.check()
        return data.tobytes()
    finally:
        source.close()
