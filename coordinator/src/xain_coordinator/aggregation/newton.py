"""The rule "newton": the next model is a Newton step from the sums that participants send.

A step solves equations of all parameters together, so it does not go through the tile engine.
Memory: the model, the sum, and one update, each of some 4 m² bytes for m parameters, and three
matrices of m².
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from xain_coordinator.aggregation.aggregator import Joining, RuleFailed, Stopped
from xain_coordinator.aggregation.publishing import publish
from xain_coordinator.aggregation.sources import Source
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.ports import WeightsStore
from xain_wire.np import npy_header
from xain_workloads.model import Vector

RULE = "newton"
_DTYPE = np.dtype("<f8")


@dataclass(frozen=True)
class Newton(Joining):
    """Updates are sums over the rows of a site: score, information matrix and deviance. One round
    is one step, halved where the deviance has risen; the session ends when steps become short.

    Source: McCullagh and Nelder 1989, Generalized Linear Models, section 2.5.
    """


def take_step(
    store: WeightsStore, work: Aggregate, stop: threading.Event | None = None
) -> GlobalModel:
    """Make and store the model of the round after `work.round`. Blocks; runs in a thread.

    The sums are added in the order of the updates, so a second call after a crash makes the same
    bytes. Raises UpdateChanged, RuleFailed, Stopped, and the store's errors.
    """
    from xain_workloads.linear.glm.newton import stepped  # of a regression alone

    base = work.base
    try:
        before = _read(store, base.ref, "global model", base.shape[0])
        updates = _updates(store, work, stop)
        vector, metadata = stepped(before, base.layout, base.metadata, updates)
    except ValueError as error:
        raise RuleFailed(f"the global model of round {work.round}: {error}") from error
    header = npy_header(_DTYPE, base.shape)
    made = vector.astype(_DTYPE, copy=False).tobytes()
    ref = publish(store, model_key(work.round + 1), [header, made])
    return replace(base, round=work.round + 1, ref=ref, metadata=metadata, state={})


def _updates(
    store: WeightsStore, work: Aggregate, stop: threading.Event | None
) -> Iterator[Vector]:
    """Each update, one in memory at a time. Raises Stopped and UpdateChanged."""
    for update in work.updates:
        if stop is not None and stop.is_set():
            raise Stopped
        yield _read(store, update.weights.ref, "accepted update", update.weights.shape[0])


def _read(store: WeightsStore, ref: WeightsRef, kind: str, length: int) -> Vector:
    """A stored vector. Raises UpdateChanged if its digest is not that of ref."""
    with Source(store, ref, kind, _DTYPE, length) as source:
        vector = np.empty(length, _DTYPE)
        source.read_into(0, vector)
        source.add_to_digest(vector)
        source.check()
        return vector
