"""The rule "assemble": the next model is the slices of all participants put together.

In model parallelism each participant trains one stage of the model, and hands in the slice of the
flat vector that its stage owns. Nothing is combined, so the slices are copied in their order.
Memory: one piece of a slice.
"""

import threading
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from xain_coordinator.aggregation.aggregator import Joining, RuleFailed, Stopped
from xain_coordinator.aggregation.publishing import Publication
from xain_coordinator.aggregation.sources import Source
from xain_coordinator.core.parts.attempts import slice_of
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.ports import WeightsStore
from xain_wire.np import npy_header

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Assemble(Joining):
    """Each update is the slice of the model that its sender owns. The slices put together are the
    next model.

    stages: participants that train a round, at most; 0: all that are connected. With a workload it
        follows from the workload's options.
    Source: Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism, whose partitions of a network are the slices.
    """

    stages: Annotated[int, Field(ge=0)] = 0


def assemble_slices(
    store: WeightsStore,
    work: Aggregate,
    stop: threading.Event | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> GlobalModel:
    """Make and store the model of the round after `work.round`. Blocks; runs in a thread.

    A second call after a crash makes the same bytes. Raises RuleFailed if slices overlap or leave a
    gap, UpdateChanged, Stopped, and the store's errors.
    """
    base = work.base
    try:
        cut = [(*slice_of(base.layout, u.layout), u.weights) for u in work.updates]
    except InvalidUpdate as error:
        raise RuleFailed(f"an accepted update of round {work.round}: {error}") from error
    slices = sorted(cut, key=lambda one: one[:2])
    ends = [0, *(stop_at for _, stop_at, _ in slices)]
    starts = [*(start for start, _, _ in slices), base.shape[0]]
    if starts != ends:
        raise RuleFailed(
            f"the slices of round {work.round} begin at {starts[:-1]} and end at {ends[1:]}; they "
            f"do not make up the {base.shape[0]} elements of the model"
        )
    dtype = np.dtype(base.dtype).newbyteorder("<")
    piece = np.empty(piece_bytes // dtype.itemsize, dtype)
    size_bytes = base.shape[0] * dtype.itemsize
    with Publication(store, model_key(work.round + 1), size_bytes) as begun:
        begun.write(npy_header(dtype, base.shape))
        for start, end, weights in slices:
            length = end - start
            with Source(store, weights.ref, "accepted update", dtype, length) as source:
                for at in range(start, end, len(piece)):
                    if stop is not None and stop.is_set():
                        raise Stopped
                    values = piece[: min(len(piece), end - at)]
                    source.read_into(at - start, values)
                    source.add_to_digest(values)
                    begun.write(values.view(np.uint8).data)
                source.check()
        ref = begun.commit()
    return replace(base, round=work.round + 1, ref=ref, state={})
